"""Modelled groups and runs: when they end, and where they go on when the core routes them elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import InvariantError
from services.scheduler.actions import AbortRuns, DropGroup, OpenGroup, ScoreGroup, StartRun
from services.scheduler.events import Event, GroupScored, RunEnded, RunStarted
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.config import SystemConfig
from services.scheduler.sim.pool import SimCell, SimRun
from services.scheduler.sim.result import TrainedGroup
from services.scheduler.sim.workload import Workload
from services.scheduler.state import JobState
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.types import GroupResult, GroupSpec

_MIN_COUNTED_RUNS = 2
"""Fewer valid runs give no advantage."""


@dataclass(slots=True, eq=False)
class _Group:
    """A dispatched group."""

    spec: GroupSpec
    task_index: int
    duration_of: dict[str, float]
    outcome_of: dict[str, Outcome]
    """Of the runs whose last attempt ended."""


class SimRuns:
    """All groups that are neither trained nor lost, and the attempts that are under way."""

    def __init__(
        self,
        state: JobState,
        agenda: Agenda,
        workload: Workload,
        system: SystemConfig,
        seed: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.cells: dict[str, SimCell] = {}
        self.num_ended = 0
        """Training runs whose last attempt ended by itself."""
        self.num_lost_attempts = 0
        self.num_moves = 0
        self._state = state
        self._agenda = agenda
        self._workload = workload
        self._system = system
        self._seed = seed
        self._emit = emit
        self._groups: dict[str, _Group] = {}
        self._runs: dict[str, SimRun] = {}
        self._homeless: dict[str, SimRun] = {}
        """Attempts that no cell serves: they stand still."""

    @property
    def any_goes_on(self) -> bool:
        """Whether a run has a cell."""
        return len(self._runs) > len(self._homeless)

    # -- runs --

    def open_group(self, action: OpenGroup) -> None:
        spec = action.spec
        seconds = self._workload.durations(action.task_index, spec.group_id, len(spec.run_ids))
        self._groups[spec.group_id] = _Group(spec, action.task_index, dict(zip(spec.run_ids, seconds, strict=True)), {})

    def start(self, action: StartRun) -> None:
        run_id = action.run_id
        duration_s = self._groups[action.group_id].duration_of[run_id]
        outcome = Outcome.FINISHED
        probability = self._system.run_loss_probability
        if probability > 0:
            rng = self._rng("run", run_id, action.attempt)
            if rng.random() < probability:
                outcome, duration_s = Outcome.ENGINE_LOSS, duration_s * rng.random()
        run = SimRun(run_id, action.attempt, duration_s, outcome, since_s=self._agenda.now_s)
        self._runs[run_id] = run
        cell_id = self._state.cells.cell_of(run_id)
        if cell_id is None:
            self._homeless[run_id] = run
        else:
            self.cells[cell_id].attach(run)
        self._emit(RunStarted(run_id, action.attempt))

    def on_due(self, due: tuple[SimRun, int]) -> None:
        """The end of a run by one of its timings; only the newest counts."""
        run, timing = due
        if run.timing != timing:
            return
        self._take_off(run)
        group = self._groups[run.run_id.rpartition("-r")[0]]
        rule = OUTCOME_TABLE[run.outcome]
        self.num_lost_attempts += run.outcome is not Outcome.FINISHED
        if not rule.is_retried(run.attempt):
            if run.run_id in group.outcome_of:
                raise InvariantError(f"run {run.run_id} ended twice.", self._state.history())
            group.outcome_of[run.run_id] = run.outcome
            self.num_ended += not group.spec.is_eval
        self._emit(RunEnded(run.run_id, run.attempt, run.outcome))

    def abort(self, action: AbortRuns) -> None:
        for run_id, attempt in action.attempts:
            run = self._runs.get(run_id)
            if run is not None and run.attempt == attempt:
                self._take_off(run)

    def _take_off(self, run: SimRun) -> None:
        del self._runs[run.run_id]
        self._homeless.pop(run.run_id, None)
        if run.cell is not None:
            run.cell.detach(run)
        run.timing += 1

    def follow(self, cell: SimCell) -> None:
        """Runs of a cell, and runs without one, go where the core routes them now."""
        cell_of = self._state.cells.cell_of
        for run in list(cell.runs.values()):
            if cell_of(run.run_id) != cell.cell_id:
                cell.detach(run)
                self._homeless[run.run_id] = run
        for run in list(self._homeless.values()):
            cell_id = cell_of(run.run_id)
            if cell_id is not None:
                del self._homeless[run.run_id]
                run.remaining_s += self._system.prefill_s
                self.num_moves += 1
                self.cells[cell_id].attach(run)

    # -- groups --

    def score(self, action: ScoreGroup) -> None:
        self._agenda.after(self._system.score_s, self._on_scored, action.group_id)

    def _on_scored(self, group_id: str) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        spec = group.spec
        num_counted = sum(OUTCOME_TABLE[outcome].counted for outcome in group.outcome_of.values())
        probability = self._system.group_loss_probability
        reason = ""
        if num_counted < _MIN_COUNTED_RUNS:
            reason = f"{num_counted} valid runs"
        elif group_id in self._workload.lost_groups:
            reason = "lost in the real job"
        elif not spec.is_eval and probability > 0 and self._rng("group", group_id).random() < probability:
            reason = "filtered"
        if reason or spec.is_eval:
            del self._groups[group_id]
        result = GroupResult(
            group_id=group_id,
            ready=not reason,
            reason=reason,
            num_runs=len(spec.run_ids),
            num_counted=num_counted,
            num_targets=0,
            num_tokens=0,
            reward_mean=1.0 if num_counted else None,
            rewards=(1.0,) * num_counted,
            version_min=spec.version,
        )
        self._emit(GroupScored(result))

    def drop(self, action: DropGroup) -> None:
        self._groups.pop(action.group_id, None)

    def take(self, group_id: str, step: int) -> TrainedGroup:
        """A group that goes to a step. Raises ``InvariantError`` if not every run of it has ended once."""
        group = self._groups.pop(group_id)
        if group.outcome_of.keys() != group.duration_of.keys():
            raise InvariantError(f"{group_id} is trained with unfinished runs.", self._state.history())
        durations_s = tuple(
            group.duration_of[run_id] for run_id, outcome in group.outcome_of.items() if OUTCOME_TABLE[outcome].trained
        )
        return TrainedGroup(group_id, group.task_index, step, step - 1 - group.spec.version, durations_s)

    def _rng(self, *key: str | int) -> random.Random:
        """Randomness that belongs to a key, whatever else was drawn."""
        return random.Random("/".join(map(str, (self._seed, *key))))
