from __future__ import annotations

import pytest

from services.common.marks import longest_overlap


@pytest.mark.parametrize(
    ("text", "marks", "length"),
    [
        ("abc", ("cd",), 1),
        ("ab<to", ("<tool>", "<think>"), 3),
        ("aaa", ("aab",), 2),
        ("<tool>", ("<tool>",), 0),
        ("abc", ("x",), 0),
        ("abc", (), 0),
        ("", ("ab",), 0),
    ],
)
def test_the_end_of_a_text_that_may_begin_a_mark(text: str, marks: tuple[str, ...], length: int) -> None:
    assert longest_overlap(text, marks) == length
