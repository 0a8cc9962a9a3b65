"""The mailbox of a cell's training side: commands go in, one at a time the training ranks take them out.

It outlives the ranks, and whoever submits. What is handed out when: ``services.trainer.orders``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from services.trainer.commands import Command, MailboxStatus, Order, StepNote
from services.trainer.orders import OrderBook

_POLL_S = 1.0
"""How often a waiting command looks whether its deadline has been moved."""


class Mailbox:
    """Ray actor (async). Its arguments are those of ``OrderBook``."""

    def __init__(self, timeout_s: float, *, shares_micro_steps: bool = False) -> None:
        self._book = OrderBook(timeout_s, shares_micro_steps=shares_micro_steps)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """By ticket."""
        self._noted_step = 0
        self._noted: dict[str, None] = {}
        self._changed = asyncio.Condition()

    async def submit(self, command: Command) -> Any:
        """Have a command done; its result. Commands are done in the order of their submission.

        Submitting is idempotent (``services.trainer.orders``).

        Raises:
            TrainingError: it failed, took longer than the deadline, or the ranks cannot be restarted any more.
        """
        ticket = self._book.submit(command, time.monotonic())
        answer = self._answers.get(ticket)
        if answer is None:
            answer = self._answers[ticket] = asyncio.get_running_loop().create_future()
        await self._tell()
        while not answer.done():
            deadline_s = self._book.deadline_s
            remaining_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s <= 0:
                self._book.expire(time.monotonic())
                await self._tell()
            else:
                await asyncio.wait([answer], timeout=min(remaining_s, _POLL_S))
        return answer.result()

    async def note_groups(self, step: int, group_ids: Sequence[str]) -> StepNote:
        """Remember that groups come to a step; what is known of it. Groups of one step only are remembered."""
        if step != self._noted_step:
            self._noted_step, self._noted = step, {}
        self._noted.update(dict.fromkeys(group_ids))
        return StepNote(tuple(self._noted), self._book.report_of(step))

    async def register(self, group: str, rank: int, world_size: int, start_step: int) -> None:
        """A rank of a (new) group is ready, its weights standing at ``start_step``. Older groups are fenced off."""
        self._book.register(group, rank, world_size, start_step, time.monotonic())
        await self._tell()

    async def next(self, group: str, rank: int) -> Order:
        """The next order for a rank: waits until there is one. A fenced rank is told to stop."""
        async with self._changed:
            while (order := self._book.next_order(group, rank)) is None:
                await self._changed.wait()
            return order

    async def done(self, group: str, rank: int, order_id: int, result: Any) -> bool:
        """A rank did its order. Whether that still counts (False: the order was taken from it)."""
        counts = self._book.done(group, rank, order_id, result, time.monotonic())
        await self._tell()
        return counts

    async def failed(self, group: str, order_id: int, error: Exception) -> None:
        """A rank could not do its order, and doing it again would not help."""
        self._book.failed(group, order_id, error, time.monotonic())
        await self._tell()

    async def close(self, reason: str) -> None:
        """No rank will come any more: everything waiting fails with ``reason``."""
        self._book.close(reason)
        await self._tell()

    async def status(self) -> MailboxStatus:
        return self._book.status()

    async def _tell(self) -> None:
        """Answer what was settled, and wake ranks that wait."""
        for settled in self._book.take_settled():
            answer = self._answers.pop(settled.ticket, None)
            if answer is None or answer.done():
                continue
            if settled.error is None:
                answer.set_result(settled.result)
            else:
                answer.set_exception(settled.error)
        async with self._changed:
            self._changed.notify_all()
