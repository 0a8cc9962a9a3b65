"""Single rules of the state machine, each in a small world that is driven event by event."""

from __future__ import annotations

import itertools
import random

import pytest

from services.common.errors import ConfigError, InvariantError
from services.common.types import CellRole, CellState
from services.scheduler.actions import (
    AbortRuns,
    Action,
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
    ActionFailed,
    BestMarked,
    CancelRequested,
    CellDrained,
    CellJoined,
    CellLost,
    CellServing,
    CellStale,
    CellUpdating,
    CheckpointSaved,
    GroupScored,
    HarnessEnded,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
    Tick,
    TrainingFailed,
)
from services.scheduler.options import AtStalenessBound
from services.scheduler.types import JobStatus, ResumeState
from services.trajectory.outcome import Outcome
from tests.unit.scheduler.world import World, group_result, options


def opened(slots: tuple[int, ...] = (4, 4), **changes) -> World:
    """A job whose cells joined and got their first weights."""
    world = World(options(num_cells=len(slots), **changes), slots)
    world.join_all()
    answer(world, PublishWeights)
    return world


def answer(world: World, kind: type[Action], faults: bool = False) -> None:
    """Answer the oldest pending action of a kind (a run: its start and its end)."""
    for _ in range(2 if kind is StartRun else 1):
        index = next(i for i, action in enumerate(world.pending) if isinstance(action, kind))
        world.answer(index, random.Random(0), faults=faults)
        if kind is StartRun and not any(isinstance(action, StartRun) for action in world.pending):
            return
        if kind is StartRun and isinstance(world.pending[-1], StartRun):
            # the run that was just started is the newest pending one: end it
            world.pending.insert(0, world.pending.pop())


def finish_runs(world: World, count: int) -> None:
    for _ in range(count):
        answer(world, StartRun)


def finish_group(world: World) -> None:
    """All runs of one group end, and it is scored."""
    while not any(isinstance(action, ScoreGroup) for action in world.pending):
        answer(world, StartRun)
    answer(world, ScoreGroup)


def decided(world: World, kind: type[Action], since: int = 0) -> list:
    return [d.action for _, _, made in world.log[since:] for d in made if isinstance(d.action, kind)]


def role(world: World, cell_id: str = "cell-0") -> CellRole:
    return world.state.cells.get(cell_id).role


def until(world: World, kind: type[Action]) -> None:
    """Answer runs, scores and switches until an action of this kind was decided."""
    for _ in range(500):
        if any(isinstance(action, kind) for action in world.pending):
            return
        world.answer(0, random.Random(0))
    raise AssertionError(f"{kind.__name__} was never decided.\n{world.state.history()}")


# -- start ------------------------------------------------------------------------------------------------------------


def test_first_weights_are_published_when_all_cells_are_known() -> None:
    world = World(options(num_cells=3), (4, 4, 4))
    world.join("cell-0")
    world.join("cell-2")
    assert not decided(world, PublishWeights)
    world.cells["cell-1"] = world.cells["cell-2"]
    world.feed(CellLost("cell-1", "its node died"))
    [publish] = decided(world, PublishWeights)
    assert publish == PublishWeights(0, ("cell-2", "cell-0"))


def test_nothing_is_dispatched_before_the_first_weights_are_published() -> None:
    world = World(options(), (4, 4))
    world.join_all()
    assert not decided(world, OpenGroup)
    answer(world, PublishWeights)
    groups = decided(world, OpenGroup)
    assert len(groups) == 4
    assert all(group.spec.version == 0 for group in groups)


def test_a_cell_that_only_joined_gets_no_traffic() -> None:
    world = World(options(), (4, 4))
    world.join_all()
    assert {route.state for route in world.state.routes().cells} == {CellState.STALE}


@pytest.mark.parametrize("numbers", [{"task_names": ()}, {"steps_per_burst": 4, "max_staleness_steps": 2}])
def test_options_that_cannot_work_are_refused(numbers) -> None:
    with pytest.raises(ConfigError):
        options(**numbers)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_no_more_runs_start_than_slots_and_runners_allow() -> None:
    assert len(decided(opened((2, 1)), StartRun)) == 3
    assert len(decided(opened((4, 4), max_concurrent_runs=5), StartRun)) == 5


def test_a_run_that_ends_frees_its_slot_for_the_next() -> None:
    world = opened((1, 1))
    assert len(decided(world, StartRun)) == 2
    finish_runs(world, 1)
    assert len(decided(world, StartRun)) == 3


