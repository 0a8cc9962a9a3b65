"""Which parts of a file are in use. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + num_bytes)`` of a file."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class Extents:
    """Gives out parts of a file, the first that is large enough, and joins what comes back with its neighbours."""

    def __init__(self) -> None:
        self.end = 0
        """The file needs no more bytes than this."""
        self.used_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (offset, end), ascending, none touching another or the end

    def allocate(self, num_bytes: int) -> Extent:
        """At least one byte."""
        if num_bytes < 1:
            raise ValueError(f"an extent of {num_bytes} bytes")
        self.used_bytes += num_bytes
        for index, (offset, end) in enumerate(self._gaps):
            if end - offset < num_bytes:
                continue
            if end - offset == num_bytes:
                del self._gaps[index]
            else:
                self._gaps[index] = (offset + num_bytes, end)
            return Extent(offset, num_bytes)
        self.end += num_bytes
        return Extent(self.end - num_bytes, num_bytes)

    def free(self, extent: Extent) -> None:
        """Takes back what ``allocate`` gave."""
        self.used_bytes -= extent.num_bytes
        offset, end = extent.offset, extent.end
        index = bisect_left(self._gaps, (offset, end))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index > 0 and self._gaps[index - 1][1] == offset:
            index -= 1
            offset = self._gaps.pop(index)[0]
        if end == self.end:
            self.end = offset
        else:
            self._gaps.insert(index, (offset, end))
