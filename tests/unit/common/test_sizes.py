from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.common.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16GiB", 16 << 30),
        ("80GB", 80 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5 TiB", 3 << 39),
        ("64k", 64_000),
        (" 100 ", 100),
        ("10B", 10),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1GB", "lots", "16 gallons", "1e9", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_sizes_are_written_in_powers_of_ten() -> None:
    assert [size_text(size) for size in (0, 999, 1500, 2.5e9, 1e13)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.5 GB",
        "10 TB",
    ]