def test_a_run_whose_work_is_being_scored_holds_no_slot_but_is_unfinished() -> None:
    world = opened((1, 1), max_concurrent_runs=2)
    first, second = (start.run_id for start in decided(world, StartRun))
    for run_id in (first, second):
        world.attempts[(run_id, 0)] = "scoring"
        world.feed(RunStarted(run_id, 0))
        world.feed(HarnessEnded(run_id, 0))
    assert len(decided(world, StartRun)) == 4  # a scorer that hangs holds up no other run
    snapshot = world.state.snapshot()
    assert (snapshot["active_runs"], snapshot["scoring_runs"], snapshot["ended"]) == (4, 2, 0)
    assert {run_id for run_id, _ in world.state.routes().affinity}.isdisjoint({first, second})
    assert world.state.active_attempts()[:2] == ((first, 0), (second, 0))  # a restarted scheduler asks for them again


def test_no_more_runs_are_scored_at_once_than_harnesses_may_run() -> None:
    world = opened((1, 1), max_concurrent_runs=1)
    for number in range(2):
        run_id = decided(world, StartRun)[number].run_id
        world.attempts[(run_id, 0)] = "scoring"
        world.feed(RunStarted(run_id, 0))
        world.feed(HarnessEnded(run_id, 0))
    assert len(decided(world, StartRun)) == 2
    world.unfinished.discard(run_id)
    world.feed(RunEnded(run_id, 0, Outcome.FINISHED, 1.0))
    assert len(decided(world, StartRun)) == 3


def test_what_is_said_again_of_a_run_that_is_scored_changes_nothing() -> None:
    world = opened((1, 1))
    run_id = decided(world, StartRun)[0].run_id
    world.attempts[(run_id, 0)] = "scoring"
    for event in (HarnessEnded(run_id, 0), HarnessEnded(run_id, 0), RunStarted(run_id, 0)):
        world.feed(event)
    assert world.state.snapshot()["scoring_runs"] == 1
    world.unfinished.discard(run_id)
    world.feed(RunEnded(run_id, 0, Outcome.FINISHED, 1.0))
    world.feed(HarnessEnded(run_id, 0))  # late news
    assert world.state.snapshot()["scoring_runs"] == 0


def test_a_run_whose_runner_dies_while_it_is_scored_is_tried_again() -> None:
    world = opened((4, 4))
    run_id = decided(world, StartRun)[0].run_id
    world.attempts[(run_id, 0)] = "scoring"
    world.feed(RunStarted(run_id, 0))
    world.feed(HarnessEnded(run_id, 0))
    world.attempts[(run_id, 0)] = "ended"
    world.feed(RunEnded(run_id, 0, Outcome.RUNNER_LOSS))
    assert [start.attempt for start in decided(world, StartRun) if start.run_id == run_id] == [0, 1]
    assert world.state.snapshot()["scoring_runs"] == 0


@pytest.mark.parametrize(
    ("outcome", "num_attempts"),
    [
        (Outcome.SETUP_FAILURE, 3),
        (Outcome.ENGINE_LOSS, 3),
        (Outcome.RUNNER_LOSS, 3),
        (Outcome.HARNESS_CRASH, 1),
        (Outcome.VERIFIER_FAILURE, 1),  # the runner itself evaluates again
        (Outcome.CANCELLED, 1),
    ],
)
def test_runs_are_retried_as_the_outcome_table_says(outcome, num_attempts) -> None:
    world = opened()
    before = world.state.book.training
    run_id = decided(world, StartRun)[0].run_id
    for attempt in range(num_attempts):
        assert world.state.book.training.ended == before.ended
        world.feed(RunStarted(run_id, attempt))
        world.unfinished -= {run_id} if attempt == num_attempts - 1 else set()
        world.feed(RunEnded(run_id, attempt, outcome))
    attempts = [start.attempt for start in decided(world, StartRun) if start.run_id == run_id]
    assert attempts == list(range(num_attempts))
    after = world.state.book.training
    assert (after.dispatched, after.ended) == (before.dispatched, before.ended + 1)


def test_a_run_that_does_not_start_in_time_is_aborted_and_tried_again() -> None:
    world = opened((1, 1), run_start_timeout_s=60)
    first = decided(world, StartRun)[0]
    world.now_s += 61
    world.feed(Tick())
    aborted = [attempt for abort in decided(world, AbortRuns) for attempt in abort.attempts]
    assert (first.run_id, 0) in aborted
    assert (first.run_id, 1) in [(start.run_id, start.attempt) for start in decided(world, StartRun)]
    assert not world.feed(RunEnded(first.run_id, 0, Outcome.CANCELLED)), "news of the aborted attempt means nothing"


