"""The rules of the scheduler: what is decided in which state. Each returns whether it decided anything.

Rules look at the state only, never at the event that led to it, and mark what they started as under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from services.common.errors import InvariantError
from services.common.types import CellRole
from services.scheduler import policy
from services.scheduler.actions import PublishWeights, StartRun, TrainStep
from services.scheduler.cells import Cell
from services.scheduler.options import AtStalenessBound, PolicyMode
from services.scheduler.placement import (
    leave_rollout,
    place_core_after_burst,
    rescue_rollout,
    return_after_burst,
    return_drained,
)
from services.scheduler.step import OpenStep
from services.scheduler.types import JobStatus
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

_BROKEN = (Outcome.HARNESS_CRASH,)
"""Outcomes that count, but show no working harness where nothing else is seen."""
_MIN_RUNS_TO_JUDGE = 16


if TYPE_CHECKING:
    from services.scheduler.state import JobState

# -- rules --------------------------------------------------------------------------------------------------------


def _house_runs(state: JobState) -> bool:
    """Running runs without a cell get one."""
    state.cells.house_runs()
    return False


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
    has_held_out_pass = state.evaluation is not None or state.new_best is not None
    if state.wanted_version is not None and not has_held_out_pass and not state.cells.in_transition:
        undrained = [cell for cell in state.cells.live if not cell.is_draining]
        served = [cell for cell in undrained if not _only_trains(state, cell)] or undrained
        for cell in served:
            cell.note_update_attempts(1)
        if served:
            _begin_publication(state, state.wanted_version, served, f"{len(served)} live cells, the core last")
            return True
    if state.version < 0:
        return False
    targets = [cell for cell in state.cells.stale if cell.is_repairable]
    if not targets:
        return False
    for cell in targets:
        cell.note_update_attempts(cell.num_update_attempts + 1)
    _begin_publication(state, state.version, targets, "; ".join(f"{cell.cell_id} {cell.reason}" for cell in targets))
    return True


def _only_trains(state: JobState, cell: Cell) -> bool:
    """It gets new weights when it ever returns to rollout. (A drained cell gets them when it is undrained.)"""
    return state.options.policy.mode is PolicyMode.ASYNC and cell.role is CellRole.TRAIN


def _begin_publication(state: JobState, version: int, cells: list[Cell], reason: str) -> None:
    state.publication = PublishWeights(version, tuple(cell.cell_id for cell in cells))
    state.decide(state.publication, f"version {version} is due: {reason}")


def _cross_boundary(state: JobState) -> bool:
    """After a publication: a held-out pass if one is due, Eq. 6 for the core, dispatch up to Q."""
    if not state.at_boundary:
        return False
    state.options, state.pending_policy = state.next_options, None
    options = state.options
    state.order.window_size = options.window_groups
    state.status, state.at_boundary = JobStatus.RUNNING, False
    phi, mu = state.cadence()
    state.burst_done, state.burst_steps = 0, min(mu, state.steps_left)
    state.departures_are_over = False
    for cell in state.cells:
        cell.is_held = False
    if state.evaluation_is_due:
        if state.step > 0 and state.exported_step != state.step:
            state.save_checkpoint("resumed where a held-out pass is due", export=True)
        state.open_evaluation()
    target, why_target = policy.outstanding_target(options.groups_per_step, mu, phi, state.steps_left)
    num_groups, why = policy.groups_to_dispatch(target, state.book.num_outstanding)
    place_core_after_burst(state, num_groups * options.group_size)
    state.open_training_groups(num_groups, f"burst boundary at step {state.step}: {why}; {why_target}")
    return True


def _drop_stale(state: JobState) -> bool:
    """Groups beyond the staleness bound are dropped and replaced.

    In ``wait`` mode none gets there, but those that a resumed job brought along under a lower bound.
    """
    if not state.staleness_is_due:
        return False
    state.staleness_is_due = False
    if state.steps_left == 0:
        return False
    drops_unfinished = state.options.at_staleness_bound is AtStalenessBound.DROP
    unfinished = state.book.unfinished(is_eval=False) if drops_unfinished else []
    for group in [*state.book.ready.values(), *unfinished]:
        stale, why = policy.too_stale(state.step, group.spec.version, state.options.max_staleness_steps)
        if stale and not state.status.is_final and state.status is not JobStatus.ENDING:
            state.drop_and_replace(group, f"too stale: {why}")
    return False


def _train(state: JobState) -> bool:
    """The next step of the burst, or more groups of it, once the core is in training.

    Without streaming a step starts when all of its groups are ready; with it, groups join as they become ready.
    """
    step = state.training_step
    if step is not None and step.is_closed:
        return False
    if state.checkpoint is not None or len(state.book.ready) < state.num_ready_needed or not state.can_train_now:
        return False
    core = state.cells.core
    if core is not None and core.role not in (CellRole.TRAIN, CellRole.DOWN):
        return False
    groups = state.admissible(state.seats_left)
    state.book.begin_training(groups)
    if step is None:
        step = state.training_step = OpenStep(state.step + 1, state.version, state.next_step_seats)
    step.group_ids += [group.group_id for group in groups]
    step.num_unclaimed += len(groups)
    step.is_closed = step.num_missing == 0
    where = "core is in training" if core is not None and core.is_live else "core's rollout side is down"
    ages = f"oldest staleness {state.step - groups[0].spec.version}" if groups else "the step closes short"
    state.decide(
        TrainStep(step.step, tuple(group.group_id for group in groups), step.version, step.num_missing),
        f"{where}, {len(step.group_ids)} of {step.num_seats} groups are in; step {state.burst_done + 1} of "
        f"{state.burst_steps} in its burst, {ages}",
    )
    return True


def _start_runs(state: JobState) -> bool:
    """Queued runs take free slots of serving cells, held-out runs first.

    As many runs may be scored as harnesses run: the runners have room for no more, and a run that waits for a runner
    loses time of its own.
    """
    limit = state.options.max_concurrent_runs
    while state.book.num_slots_taken < limit and state.book.num_active_runs < 2 * limit:
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
            f"{why}; {state.book.num_slots_taken} of {limit} runs run",
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
    if state.cells.any_may_return:
        return False
    live, all_known = state.cells.live, len(state.cells) >= state.options.num_cells
    if all_known and not live:
        state.begin_ending(JobStatus.FAILED, f"no cell is alive: {state.cells.describe()}")
        return True
    is_training = state.training_step is not None and state.training_step.is_closed
    if state.publication or is_training or state.cells.in_transition or not all_known:
        return False
    can_serve = state.cells.any_can_serve
    if can_serve and state.status is JobStatus.STARTING:
        return False
    if state.checkpoint or state.new_best or state.book.num_scoring or state.book.num_scoring_runs:
        return False
    if can_serve and state.book.num_slots_taken:
        return False
    if can_serve:
        raise InvariantError("the job waits for nothing.")
    state.begin_ending(JobStatus.FAILED, f"no cell can serve: {state.cells.describe()}")
    return True


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
    _house_runs,
    _mark_best,
    return_after_burst,
    _publish,
    _cross_boundary,
    _drop_stale,
    return_drained,
    rescue_rollout,
    _train,
    leave_rollout,
    _start_runs,
    _finish_when_done,
    _give_up_when_no_run_works,
    _give_up_when_stuck,
)
"""Tried in this order until none decides anything."""

ENDING_RULES: tuple[Callable[[JobState], bool], ...] = (_mark_best, _conclude)
