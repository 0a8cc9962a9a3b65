"""The simulator: the production core (``JobState``), unchanged, with modelled cells, runs and training.

The engine is the core's shell: it performs every action against the models and feeds the answers back as events,
in simulated time. It decides nothing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
    PublicationEnded,
    StepTrained,
)
from services.scheduler.options import JobOptions
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.figures import Figures
from services.scheduler.sim.pool import CellMode, SimCell
from services.scheduler.sim.result import SimResult
from services.scheduler.sim.runs import SimRuns
from services.scheduler.sim.training import SimTraining
from services.scheduler.sim.workload import Workload, make_workload
from services.scheduler.state import JobState

_Publication = tuple[int, list[tuple[SimCell, int]], int]
"""Version; cells that are still to be updated, each with its losses so far; how many there were."""


class Simulation:
    """One simulated job. Construct, ``run`` once.

    ``rows_by_task_s`` holds the durations of a CSV workload; ``workload`` replaces the configured one. ``listener``
    is told of every event with its time and what was decided.
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        rows_by_task_s: Sequence[Sequence[float]] = (),
        workload: Workload | None = None,
        is_recorded: bool = False,
        listener: Callable[[float, Event, list[Decision]], None] | None = None,
    ) -> None:
        self.config = config
        self._listener = listener
        self.workload = workload or make_workload(config.workload, config.seed, rows_by_task_s)
        self.state = JobState(make_options(config, self.workload.num_tasks))
        self.end: FinishJob | None = None
        self._agenda = Agenda()
        self._answers: deque[Event] = deque()
        """Events of this very moment that the core has not seen yet."""
        emit = self._answers.append
        self._runs = SimRuns(self.state, self._agenda, self.workload, config.system, config.seed, emit)
        self._training = SimTraining(self._agenda, config.system.optimizer_s, emit)
        self._cells = self._runs.cells = {cell.cell_id: cell for cell in self._make_cells(is_recorded)}
        self._figures = Figures(config, self._agenda, self._cells.values(), is_recorded=is_recorded)
        self._performers = self._make_performers()
        self._followers: dict[type[Event], Callable[[Any], None]] = {
            CellJoined: self._on_role,
            CellLost: self._on_role,
            CellDrained: self._on_role,
            CellAdmitted: self._on_role,
            CellServing: self._on_routes,
            CellStale: self._on_routes,
            PublicationEnded: self._on_publication_ended,
            StepTrained: self._on_step_trained,
        }

    def _make_cells(self, is_recorded: bool) -> Iterable[SimCell]:
        pool = self.config.pool
        first_standalone = pool.num_cells - pool.standalone_cells
        for index, slots in enumerate(pool.slots_by_cell):
            kind = CellKind.CORE if index == 0 else CellKind.SATELLITE
            if index >= first_standalone:
                kind = CellKind.STANDALONE
            yield SimCell(make_cell_id(index), slots, kind, self._agenda, self._runs.on_due, is_recorded)

    def _make_performers(self) -> dict[type[Action], Callable[[Any], None]]:
        emit = self._answers.append
        return {
            OpenGroup: self._runs.open_group,
            StartRun: self._runs.start,
            AbortRuns: self._runs.abort,
            ScoreGroup: self._runs.score,
            DropGroup: self._runs.drop,
            SwitchCell: self._switch_cell,
            TrainStep: self._train_step,
            PublishWeights: self._publish,
            SaveCheckpoint: self._save_checkpoint,
            MarkBest: lambda action: emit(BestMarked(action.step)),
            RecordEvaluation: lambda action: None,
            FinishJob: self._finish,
        }

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> SimResult:
        """Simulate to the end. Raises ``InvariantError``, with the core's history, for a job that does not end."""
        for cell in self._cells.values():
            self._answers.append(CellJoined(cell.cell_id, cell.slots, cell.kind))
            self._plan_failure(cell)
        max_events = self._max_events()
        while self.end is None:
            if self._answers:
                self._handle(self._answers.popleft())
            elif not self._agenda.advance():
                raise InvariantError("the simulated job waits for what will not come.", self.state.history())
            if self._figures.num_events > max_events:
                raise InvariantError(f"no end after {max_events} events.", self.state.history())
        return self._figures.result(self.state, self._runs, self.end)

    def _max_events(self) -> int:
        """Far more than a job needs that goes on: about two for each run, its retries included."""
        scheduler = self.config.scheduler
        num_steps = self.config.steps + self.config.steps_after + scheduler.steps_per_burst
        num_steps += math.ceil(scheduler.carry_over_steps)
        return 100_000 + 100 * num_steps * scheduler.groups_per_step * scheduler.group_size

    def _handle(self, event: Event) -> None:
        """The core takes in an event; the models follow what it changed, then perform what it decided."""
        figures = self._figures
        figures.num_events += 1
        decisions = self.state.handle(event, self._agenda.now_s)
        if self._listener is not None:
            self._listener(self._agenda.now_s, event, decisions)
        follow = self._followers.get(type(event))
        if follow is not None:
            follow(event)
        for decision in decisions:
            self._performers[type(decision.action)](decision.action)
        figures.note_exposure(self._training.is_busy and not self._runs.any_goes_on)
        if figures.is_recorded:
            figures.record(self.state.book.water_level, len(self.state.book.ready))

    def _on_role(self, event: CellJoined | CellLost | CellDrained | CellAdmitted) -> None:
        cell = self._cells[event.cell_id]
        self._take_role(cell)
        self._runs.follow(cell)

    def _on_routes(self, event: CellServing | CellStale) -> None:
        self._runs.follow(self._cells[event.cell_id])

    def _on_publication_ended(self, event: PublicationEnded) -> None:
        for cell in self._cells.values():
            self._take_role(cell)
            self._runs.follow(cell)
        self._figures.note_publication()

    def _on_step_trained(self, event: StepTrained) -> None:
        self._figures.note_step(event.step)

    # -- cells --------------------------------------------------------------------------------------------------------

    def _take_role(self, cell: SimCell) -> None:
        """The cell does what the core has it do."""
        role = self.state.cells.get(cell.cell_id).role
        if role is CellRole.TRAIN or (cell.is_core and role is CellRole.DOWN):
            # what is lost of the core is its rollout side: it goes on training
            if cell.mode is not CellMode.TRAINING:
                cell.set_mode(CellMode.DOWN if role is CellRole.DOWN else CellMode.WAITING)
            self._training.join(cell)
            return
        self._training.leave(cell)
        if role is CellRole.ROLLOUT:
            cell.set_mode(CellMode.SERVING)
        else:
            cell.set_mode(CellMode.DOWN if role is CellRole.DOWN else CellMode.SWITCHING)

    def _switch_cell(self, action: SwitchCell) -> None:
        cell, system = self._cells[action.cell_id], self.config.system
        self._figures.num_switches += 1
        self._take_role(cell)
        self._runs.follow(cell)
        if action.role is CellRole.TRAIN:
            self._answer_unless_lost(system.switch_to_train_s, cell, CellDrained(cell.cell_id))
        else:
            self._answer_unless_lost(system.switch_to_rollout_s, cell, CellAdmitted(cell.cell_id))

    def _answer_unless_lost(self, delay_s: float, cell: SimCell, event: Event) -> None:
        self._agenda.after(delay_s, self._on_answer_due, (cell, cell.num_losses, event))

    def _on_answer_due(self, answer: tuple[SimCell, int, Event]) -> None:
        cell, num_losses, event = answer
        if cell.num_losses == num_losses:
            self._answers.append(event)

    def _plan_failure(self, cell: SimCell) -> None:
        mtbf_s = self.config.system.cell_mtbf_s
        if mtbf_s > 0:
            rng = random.Random(f"{self.config.seed}/failures/{cell.cell_id}/{cell.num_losses}")
            self._agenda.after(rng.expovariate(1 / mtbf_s), self._on_cell_fails, cell)

    def _on_cell_fails(self, cell: SimCell) -> None:
        cell.num_losses += 1
        cell.version = -1
        self._answers.append(CellLost(cell.cell_id, "simulated failure", may_return=True))
        self._agenda.after(self.config.system.cell_repair_s, self._on_cell_repaired, cell)

    def _on_cell_repaired(self, cell: SimCell) -> None:
        if cell.is_paused:
            cell.pause(False)
        self._answers.append(CellJoined(cell.cell_id, cell.slots, cell.kind))
        self._plan_failure(cell)

    # -- publication --------------------------------------------------------------------------------------------------

    def _publish(self, action: PublishWeights) -> None:
        cells = [self._cells[cell_id] for cell_id in action.cell_ids]
        self._publish_next((action.version, [(cell, cell.num_losses) for cell in cells], len(cells)))

    def _publish_next(self, publication: _Publication) -> None:
        """The next cell fetches the weights while it serves the old ones."""
        version, cells, num_cells = publication
        while cells and cells[0][0].num_losses != cells[0][1]:
            del cells[0]
        if not cells:
            self._answers.append(PublicationEnded(version))
            return
        fetch_s = self.config.system.publish_s / num_cells - self.config.system.update_pause_s
        self._agenda.after(max(0.0, fetch_s), self._begin_update, publication)

    def _begin_update(self, publication: _Publication) -> None:
        """It takes them in; its runs stand still."""
        version, cells, _ = publication
        cell, num_losses = cells[0]
        if cell.num_losses == num_losses:
            self._answers.append(CellUpdating(cell.cell_id, version))
            if self.config.system.update_pause_s > 0:
                cell.pause(True)
        self._agenda.after(self.config.system.update_pause_s, self._end_update, publication)

    def _end_update(self, publication: _Publication) -> None:
        """Its runs go on, after a prefill."""
        version, cells, _ = publication
        cell, num_losses = cells.pop(0)
        if cell.num_losses == num_losses:
            if cell.version != version:
                cell.delay_runs(self.config.system.prefill_s)
            cell.version = version
            if cell.is_paused:
                cell.pause(False)
            self._answers.append(CellServing(cell.cell_id, version))
        self._publish_next(publication)

    # -- training and the rest ----------------------------------------------------------------------------------------

    def _train_step(self, action: TrainStep) -> None:
        system = self.config.system
        factor = system.train_per_rollout
        if not self.state.options.policy.streaming:
            factor *= system.batch_overhead
        groups = [self._runs.take(group_id, action.step) for group_id in action.group_ids]
        self._figures.trained += groups
        if not self._training.is_busy:
            for cell in self._cells.values():
                self._take_role(cell)
        self._training.add(action, [factor * seconds for group in groups for seconds in group.durations_s])

    def _save_checkpoint(self, action: SaveCheckpoint) -> None:
        self._agenda.after(self.config.system.checkpoint_s, self._answers.append, CheckpointSaved(action.step))

    def _finish(self, action: FinishJob) -> None:
        self.end = action


def make_options(config: SimConfig, num_tasks: int) -> JobOptions:
    """The core's options of a simulated job."""
    pool, evaluation = config.pool, config.evaluation
    return JobOptions.from_config(
        config.scheduler,
        job_id=JobId(config.name),
        num_cells=pool.num_cells,
        task_names=tuple(f"task-{index}" for index in range(num_tasks)),
        steps=config.steps + config.steps_after,
        eval_task_names=tuple(f"held-out-{index}" for index in range(evaluation.num_tasks)),
        eval_every=evaluation.every,
        eval_at_start=evaluation.at_start,
        eval_at_end=evaluation.at_end,
        eval_group_size=evaluation.group_size,
        max_concurrent_runs=pool.max_concurrent_runs or 1_000_000_000,
        checkpoint_every=config.system.checkpoint_every or config.steps + config.steps_after + 1,
        seed=config.seed,
    )


def simulate(
    config: SimConfig, rows_by_task_s: Sequence[Sequence[float]] = (), *, is_recorded: bool = False
) -> SimResult:
    """Simulate one job. ``rows_by_task_s``: the durations of a CSV workload (``durations.read_durations``)."""
    return Simulation(config, rows_by_task_s=rows_by_task_s, is_recorded=is_recorded).run()