def test_late_news_of_the_last_aborted_attempt_means_nothing() -> None:
    world = opened((1, 1))
    run_id = decided(world, StartRun)[0].run_id
    for _ in range(3):
        world.now_s += 1000
        world.give_up_late_starts()
        world.feed(Tick())
    ended = world.state.book.training.ended
    world.feed(RunEnded(run_id, 2, Outcome.CANCELLED))
    assert world.state.book.training.ended == ended


# -- impossible events ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        RunEnded("g000099-r0", 0, Outcome.FINISHED, 1.0),
        RunEnded("g000000-r0", 5, Outcome.FINISHED, 1.0),
        RunStarted("g000003-r1", 1),
        GroupScored(group_result("g000077")),
        CellDrained("cell-1"),
        CellServing("cell-7", 0),
        CellServing("cell-1", 3),
        StepTrained(1),
        PublicationEnded(1),
        CheckpointSaved(1),
        BestMarked(1),
    ],
)
def test_an_impossible_event_raises_with_the_history(event) -> None:
    world = opened()
    with pytest.raises(InvariantError) as caught:
        world.state.handle(event, 100.0)
    assert "CellJoined(cell_id='cell-1'" in caught.value.hint
    assert repr(event) in caught.value.hint


def test_a_run_that_ends_twice_raises() -> None:
    world = opened()
    run_id = decided(world, StartRun)[0].run_id
    world.feed(RunStarted(run_id, 0))
    world.unfinished.discard(run_id)
    world.feed(RunEnded(run_id, 0, Outcome.FINISHED, 1.0))
    with pytest.raises(InvariantError, match="ended"):
        world.state.handle(RunEnded(run_id, 0, Outcome.FINISHED, 1.0), 100.0)


# -- groups -----------------------------------------------------------------------------------------------------------


def test_a_lost_group_is_replaced_at_once_under_the_current_version() -> None:
    world = opened()
    while not any(isinstance(action, ScoreGroup) for action in world.pending):
        answer(world, StartRun)
    [score] = [action for action in world.pending if isinstance(action, ScoreGroup)]
    world.pending.remove(score)
    world.ends[score.group_id] = "lost"
    [decision, *_] = world.feed(GroupScored(group_result(score.group_id, ready=False, reason="all rewards are equal")))
    assert isinstance(decision.action, OpenGroup)
    assert decision.action.spec.group_id == "g000004"
    assert decision.reason == f"replaces {score.group_id} inside the burst: all rewards are equal"
    assert world.state.snapshot()["outstanding_groups"] == 4


def test_a_group_that_cannot_be_scored_is_dropped_in_the_store_too() -> None:
    world = opened()
    while not any(isinstance(action, ScoreGroup) for action in world.pending):
        answer(world, StartRun)
    [score] = [action for action in world.pending if isinstance(action, ScoreGroup)]
    world.pending.remove(score)
    dropped, opened_anew, *_ = world.feed(ActionFailed(score, "a run has no result"))
    assert dropped.action == DropGroup(score.group_id, "scoring failed: a run has no result")
    assert isinstance(opened_anew.action, OpenGroup)


def test_the_job_fails_when_too_many_groups_are_lost() -> None:
    world = opened(max_lost_groups=2, steps=50)
    rng = random.Random(0)
    while world.finish is None:
        action = world.pending[0]
        if isinstance(action, ScoreGroup):
            world.pending.pop(0)
            world.ends[action.group_id] = "lost"
            world.feed(GroupScored(group_result(action.group_id, ready=False, reason="no reward")))
        else:
            world.answer(0, rng)
    assert world.finish.status is JobStatus.FAILED
    assert world.finish.reason == "3 groups in a row were lost, max_lost_groups is 2; the last one: no reward"


def test_a_ready_group_shows_that_lost_ones_are_no_fault() -> None:
    world = opened(max_lost_groups=2, steps=8)
    rng, num_scored = random.Random(0), 0
    for _ in range(4000):
        if world.finish is not None:
            break
        action = world.pending[0]
        if isinstance(action, ScoreGroup) and (num_scored := num_scored + 1) % 2:
            world.pending.pop(0)
            world.ends[action.group_id] = "lost"
            world.feed(GroupScored(group_result(action.group_id, ready=False, reason="no reward")))
        else:
            world.answer(0, rng)
    assert world.finish is not None
    assert world.finish.status is JobStatus.FINISHED
    assert world.state.book.num_lost > 2


