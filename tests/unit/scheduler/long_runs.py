"""A job whose runs go on until a test ends them, in an otherwise ideal world."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.actions import Action, StartRun
from services.scheduler.events import Event, RunEnded, RunStarted
from services.trajectory.outcome import Outcome
from tests.unit.scheduler.live import IdealPerformer


class LongRuns(IdealPerformer):
    """``running`` holds the (run id, attempt) that were started and did not end."""

    def __init__(self) -> None:
        super().__init__()
        self.running: set[tuple[str, int]] = set()
        self._emit: Callable[[Event], None] | None = None

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        await super().perform(action, emit)

    def answers(self, action: Action) -> list[Event]:
        if isinstance(action, StartRun):
            self.running.add((action.run_id, action.attempt))
            return [RunStarted(action.run_id, action.attempt)]
        return super().answers(action)

    def end_runs(self) -> None:
        """All runs that are running now end well."""
        ended, self.running = self.running, set()
        for run_id, attempt in sorted(ended):
            assert self._emit is not None
            self._emit(RunEnded(run_id, attempt, Outcome.FINISHED, 1.0))
