"""Memory for records, up to a budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.trainer.tree.records import Record

_RESERVED_RECORDS = 4
"""Room for two records that are read ahead and two additions on their way to the page file."""


class MemoryTier:
    """Records in the memory of one device, each whole.

    Which records stay: a walk over pages comes back to all of them before it comes back to the first, so what was used
    last is needed last and throwing out the least recently used would throw out what is needed next. Records
    therefore stay where they are, newcomers go below, and only a record of a higher rank displaces one, the youngest of
    the lowest rank first.
    """

    def __init__(self, level: int, device: torch.device, limit_bytes: int | None, *, pinned: bool = False) -> None:
        """``pinned``: host memory that a GPU copies from by itself (PyTorch rounds such blocks up to powers of two)."""
        self.level = level
        self.device = device
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """Of records and of what passes through."""
        self.peak_bytes = 0
        self._record_bytes = 0
        self._pinned = pinned
        self._largest_bytes = 0
        self._lowest: list[tuple[int, int, Record]] = []  # heap of (rank, -created, record), some of them outdated

    def allocate(self, num_bytes: int) -> Tensor:
        """Uninitialised bytes, not counted; autograd can use them even if they are made where it is off."""
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def hold(self, record: Record, buffer: Tensor) -> None:
        """Keeps a record that is in no tier."""
        record.level, record.buffer, record.tensors = self.level, buffer, record.layout.views(buffer)
        self._record_bytes += record.num_bytes
        self.count(record.num_bytes)
        self.note_rank(record)

    def drop(self, record: Record) -> None:
        """Forgets a record that it holds."""
        record.level, record.buffer, record.tensors = None, None, ()
        self._record_bytes -= record.num_bytes
        self.uncount(record.num_bytes)

    def note_rank(self, record: Record) -> None:
        """To be called when the rank of a record has changed that it holds."""
        heapq.heappush(self._lowest, (record.rank, -record.created, record))

    def losers(self, record: Record, *, reserve: bool) -> list[Record] | None:
        """What has to leave for ``record`` to fit: nothing, some records of lower rank, or None: it cannot fit.

        What passes through is not looked at: it will be gone. ``reserve``: leave room for it.
        """
        self._largest_bytes = max(self._largest_bytes, record.num_bytes)
        if self.limit_bytes is None:
            return []
        missing = self._record_bytes + record.num_bytes - self.limit_bytes
        return self._lowest_ranked(missing + (self._reserved_bytes if reserve else 0), below_rank=record.rank)

    def excess(self) -> list[Record]:
        """What has to leave so that there is room for records that only pass through."""
        if self.limit_bytes is None:
            return []
        missing = self._record_bytes + self._reserved_bytes - self.limit_bytes
        return self._lowest_ranked(missing, below_rank=None) or []

    @property
    def _reserved_bytes(self) -> int:
        return min(_RESERVED_RECORDS * self._largest_bytes, (self.limit_bytes or 0) // 4)

    def _lowest_ranked(self, missing_bytes: int, below_rank: int | None) -> list[Record] | None:
        """Records that hold so many bytes; None: those of lower rank do not."""
        found: list[Record] = []
        passed: list[tuple[int, int, Record]] = []
        while missing_bytes > 0 and self._lowest and (below_rank is None or self._lowest[0][0] < below_rank):
            item = heapq.heappop(self._lowest)
            rank, _, record = item
            if record.level == self.level and record.rank == rank and record not in found:
                passed.append(item)
                found.append(record)
                missing_bytes -= record.num_bytes
        for item in passed:
            heapq.heappush(self._lowest, item)
        return found if missing_bytes <= 0 else None

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more stay within the budget."""
        return self.limit_bytes is None or self.used_bytes + num_bytes <= self.limit_bytes

    def count(self, num_bytes: int) -> None:
        """Counts bytes that are not a record's own."""
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def uncount(self, num_bytes: int) -> None:
        """The inverse of ``count``."""
        self.used_bytes -= num_bytes

    @contextmanager
    def passing(self, num_bytes: int) -> Iterator[None]:
        """Counts bytes of a buffer that lives as long as the block."""
        self.count(num_bytes)
        try:
            yield
        finally:
            self.uncount(num_bytes)