def test_a_group_beyond_the_staleness_bound_is_dropped_and_replaced() -> None:
    world = opened(
        slots=(8, 8), steps=6, max_staleness_steps=1, carry_over_steps=2.0, at_staleness_bound=AtStalenessBound.DROP
    )
    slow = decided(world, StartRun)[0]
    held = [action for action in world.pending if isinstance(action, StartRun) and action.group_id == slow.group_id]
    world.pending = [action for action in world.pending if action not in held]
    while world.step < 2:
        world.answer(0, random.Random(0))
    [drop] = [drop for drop in decided(world, DropGroup) if drop.group_id == slow.group_id]
    assert drop.reason == "too stale: staleness 2 = step 2 - version 0, max 1"
    assert any(f"replaces {slow.group_id}" in d.reason for _, _, made in world.log for d in made)
    assert any(set(abort.attempts) >= {(run.run_id, 0) for run in held} for abort in decided(world, AbortRuns))
    world.pending = held + world.pending


def test_a_step_waits_for_a_group_that_would_grow_too_old() -> None:
    world = opened(slots=(8, 8), steps=4, max_staleness_steps=1, carry_over_steps=1.0)
    slow = decided(world, StartRun)[0]
    held = [action for action in world.pending if isinstance(action, StartRun) and action.group_id == slow.group_id]
    world.pending = [action for action in world.pending if action not in held]
    while world.pending:
        world.answer(0, random.Random(0))
    assert world.step == 1, "the second step needs the group that was dispatched before the first"
    assert world.state.snapshot()["ready_groups"] == 3
    world.pending = held
    while slow.group_id not in world.ends:
        world.answer(0, random.Random(0))
    assert world.ends[slow.group_id] == "trained"
    assert max(world.trained_staleness) == 1
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


def test_a_group_that_could_not_be_opened_is_replaced() -> None:
    world = opened()
    opening = decided(world, OpenGroup)[0]
    decisions = world.feed(ActionFailed(opening, "the shard is gone"))
    kinds = [type(decision.action) for decision in decisions]
    assert kinds[:3] == [AbortRuns, DropGroup, OpenGroup]


# -- switching and training -------------------------------------------------------------------------------------------


def test_the_core_leaves_at_the_very_run_that_makes_room() -> None:
    world = opened((4, 3))
    finish_group(world)
    finish_group(world)
    assert world.state.snapshot()["water_level"] == 4
    assert role(world) is CellRole.ROLLOUT
    finish_runs(world, 1)
    assert role(world) is CellRole.TO_TRAIN
    [switch] = [d for _, _, made in world.log for d in made if isinstance(d.action, SwitchCell)]
    assert switch.reason == "core leaves rollout: w=3 <= C_R - C_core = 3 and 2 groups are ready of the 2 that it needs"


def test_runs_of_a_leaving_cell_are_routed_to_others() -> None:
    world = opened((4, 4))
    until(world, SwitchCell)
    table = world.state.routes()
    assert {route.cell_id for route in table.cells} == {"cell-1"}
    assert {cell_id for _, cell_id in table.affinity} <= {"cell-1"}
    assert len(table.affinity) == world.state.snapshot()["active_runs"]


def test_a_step_trains_the_oldest_groups_after_the_drain() -> None:
    world = opened()
    until(world, SwitchCell)
    assert not decided(world, TrainStep)
    answer(world, SwitchCell)
    [step] = decided(world, TrainStep)
    assert (step.step, step.version) == (1, 0)
    assert step.group_ids == tuple(sorted(step.group_ids))


def test_one_cell_trains_when_nothing_is_unfinished() -> None:
    world = opened((4,))
    until(world, SwitchCell)
    assert world.state.snapshot()["water_level"] == 0
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


def test_weights_are_published_after_the_steps_of_a_burst() -> None:
    world = opened(steps=4, steps_per_burst=2)
    until(world, TrainStep)
    answer(world, TrainStep)
    assert len(decided(world, PublishWeights)) == 1, "only the first weights so far"
    until(world, TrainStep)
    answer(world, TrainStep)
    assert decided(world, PublishWeights)[-1] == PublishWeights(2, ("cell-1", "cell-0"))


def test_dispatch_waits_for_the_burst_boundary() -> None:
    world = opened(steps=4)
    until(world, TrainStep)
    num_groups = len(decided(world, OpenGroup))
    answer(world, TrainStep)
    assert len(decided(world, OpenGroup)) == num_groups
    answer(world, PublishWeights)
    new = decided(world, OpenGroup)[num_groups:]
    assert len(new) == 2
    assert all(group.spec.version == 1 for group in new)


def test_the_core_stays_in_training_when_the_others_can_take_all_runs() -> None:
    world = opened((2, 50), steps=6)
    until(world, TrainStep)
    while any(isinstance(action, StartRun | ScoreGroup) for action in world.pending):
        index = next(i for i, a in enumerate(world.pending) if isinstance(a, StartRun | ScoreGroup))
        world.answer(index, random.Random(0))
    answer(world, TrainStep)
    since = len(world.log)
    answer(world, PublishWeights)
    assert role(world) is CellRole.TRAIN
    assert not decided(world, SwitchCell, since)
    assert [step.step for step in decided(world, TrainStep, since)] == [2]


