"""Cells between rollout and training: in which order, when, and back."""

from __future__ import annotations

import random

import pytest

from services.common.types import CellKind, CellRole
from services.scheduler.actions import PublishWeights, ScoreGroup, StartRun, SwitchCell, TrainStep
from services.scheduler.events import DrainRequested, RunEnded, RunStarted, SwitchRequested, TrainingProgressed
from services.scheduler.options import OnLostGroup, Policy, PolicyMode
from services.scheduler.types import JobStatus
from services.trajectory.outcome import Outcome
from tests.unit.scheduler.world import World, options


def world_of(mode: PolicyMode, slots: tuple[int, ...] = (4, 4, 4), *, streaming: bool = True, **changes) -> World:
    train_cells = changes.pop("train_cells", 1)
    others = changes.pop("others", CellKind.SATELLITE)
    job = options(num_cells=len(slots), policy=Policy(mode, streaming, train_cells), **{"steps": 4, **changes})
    world = World(job, slots, others=others)
    world.join_all()
    answer(world, PublishWeights)
    return world


def answer(world: World, kind: type) -> None:
    index = next(index for index, action in enumerate(world.pending) if isinstance(action, kind))
    world.answer(index, random.Random(0))


def end_runs(world: World, number: int) -> None:
    """End so many runs, in the order of their start; score what is complete."""
    for _ in range(number):
        end_run(world, next(action.run_id for action in world.pending if isinstance(action, StartRun)))
    while any(isinstance(action, ScoreGroup) for action in world.pending):
        answer(world, ScoreGroup)


def end_run(world: World, run_id: str) -> None:
    while run_id in world.unfinished:
        pending = enumerate(world.pending)
        index = next(i for i, action in pending if isinstance(action, StartRun) and action.run_id == run_id)
        world.answer(index, random.Random(0))


def switches(world: World) -> list[tuple[str, CellRole]]:
    return [
        (made.action.cell_id, made.action.role)
        for _, _, decisions in world.log
        for made in decisions
        if isinstance(made.action, SwitchCell)
    ]


def reasons(world: World, kind: type) -> list[str]:
    return [made.reason for _, _, decisions in world.log for made in decisions if isinstance(made.action, kind)]


def in_training(world: World) -> list[str]:
    return [cell_id for cell_id, cell in world.cells.items() if cell.role in (CellRole.TRAIN, CellRole.TO_TRAIN)]


def test_cells_leave_in_order_one_at_a_time_as_the_water_falls() -> None:
    world = world_of(PolicyMode.ELASTIC)  # 8 runs in 12 slots
    end_runs(world, 2)
    assert in_training(world) == ["cell-0"], "w=6 <= 12 - 4 and a group is ready"
    answer(world, SwitchCell)
    world.feed(TrainingProgressed(1, 1))
    assert in_training(world) == ["cell-0"], "w=6 > 8 - 4"
    end_runs(world, 2)
    assert in_training(world) == ["cell-0", "cell-1"]
    reason = "cell-1 leaves rollout: w=4 <= C_R - C_e = 4 and 1 micro-steps are unclaimed"
    assert reasons(world, SwitchCell)[-1] == reason
    end_runs(world, 4)
    assert in_training(world) == ["cell-0", "cell-1"], "cell-1 is still on its way"
    answer(world, SwitchCell)
    assert in_training(world) == ["cell-0", "cell-1", "cell-2"]


def test_a_satellite_needs_unclaimed_work() -> None:
    world = world_of(PolicyMode.ELASTIC)
    end_runs(world, 2)
    answer(world, SwitchCell)
    world.feed(TrainingProgressed(1, 0))
    for run_id in ("g000001-r0", "g000002-r0"):
        end_run(world, run_id)
    assert world.state.snapshot()["water_level"] == 4, "Eq. 5 holds"
    assert in_training(world) == ["cell-0"]
    end_run(world, "g000001-r1")
    answer(world, ScoreGroup)  # a second group is ready, and told
    assert in_training(world) == ["cell-0", "cell-1"]


def test_satellites_return_when_the_burst_is_over_before_the_weights_are_published() -> None:
    world = world_of(PolicyMode.ELASTIC)
    end_runs(world, 2)
    answer(world, SwitchCell)
    end_runs(world, 2)
    answer(world, SwitchCell)
    assert in_training(world) == ["cell-0", "cell-1"]
    answer(world, TrainStep)
    answer(world, TrainStep)
    assert switches(world)[-1] == ("cell-1", CellRole.ROLLOUT)
    assert not any(isinstance(action, PublishWeights) for action in world.pending)
    answer(world, SwitchCell)
    assert any(isinstance(action, PublishWeights) for action in world.pending)


def test_a_standalone_cell_always_serves() -> None:
    world = world_of(PolicyMode.ELASTIC, others=CellKind.STANDALONE)
    world.play(random.Random(0))
    assert {cell_id for cell_id, _ in switches(world)} == {"cell-0"}


def test_async_cells_go_once_and_stay() -> None:
    world = world_of(PolicyMode.ASYNC, train_cells=2)
    assert in_training(world) == ["cell-0"]
    assert world.play(random.Random(0)).status is JobStatus.FINISHED
    assert switches(world)[:2] == [("cell-0", CellRole.TRAIN), ("cell-1", CellRole.TRAIN)]
    assert switches(world)[2:] in ([], [("cell-1", CellRole.ROLLOUT)]), "at most once, when all steps are trained"
    assert reasons(world, SwitchCell)[0] == "core leaves rollout: a fixed split, 2 of 3 cells only train"


