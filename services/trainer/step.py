"""A step in flight: grants of its queue become commands to the cells, and their answers the queue's events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.common.errors import TidegateError, TrainingError
from services.common.remote import one_line
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Collect,
    Command,
    Discard,
    GradientSum,
    MicroStepRef,
    Snapshot,
    SumReport,
    Update,
    WeightSnapshot,
)
from services.trainer.queue import Failed, Grant, GrantKind, HandedIn, Summed, Ticked, Told, WorkEvent, WorkQueue
from services.trainer.types import StepReport

_TICK_S = 1.0
_HINT = "Look into the logs of the training ranks for the cause."


@dataclass(frozen=True, slots=True)
class Portion:
    """Groups that come to a step."""

    step: int
    version: int
    """As in ``commands.TrainStep``."""
    temperature: float
    group_ids: tuple[str, ...]
    is_last: bool
    """No more will come to the step."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    report: StepReport
    group_ids: tuple[str, ...]
    """Of all portions."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told of what happens to a step."""

    progressed: Callable[[int], None]
    """The number of micro-steps that nobody has claimed: whenever it changes, and when groups were told."""
    failed: Callable[[str], None]
    """The step failed while more groups were expected. (Afterwards ``train`` raises.)"""


class Cells(Protocol):
    """What a step needs of the cells that train it."""

    core_id: str

    async def ask(self, cell_id: str, command: Command) -> Any:
        """Have a command done."""

    async def again(self, cell_id: str, error: BaseException) -> None:
        """A satellite failed in the midst of a step: it may try again, with weights given anew."""

    def note_success(self, cell_id: str) -> None:
        """A cell did what it was told."""

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something besides."""


class StepInFlight:
    """One step, from its first portion on. ``report`` is set when it is trained, or has failed."""

    def __init__(self, cells: Cells, queue: WorkQueue, first: Portion, listener: Listener) -> None:
        self.number = first.step
        self.listener = listener
        self.telling = asyncio.Lock()
        """Held by the portion that is being told: portions keep their order."""
        self.group_ids: dict[str, None] = {}
        self.report: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        self._cells = cells
        self._first = first
        self._epoch = time.time_ns()
        self._queue = queue
        self._refs: dict[str, MicroStepRef] = {}
        self._gradients: dict[int, GradientSum] = {}
        """By the grant that brought them, until the core absorbs them."""
        self._snapshot: asyncio.Task[WeightSnapshot] | None = None
        self._is_told = False
        self._num_unclaimed: int | None = None
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._satellite_peak_bytes = 0

    @property
    def is_over(self) -> bool:
        return self.report.done()

    @property
    def has_failed(self) -> bool:
        return self.is_over and (self.report.cancelled() or self.report.exception() is not None)

    def end(self) -> None:
        """Whoever waits for it waits for nothing."""
        self.report.cancel()
        self._let_go()

    def tell(self, group_ids: Sequence[str], refs: Sequence[MicroStepRef], *, is_last: bool) -> None:
        """Groups come to the step."""
        self.group_ids.update(dict.fromkeys(group_ids))
        self._refs.update((ref.key, ref) for ref in refs)
        if not self._is_told:
            self._is_told = is_last
            self.handle(Told(tuple(ref.key for ref in refs), is_last))

    def was_trained(self, group_ids: Sequence[str], report: StepReport) -> None:
        """It was trained in an earlier life."""
        self.group_ids.update(dict.fromkeys(group_ids))
        self._finish(report)

    async def watch(self) -> None:
        """Notice who is late."""
        while not self.is_over:
            await asyncio.wait([self.report], timeout=_TICK_S)
            self.handle(Ticked())

    def handle(self, event: WorkEvent) -> None:
        """Take an event in, and do what follows."""
        if self.is_over:
            return
        try:
            grants = self._queue.handle(event, time.monotonic())
        except TidegateError as error:
            self.fail(error)
            return
        self._keep_time()
        if self._num_unclaimed != self._queue.num_unclaimed or isinstance(event, Told):
            self._num_unclaimed = self._queue.num_unclaimed
            self.listener.progressed(self._num_unclaimed)
        for grant in grants:
            self._start(grant)

    def _start(self, grant: Grant) -> None:
        if grant.kind is GrantKind.DISMISS:
            self._cells.run(self._dismiss(grant))
        else:
            self._cells.run(self._perform(grant, self._command(grant)))

    def fail(self, error: BaseException) -> None:
        """The step cannot be trained."""
        if self.is_over:
            return
        self.report.set_exception(error)
        self.report.exception()  # it may be that nobody waits for it
        self._let_go()
        if not self._is_told:
            self.listener.failed(one_line(error))

    async def snapshot(self) -> WeightSnapshot:
        """The weights from which the step starts; asked for once."""
        if self._snapshot is None:
            ask = self._cells.ask(self._cells.core_id, Snapshot(self.number))
            self._snapshot = asyncio.ensure_future(ask)
        return await asyncio.shield(self._snapshot)

    def forget_snapshot(self) -> None:
        """It may be lost with the ranks that made it: it is asked for again."""
        self._snapshot = None

    async def _perform(self, grant: Grant, command: Command) -> None:
        """Give a command; its answer is an event."""
        cell_id = grant.cell_id
        try:
            answer = await self._cells.ask(cell_id, command)
        except Exception as error:  # or nobody would hear of it, and the step would hang
            if grant.kind is GrantKind.DISCARD:
                return
            if cell_id == self._cells.core_id:
                self.fail(_as_step_error(error))
            elif self._queue.cell_of(grant.grant_id) is not None:
                self.handle(Failed(grant.grant_id))
                await self._cells.again(cell_id, error)
            return
        match answer:
            case StepReport():
                self._finish(answer)
            case GradientSum():
                self._gradients[grant.grant_id] = answer
                self._satellite_peak_bytes = max(self._satellite_peak_bytes, answer.peak_rss_bytes)
                self.handle(HandedIn(grant.grant_id, answer.keys))
            case SumReport():
                self._cells.note_success(cell_id)
                self.handle(Summed(grant.grant_id, answer.keys))

    async def _dismiss(self, grant: Grant) -> None:
        """A satellite may try again; its sum is forgotten when it is given weights."""
        late = f"{grant.cell_id} held its part of step {self.number} for too long, or had a part that was not its own."
        await self._cells.again(grant.cell_id, TrainingError(late, _HINT))

    def _command(self, grant: Grant) -> Command:
        refs = tuple(self._refs[key] for key in grant.keys)
        of_step = (self.number, self._epoch)
        of_weights = (self._first.version, self._first.temperature)
        match grant.kind:
            case GrantKind.ACCUMULATE:
                return Accumulate(*of_step, *of_weights, refs)
            case GrantKind.COLLECT:
                return Collect(*of_step)
            case GrantKind.ABSORB:
                return Absorb(*of_step, self._gradients.pop(grant.source))
            case GrantKind.UPDATE:
                return Update(*of_step, *of_weights, refs)
            case _:
                return Discard()

    def _finish(self, report: StepReport) -> None:
        """The step is trained. Its report counts the time in which any cell was at work."""
        if self.is_over:
            return
        seconds = self._busy_s + (time.monotonic() - self._busy_since_s if self._busy_since_s is not None else 0.0)
        shares = self._queue.shares
        num_counted = sum(shares.values())
        extra = {
            **report.extra,
            "tokens_per_s": report.num_tokens / max(seconds, 1e-9),
            "num_training_cells": float(len(shares) or 1),
            "satellite_share": 1.0 - shares.get(self._cells.core_id, 0) / num_counted if num_counted else 0.0,
        }
        if self._satellite_peak_bytes:
            extra["satellite_peak_rss_bytes"] = float(self._satellite_peak_bytes)
        self.report.set_result(replace(report, seconds=seconds, extra=extra))
        self._let_go()

    def _let_go(self) -> None:
        """The object store's memory is wanted elsewhere."""
        self._refs, self._gradients, self._snapshot = {}, {}, None

    def _keep_time(self) -> None:
        now_s = time.monotonic()
        if self._queue.is_busy and self._busy_since_s is None:
            self._busy_since_s = now_s
        elif not self._queue.is_busy and self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = None


def _as_step_error(error: BaseException) -> BaseException:
    """A ``TimeoutError`` says nothing to a user."""
    if isinstance(error, TimeoutError):
        return TrainingError("the core's mailbox gave no answer.", _HINT)
    return error