def test_the_core_returns_with_the_last_rollout_capacity_as_soon_as_its_step_ends() -> None:
    world = opened((4, 4), steps=10, steps_per_burst=3, carry_over_steps=0.0)
    until(world, TrainStep)
    assert world.state.snapshot()["water_level"] > 0
    world.lose("cell-1")
    assert role(world) is CellRole.TRAIN
    since = len(world.log)
    while not decided(world, SwitchCell, since):  # what is ready is trained first
        answer(world, TrainStep)
    [switch] = decided(world, SwitchCell, since)
    assert switch.role is CellRole.ROLLOUT
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


# -- cells that fail and return ---------------------------------------------------------------------------------------


def test_a_stale_cell_gets_no_traffic_until_it_was_updated() -> None:
    world = opened((4, 4))
    world.make_stale("cell-1")
    table = world.state.routes()
    assert {route.cell_id: route.state for route in table.cells}["cell-1"] is CellState.STALE
    assert {cell_id for _, cell_id in table.affinity} == {"cell-0"}
    assert decided(world, PublishWeights)[-1] == PublishWeights(0, ("cell-1",))
    answer(world, PublishWeights)
    assert {route.cell_id: route.state for route in world.state.routes().cells}["cell-1"] is CellState.SERVING


def test_a_stale_cell_stays_stale_while_it_is_updated() -> None:
    world = opened((4, 4))
    world.make_stale("cell-1")
    world.feed(CellUpdating("cell-1", 0))
    assert world.state.cells.get("cell-1").state is CellState.STALE
    assert world.state.cells.rollout_slots == 4, "it is no capacity that the core could leave behind"


def test_a_serving_cell_keeps_its_runs_while_it_is_updated() -> None:
    world = opened((4, 4), steps=5)
    until(world, TrainStep)
    answer(world, TrainStep)
    before = dict(world.state.routes().affinity)
    world.feed(CellUpdating("cell-1", 1))
    table = world.state.routes()
    assert {route.cell_id: route.state for route in table.cells} == {"cell-1": CellState.UPDATING}
    assert dict(table.affinity) == before


def test_a_returned_cell_gets_weights_before_runs() -> None:
    world = opened((4, 4))
    world.lose("cell-1")
    world.join("cell-1")
    assert decided(world, PublishWeights)[-1] == PublishWeights(0, ("cell-1",))
    since = len(world.log)
    answer(world, PublishWeights)
    assert world.state.cells.get("cell-1").state is CellState.SERVING
    assert since < len(world.log)


def test_a_cell_that_serves_an_old_version_is_stale() -> None:
    world = opened(steps=5)
    while world.state.version < 2:
        world.answer(0, random.Random(0))
    since = len(world.log)
    world.cells["cell-1"].serving = False
    world.feed(CellServing("cell-1", 0))
    assert world.state.cells.get("cell-1").state is CellState.STALE
    assert decided(world, PublishWeights, since) == [PublishWeights(2, ("cell-1",))]


def test_a_job_waits_for_cells_that_are_being_restarted() -> None:
    world = opened((4, 4))
    for cell_id in ("cell-0", "cell-1"):
        world.feed(CellLost(cell_id, "killed", may_return=True))
    assert world.finish is None
    since = len(world.log)
    world.join("cell-1")
    assert decided(world, PublishWeights, since) == [PublishWeights(0, ("cell-1",))]


def test_a_job_gives_up_when_no_restart_brings_a_cell_back() -> None:
    world = opened((4, 4))
    for may_return in (True, False):
        for cell_id in ("cell-0", "cell-1"):
            world.feed(CellLost(cell_id, "killed", may_return=may_return))
    assert world.finish is not None
    assert world.finish.status is JobStatus.FAILED


@pytest.mark.parametrize(("outcome", "gives_up"), [(Outcome.HARNESS_CRASH, True), (Outcome.HARNESS_TIMEOUT, False)])
def test_a_job_gives_up_when_none_of_its_first_runs_works(outcome: Outcome, gives_up: bool) -> None:
    world = opened((8, 8), group_size=8)
    world.usual_outcome = outcome
    for _ in range(400):
        if world.finish is not None or not world.pending:
            break
        world.answer(0, random.Random(0))
    assert (world.finish is not None and "none of the first" in world.finish.reason) is gives_up


def test_without_a_live_cell_the_job_fails() -> None:
    world = opened((4, 4))
    world.lose("cell-1")
    world.lose("cell-0")
    assert world.finish is not None
    assert world.finish.status is JobStatus.FAILED
    assert world.finish.reason.startswith("no cell is alive: cell-0 down")


