"""The cells in training as one: drives the mailboxes of all cells as the division of work says.

Who does what is decided in ``services.trainer.queue``; here its grants become commands, and the answers its events.
It lives where the scheduler's actions are performed. It may die and be made anew at any time: groups that were told
to a step are noted in the core's mailbox, a step that was trained meanwhile is answered with its report, and partial
sums of an older life are forgotten by their epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayActorError, RayError

from services.common.errors import TidegateError, TrainingError
from services.common.remote import one_line
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Collect,
    Command,
    Discard,
    GradientSum,
    Load,
    MicroStepRef,
    Snapshot,
    SumReport,
    Update,
    WeightSnapshot,
)
from services.trainer.queue import (
    Failed,
    Grant,
    HandedIn,
    Joined,
    Left,
    Summed,
    Task,
    Ticked,
    Told,
    WorkEvent,
    WorkQueue,
)
from services.trainer.types import StepReport

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_MARGIN_S = 60.0
"""So that a mailbox's own deadline comes first."""
_MAX_FAILURES = 3
"""In a row, after which a satellite trains no more."""
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
    """The number of micro-steps that nobody has claimed, whenever it changes."""
    failed: Callable[[str], None]
    """The step failed while more groups were expected. (Afterwards ``train`` raises.)"""


