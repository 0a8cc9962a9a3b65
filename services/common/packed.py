"""Quick pickling of frozen dataclasses that travel between actors in great numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


class Packed:
    """Base of frozen dataclasses with slots: pickled by their fields in order, five times as fast as by the state
    functions that ``dataclass`` gives them. Every field must be one of the constructor's."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Packed], tuple[Any, ...]]:
        return type(self), _fields(type(self))(self)


_READERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _fields(cls: type[Packed]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the fields of an instance."""
    if cls not in _READERS:
        names = cls.__match_args__  # type: ignore[attr-defined]
        _READERS[cls] = operator.attrgetter(*names) if len(names) > 1 else lambda one: (getattr(one, names[0]),)
    return _READERS[cls]