def test_without_a_cell_that_can_be_updated_the_job_fails() -> None:
    world = opened((4,))
    world.make_stale("cell-0")
    while world.finish is None:
        index = next(i for i, action in enumerate(world.pending) if isinstance(action, PublishWeights))
        publish = world.pending.pop(index)
        assert isinstance(publish, PublishWeights)
        world.feed(CellStale("cell-0", "checksum of lm_head differs"))
        world.feed(PublicationEnded(publish.version))
    assert world.finish.reason == "no cell can serve: cell-0 rollout stale (checksum of lm_head differs)"
    assert len(decided(world, PublishWeights)) == 1 + 3


def test_the_job_goes_on_when_the_cores_rollout_side_dies() -> None:
    world = opened((4, 4))
    world.lose("cell-0")
    assert world.play(random.Random(0)).status is JobStatus.FINISHED
    assert world.step == 3


def test_a_late_answer_of_a_lost_cell_means_nothing() -> None:
    world = opened()
    until(world, SwitchCell)
    world.lose("cell-0")
    assert not any(isinstance(d.action, SwitchCell) for d in world.feed(CellDrained("cell-0")))
    with pytest.raises(InvariantError):
        world.state.handle(CellDrained("cell-0"), 1000.0)


# -- held-out passes --------------------------------------------------------------------------------------------------


def test_held_out_runs_start_before_training_runs() -> None:
    world = opened((2, 1), eval_task_names=("e0",), eval_at_start=True, eval_group_size=2)
    assert [start.is_eval for start in decided(world, StartRun)] == [True, True, False]


def test_held_out_groups_do_not_count_as_outstanding_but_in_the_water_level() -> None:
    world = opened(eval_task_names=("e0", "e1"), eval_at_start=True, eval_group_size=3)
    snapshot = world.state.snapshot()
    assert snapshot["outstanding_groups"] == 4
    assert snapshot["water_level"] == 4 * 2 + 2 * 3
    assert snapshot["evaluation"]["dispatched"] == 6


def test_a_publication_waits_for_the_held_out_pass_of_the_version_before() -> None:
    world = opened((8, 8), eval_task_names=("e0",), eval_at_start=True, eval_group_size=2)
    held = [action for action in world.pending if isinstance(action, StartRun) and action.is_eval]
    world.pending = [action for action in world.pending if action not in held]
    until(world, TrainStep)
    answer(world, TrainStep)
    assert len(decided(world, PublishWeights)) == 1
    world.pending += held
    since = len(world.log)
    while not decided(world, RecordEvaluation, since):
        world.answer(len(world.pending) - 1, random.Random(0))
    [record] = decided(world, RecordEvaluation)
    assert (record.version, record.reward_mean) == (0, 0.5)
    assert [task.task_name for task in record.tasks] == ["e0"]
    assert decided(world, PublishWeights)[-1].version == 1


# -- the best checkpoint ----------------------------------------------------------------------------------------------


def evaluated(rewards: dict[int, float], resume: ResumeState | None = None, **changes) -> World:
    """A job with a held-out pass at the start, every second step and the end, before its first event."""
    numbers = {"steps": 5, "checkpoint_every": 100, "eval_task_names": ("e0",), "eval_every": 2, "eval_at_start": True}
    world = World(options(**{**numbers, "eval_at_end": True, **changes}), (4, 4), resume)
    world.eval_reward = lambda version: rewards[version]
    world.join_all()
    return world


def test_each_step_with_a_held_out_pass_is_saved_with_an_export() -> None:
    world = evaluated({0: 0.5, 2: 0.5, 4: 0.5, 5: 0.5}, checkpoint_every=3)
    world.play(random.Random(0))
    assert [record.version for record in world.evaluations] == [0, 2, 4, 5]
    assert [(c.step, c.export) for c in world.checkpoints] == [(2, True), (3, False), (4, True), (5, True)]


def test_steps_inside_a_burst_get_no_export() -> None:
    world = evaluated({0: 0.5, 2: 0.5, 4: 0.5}, steps=4, steps_per_burst=2, eval_every=1, checkpoint_every=1)
    world.play(random.Random(0))
    assert [(c.step, c.export) for c in world.checkpoints] == [(1, False), (2, True), (3, False), (4, True)]


