"""The cells in training as one: drives the mailboxes of all cells as the division of work says.

Who does what is decided in ``services.trainer.queue``; here its grants become commands, and the answers its events.
It lives where the scheduler's actions are performed. It may die and be made anew at any time: groups that were told
to a step are noted in the core's mailbox, a step that was trained meanwhile is answered with its report, and partial
sums of an older life are forgotten by their epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError

from services.common.errors import TidegateError, TrainingError
from services.common.remote import one_line
from services.trainer.commands import Command, Load, MicroStepRef
from services.trainer.queue import Joined, Left, WorkQueue
from services.trainer.step import Listener, Portion, StepInFlight, TrainedStep

_log = logging.getLogger(__name__)

_MARGIN_S = 60.0
"""So that a mailbox's own deadline comes first."""
_MAX_FAILURES = 3
"""In a row, after which a satellite trains no more."""
_HINT = "Look into the logs of the training ranks for the cause."


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
        self._step: StepInFlight | None = None
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

    def _begin(self, portion: Portion, listener: Listener) -> StepInFlight:
        if self._step is None or self._step.number != portion.step:
            if self._step is not None:
                self._step.end()
            self._step = StepInFlight(self, self._make_queue(), portion, listener)
            self.run(self._step.watch())
            for cell_id in self._in_training:
                self._bring_in(cell_id)
        self._step.listener = listener
        return self._step

    def _make_queue(self) -> WorkQueue:
        return WorkQueue(self.core_id, self._num_ranks, self._timeout_s + _MARGIN_S)

    async def _tell(self, step: StepInFlight, portion: Portion) -> None:
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

    async def _arrive(self, cell_id: str, step: StepInFlight) -> None:
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

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something besides."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
