"""The rules of the scheduler: what is decided in which state. Each returns whether it decided anything.

Rules look at the state only, never at the event that led to it, and mark what they started as under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.common.errors import InvariantError
from services.common.types import CellRole, CellState
from services.scheduler import policy
from services.scheduler.actions import PublishWeights, StartRun, SwitchCell, TrainStep
from services.scheduler.cells import Cell
from services.scheduler.types import JobStatus
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

_BROKEN = (Outcome.HARNESS_CRASH,)
"""Outcomes that count, but show no working harness where nothing else is seen."""
_MIN_RUNS_TO_JUDGE = 16

if TYPE_CHECKING:
    from services.scheduler.state import JobState

# -- rules --------------------------------------------------------------------------------------------------------


def _mark_best(state: JobState) -> bool:
    """The best held-out reward so far: its checkpoint is marked, once it is complete."""
    best = state.new_best
    if best is None or state.is_marking_best or state.checkpoint is not None:
        return False
    state.is_marking_best = True
    _, why = policy.is_new_best(best.reward_mean, best.step, state.best_eval_reward, state.best_eval_step)
    state.decide(best, why)
    return True


def _publish(state: JobState) -> bool:
    """New weights go to all live cells at a burst's end; weights of the last version to cells that are stale.

    New weights wait until the held-out pass of the version before is over and, if it was the best, that is marked;
    cells that went stale do not wait.
    """
    if state.publication is not None:
        return False
    if state.status is JobStatus.STARTING and len(state.cells) < state.options.num_cells:
        return False
    live = state.cells.live
    in_transition = any(cell.in_transition for cell in live)
    has_held_out_pass = state.evaluation is not None or state.new_best is not None
    if state.wanted_version is not None and live and not has_held_out_pass and not in_transition:
        for cell in live:
            cell.num_update_attempts = 1
        _begin_publication(state, state.wanted_version, live, f"{len(live)} cells are live; the core comes last")
        return True
    stale = [cell for cell in live if cell.role is CellRole.ROLLOUT and cell.state is CellState.STALE]
    targets = [cell for cell in stale if cell.is_repairable]
    if not targets or state.version < 0:
        return False
    for cell in targets:
        cell.num_update_attempts += 1
    _begin_publication(state, state.version, targets, "; ".join(f"{cell.cell_id} {cell.reason}" for cell in targets))
    return True


def _begin_publication(state: JobState, version: int, cells: list[Cell], reason: str) -> None:
    state.publication = PublishWeights(version, tuple(cell.cell_id for cell in cells))
    state.decide(state.publication, f"version {version} is due: {reason}")


def _cross_boundary(state: JobState) -> bool:
    """After a publication: a held-out pass if one is due, Eq. 6 for the core, dispatch up to Q."""
    if not state.at_boundary:
        return False
    options = state.options
    state.status, state.at_boundary = JobStatus.RUNNING, False
    state.burst_done, state.burst_steps = 0, min(options.steps_per_burst, state.steps_left)
    if state.evaluation_is_due:
        if state.step > 0 and state.exported_step != state.step:
            state.save_checkpoint("resumed where a held-out pass is due", export=True)
        state.open_evaluation()
    target, why_target = policy.outstanding_target(
        options.groups_per_step, options.steps_per_burst, options.carry_over_steps, state.steps_left
    )
    num_groups, why = policy.groups_to_dispatch(target, state.book.num_outstanding)
    _place_core_after_burst(state, num_groups * options.group_size)
    for _ in range(num_groups):
        state.open_training_group(f"burst boundary at step {state.step}: {why}; {why_target}")
    return True


def _place_core_after_burst(state: JobState, num_missing_runs: int) -> None:
    core = state.cells.core
    if core is None or core.role is not CellRole.TRAIN:
        return
    if state.steps_left == 0:
        if state.evaluation is not None:
            state.return_core(core, f"all {state.options.steps} steps are trained and a held-out pass runs")
        return
    others = sum(cell.slots for cell in state.cells.live if not cell.is_core and cell.state is not CellState.STALE)
    stays, why = policy.core_stays_in_training(
        state.book.water_level, len(state.book.ready), num_missing_runs, others, state.options.groups_per_step
    )
    if not stays:
        state.return_core(core, f"core returns to rollout: {why}")


def _drop_stale(state: JobState) -> bool:
    """Ready groups beyond the staleness bound are dropped and replaced."""
    if not state.staleness_is_due:
        return False
    state.staleness_is_due = False
    if state.steps_left == 0:
        return False
    for group in list(state.book.ready.values()):
        stale, why = policy.too_stale(state.step, group.spec.version, state.options.max_staleness_steps)
        if stale and not state.status.is_final and state.status is not JobStatus.ENDING:
            state.drop_and_replace(group, f"too stale: {why}")
    return False


def _rescue_rollout(state: JobState) -> bool:
    """With no rollout capacity left and runs unfinished, the core goes back as soon as its step ends."""
    core = state.cells.core
    if core is None or core.role is not CellRole.TRAIN or state.training_step is not None:
        return False
    if state.publication is not None or state.book.water_level == 0:
        return False
    others = [cell for cell in state.cells.live if not cell.is_core]
    if any(cell.state is not CellState.STALE or cell.is_repairable for cell in others):
        return False
    state.return_core(core, f"no other cell can serve and w={state.book.water_level} runs are unfinished")
    return True


def _train(state: JobState) -> bool:
    """The next step of the burst, once the core is in training and B groups are ready."""
    size = state.options.groups_per_step
    if state.training_step is not None or state.checkpoint is not None or state.burst_done >= state.burst_steps:
        return False
    core = state.cells.core
    if core is not None and core.role not in (CellRole.TRAIN, CellRole.DOWN):
        return False
    if state.wanted_version is not None or len(state.book.ready) < size:
        return False
    groups = state.book.oldest_ready(size)
    state.book.begin_training(groups)
    state.training_step = TrainStep(state.step + 1, tuple(group.group_id for group in groups), state.version)
    where = "core is in training" if core is not None and core.is_live else "core's rollout side is down"
    oldest = state.step - groups[0].spec.version
    state.decide(
        state.training_step,
        f"{where}, {size} of {size} groups are ready; step {state.burst_done + 1} of {state.burst_steps} in its "
        f"burst, oldest staleness {oldest}",
    )
    return True


def _leave_rollout(state: JobState) -> bool:
    """Eq. 5, for the core."""
    core = state.cells.core
    if core is None or core.role is not CellRole.ROLLOUT or state.burst_done >= state.burst_steps:
        return False
    if state.wanted_version is not None or len(state.book.ready) < state.options.groups_per_step:
        return False
    if state.publication is not None and core.cell_id in state.publication.cell_ids:
        return False
    leaves, why = policy.core_may_leave_rollout(
        state.book.water_level,
        state.cells.rollout_slots,
        core.rollout_slots,
        len(state.book.ready),
        state.options.groups_per_step,
    )
    if not leaves:
        return False
    core.move_to(CellRole.TO_TRAIN)
    state.cells.move_runs_off(core)
    state.decide(SwitchCell(core.cell_id, CellRole.TRAIN, state.options.drain_timeout_s), f"core leaves rollout: {why}")
    return True


def _start_runs(state: JobState) -> bool:
    """Queued runs take free slots of serving cells, held-out runs first."""
    while state.book.num_active_runs < state.options.max_concurrent_runs:
        run = state.book.next_queued()
        if run is None:
            return False
        cell_id, why = state.cells.choose()
        if cell_id is None:
            return False
        state.book.take_slot(run, state.now_s)
        state.cells.place(run.run_id, cell_id)
        group = run.group
        state.decide(
            StartRun(run.run_id, run.attempt, group.group_id, group.task_index, cell_id, group.spec.is_eval),
            f"{why}; {state.book.num_active_runs} of {state.options.max_concurrent_runs} runs run",
        )
    return False


def _finish_when_done(state: JobState) -> bool:
    """All steps trained, saved and published, the final held-out pass recorded, the best checkpoint marked."""
    if state.status is not JobStatus.RUNNING or state.steps_left > 0 or state.wanted_version is not None:
        return False
    if state.evaluation is not None or state.checkpoint is not None or state.new_best is not None:
        return False
    state.finish(JobStatus.FINISHED, f"{state.step} of {state.options.steps} steps are trained")
    return True


def _give_up_when_no_run_works(state: JobState) -> bool:
    """The harness, the verifier or the engine is set up wrong: going on would only repeat it."""
    outcomes = state.book.num_outcomes
    num_ended = sum(outcomes.values())
    if num_ended < max(_MIN_RUNS_TO_JUDGE, 2 * state.options.group_size):
        return False
    if any(OUTCOME_TABLE[Outcome(name)].counted for name in outcomes if name not in _BROKEN):
        return False
    told = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
    state.begin_ending(JobStatus.FAILED, f"none of the first {num_ended} runs worked: {told}")
    return True


def _give_up_when_stuck(state: JobState) -> bool:
    """Nothing may wait for what cannot come."""
    if any(cell.may_return for cell in state.cells):
        return False
    all_known = len(state.cells) >= state.options.num_cells
    if all_known and not state.cells.live:
        state.begin_ending(JobStatus.FAILED, f"no cell is alive: {state.cells.describe()}")
        return True
    in_flight = state.publication or state.training_step or any(cell.in_transition for cell in state.cells)
    if in_flight or not all_known:
        return False
    if any(cell.state is not CellState.STALE or cell.is_repairable for cell in state.cells.live):
        waits = state.checkpoint or state.new_best or state.book.num_active_runs or state.book.num_scoring
        if not waits and state.status is JobStatus.RUNNING:
            raise InvariantError("the job waits for nothing.")
        return False
    if state.book.water_level > 0 or state.status is JobStatus.STARTING:
        state.begin_ending(JobStatus.FAILED, f"no cell can serve: {state.cells.describe()}")
        return True
    return False


def _conclude(state: JobState) -> bool:
    """A job that ends early: the step in flight ends, what was trained is saved, then it is over."""
    if state.training_step is not None or state.checkpoint is not None or state.planned_end is None:
        return False
    if state.new_best is not None:
        return False
    if state.saved_step < state.step:
        state.save_checkpoint(f"the job ends: {state.planned_end.reason}", export=False)
        return True
    state.finish(state.planned_end.status, state.planned_end.reason)
    return True


RULES: tuple[Callable[[JobState], bool], ...] = (
    _mark_best,
    _publish,
    _cross_boundary,
    _drop_stale,
    _rescue_rollout,
    _train,
    _leave_rollout,
    _start_runs,
    _finish_when_done,
    _give_up_when_no_run_works,
    _give_up_when_stuck,
)
"""Tried in this order until none decides anything."""

ENDING_RULES: tuple[Callable[[JobState], bool], ...] = (_mark_best, _conclude)
