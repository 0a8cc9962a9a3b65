"""The simulator: the production core (``JobState``), unchanged, with modelled cells, runs and training.

The engine is the core's shell: it performs every action against the models and feeds the answers back as events,
in simulated time. It decides nothing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvariantError
from services.common.ids import JobId, make_cell_id
from services.common.types import CellKind, CellRole
from services.scheduler.actions import (
    AbortRuns,
    Action,
    Decision,
    DropGroup,
    FinishJob,
    MarkBest,
    OpenGroup,
    PublishWeights,
    RecordEvaluation,
    SaveCheckpoint,
    ScoreGroup,
    StartRun,
    SwitchCell,
    TrainStep,
)
from services.scheduler.events import (
    BestMarked,
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellLost,
    CellServing,
    CellStale,
    CellUpdating,
    CheckpointSaved,
    Event,
    GroupScored,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
)
from services.scheduler.options import JobOptions
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.bounds import lower_bound
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.pool import CellMode, SimCell, SimRun
from services.scheduler.sim.result import (
    CellIntervals,
    RunCounts,
    SimResult,
    Timeline,
    TrainedGroup,
    staleness_of,
    utilisation_of,
)
from services.scheduler.sim.training import SimTraining
from services.scheduler.sim.workload import Workload, make_workload
from services.scheduler.state import JobState
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.types import GroupResult, GroupSpec

_MIN_COUNTED_RUNS = 2
"""Fewer valid runs give no advantage."""
_MOVES_RUNS = (CellLost, CellStale, CellServing, CellAdmitted, CellDrained)
"""Events of a cell after which the core may have moved runs."""
_CHANGES_ROLE = (CellLost, CellAdmitted, CellDrained, CellJoined)


@dataclass(slots=True, eq=False)
class _Group:
    """A dispatched group."""

    spec: GroupSpec
    duration_of: dict[str, float]
    outcome_of: dict[str, Outcome]
    """Of the runs whose last attempt ended."""


class Simulation:
    """One simulated job. Construct, ``run`` once.

    ``rows_by_task_s`` holds the durations of a CSV workload; ``workload`` replaces the configured one.
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        rows_by_task_s: Sequence[Sequence[float]] = (),
        workload: Workload | None = None,
        is_recorded: bool = False,
    ) -> None:
        self.config = config
        self._workload = workload or make_workload(config.workload, config.seed, rows_by_task_s)
        self.state = JobState(make_options(config, self._workload.num_tasks))
        self._agenda = Agenda()
        self._answers: deque[Event] = deque()
        """Events of this very moment that the core has not seen yet."""
        self._training = SimTraining(self._agenda, config.system.optimizer_s, self._emit)
        self._cells = {cell.cell_id: cell for cell in self._make_cells(is_recorded)}
        self._runs: dict[str, SimRun] = {}
        self._homeless: dict[str, SimRun] = {}
        self._groups: dict[str, _Group] = {}
        self._trained: list[TrainedGroup] = []
        self._step_end_s: list[float] = []
        self._start_s: float | None = None
        self._accounts: list[dict[str, Any]] = []
        self._end: FinishJob | None = None
        self._is_recorded = is_recorded
        self._water_level: list[tuple[float, int]] = []
        self._ready_groups: list[tuple[float, int]] = []
        self.num_events = 0
        self._num_switches = self._num_moves = self._num_lost_attempts = self._num_ended = 0
        self._exposed_s, self._exposed_since_s = 0.0, math.inf
        self._perform_by_type = self._performers()

    def _make_cells(self, is_recorded: bool) -> Iterable[SimCell]:
        pool = self.config.pool
        first_standalone = pool.num_cells - pool.standalone_cells
        for index, slots in enumerate(pool.slots_by_cell):
            kind = CellKind.CORE if index == 0 else CellKind.SATELLITE
            if index >= first_standalone:
                kind = CellKind.STANDALONE
            yield SimCell(make_cell_id(index), slots, kind, self._agenda, self._on_run_due, is_recorded)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> SimResult:
        """Simulate to the end. Raises ``InvariantError``, with the core's history, for a job that does not end."""
        for cell in self._cells.values():
            self._emit(CellJoined(cell.cell_id, cell.slots, cell.kind))
            self._plan_failure(cell)
        max_events = self._max_events()
        while self._end is None:
            if self._answers:
                self._handle(self._answers.popleft())
            elif not self._agenda.advance():
                raise InvariantError("the simulated job waits for what will not come.", self.state.history())
            if self.num_events > max_events:
                raise InvariantError(f"no end after {max_events} events.", self.state.history())
        return self._result()

    def _max_events(self) -> int:
        """Far more than a job needs that goes on: about two for each run, its retries included."""
        scheduler = self.config.scheduler
        runs = (self.config.steps + scheduler.steps_per_burst + math.ceil(scheduler.carry_over_steps) + 2) * (
            scheduler.groups_per_step * scheduler.group_size
        )
        return 100_000 + 100 * runs

    def _emit(self, event: Event) -> None:
        self._answers.append(event)

    def _handle(self, event: Event) -> None:
        self.num_events += 1
        decisions = self.state.handle(event, self._agenda.now_s)
        kind = type(event)
        if kind in _MOVES_RUNS:
            self._follow_runs_of(self._cells[event.cell_id])  # type: ignore[union-attr]
        if kind in _CHANGES_ROLE:
            self._take_role(self._cells[event.cell_id])  # type: ignore[union-attr]
        elif kind is StepTrained:
            self._note_step(event)  # type: ignore[arg-type]
        elif kind is PublicationEnded:
            self._note_publication()
        self._perform_all(decisions)
        self._note_exposure()
        if self._is_recorded:
            self._record()

    def _perform_all(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            action = decision.action
            self._perform_by_type[type(action)](action)

    def _performers(self) -> dict[type[Action], Callable[[Any], None]]:
        return {
            OpenGroup: self._open_group,
            StartRun: self._start_run,
            ScoreGroup: self._score_group,
            DropGroup: self._drop_group,
            SwitchCell: self._switch_cell,
            TrainStep: self._train_step,
            PublishWeights: self._publish,
            SaveCheckpoint: self._save_checkpoint,
            MarkBest: self._mark_best,
            RecordEvaluation: self._record_evaluation,
            AbortRuns: self._abort_runs,
            FinishJob: self._finish,
        }

    # -- runs and groups ----------------------------------------------------------------------------------------------

    def _open_group(self, action: OpenGroup) -> None:
        spec = action.spec
        seconds = self._workload.durations(action.task_index, spec.group_id, len(spec.run_ids))
        self._groups[spec.group_id] = _Group(spec, dict(zip(spec.run_ids, seconds, strict=True)), {})

    def _start_run(self, action: StartRun) -> None:
        duration_s = self._groups[action.group_id].duration_of[action.run_id]
        outcome = Outcome.FINISHED
        probability = self.config.system.run_loss_probability
        if probability > 0:
            rng = self._rng("run", action.run_id, action.attempt)
            if rng.random() < probability:
                outcome, duration_s = Outcome.ENGINE_LOSS, duration_s * rng.random()
        run = SimRun(action.run_id, action.attempt, duration_s, outcome, since_s=self._agenda.now_s)
        self._runs[action.run_id] = run
        cell_id = self.state.cells.cell_of(action.run_id)
        if cell_id is None:
            self._homeless[action.run_id] = run
        else:
            self._cells[cell_id].attach(run)
        self._emit(RunStarted(action.run_id, action.attempt))

    def _on_run_due(self, due: tuple[SimRun, int]) -> None:
        run, timing = due
        if run.timing != timing:
            return
        self._take_off(run)
        group = self._groups[run.run_id.rpartition("-r")[0]]
        rule = OUTCOME_TABLE[run.outcome]
        self._num_lost_attempts += run.outcome is not Outcome.FINISHED
        if rule.scored or run.attempt >= rule.max_retries:
            if run.run_id in group.outcome_of:
                raise InvariantError(f"run {run.run_id} ended twice.", self.state.history())
            group.outcome_of[run.run_id] = run.outcome
            self._num_ended += not group.spec.is_eval
        self._emit(RunEnded(run.run_id, run.attempt, run.outcome))

    def _take_off(self, run: SimRun) -> None:
        del self._runs[run.run_id]
        self._homeless.pop(run.run_id, None)
        if run.cell is not None:
            run.cell.detach(run)
        run.timing += 1

    def _abort_runs(self, action: AbortRuns) -> None:
        for run_id, attempt in action.attempts:
            run = self._runs.get(run_id)
            if run is not None and run.attempt == attempt:
                self._take_off(run)

    def _score_group(self, action: ScoreGroup) -> None:
        self._agenda.after(self.config.system.score_s, self._on_scored, action.group_id)

    def _on_scored(self, group_id: str) -> None:
        group = self._groups.get(group_id)
        if group is None:
            return
        counted = [outcome for outcome in group.outcome_of.values() if OUTCOME_TABLE[outcome].counted]
        probability = self.config.system.group_loss_probability
        reason = ""
        if len(counted) < _MIN_COUNTED_RUNS:
            reason = f"{len(counted)} valid runs"
        elif not group.spec.is_eval and probability > 0 and self._rng("group", group_id).random() < probability:
            reason = "filtered"
        rewards = (1.0,) * len(counted)
        mean = 1.0 if counted else None
        version = group.spec.version
        num_runs = len(group.spec.run_ids)
        self._emit(
            GroupScored(GroupResult(group_id, not reason, reason, num_runs, len(counted), 0, 0, mean, rewards, version))
        )
        if reason or group.spec.is_eval:
            del self._groups[group_id]

    def _drop_group(self, action: DropGroup) -> None:
        self._groups.pop(action.group_id, None)

    def _rng(self, *key: str | int) -> random.Random:
        """Randomness that belongs to a key, whatever else was drawn."""
        return random.Random("/".join(map(str, (self.config.seed, *key))))

    # -- placement ----------------------------------------------------------------------------------------------------

    def _follow_runs_of(self, cell: SimCell) -> None:
        """Runs of a cell, and runs without one, go where the core routes them now."""
        cell_of = self.state.cells.cell_of
        for run in list(cell.runs.values()):
            if cell_of(run.run_id) != cell.cell_id:
                cell.detach(run)
                self._homeless[run.run_id] = run
        if not self._homeless:
            return
        for run in list(self._homeless.values()):
            cell_id = cell_of(run.run_id)
            if cell_id is not None:
                del self._homeless[run.run_id]
                run.remaining_s += self.config.system.prefill_s
                self._num_moves += 1
                self._cells[cell_id].attach(run)

    # -- cells --------------------------------------------------------------------------------------------------------

    def _take_role(self, cell: SimCell) -> None:
        """The cell does what the core has it do."""
        role = self.state.cells.get(cell.cell_id).role
        # what is lost of the core is its rollout side: it goes on training
        if role is CellRole.TRAIN or (cell.is_core and role is CellRole.DOWN):
            if role is CellRole.DOWN and cell.micro_step is None:
                cell.set_mode(CellMode.DOWN)
            elif cell.micro_step is None and cell.mode is not CellMode.TRAINING:
                cell.set_mode(CellMode.WAITING)
            self._training.join(cell)
            return
        self._training.leave(cell)
        if role is CellRole.ROLLOUT:
            cell.set_mode(CellMode.SERVING)
        else:
            cell.set_mode(CellMode.DOWN if role is CellRole.DOWN else CellMode.SWITCHING)

    def _switch_cell(self, action: SwitchCell) -> None:
        cell, system = self._cells[action.cell_id], self.config.system
        self._num_switches += 1
        self._take_role(cell)
        self._follow_runs_of(cell)
        answer: Event
        if action.role is CellRole.TRAIN:
            delay_s, answer = system.switch_to_train_s, CellDrained(cell.cell_id)
        else:
            delay_s, answer = system.switch_to_rollout_s, CellAdmitted(cell.cell_id)
        self._agenda.after(delay_s, self._emit_unless_lost, (cell, cell.num_losses, answer))

    def _emit_unless_lost(self, news: tuple[SimCell, int, Event]) -> None:
        cell, num_losses, event = news
        if cell.num_losses == num_losses:
            self._emit(event)

    def _plan_failure(self, cell: SimCell) -> None:
        mtbf_s = self.config.system.cell_mtbf_s
        if mtbf_s > 0:
            delay_s = self._rng("cell", cell.cell_id, cell.num_losses).expovariate(1 / mtbf_s)
            self._agenda.after(delay_s, self._on_cell_fails, cell)

    def _on_cell_fails(self, cell: SimCell) -> None:
        cell.num_losses += 1
        cell.is_up, cell.version = False, -1
        self._emit(CellLost(cell.cell_id, "simulated failure", may_return=True))
        self._agenda.after(self.config.system.cell_repair_s, self._on_cell_repaired, cell)

    def _on_cell_repaired(self, cell: SimCell) -> None:
        cell.is_up = True
        if cell.is_paused:
            cell.pause(False)
        self._emit(CellJoined(cell.cell_id, cell.slots, cell.kind))
        self._plan_failure(cell)

    # -- publication --------------------------------------------------------------------------------------------------

    def _publish(self, action: PublishWeights) -> None:
        cells = [self._cells[cell_id] for cell_id in action.cell_ids]
        self._publish_next((action.version, [(cell, cell.num_losses) for cell in cells], len(cells)))

    def _publish_next(self, publication: tuple[int, list[tuple[SimCell, int]], int]) -> None:
        """The next cell fetches the weights while it serves the old ones; then its runs pause."""
        version, cells, num_cells = publication
        while cells and cells[0][0].num_losses != cells[0][1]:
            del cells[0]
        if not cells:
            self._emit(PublicationEnded(version))
            return
        fetch_s = self.config.system.publish_s / num_cells - self.config.system.update_pause_s
        self._agenda.after(max(0.0, fetch_s), self._begin_update, publication)

    def _begin_update(self, publication: tuple[int, list[tuple[SimCell, int]], int]) -> None:
        version, cells, _ = publication
        cell, num_losses = cells[0]
        if cell.num_losses == num_losses:
            self._emit(CellUpdating(cell.cell_id, version))
            if self.config.system.update_pause_s > 0:
                cell.pause(True)
        self._agenda.after(self.config.system.update_pause_s, self._end_update, publication)

    def _end_update(self, publication: tuple[int, list[tuple[SimCell, int]], int]) -> None:
        version, cells, _ = publication
        cell, num_losses = cells.pop(0)
        if cell.num_losses == num_losses:
            if cell.version != version:
                cell.delay_runs(self.config.system.prefill_s)
            cell.version = version
            if cell.is_paused:
                cell.pause(False)
            self._emit(CellServing(cell.cell_id, version))
        self._publish_next(publication)

    # -- training and the rest ----------------------------------------------------------------------------------------

    def _train_step(self, action: TrainStep) -> None:
        for cell in self._cells.values():
            self._take_role(cell)
        system = self.config.system
        factor = system.train_per_rollout
        if not self.state.options.policy.streaming:
            factor *= system.batch_overhead
        costs_s: list[float] = []
        for group_id in action.group_ids:
            group = self._groups.pop(group_id)
            if len(group.outcome_of) != len(group.duration_of):
                raise InvariantError(f"{group_id} is trained with unfinished runs.", self.state.history())
            durations_s = tuple(
                group.duration_of[run_id]
                for run_id, outcome in group.outcome_of.items()
                if OUTCOME_TABLE[outcome].trained
            )
            costs_s += [factor * seconds for seconds in durations_s]
            staleness = action.step - 1 - group.spec.version
            self._trained.append(TrainedGroup(group_id, action.step, staleness, durations_s))
        self._training.add(action, costs_s)

    def _save_checkpoint(self, action: SaveCheckpoint) -> None:
        self._agenda.after(self.config.system.checkpoint_s, self._emit, CheckpointSaved(action.step))

    def _mark_best(self, action: MarkBest) -> None:
        self._emit(BestMarked(action.step))

    def _record_evaluation(self, action: RecordEvaluation) -> None:
        """Nothing follows from it."""

    def _finish(self, action: FinishJob) -> None:
        self._end = action

    # -- figures ------------------------------------------------------------------------------------------------------

    def _note_step(self, event: StepTrained) -> None:
        self._step_end_s.append(self._agenda.now_s)
        if event.step == self.config.steps:
            self._accounts = [cell.accounts() for cell in self._cells.values()]

    def _note_publication(self) -> None:
        for cell in self._cells.values():
            self._follow_runs_of(cell)
            self._take_role(cell)
            if self._start_s is None:
                cell.open_accounts()
        if self._start_s is None:
            self._start_s = self._agenda.now_s

    def _note_exposure(self) -> None:
        is_exposed = self._training.is_busy and len(self._runs) == len(self._homeless)
        since_s = self._exposed_since_s
        if is_exposed and since_s == math.inf:
            self._exposed_since_s = self._agenda.now_s
        elif not is_exposed and since_s != math.inf:
            self._exposed_s += self._agenda.now_s - since_s
            self._exposed_since_s = math.inf

    def _record(self) -> None:
        now_s, book = self._agenda.now_s, self.state.book
        for series, value in ((self._water_level, book.water_level), (self._ready_groups, len(book.ready))):
            if not series or series[-1][1] != value:
                series.append((now_s, value))

    def _result(self) -> SimResult:
        assert self._end is not None
        accounts = self._accounts or [cell.accounts() for cell in self._cells.values()]
        durations = [seconds for group in self._trained for seconds in group.durations_s]
        slowest = [group.slowest_s for group in self._trained]
        book, scheduler, pool = self.state.book, self.config.scheduler, self.config.pool
        counts = RunCounts(
            dispatched_runs=book.training.dispatched,
            ended_runs=self._num_ended,
            trained_runs=len(durations),
            lost_attempts=self._num_lost_attempts,
            moved_runs=self._num_moves,
            dispatched_groups=self.state.next_group_index,
            trained_groups=book.num_trained,
            lost_groups=book.num_lost,
        )
        return SimResult(
            name=self.config.name,
            status=self._end.status.value,
            reason=self._end.reason,
            start_s=self._start_s or 0.0,
            step_end_s=tuple(self._step_end_s),
            staleness=staleness_of(self._trained, scheduler.steps_per_burst),
            counts=counts,
            utilisation=utilisation_of(accounts, pool.slots_by_cell),
            exposed_training_s=self._exposed_s,
            run_mean_s=sum(durations) / len(durations) if durations else 0.0,
            slowest_of_group_mean_s=sum(slowest) / len(slowest) if slowest else 0.0,
            num_switches=self._num_switches,
            num_events=self.num_events,
            lower_bound=lower_bound(
                slowest,
                [(group.step - 1) // scheduler.steps_per_burst for group in self._trained],
                sum(durations),
                self.config.system.train_per_rollout * sum(durations),
                slots=pool.slots_by_cell,
                num_standalone=pool.standalone_cells,
                max_outstanding=math.ceil(
                    (scheduler.carry_over_steps + scheduler.steps_per_burst) * scheduler.groups_per_step - 1e-9
                ),
                has_carry_over=scheduler.carry_over_steps > 0,
            ),
            groups=tuple(self._trained),
            timeline=self._timeline() if self._is_recorded else None,
        )

    def _timeline(self) -> Timeline:
        return Timeline(
            cells=tuple(
                CellIntervals(
                    cell.cell_id, tuple((span.mode.value, span.start_s, span.end_s) for span in cell.intervals)
                )
                for cell in self._cells.values()
            ),
            water_level=tuple(self._water_level),
            ready_groups=tuple(self._ready_groups),
        )


def make_options(config: SimConfig, num_tasks: int) -> JobOptions:
    """The core's options of a simulated job."""
    pool, evaluation = config.pool, config.evaluation
    return JobOptions.from_config(
        config.scheduler,
        job_id=JobId(config.name),
        num_cells=pool.num_cells,
        task_names=tuple(f"task-{index}" for index in range(num_tasks)),
        steps=config.steps,
        eval_task_names=tuple(f"held-out-{index}" for index in range(evaluation.num_tasks)),
        eval_every=evaluation.every,
        eval_at_start=evaluation.at_start,
        eval_at_end=evaluation.at_end,
        eval_group_size=evaluation.group_size,
        max_concurrent_runs=pool.max_concurrent_runs or 1_000_000_000,
        checkpoint_every=config.system.checkpoint_every or config.steps + 1,
        seed=config.seed,
    )


def simulate(
    config: SimConfig, rows_by_task_s: Sequence[Sequence[float]] = (), *, is_recorded: bool = False
) -> SimResult:
    """Simulate one job. ``rows_by_task_s``: the durations of a CSV workload (``durations.read_durations``)."""
    return Simulation(config, rows_by_task_s=rows_by_task_s, is_recorded=is_recorded).run()
