"""The store's one background thread: it reads states ahead and adds gradients behind, in the order it was asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.tree.records import Record
from services.trainer.tree.tiers import MemoryTier

_MAX_AHEAD = 2
_MAX_BEHIND = 8


@dataclass(frozen=True, slots=True)
class _Ahead:
    buffer: Tensor
    tier: MemoryTier
    """Where the buffer is counted."""
    future: Future[None] | None
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Behind:
    record: Record
    tier: MemoryTier
    num_bytes: int
    """Counted there while the addition waits."""
    future: Future[None]


class Traffic:
    """Copies on their way. Its methods are for one thread; whatever moves or frees a record calls ``settle`` and
    ``forget`` first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "state-store")
        self._ahead: dict[Record, _Ahead] = {}
        self._behind: deque[_Behind] = deque()
        self._failure: BaseException | None = None

    # -- ahead

    def reads_ahead(self, record: Record) -> bool:
        """Whether the record is on its way."""
        return record in self._ahead

    def read_ahead(self, record: Record, tier: MemoryTier, read: Callable[[Tensor], None]) -> None:
        """Fills a new buffer of a CPU tier in the background, if there is room for it."""
        if self._makes_way(record, tier):
            buffer = tier.allocate(record.num_bytes)
            self._ahead[record] = _Ahead(buffer, tier, self._pool.submit(read, buffer), None)

    def copy_ahead(self, record: Record, tier: MemoryTier, stream: torch.cuda.Stream) -> None:
        """Copies a record of pinned memory to a GPU beside its computations, if there is room for it."""
        if record.buffer is not None and self._makes_way(record, tier):
            with torch.cuda.stream(stream):
                buffer = tier.allocate(record.num_bytes)
                buffer.copy_(record.buffer, non_blocking=True)
                self._ahead[record] = _Ahead(buffer, tier, None, stream.record_event())

    def take(self, record: Record) -> Tensor | None:
        """What was read ahead of a record, no longer counted; None if nothing was.

        Raises:
            MachineError: it could not be read.
        """
        coming = self._ahead.pop(record, None)
        if coming is None:
            return None
        coming.tier.uncount(record.num_bytes)
        if coming.future is not None:
            coming.future.result()
        if coming.event is not None:
            stream = torch.cuda.current_stream(coming.buffer.device)
            stream.wait_event(coming.event)
            coming.buffer.record_stream(stream)  # it was allocated for the stream of copies
        return coming.buffer

    def forget(self, record: Record) -> None:
        """Stops reading a record ahead."""
        coming = self._ahead.pop(record, None)
        if coming is None:
            return
        if coming.future is not None and not coming.future.cancel():
            coming.future.exception()  # waits: what it reads may be about to be given away
        if coming.event is not None:
            coming.event.synchronize()
        coming.tier.uncount(record.num_bytes)

    def _makes_way(self, record: Record, tier: MemoryTier) -> bool:
        if len(self._ahead) >= _MAX_AHEAD:
            self.forget(next(iter(self._ahead)))  # nobody has come for it
        if not tier.has_room(record.num_bytes):
            return False
        tier.count(record.num_bytes)
        return True

    # -- behind

    def add_behind(self, record: Record, tier: MemoryTier, num_bytes: int, add: Callable[[], None]) -> None:
        """Runs ``add`` in the background; ``num_bytes`` of ``tier`` are counted until it has ended."""
        while len(self._behind) >= _MAX_BEHIND:
            self._finish_first()
        tier.count(num_bytes)
        self._behind.append(_Behind(record, tier, num_bytes, self._pool.submit(add)))

    def waits_for_room(self, tier: MemoryTier, num_bytes: int) -> bool:
        """Waits for additions until ``tier`` has so much room; False: it will not have it."""
        while self._behind and not tier.has_room(num_bytes):
            self._finish_first()
        return tier.has_room(num_bytes)

    def make_room(self, tier: MemoryTier, num_bytes: int) -> None:
        """Ends what is under way until ``tier`` has so much room, or nothing is under way any more."""
        if not self.waits_for_room(tier, num_bytes):
            for record in [record for record, coming in self._ahead.items() if coming.tier is tier]:
                self.forget(record)

    def settle(self, record: Record | None = None) -> None:
        """Waits for the additions to a record (None: for all).

        Raises:
            MachineError: one of them failed.
        """
        while any(record is None or addition.record is record for addition in self._behind):
            self._finish_first()

    def check(self) -> None:
        """Raises:
        MachineError: an addition has failed, so gradients are not what they should be.
        """
        while self._behind and self._behind[0].future.done():
            self._finish_first()
        if self._failure is not None:
            raise self._failure

    def _finish_first(self) -> None:
        addition = self._behind.popleft()
        addition.tier.uncount(addition.num_bytes)
        self._failure = addition.future.exception() or self._failure
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the thread; what has not been done is not done any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._behind.clear()
