"""The scheduler's hands: every decision is performed by a task of its own, in the order that a group's actions need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.remote import one_line
from services.scheduler.actions import Action, DropGroup, FinishJob, OpenGroup, ScoreGroup, StartRun
from services.scheduler.events import ActionFailed, Event
from services.scheduler.performer import Performer

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 60.0
"""How long ``FinishJob`` waits for actions that are still being performed; then they are cancelled."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a decision stands in the journal."""

    sequence: int
    position: int


class Hands:
    """Performs decisions through ``performer``. An action that fails becomes an event.

    ``performed`` is told of each decision behind the events that came of it; ``finished`` of ``FinishJob``.
    """

    def __init__(
        self,
        performer: Performer,
        emit: Callable[[Event], None],
        performed: Callable[[Mark], None],
        finished: Callable[[Mark], Awaitable[None]],
    ) -> None:
        self._performer = performer
        self._emit = emit
        self._performed = performed
        self._finished = finished
        self.tasks: set[asyncio.Task[bool]] = set()
        self._opening: dict[str, asyncio.Task[bool]] = {}
        """Group id -> its ``OpenGroup``, while that is being performed."""

    def perform_soon(self, action: Action, mark: Mark) -> None:
        """Begin to perform a decision."""
        others = frozenset(self.tasks)
        before = self._opening.get(_group_of_action(action))
        task = asyncio.create_task(
            self._finish(action, mark, others) if isinstance(action, FinishJob) else self._perform(action, mark, before)
        )
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if isinstance(action, OpenGroup):
            group_id = action.spec.group_id
            self._opening[group_id] = task
            task.add_done_callback(lambda _: self._opening.pop(group_id, None))

    async def _perform(self, action: Action, mark: Mark, before: asyncio.Task[bool] | None) -> bool:
        """Perform one action, after its group's ``OpenGroup`` (not at all if that failed: the core gives the group
        up). A failure becomes an event; returns whether there was none."""
        if before is not None and not await asyncio.shield(before):
            return False
        succeeded = True
        try:
            await self._performer.perform(action, self._emit)
        except Exception as error:
            reason = one_line(error)
            logger.warning("%s failed: %s", type(action).__name__, reason)
            self._emit(ActionFailed(action, reason))
            succeeded = False
        self._performed(mark)
        return succeeded

    async def _finish(self, action: FinishJob, mark: Mark, others: frozenset[asyncio.Task[bool]]) -> bool:
        """Perform ``FinishJob`` when all other actions are over, or were cancelled because they took too long."""
        try:
            if others:
                _, late = await asyncio.wait(others, timeout=FINISH_TIMEOUT_S)
                for task in late:
                    task.cancel()
            await self._performer.perform(action, self._emit)
        except Exception:
            logger.exception("the job is over (%s), but not everything could be finished", action.status)
        finally:
            await self._finished(mark)
        return True


def _group_of_action(action: Action) -> str:
    return action.group_id if isinstance(action, StartRun | ScoreGroup | DropGroup) else ""
