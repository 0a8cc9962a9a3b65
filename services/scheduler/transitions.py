"""What each event changes in the records. (What is decided in consequence: ``services.scheduler.rules``.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.common.errors import InvariantError
from services.common.types import CellKind, CellRole, CellState
from services.scheduler import policy, requests
from services.scheduler.actions import (
    AbortRuns,
    DropGroup,
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
    ActionFailed,
    BestMarked,
    CancelRequested,
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellLost,
    CellReported,
    CellServing,
    CellStale,
    CellUpdating,
    CheckpointSaved,
    DrainRequested,
    GroupScored,
    HarnessEnded,
    PolicyRequested,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
    SwitchRequested,
    Tick,
    TrainingFailed,
    TrainingProgressed,
    UndrainRequested,
)
from services.scheduler.groups import Group, GroupStatus, Run
from services.scheduler.options import JobOptions
from services.scheduler.types import JobStatus, TaskRewards
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

if TYPE_CHECKING:
    from services.scheduler.state import JobState

# -- events: cells ------------------------------------------------------------------------------------------------


def _on_cell_joined(state: JobState, event: CellJoined) -> None:
    known = state.cells.find(event.cell_id)
    if known is not None and known.is_live:
        state.cells.lose(event.cell_id, "joined again without a word of its loss", may_return=True)
    in_burst = state.training_step is not None or state.burst_done > 0
    comes_back_to_training = event.kind is CellKind.CORE and known is not None and in_burst
    role = CellRole.TRAIN if comes_back_to_training else CellRole.ROLLOUT
    state.cells.join(event.cell_id, event.slots, event.kind, role, is_held=state.is_inside_burst)


def _on_cell_reported(state: JobState, event: CellReported) -> None:
    cell = state.cells.get(event.cell_id)
    if not cell.is_live:  # it was away only for its watcher
        state.cells.join(event.cell_id, event.slots, cell.kind, CellRole.ROLLOUT, is_held=state.is_inside_burst)
        return
    if event.slots != cell.slots:
        cell.set_slots(event.slots)
    in_publication = state.publication is not None and event.cell_id in state.publication.cell_ids
    if in_publication or event.version == cell.version:
        return
    cell.mark_stale(f"reports version {event.version}, known was {cell.version}")
    if cell.role is CellRole.ROLLOUT:
        state.cells.move_runs_off(cell)


def _on_cell_updating(state: JobState, event: CellUpdating) -> None:
    cell, publication = state.cells.get(event.cell_id), state.publication
    in_publication = publication is not None and event.cell_id in publication.cell_ids
    # a stale cell stays stale until its weights are verified: it is no capacity that another cell could leave behind
    if cell.is_live and in_publication and cell.state is CellState.SERVING:
        cell.mark_updating(event.version)


def _on_cell_serving(state: JobState, event: CellServing) -> None:
    cell = state.cells.get(event.cell_id)
    if not cell.is_live:
        return
    wanted = state.version if state.wanted_version is None else state.wanted_version
    if event.version > wanted:
        raise InvariantError(f"{event.cell_id} serves version {event.version}; the newest is {wanted}.")
    if event.version not in (wanted, state.version):
        cell.mark_stale(f"serves version {event.version}, the newest is {wanted}")
        if cell.role is CellRole.ROLLOUT:
            state.cells.move_runs_off(cell)
        return
    cell.mark_serving(event.version)


def _on_cell_stale(state: JobState, event: CellStale) -> None:
    cell = state.cells.get(event.cell_id)
    if cell.is_live:
        cell.mark_stale(event.reason)
        state.cells.move_runs_off(cell)


def _on_cell_lost(state: JobState, event: CellLost) -> None:
    known = state.cells.find(event.cell_id)
    if known is None or known.is_live:
        state.cells.lose(event.cell_id, event.reason, may_return=event.may_return)
    else:
        known.may_return = event.may_return
        state.cells.changed()


def _on_cell_drained(state: JobState, event: CellDrained) -> None:
    _end_switch(state, event.cell_id, CellRole.TO_TRAIN, CellRole.TRAIN)


def _on_cell_admitted(state: JobState, event: CellAdmitted) -> None:
    _end_switch(state, event.cell_id, CellRole.TO_ROLLOUT, CellRole.ROLLOUT)


def _end_switch(state: JobState, cell_id: str, expected: CellRole, role: CellRole) -> None:
    cell = state.cells.get(cell_id)
    if cell.role is not expected and cell.num_late_answers > 0:
        cell.num_late_answers -= 1
        return
    if cell.role is role:
        return  # said again after a restart of the scheduler
    if cell.role is not expected:
        raise InvariantError(f"{cell_id} completed a switch to {role}, but it is {cell.role}.")
    cell.move_to(role)
    if role is CellRole.ROLLOUT and cell.state is CellState.SERVING and cell.version != state.version:
        cell.mark_stale(f"returned with version {cell.version}, the newest is {state.version}")


# -- events: runs and groups --------------------------------------------------------------------------------------


def _on_run_started(state: JobState, event: RunStarted) -> None:
    run = state.book.find_run(event.run_id, event.attempt)
    if run is not None:
        state.book.mark_running(run)


def _on_harness_ended(state: JobState, event: HarnessEnded) -> None:
    run = state.book.find_run(event.run_id, event.attempt)
    if run is not None and run.is_active:
        state.cells.release(run.run_id)
        state.book.begin_scoring_run(run)


def _on_run_ended(state: JobState, event: RunEnded) -> None:
    run = state.book.find_run(event.run_id, event.attempt)
    if run is not None:
        _end_attempt(state, run, event.outcome, event.reward)


def _end_attempt(state: JobState, run: Run, outcome: Outcome, reward: float | None) -> None:
    rule = OUTCOME_TABLE[outcome]
    state.cells.release(run.run_id)
    if rule.is_retried(run.attempt):
        state.book.requeue(run, outcome)
        return
    state.book.end(run, outcome, reward)
    run.group.slowest_s = max(run.group.slowest_s, state.now_s - run.slot_since_s)
    if run.group.num_unfinished == 0:
        if not run.group.spec.is_eval and rule.counted:
            state.order.durations.note(run.group.task_index, run.group.slowest_s)
        state.book.begin_scoring(run.group)
        state.decide(
            ScoreGroup(run.group.group_id), f"all {len(run.group.runs)} runs of {run.group.group_id} are final"
        )


def _on_group_scored(state: JobState, event: GroupScored) -> None:
    result = event.result
    group = state.book.find(result.group_id)
    if group is None:
        return
    if group.status is not GroupStatus.SCORING:
        return  # said again after a restart of the scheduler
    if group.spec.is_eval:
        _end_eval_group(state, group, result.rewards)
    elif result.ready:
        state.book.mark_ready(group, result)
        state.staleness_is_due = True
    else:
        state.lose(group, result.reason)


def _end_eval_group(state: JobState, group: Group, rewards: tuple[float, ...]) -> None:
    state.book.retire(group, GroupStatus.EVALUATED)
    evaluation = state.evaluation
    if evaluation is None:
        raise InvariantError(f"held-out group {group.group_id} was scored outside a held-out pass.")
    del evaluation.pending[group.group_id]
    evaluation.tasks.append(TaskRewards(group.spec.task_name, rewards, len(group.spec.run_ids)))
    if evaluation.pending:
        return
    valid = [reward for task in evaluation.tasks for reward in task.rewards]
    mean = sum(valid) / len(valid) if valid else None
    state.evaluation, state.last_eval_step, state.last_eval_reward = None, evaluation.version, mean
    state.decide(
        RecordEvaluation(evaluation.version, tuple(evaluation.tasks), mean),
        f"all {len(evaluation.tasks)} held-out groups of version {evaluation.version} are scored",
    )
    if mean is not None:
        _compare_with_best(state, evaluation.version, mean)


def _compare_with_best(state: JobState, step: int, reward: float) -> None:
    is_best, _ = policy.is_new_best(reward, step, state.best_eval_reward, state.best_eval_step)
    if is_best and step == 0:  # the model as it came has no checkpoint: it only sets the reward to beat
        state.best_eval_step, state.best_eval_reward = step, reward
    elif is_best:
        state.new_best = MarkBest(step, reward)


def _on_training_progressed(state: JobState, event: TrainingProgressed) -> None:
    step = state.training_step
    if step is not None and event.step == step.step:
        step.num_unclaimed = event.num_unclaimed


# -- events: training, publication, checkpoints, the job ----------------------------------------------------------


def _on_step_trained(state: JobState, event: StepTrained) -> None:
    step = state.training_step
    if event.step <= state.step:
        return  # said again after a restart of the scheduler
    if step is None or event.step != step.step or not step.is_closed:
        raise InvariantError(f"step {event.step} was trained; in training is {step}.")
    groups = state.book.find_all(tuple(step.group_ids))
    means = [group.result.reward_mean for group in groups if group.result and group.result.reward_mean is not None]
    state.reward_mean_by_step.append(sum(means) / len(means) if means else None)
    for group in groups:
        state.book.retire(group, GroupStatus.TRAINED)
    if event.step > state.options.steps_per_burst:
        state.staleness_sum += sum(state.step - group.spec.version for group in groups)
        state.num_counted += len(groups)
    state.training_step, state.step = None, event.step
    state.next_step_seats = state.options.groups_per_step
    state.burst_done += 1
    state.staleness_is_due = True
    state.train_tokens += event.num_tokens
    if state.status is JobStatus.ENDING:
        return
    if state.burst_done >= state.burst_steps:
        state.wanted_version = state.step
    if state.steps_left == 0:
        state.drop_unfinished(f"step {state.step} of {state.options.steps} was the last", held_out_too=False)
    is_evaluated = state.wanted_version == state.step and state.evaluation_is_due
    if state.steps_left == 0:
        state.save_checkpoint("all steps are trained", export=is_evaluated)
    elif state.step % state.options.checkpoint_every == 0:
        state.save_checkpoint(f"every {state.options.checkpoint_every} steps", export=is_evaluated)
    elif is_evaluated:
        state.save_checkpoint("a held-out pass follows", export=True)


def _on_training_failed(state: JobState, event: TrainingFailed) -> None:
    state.abandon_step()
    state.end_at_once(f"training failed: {event.reason}")


def _on_publication_ended(state: JobState, event: PublicationEnded) -> None:
    publication = state.publication
    if publication is None and event.version == state.version:
        return  # said again after a restart of the scheduler
    if publication is None or event.version != publication.version:
        raise InvariantError(f"the publication of version {event.version} ended; under way is {publication}.")
    state.publication, state.num_publication_failures = None, 0
    for cell_id in publication.cell_ids:
        cell = state.cells.get(cell_id)
        if cell.is_live and cell.version != event.version and cell.state is not CellState.STALE:
            cell.mark_stale(f"no word of its update to version {event.version}")
            state.cells.move_runs_off(cell)
    if state.wanted_version == event.version:
        state.wanted_version, state.version, state.at_boundary = None, event.version, True


def _on_checkpoint_saved(state: JobState, event: CheckpointSaved) -> None:
    if state.checkpoint is None and event.step == state.saved_step:
        return  # said again after a restart of the scheduler
    if state.checkpoint is None or event.step != state.checkpoint.step:
        raise InvariantError(f"the checkpoint of step {event.step} was saved; under way is {state.checkpoint}.")
    state.saved_step, state.checkpoint = event.step, None


def _on_best_marked(state: JobState, event: BestMarked) -> None:
    best = state.new_best
    if best is None and event.step == state.best_eval_step:
        return  # said again after a restart of the scheduler
    if best is None or not state.is_marking_best or event.step != best.step:
        raise InvariantError(f"the checkpoint of step {event.step} was marked best; to be marked is {best}.")
    state.best_eval_step, state.best_eval_reward = best.step, best.reward_mean
    state.new_best, state.is_marking_best = None, False


def _on_cancel_requested(state: JobState, event: CancelRequested) -> None:
    if state.status is not JobStatus.ENDING:
        state.begin_ending(JobStatus.CANCELLED, event.reason or "cancelled")


def _on_tick(state: JobState, event: Tick) -> None:
    timeout_s = state.options.run_start_timeout_s
    for run in state.book.started_before(state.now_s - timeout_s):
        reason = f"attempt {run.attempt} of {run.run_id} did not start within {timeout_s:g} s"
        state.decide(AbortRuns(((run.run_id, run.attempt),), reason), reason)
        run.given_up = True
        _end_attempt(state, run, Outcome.RUNNER_LOSS, None)


def _on_action_failed(state: JobState, event: ActionFailed) -> None:
    handler = _FAILURE_HANDLERS.get(type(event.action))
    if handler is not None:
        handler(state, event.action, event.reason)


def _on_open_failed(state: JobState, action: OpenGroup, reason: str) -> None:
    group = state.book.find(action.spec.group_id)
    if group is None:
        return
    why = f"{group.group_id} could not be opened: {reason}"
    if not group.spec.is_eval:
        state.drop_and_replace(group, why)
        return
    state.end_runs(group, why)
    state.book.begin_scoring(group)
    _end_eval_group(state, group, ())


def _on_start_failed(state: JobState, action: StartRun, reason: str) -> None:
    run = state.book.find_run(action.run_id, action.attempt)
    if run is not None and run.is_active:
        run.given_up = True
        _end_attempt(state, run, Outcome.RUNNER_LOSS, None)


def _on_score_failed(state: JobState, action: ScoreGroup, reason: str) -> None:
    group = state.book.find(action.group_id)
    if group is None or group.status is not GroupStatus.SCORING:
        return
    why = f"scoring failed: {reason}"
    state.decide(DropGroup(group.group_id, why), why)  # its shard may not even know that its runs have ended
    if group.spec.is_eval:
        _end_eval_group(state, group, ())
    else:
        state.lose(group, why)


def _on_switch_failed(state: JobState, action: SwitchCell, reason: str) -> None:
    cell = state.cells.get(action.cell_id)
    expected = CellRole.TO_TRAIN if action.role is CellRole.TRAIN else CellRole.TO_ROLLOUT
    if cell.role is not expected:
        cell.num_late_answers = max(0, cell.num_late_answers - 1)
        return
    cell.num_switch_failures += 1
    if cell.num_switch_failures > JobOptions.MAX_UPDATE_ATTEMPTS:
        state.begin_ending(JobStatus.FAILED, f"{cell.cell_id} cannot switch to {action.role}: {reason}")
    cell.move_to(CellRole.ROLLOUT)
    cell.mark_stale(f"switch to {action.role} failed: {reason}")
    cell.is_held = True
    state.departures_are_over = True


def _on_train_failed(state: JobState, action: TrainStep, reason: str) -> None:
    _on_training_failed(state, TrainingFailed(reason))


def _on_publish_failed(state: JobState, action: PublishWeights, reason: str) -> None:
    if state.publication != action:
        return
    state.publication = None
    state.num_publication_failures += 1
    for cell_id in action.cell_ids:
        cell = state.cells.get(cell_id)
        if cell.is_live and cell.state is CellState.UPDATING:
            cell.mark_stale(f"its update to version {action.version} failed: {reason}")
            state.cells.move_runs_off(cell)
    if state.num_publication_failures >= JobOptions.MAX_UPDATE_ATTEMPTS:
        state.begin_ending(JobStatus.FAILED, f"version {action.version} could not be published: {reason}")


def _on_checkpoint_failed(state: JobState, action: SaveCheckpoint, reason: str) -> None:
    if state.checkpoint != action:
        return
    state.checkpoint = None
    state.end_at_once(f"the checkpoint of step {action.step} could not be saved: {reason}")


def _on_mark_failed(state: JobState, action: MarkBest, reason: str) -> None:
    if state.new_best == action:
        state.new_best, state.is_marking_best = None, False


HANDLERS: dict[type[Any], Callable[[JobState, Any], None]] = {
    CellJoined: _on_cell_joined,
    CellReported: _on_cell_reported,
    CellUpdating: _on_cell_updating,
    CellServing: _on_cell_serving,
    CellStale: _on_cell_stale,
    CellLost: _on_cell_lost,
    CellDrained: _on_cell_drained,
    CellAdmitted: _on_cell_admitted,
    RunStarted: _on_run_started,
    HarnessEnded: _on_harness_ended,
    RunEnded: _on_run_ended,
    GroupScored: _on_group_scored,
    TrainingProgressed: _on_training_progressed,
    StepTrained: _on_step_trained,
    PublicationEnded: _on_publication_ended,
    CheckpointSaved: _on_checkpoint_saved,
    BestMarked: _on_best_marked,
    TrainingFailed: _on_training_failed,
    ActionFailed: _on_action_failed,
    CancelRequested: _on_cancel_requested,
    DrainRequested: requests.apply,
    UndrainRequested: requests.apply,
    SwitchRequested: requests.apply,
    PolicyRequested: requests.apply,
    Tick: _on_tick,
}
"""What each event changes."""

_FAILURE_HANDLERS: dict[type[Any], Callable[[JobState, Any, str], None]] = {
    OpenGroup: _on_open_failed,
    StartRun: _on_start_failed,
    ScoreGroup: _on_score_failed,
    SwitchCell: _on_switch_failed,
    TrainStep: _on_train_failed,
    PublishWeights: _on_publish_failed,
    SaveCheckpoint: _on_checkpoint_failed,
    MarkBest: _on_mark_failed,
}
"""What follows from an action that failed. The failure of any other one changes nothing; it stays in the log."""