@pytest.mark.parametrize(
    ("rewards", "marked", "best"),
    [
        ({0: 0.54, 2: 0.61, 4: 0.5, 5: 0.6}, [2], (2, 0.61)),
        ({0: 0.54, 2: 0.61, 4: 0.5, 5: 0.7}, [2, 5], (5, 0.7)),
        ({0: 0.5, 2: 0.5, 4: 0.6, 5: 0.6}, [4], (4, 0.6)),  # of equal ones the older stays
        ({0: 0.8, 2: 0.5, 4: 0.6, 5: 0.7}, [], (0, 0.8)),  # the model as it came has no checkpoint
    ],
)
def test_a_higher_held_out_reward_makes_the_best_checkpoint(rewards, marked, best) -> None:
    world = evaluated(rewards)
    assert world.play(random.Random(0)).status is JobStatus.FINISHED
    assert world.marked == marked
    evaluation = world.state.snapshot()["evaluation"]
    assert (evaluation["best_step"], evaluation["best_reward_mean"]) == best


def test_the_first_held_out_pass_counts_where_there_was_none_at_the_start() -> None:
    world = evaluated({2: 0.1, 4: 0.1, 5: 0.0}, eval_at_start=False)
    world.play(random.Random(0))
    assert world.marked == [2]


def test_a_mark_tells_the_numbers() -> None:
    world = evaluated({0: 0.54, 2: 0.61, 4: 0.5, 5: 0.5})
    world.play(random.Random(0))
    [reason] = [d.reason for _, _, made in world.log for d in made if isinstance(d.action, MarkBest)]
    assert reason == "held-out mean reward 0.61 at step 2 beats 0.54 at step 0"


def test_a_mark_waits_until_its_checkpoint_is_complete() -> None:
    world = evaluated({0: 0.1, 1: 0.2}, steps=1, eval_every=0)
    until(world, SaveCheckpoint)
    save = next(action for action in world.pending if isinstance(action, SaveCheckpoint))
    world.pending.remove(save)
    while world.pending:
        world.answer(0, random.Random(0))
    assert [record.version for record in world.evaluations] == [0, 1]
    assert not decided(world, MarkBest)
    world.pending = [save]
    answer(world, SaveCheckpoint)
    assert world.pending == [MarkBest(1, 0.2)]


def test_the_job_ends_when_the_mark_is_answered() -> None:
    for how in (lambda world: answer(world, MarkBest), lambda world: world.fail_one(0)):
        world = evaluated({0: 0.1, 1: 0.2}, steps=1, eval_every=0)
        until(world, MarkBest)
        while len(world.pending) > 1:
            world.answer(next(i for i, a in enumerate(world.pending) if not isinstance(a, MarkBest)), random.Random(0))
        assert world.finish is None
        how(world)
        assert world.finish is not None
        assert world.finish.status is JobStatus.FINISHED


def test_a_mark_that_failed_leaves_the_reward_to_beat() -> None:
    world = evaluated({0: 0.1, 2: 0.5, 4: 0.4, 5: 0.3})
    until(world, MarkBest)
    world.fail_one(next(i for i, action in enumerate(world.pending) if isinstance(action, MarkBest)))
    world.play(random.Random(0))
    assert world.marked == [4]


def test_a_cancelled_job_waits_for_the_mark() -> None:
    world = evaluated({0: 0.1, 2: 0.5})
    until(world, MarkBest)
    world.feed(CancelRequested("enough"))
    assert world.finish is None
    assert world.play(random.Random(0)).status is JobStatus.CANCELLED
    assert world.marked == [2]


def test_a_checkpoint_in_its_held_out_pass_is_kept() -> None:
    world = evaluated({0: 0.1, 2: 0.5, 4: 0.1, 5: 0.1}, steps_per_burst=2, checkpoint_every=1, max_concurrent_runs=100)
    while not (world.state.evaluation and world.state.evaluation.version == 2):
        world.answer(0, random.Random(0))
    held = [action for action in world.pending if isinstance(action, StartRun) and action.is_eval]
    world.pending = [action for action in world.pending if action not in held]
    until(world, TrainStep)
    until(world, SaveCheckpoint)
    assert world.checkpoints[-1].step == 3
    assert world.checkpoints[-1].kept_steps == (2,)
    world.pending += held
    world.play(random.Random(0))


def test_a_job_that_died_between_pass_and_mark_repeats_the_pass_and_marks() -> None:
    rewards = {0: 0.1, 2: 0.5, 4: 0.4, 5: 0.3}
    world = evaluated(rewards)
    until(world, MarkBest)
    again = evaluated(rewards, world.checkpoints[-1].resume)
    again.play(random.Random(0))
    assert [record.version for record in again.evaluations] == [2, 4, 5]
    assert again.marked == [2]
    assert [c.step for c in again.checkpoints] == [4, 5], "step 2 is on disk, with its export"


