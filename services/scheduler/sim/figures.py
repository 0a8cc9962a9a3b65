"""What a simulation notes on its way, and the result made of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from services.scheduler import policy
from services.scheduler.actions import FinishJob
from services.scheduler.options import ElasticRule, policy_of
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.bounds import lower_bound
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.pool import SimCell
from services.scheduler.sim.result import (
    CellIntervals,
    RunCounts,
    SimResult,
    Timeline,
    TrainedGroup,
    staleness_of,
    utilisation_of,
)
from services.scheduler.sim.runs import SimRuns
from services.scheduler.state import JobState


class Figures:
    """Times and counts."""

    def __init__(self, config: SimConfig, agenda: Agenda, cells: Collection[SimCell], *, is_recorded: bool) -> None:
        self.is_recorded = is_recorded
        self.num_events = 0
        self.num_switches = 0
        self.trained: list[TrainedGroup] = []
        self._config = config
        self._agenda = agenda
        self._cells = cells
        self._step_end_s: list[float] = []
        self._start_s: float | None = None
        self._accounts: list[dict[str, Any]] = []
        self._exposed_s, self._exposed_since_s = 0.0, math.inf
        self._water_level: list[tuple[float, int]] = []
        self._ready_groups: list[tuple[float, int]] = []

    def note_publication(self) -> None:
        """The first one starts the clock."""
        if self._start_s is None:
            self._start_s = self._agenda.now_s
            for cell in self._cells:
                cell.open_accounts()

    def note_step(self, step: int) -> None:
        """The last one stops it."""
        self._step_end_s.append(self._agenda.now_s)
        if step == self._config.steps:
            self._accounts = [cell.accounts() for cell in self._cells]

    def note_exposure(self, is_exposed: bool) -> None:
        """Whether a step is in flight while no run goes on."""
        if is_exposed is (self._exposed_since_s != math.inf):
            return
        if is_exposed:
            self._exposed_since_s = self._agenda.now_s
        else:
            self._exposed_s += self._agenda.now_s - self._exposed_since_s
            self._exposed_since_s = math.inf

    def record(self, water_level: int, num_ready: int) -> None:
        for series, value in ((self._water_level, water_level), (self._ready_groups, num_ready)):
            if not series or series[-1][1] != value:
                series.append((self._agenda.now_s, value))

    def result(self, state: JobState, runs: SimRuns, end: FinishJob) -> SimResult:
        accounts = self._accounts or [cell.accounts() for cell in self._cells]
        trained = [group for group in self.trained if group.step <= self._config.steps]
        durations = [seconds for group in trained for seconds in group.durations_s]
        slowest = [group.slowest_s for group in trained]
        scheduler, pool, system = self._config.scheduler, self._config.pool, self._config.system
        return SimResult(
            name=self._config.name,
            status=end.status.value,
            reason=end.reason,
            start_s=self._start_s or 0.0,
            step_end_s=tuple(self._step_end_s[: self._config.steps]),
            staleness=staleness_of(trained, scheduler.steps_per_burst),
            counts=RunCounts(
                dispatched_runs=state.book.training.dispatched,
                ended_runs=runs.num_ended,
                trained_runs=len(durations),
                lost_attempts=runs.num_lost_attempts,
                moved_runs=runs.num_moves,
                dispatched_groups=state.next_group_index,
                trained_groups=state.book.num_trained,
                lost_groups=state.book.num_lost,
            ),
            utilisation=utilisation_of(accounts, pool.slots_by_cell),
            exposed_training_s=self._exposed_s,
            run_mean_s=_mean(durations),
            slowest_of_group_mean_s=_mean(slowest),
            num_switches=self.num_switches,
            num_events=self.num_events,
            lower_bound=lower_bound(
                slowest,
                [(group.step - 1) // scheduler.steps_per_burst for group in trained],
                sum(durations),
                system.train_per_rollout * sum(durations),
                slots=pool.slots_by_cell,
                num_standalone=pool.standalone_cells,
                max_outstanding=self._max_outstanding(),
                has_carry_over=scheduler.carry_over_steps > 0,
                max_concurrent_runs=pool.max_concurrent_runs,
            ),
            groups=tuple(trained),
            timeline=self._timeline() if self.is_recorded else None,
        )

    def _max_outstanding(self) -> int:
        """Q; the larger one where the rule changes the cadence."""
        scheduler = self._config.scheduler
        cadences = [(scheduler.carry_over_steps, scheduler.steps_per_burst)]
        if policy_of(scheduler).rule is ElasticRule.SORTED:
            cadences.append(policy.homogeneous_cadence(*cadences[0]))
        return math.ceil(max(phi + mu for phi, mu in cadences) * scheduler.groups_per_step - 1e-9)

    def _timeline(self) -> Timeline:
        return Timeline(
            cells=tuple(
                CellIntervals(
                    cell.cell_id, tuple((span.mode.value, span.start_s, span.end_s) for span in cell.intervals)
                )
                for cell in self._cells
            ),
            water_level=tuple(self._water_level),
            ready_groups=tuple(self._ready_groups),
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
