"""Sizes in bytes as people write them."""

from __future__ import annotations

import math
import re

from services.common.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from ``16GiB``, ``80GB``, ``512M``, ``1.5 TiB`` or a plain number.

    Raises:
        ConfigError: it is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is no size.", "Write it as 16GiB, 80GB, 512MB or a number of bytes.")
    unit = (found[2] or "").lower()
    return math.floor(float(found[1]) * (_UNITS | _BINARY_UNITS)[unit])


def size_text(size_bytes: float) -> str:
    """As ``12.3 GB``, in powers of ten."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.0f} bytes"