def test_a_resumed_job_saves_its_step_again_where_a_pass_is_due_and_no_export_is_there() -> None:
    resume = ResumeState(step=3, version=2, last_eval_step=0, best_eval_step=0, best_eval_reward=0.1)
    world = evaluated({3: 0.5, 4: 0.4, 5: 0.3}, resume)
    until(world, SaveCheckpoint)
    assert [(c.step, c.export) for c in world.checkpoints] == [(3, True)]
    world.play(random.Random(0))
    assert world.marked == [3]


def test_a_resumed_job_knows_the_reward_to_beat() -> None:
    world = evaluated({0: 0.1, 2: 0.5, 4: 0.4, 5: 0.3})
    world.play(random.Random(0))
    resume = world.checkpoints[-1].resume
    assert (resume.step, resume.best_eval_step, resume.best_eval_reward) == (5, 2, 0.5)
    again = evaluated({5: 0.3, 6: 0.45, 7: 0.5}, resume, steps=7)
    again.play(random.Random(0))
    assert again.marked == []


# -- checkpoints, resume, the end -------------------------------------------------------------------------------------


def test_checkpoints_come_every_so_many_steps_and_at_the_end() -> None:
    world = opened(steps=5, checkpoint_every=2)
    world.play(random.Random(0))
    assert [c.step for c in world.checkpoints] == [2, 4, 5]


def test_the_next_step_waits_for_the_checkpoint() -> None:
    world = opened((4, 50), steps=5, checkpoint_every=1)
    until(world, SaveCheckpoint)
    held = [action for action in world.pending if isinstance(action, SaveCheckpoint)]
    world.pending = [action for action in world.pending if action not in held]
    while world.pending:
        world.answer(0, random.Random(0))
    assert world.step == 1
    world.pending = held
    answer(world, SaveCheckpoint)
    assert decided(world, TrainStep)[-1].step == 2


def test_a_resumed_job_goes_on_with_its_ready_groups_and_tasks() -> None:
    names = tuple(f"t{index}" for index in range(10))
    world = opened(steps=2, checkpoint_every=1, task_names=names)
    until(world, SaveCheckpoint)
    resume = world.checkpoints[0].resume
    assert resume.step == 1
    assert len(resume.ready) + len(resume.unfinished_task_indices) == 2
    again = World(options(steps=2, task_names=names), (4, 4), resume)
    again.join_all()
    assert decided(again, PublishWeights) == [PublishWeights(1, ("cell-1", "cell-0"))]
    answer(again, PublishWeights)
    groups = decided(again, OpenGroup)
    assert [group.task_index for group in groups] == list(resume.unfinished_task_indices)
    assert not {group.spec.group_id for group in groups} & set(world.specs)
    assert again.play(random.Random(0)).status is JobStatus.FINISHED
    assert again.step == 2


def test_unneeded_runs_are_cancelled_when_the_last_step_is_trained() -> None:
    world = opened((4, 50), steps=1, carry_over_steps=0.0)
    world.play(random.Random(0))
    assert len(world.specs) == 2, "no more groups than the steps that are left can train"


def test_cancel_waits_for_the_step_in_flight_then_saves() -> None:
    world = opened()
    until(world, TrainStep)
    decisions = world.feed(CancelRequested("enough"))
    assert not any(isinstance(decision.action, FinishJob | SaveCheckpoint) for decision in decisions)
    answer(world, TrainStep)
    [saved] = world.checkpoints
    assert saved.step == 1
    answer(world, SaveCheckpoint)
    assert world.finish == FinishJob(JobStatus.CANCELLED, "enough")


def test_cancel_before_the_first_step_saves_nothing() -> None:
    world = opened()
    world.feed(CancelRequested("enough"))
    assert world.finish == FinishJob(JobStatus.CANCELLED, "enough")
    assert not world.checkpoints
    assert world.state.snapshot()["water_level"] == 0
    assert not world.feed(CellJoined("cell-1", 4)), "nothing is decided after the end"


def test_a_failed_training_ends_the_job() -> None:
    world = opened()
    until(world, TrainStep)
    world.ready |= set(decided(world, TrainStep)[-1].group_ids)
    world.feed(TrainingFailed("rank 0 was killed"))
    assert world.finish == FinishJob(JobStatus.FAILED, "training failed: rank 0 was killed")


def test_the_route_tables_epoch_rises_with_each_change() -> None:
    world = opened((2, 2))
    tables = [world.state.routes()]
    for _ in range(60):
        if world.finish is None:
            world.answer(0, random.Random(0))
            tables.append(world.state.routes())
    for before, after in itertools.pairwise(tables):
        assert after.epoch >= before.epoch
        same = (before.cells, before.affinity) == (after.cells, after.affinity)
        assert same or after.epoch > before.epoch