class TrainingTeam:
    """The core and the satellites that are in training.

    ``mailboxes``: of all cells that have a training side, by cell id. ``micro_steps_of``: those of a group, the same
    ones each time. ``lost`` is told the id of a satellite that trains no more, and why.
    """

    def __init__(
        self,
        core_id: str,
        mailboxes: Mapping[str, Any],
        micro_steps_of: Callable[[str], Awaitable[Sequence[Any]]],
        *,
        num_ranks: int,
        timeout_s: float,
        lost: Callable[[str, str], None],
    ) -> None:
        self.core_id = core_id
        self._mailboxes = dict(mailboxes)
        self._micro_steps_of = micro_steps_of
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._lost = lost
        self._in_training: dict[str, None] = {}
        self._dead: dict[str, str] = {}
        self._num_failures: dict[str, int] = {}
        self._weights_step: dict[str, int] = {}
        """By satellite: the step that starts from the weights which it has."""
        self._arrivals: dict[str, asyncio.Task[None]] = {}
        self._step: _Step | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- cells --

    def join(self, cell_id: str) -> None:
        """A satellite is in training from now on; it takes part in the step in flight.

        Raises:
            TrainingError: its training side is gone.
        """
        if cell_id == self.core_id:
            return
        if reason := self.why_dead(cell_id):
            raise TrainingError(f"{cell_id} cannot train: {reason}", _HINT)
        self._in_training[cell_id] = None
        self._bring_in(cell_id)

    def leave(self, cell_id: str) -> None:
        """A satellite is not in training any more: what it has not handed in goes to others."""
        if self._in_training.pop(cell_id, self) is self:
            return
        if arrival := self._arrivals.pop(cell_id, None):
            arrival.cancel()
        if self._step is not None:
            self._step.handle(Left(cell_id))

    def why_dead(self, cell_id: str) -> str:
        """Why a cell has no training side; empty: it has one."""
        if cell_id not in self._mailboxes:
            return "it was started without a training side"
        return self._dead.get(cell_id, "")

    async def check(self, cell_id: str) -> str:
        """``why_dead``, after a look at the cell's mailbox."""
        reason = self.why_dead(cell_id)
        if not reason and cell_id != self.core_id and await self._is_closed(cell_id):
            reason = self._dead[cell_id] = "its training ranks ended, and may not be restarted any more"
        return reason

    # -- steps --

    async def train(self, portion: Portion, listener: Listener) -> TrainedStep | None:
        """Train a portion of a step. The last one waits for the step's report, the others return at once with None.

        Groups that were told before are passed over, so a portion may be told again.

        Raises:
            RayError, TidegateError: the step failed.
        """
        step = self._begin(portion, listener)
        async with step.telling:
            if not step.is_over:
                await self._tell(step, portion)
        if not portion.is_last and not step.has_failed:
            return None
        return TrainedStep(await step.report, tuple(step.group_ids))

    async def close(self) -> None:
        """Stop driving the cells."""
        if self._step is not None:
            self._step.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, portion: Portion, listener: Listener) -> _Step:
        if self._step is None or self._step.number != portion.step:
            if self._step is not None:
                self._step.end()
            self._step = _Step(self, portion, listener)
            self.run(self._step.watch())
            for cell_id in self._in_training:
                self._bring_in(cell_id)
        self._step.listener = listener
        return self._step

    async def _tell(self, step: _Step, portion: Portion) -> None:
        """Add the portion's groups, after those that are noted from an earlier life."""
        note = await self._mailboxes[self.core_id].note_groups.remote(portion.step, list(portion.group_ids))
        new = [group_id for group_id in note.group_ids if group_id not in step.group_ids]
        if note.report is not None:
            step.was_trained(new, note.report)
            return
        found = await asyncio.gather(*(self._micro_steps_of(group_id) for group_id in new))
        refs = [
            MicroStepRef(f"{group_id}/{index}", data)
            for group_id, micro_steps in zip(new, found, strict=True)
            for index, data in enumerate(micro_steps)
        ]
        step.tell(new, refs, is_last=portion.is_last)

    # -- satellites come and go --

    def _bring_in(self, cell_id: str) -> None:
        if self._step is None or self._step.is_over:
            return
        if before := self._arrivals.pop(cell_id, None):
            before.cancel()
        self._arrivals[cell_id] = self.run(self._arrive(cell_id, self._step))

    async def _arrive(self, cell_id: str, step: _Step) -> None:
        """Give a satellite the weights from which the step starts; then it takes part."""
        while not step.is_over and cell_id in self._in_training:
            try:
                if self._weights_step.get(cell_id) != step.number:
                    weights = await step.snapshot()
                    await self.ask(cell_id, Load(weights))
                    self._weights_step[cell_id] = step.number
            except (RayError, TidegateError, TimeoutError) as error:
                step.forget_snapshot()
                await self.note_failure(cell_id, error)
            else:
                step.handle(Joined(cell_id))
                return

    async def again(self, cell_id: str, error: BaseException) -> None:
        """A satellite failed in the midst of a step: it may try again, with weights given anew."""
        await self.note_failure(cell_id, error)
        if cell_id in self._in_training:
            self._bring_in(cell_id)

    def note_success(self, cell_id: str) -> None:
        self._num_failures.pop(cell_id, None)

    async def note_failure(self, cell_id: str, error: BaseException) -> None:
        """A satellite whose ranks will not come back, or that failed too often, trains no more."""
        reason = one_line(error) or type(error).__name__
        _log.warning("%s failed in training: %s", cell_id, reason)
        self._weights_step.pop(cell_id, None)
        self._num_failures[cell_id] = self._num_failures.get(cell_id, 0) + 1
        if self._num_failures[cell_id] < _MAX_FAILURES and not await self._is_closed(cell_id):
            return
        if cell_id not in self._dead:
            self._dead[cell_id] = reason
            self.leave(cell_id)
            self._lost(cell_id, reason)

    async def _is_closed(self, cell_id: str) -> bool:
        try:
            async with asyncio.timeout(_MARGIN_S):
                return bool((await self._mailboxes[cell_id].status.remote()).closed)
        except (RayActorError, TimeoutError):
            return True

    # -- for steps --

    async def ask(self, cell_id: str, command: Command) -> Any:
        """Have a command done. Raises also ``TimeoutError``, if the mailbox itself gives no answer."""
        async with asyncio.timeout(self._timeout_s + _MARGIN_S):
            return await self._mailboxes[cell_id].submit.remote(command)

    def run(self, work: Any) -> asyncio.Task[None]:
        """Do something besides."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def make_queue(self) -> WorkQueue:
        return WorkQueue(self.core_id, self._num_ranks, self._timeout_s + _MARGIN_S)


class _Step:
    """A step in flight: its queue, its micro-steps, and what is awaited of it."""

    def __init__(self, team: TrainingTeam, first: Portion, listener: Listener) -> None:
        self.number = first.step
        self.listener = listener
        self.telling = asyncio.Lock()
        """Held by the portion that is being told: portions keep their order."""
        self.group_ids: dict[str, None] = {}
        self.report: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()
        self._team = team
        self._first = first
        self._epoch = time.time_ns()
        self._queue = team.make_queue()
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
        if self._num_unclaimed != self._queue.num_unclaimed:
            self._num_unclaimed = self._queue.num_unclaimed
            self.listener.progressed(self._num_unclaimed)
        for grant in grants:
            self._start(grant)

    def _start(self, grant: Grant) -> None:
        if grant.task is Task.DISMISS:
            self._team.run(self._dismiss(grant))
        else:
            self._team.run(self._perform(grant.cell_id, grant, self._command(grant)))

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
            ask = self._team.ask(self._team.core_id, Snapshot(self.number))
            self._snapshot = asyncio.ensure_future(ask)
        return await asyncio.shield(self._snapshot)

    def forget_snapshot(self) -> None:
        """It may be lost with the ranks that made it: it is asked for again."""
        self._snapshot = None

    async def _perform(self, cell_id: str, grant: Grant, command: Command) -> None:
        """Give a command; its answer is an event."""
        try:
            answer = await self._team.ask(cell_id, command)
        except Exception as error:  # or nobody would hear of it, and the step would hang
            if grant.task is Task.DISCARD:
                return
            if cell_id == self._team.core_id:
                self.fail(_as_step_error(error))
            elif self._queue.cell_of(grant.grant_id) is not None:
                self.handle(Failed(grant.grant_id))
                await self._team.again(cell_id, error)
            return
        match answer:
            case StepReport():
                self._finish(answer)
            case GradientSum():
                self._gradients[grant.grant_id] = answer
                self._satellite_peak_bytes = max(self._satellite_peak_bytes, answer.peak_rss_bytes)
                self.handle(HandedIn(grant.grant_id, answer.keys))
            case SumReport():
                self._team.note_success(cell_id)
                self.handle(Summed(grant.grant_id, answer.keys))

    async def _dismiss(self, grant: Grant) -> None:
        """A satellite may try again; its sum is forgotten when it is given weights."""
        late = f"{grant.cell_id} held its part of step {self.number} for too long, or had a part that was not its own."
        await self._team.again(grant.cell_id, TrainingError(late, _HINT))

    def _command(self, grant: Grant) -> Command:
        refs = tuple(self._refs[key] for key in grant.keys)
        of_step = (self.number, self._epoch)
        of_weights = (self._first.version, self._first.temperature)
        match grant.task:
            case Task.ACCUMULATE:
                return Accumulate(*of_step, *of_weights, refs)
            case Task.COLLECT:
                return Collect(*of_step)
            case Task.ABSORB:
                return Absorb(*of_step, self._gradients.pop(grant.source))
            case Task.UPDATE:
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
            "satellite_share": 1.0 - shares.get(self._team.core_id, 0) / num_counted if num_counted else 0.0,
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