def test_async_leaves_one_cell_to_serve() -> None:
    world = world_of(PolicyMode.ASYNC, slots=(4, 4), train_cells=2)
    assert world.play(random.Random(0)).status is JobStatus.FINISHED
    assert {cell_id for cell_id, _ in switches(world)} == {"cell-0"}


def test_async_weights_go_to_the_cells_that_serve() -> None:
    world = world_of(PolicyMode.ASYNC)
    world.play(random.Random(0))
    made_by_all = [made.action for _, _, decisions in world.log for made in decisions]
    published = [action.cell_ids for action in made_by_all if isinstance(action, PublishWeights)]
    assert published[0] == ("cell-1", "cell-2", "cell-0")
    assert set(published[1:]) == {("cell-1", "cell-2")}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_colocated_pool_leaves_together_when_the_bursts_groups_are_ready(streaming) -> None:
    world = world_of(PolicyMode.COLOCATE, steps_per_burst=2, carry_over_steps=1.0, streaming=streaming)
    end_runs(world, 7)
    assert in_training(world) == []
    end_runs(world, 1)  # 4 groups of 2 runs: two steps
    assert in_training(world) == ["cell-0", "cell-1", "cell-2"]
    assert "4 groups are ready of the 4 that the burst needs" in reasons(world, SwitchCell)[0]
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


def test_a_colocated_pool_stops_its_unfinished_runs_and_goes_on_with_them() -> None:
    world = world_of(PolicyMode.COLOCATE, carry_over_steps=1.0)
    end_runs(world, 4)
    assert in_training(world) == ["cell-0", "cell-1", "cell-2"]
    running = [action.run_id for action in world.pending if isinstance(action, StartRun)]
    assert running
    assert {world.state.cells.cell_of(run_id) for run_id in running} == {None}
    while world.step == 0 or in_training(world):
        kind = next(type(action) for action in world.pending if not isinstance(action, StartRun))
        answer(world, kind)
    answer(world, SwitchCell)
    assert all(world.state.cells.cell_of(run_id) for run_id in running)


def test_a_streaming_step_takes_groups_as_they_become_ready() -> None:
    world = world_of(PolicyMode.ELASTIC)
    end_runs(world, 2)
    answer(world, SwitchCell)
    end_runs(world, 2)
    told = [action for action in world.pending if isinstance(action, TrainStep)]
    assert [(action.step, action.num_missing) for action in told] == [(1, 1), (1, 0)]


def test_a_lost_group_closes_the_step_short_if_the_job_wants_it() -> None:
    world = world_of(PolicyMode.ELASTIC, on_lost_group=OnLostGroup.CLOSE_SHORT)
    end_runs(world, 2)
    answer(world, SwitchCell)
    num_groups = len(world.specs)
    for run_id in world.specs["g000001"].run_ids:
        world.feed(RunStarted(run_id, 0))
        world.unfinished.discard(run_id)
        world.attempts[(run_id, 0)] = "ended"
        world.feed(RunEnded(run_id, 0, Outcome.FINISHED, 1.0))
    world._answer_score("g000001", ready=False)
    assert len(world.specs) == num_groups, "it is not replaced"
    told = [action for action in world.pending if isinstance(action, TrainStep)]
    assert [(len(action.group_ids), action.num_missing) for action in told] == [(1, 1), (0, 0)]


def test_the_satellite_that_joined_last_returns_when_no_other_cell_can_serve() -> None:
    world = world_of(PolicyMode.ELASTIC, slots=(4, 4, 4, 4))
    end_runs(world, 4)
    answer(world, SwitchCell)
    answer(world, SwitchCell)
    answer(world, SwitchCell)
    assert in_training(world) == ["cell-0", "cell-1", "cell-2"]
    world.lose("cell-3")
    assert switches(world)[-1] == ("cell-2", CellRole.ROLLOUT)
    assert "no other cell can serve" in reasons(world, SwitchCell)[-1]
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


def test_a_drained_satellite_leaves_training_and_the_next_one_may_follow() -> None:
    world = world_of(PolicyMode.ELASTIC)
    end_runs(world, 4)
    answer(world, SwitchCell)
    answer(world, SwitchCell)
    assert in_training(world)[:2] == ["cell-0", "cell-1"]
    assert world.ask(DrainRequested("cell-1")) is None
    assert ("cell-1", CellRole.ROLLOUT) in switches(world)
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


def test_a_cell_that_a_user_takes_back_stays_until_the_burst_ends() -> None:
    world = world_of(PolicyMode.ELASTIC)
    end_runs(world, 4)
    answer(world, SwitchCell)
    answer(world, SwitchCell)
    last = in_training(world)[-1]
    while world.cells[last].role is CellRole.TO_TRAIN:
        answer(world, SwitchCell)
    assert world.ask(SwitchRequested(last, CellRole.ROLLOUT)) is None
    answer(world, SwitchCell)
    end_runs(world, 2)
    assert last not in in_training(world)
