"""The mailbox of a cell's training side: commands go in, one at a time the training ranks take them out.

It outlives the ranks. When they die, the command in flight waits for the next group of ranks and is handed out again
from the start; steps that were trained after the checkpoint from which that group starts are handed out first, so no
update is lost and what is published is what was trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvariantError, TrainingError
from services.trainer.claims import ClaimBoard
from services.trainer.commands import Command, MailboxStatus, Order, SaveCheckpoint, Stop, TrainStep

_POLL_S = 1.0
"""How often a waiting command looks whether its deadline has been moved."""
_RESTART_HINT = "Look into the logs of the training ranks (runs/<job>/ and Ray's worker logs) for the cause."


@dataclass(slots=True)
class _Entry:
    """A command on its way."""

    order_id: int
    command: Command
    answer: asyncio.Future[Any] | None
    """None for a step that is taken again to catch up: nobody waits for it."""
    board: ClaimBoard | None = None
    results: dict[int, Any] = field(default_factory=dict)
    """By rank."""
    takers: set[int] = field(default_factory=set)
    deadline_s: float = 0.0

    def start_over(self, order_id: int) -> None:
        """Nothing is done yet, and what ranks say about the old order no longer matters."""
        self.order_id = order_id
        self.board = None
        self.results = {}
        self.takers = set()


def _catching_up(entry: _Entry) -> TrainStep | None:
    return entry.command if entry.answer is None and isinstance(entry.command, TrainStep) else None


class Mailbox:
    """Ray actor (async). ``timeout_s``: a command that a group of ranks holds for longer has failed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: deque[_Entry] = deque()
        self._current: _Entry | None = None
        self._trained: list[TrainStep] = []
        self._group = ""
        self._world_size = 0
        self._registered: set[int] = set()
        self._num_orders = 0
        self._closed = ""
        self._changed = asyncio.Condition()

    async def submit(self, command: Command) -> Any:
        """Have a command done; its result. Commands are done in the order of their submission.

        Raises:
            TrainingError: it failed, took longer than the deadline, or the ranks cannot be restarted any more.
        """
        if self._closed:
            raise TrainingError(self._closed, _RESTART_HINT)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = self._make_entry(command, answer)
        self._queue.append(entry)
        await self._advance()
        while not answer.done():
            remaining_s = self._current.deadline_s - time.monotonic() if self._current is not None else _POLL_S
            if remaining_s <= 0:
                await self._end_late(self._current)
            else:
                await asyncio.wait([answer], timeout=min(remaining_s, _POLL_S))
        return answer.result()

    async def register(self, group: str, rank: int, world_size: int, start_step: int) -> None:
        """A rank of a (new) group is ready, its weights standing at ``start_step``. Older groups are fenced off."""
        if group != self._group:
            self._group, self._world_size, self._registered = group, world_size, set()
            self._hand_back(start_step)
        self._registered.add(rank)
        await self._advance()

    async def next(self, group: str, rank: int) -> Order:
        """The next order for a rank: waits until there is one. A fenced rank is told to stop."""
        async with self._changed:
            while True:
                if group != self._group or self._closed:
                    return Order(-1, Stop())
                entry = self._current
                is_ready = len(self._registered) == self._world_size
                if entry is not None and is_ready and rank not in entry.results:
                    return self._order(entry, rank)
                await self._changed.wait()

    async def done(self, group: str, rank: int, order_id: int, result: Any) -> bool:
        """A rank did its order. Whether that still counts (False: the order was taken from it)."""
        entry = self._current
        if group != self._group or entry is None or entry.order_id != order_id:
            return False
        if entry.board is not None:
            lease = entry.board.lease_of(str(rank))
            if lease is None or not entry.board.reduced(str(rank), lease.claim_ids, time.monotonic()):
                return False
        entry.results[rank] = result
        if len(entry.results) == self._world_size:
            if entry.board is not None and not entry.board.is_complete:
                raise InvariantError("a step ended with micro-steps that nobody reduced", entry.board.history)
            if isinstance(entry.command, TrainStep):
                self._trained.append(entry.command)
            if isinstance(entry.command, SaveCheckpoint):
                self._trained = [step for step in self._trained if step.step > entry.command.step]
            self._finish(entry, result=entry.results[0])
            await self._advance()
        return True

    async def failed(self, group: str, order_id: int, error: Exception) -> None:
        """A rank could not do its order, and doing it again would not help."""
        entry = self._current
        if group != self._group or entry is None or entry.order_id != order_id:
            return
        if entry.answer is None:
            await self.close(f"the restarted training ranks could not catch up: {error}")
            return
        self._finish(entry, error=error)
        await self._advance()

    async def close(self, reason: str) -> None:
        """No rank will come any more: everything waiting fails with ``reason``."""
        self._closed = self._closed or reason
        pending = [self._current] if self._current is not None else []
        pending += self._queue
        self._queue.clear()
        for entry in pending:
            self._finish(entry, error=TrainingError(reason, _RESTART_HINT))
        await self._advance()

    async def status(self) -> MailboxStatus:
        entry = self._current
        return MailboxStatus(
            num_ranks=len(self._registered),
            command=type(entry.command).__name__ if entry else "",
            num_taken=len(entry.takers) if entry else 0,
            num_waiting=len(self._queue),
            closed=self._closed,
        )

    def _make_entry(self, command: Command, answer: asyncio.Future[Any] | None) -> _Entry:
        return _Entry(self._next_order_id(), command, answer)

    def _next_order_id(self) -> int:
        self._num_orders += 1
        return self._num_orders

    def _hand_back(self, start_step: int) -> None:
        """Put the command in flight back, behind the steps that the new group's checkpoint does not hold."""
        if self._current is not None:
            self._current.start_over(self._next_order_id())
            self._queue.appendleft(self._current)
            self._current = None
        missing = [step for step in self._trained if step.step > start_step]
        missing += [step for step in map(_catching_up, self._queue) if step and step.step > start_step]
        self._trained = [step for step in self._trained if step.step <= start_step]
        self._queue = deque(entry for entry in self._queue if entry.answer is not None)
        self._queue.extendleft(self._make_entry(step, None) for step in reversed(missing))

    def _order(self, entry: _Entry, rank: int) -> Order:
        entry.takers.add(rank)
        if not isinstance(entry.command, TrainStep):
            return Order(entry.order_id, entry.command)
        num_claims = len(entry.command.micro_steps)
        if entry.board is None:
            entry.board = ClaimBoard(num_claims, self._timeout_s)
        entry.board.claim(str(rank), range(rank, num_claims, self._world_size), time.monotonic())
        lease = entry.board.lease_of(str(rank))
        assert lease is not None
        return Order(entry.order_id, entry.command, tuple(sorted(lease.claim_ids)), num_claims)

    def _finish(self, entry: _Entry, result: Any = None, error: Exception | None = None) -> None:
        if self._current is entry:
            self._current = None
        if entry.answer is None or entry.answer.done():
            return
        if error is None:
            entry.answer.set_result(result)
        else:
            entry.answer.set_exception(error)

    async def _end_late(self, entry: _Entry | None) -> None:
        """The command in flight is past its deadline, whoever noticed."""
        if entry is None:
            return
        late = f"{type(entry.command).__name__} took longer than {self._timeout_s:g} s."
        if entry.answer is None:
            await self.close(f"the restarted training ranks could not catch up: {late}")
            return
        self._finish(entry, error=TrainingError(late, _RESTART_HINT))
        await self._advance()

    async def _advance(self) -> None:
        if self._current is None and self._queue and not self._closed:
            self._current = self._queue.popleft()
            self._current.deadline_s = time.monotonic() + self._timeout_s
        async with self._changed:
            self._changed.notify_all()
