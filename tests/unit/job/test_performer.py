"""The performer against actors that are plain objects: what it does when one of them dies, hangs or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from services.common.errors import EngineError, MachineError
from services.common.ids import JobId
from services.common.types import CellKind, CellRole, CellState
from services.job import cells as cells_module
from services.job import performer as performer_module
from services.job.commit import Commit, read_commit, with_best
from services.job.config import JobConfig, TasksConfig
from services.job.performer import ClusterPerformer, Surroundings
from services.rollout.types import CellStatus, RunResult, Task
from services.scheduler.actions import AbortRuns, MarkBest, OpenGroup, SaveCheckpoint, ScoreGroup, StartRun, SwitchCell
from services.scheduler.events import (
    BestMarked,
    CellJoined,
    CellLost,
    CellReported,
    CheckpointSaved,
    Event,
    GroupScored,
    HarnessEnded,
    RunEnded,
    RunStarted,
)
from services.scheduler.performer import Recovered
from services.scheduler.types import ResumeState
from services.trainer import commands
from services.trainer.checkpoint import EXPORT, Best, mark_best
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult, GroupSpec
from tests.waiting import until

SPEC = GroupSpec("g000000", "t", ("g000000-r0", "g000000-r1"), 0)
START = StartRun("g000000-r0", 0, "g000000", 0, "cell-0")
FINISHED = RunResult("g000000-r0", 0, Outcome.FINISHED, 1.0, 2.0, 1.5, 0.5, 0)


class Method:
    """``actor.method`` as Ray shows it; each call takes the next of ``answers``, the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        """Runs whether it is awaited or not, as a remote method does."""
        self.calls.append(arguments)
        return asyncio.create_task(self._answer())

    async def _answer(self) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer


class Actor:
    def __init__(self, **methods: Method) -> None:
        self.__dict__.update(methods)


async def for_ever() -> None:
    await asyncio.Event().wait()


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("it restarts", b"x" * 16)


class World:
    """One shard, one runner, one cell, one mailbox."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.shard = Actor(
            open_group=Method(None),
            open_attempt=Method("g000000-r0.key"),
            close_attempt=Method(None),
            finish_run=Method(Outcome.FINISHED),
            attempt_result=Method(FINISHED),
            note_checkpoint=Method(None),
        )
        self.runner = Actor(
            run=Method(FINISHED),
            cancel=Method(None),
            forget=Method(None),
            keep_only=Method([]),
            harness_ended=Method(False),
            __ray_ready__=Method(True),
        )
        self.cell = Actor(start=Method("127.0.0.1:1"), status=Method(None), __ray_ready__=Method(True))
        self.mailbox = Actor(submit=Method(None))
        self.config = JobConfig(tasks=TasksConfig(train="tasks"))
        self.folder = folder
        self.num_runners = 1
        self.more_runners = [Actor(run=Method(FINISHED), forget=Method(None)) for _ in range(2)]

    @property
    def runners(self) -> list[Actor]:
        return [self.runner, *self.more_runners]

    def limit_cells(self, num_cells: int) -> None:
        cells = self.config.rollout.cells.model_copy(update={"num_cells": num_cells})
        rollout = self.config.rollout.model_copy(update={"cells": cells})
        self.config = self.config.model_copy(update={"rollout": rollout})

    def performer(self) -> ClusterPerformer:
        surroundings = Surroundings(
            job_id=JobId("j"),
            config=self.config,
            folder=str(self.folder),
            proxy_url="http://127.0.0.1:1",
            grpc_token="t",
            train_tasks=(Task("t", "/t", "do it", 10, 10, 1 << 30),),
            heldout_tasks=(),
            num_runners=self.num_runners,
        )
        return ClusterPerformer(surroundings, self.find)

    def find(self, name: str) -> Any:
        kinds = {"shard-0": self.shard, "rollout": self.cell, "train": self.mailbox}
        kinds |= {f"runner-{index}": runner for index, runner in enumerate(self.runners)}
        return kinds[name.rpartition("/")[2]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for name in ("POLL_S", "RESTART_PAUSE_S"):
        monkeypatch.setattr(cells_module, name, 0.001)
    return World(tmp_path)


async def test_a_run_ends_with_the_outcome_that_its_shard_recorded(world: World) -> None:
    await world.performer().perform(START, world.events.append)
    assert world.events == [RunStarted("g000000-r0", 0), RunEnded("g000000-r0", 0, Outcome.FINISHED, 1.0)]
    [(spec,)] = world.runner.run.calls
    assert spec.base_url == "http://127.0.0.1:1/run/g000000-r0.key"
    assert world.shard.close_attempt.calls == [("g000000-r0", 0)]


async def test_the_end_of_a_harness_is_told_while_its_work_is_scored(world: World) -> None:
    scored = asyncio.Event()

    async def score() -> RunResult:
        await scored.wait()
        return FINISHED

    world.runner.run, world.runner.harness_ended = Method(score), Method(True)
    performing = asyncio.create_task(world.performer().perform(START, world.events.append))
    await until(lambda: HarnessEnded("g000000-r0", 0) in world.events)
    assert not performing.done()
    scored.set()
    await performing
    assert [type(event) for event in world.events] == [RunStarted, HarnessEnded, RunEnded]


async def test_a_run_of_a_dead_runner_is_lost_and_its_slot_is_free_when_the_runner_is_back(world: World) -> None:
    world.runner.run = Method(unavailable())
    ready = world.runner.__dict__["__ray_ready__"] = Method(unavailable(), unavailable(), True)
    world.shard.finish_run = Method(Outcome.RUNNER_LOSS)
    await world.performer().perform(START, world.events.append)
    assert len(ready.calls) == 3
    [(result,)] = world.shard.finish_run.calls
    assert result.outcome is Outcome.RUNNER_LOSS
    assert "the runner died" in result.detail
    assert isinstance(world.events[-1], RunEnded)
    assert world.events[-1].outcome is Outcome.RUNNER_LOSS


async def test_a_runner_that_hangs_loses_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer_module, "_RUN_MARGIN_S", -30 + 0.01)
    world.runner.run = Method(for_ever)
    world.shard.finish_run = Method(Outcome.RUNNER_LOSS)
    await world.performer().perform(START, world.events.append)
    assert isinstance(world.events[-1], RunEnded)
    assert "gave no answer" in world.events[-1].detail
    assert world.runner.cancel.calls == [([("g000000-r0", 0)],)]


async def test_a_shard_that_hangs_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer_module, "_SHARD_TIMEOUT_S", 0.01)
    world.shard.open_group = Method(for_ever)
    with pytest.raises(MachineError, match="gave no answer"):
        await world.performer().perform(OpenGroup(SPEC, 0), world.events.append)


async def test_an_attempt_that_is_aborted_on_its_way_starts_no_harness(world: World) -> None:
    gate = asyncio.Event()

    async def open_slowly() -> str:
        await gate.wait()
        return "g000000-r0.key"

    world.shard.open_attempt = Method(open_slowly)
    world.shard.finish_run = Method(Outcome.CANCELLED)
    performer = world.performer()
    running = asyncio.create_task(performer.perform(START, world.events.append))
    await asyncio.sleep(0)
    await performer.perform(AbortRuns((("g000000-r0", 0),), "late"), world.events.append)
    gate.set()
    await running
    assert world.runner.run.calls == []
    assert world.events[-1] == RunEnded(
        "g000000-r0", 0, Outcome.CANCELLED, None, "aborted before its harness was started"
    )


async def test_a_cell_that_never_starts_is_lost_with_the_reason(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "START_MARGIN_S", 0.01)
    engine = world.config.rollout.engine.model_copy(update={"start_timeout_s": 0.01})
    cells = world.config.rollout.cells.model_copy(update={"num_cells": 1})
    rollout = world.config.rollout.model_copy(update={"engine": engine, "cells": cells})
    world.config = world.config.model_copy(update={"rollout": rollout})
    world.cell.start = Method(for_ever)
    await asyncio.wait_for(world.performer().attend(world.events.append), 10)
    [lost] = world.events
    assert isinstance(lost, CellLost)
    assert "gpus_per_cell" in lost.reason


async def test_a_cell_whose_constructor_failed_is_lost_for_good(world: World) -> None:
    world.cell.start = Method(EngineError("no memory.", "Lower kv_cache_bytes."))
    await asyncio.wait_for(world.performer().attend(world.events.append), 10)
    assert world.events == [CellLost(f"cell-{index}", "no memory. Lower kv_cache_bytes.") for index in range(2)]


async def test_a_cell_that_was_up_and_does_not_start_again_is_lost_for_good(world: World) -> None:
    status = CellStatus("cell-0", CellState.STALE, -1, True, 0, 4)
    world.cell.start = Method("127.0.0.1:1", EngineError("no memory."))
    world.cell.status = Method(status, TimeoutError())
    cells = world.config.rollout.cells.model_copy(update={"num_cells": 1})
    world.config = world.config.model_copy(update={"rollout": world.config.rollout.model_copy(update={"cells": cells})})
    await asyncio.wait_for(world.performer().attend(world.events.append), 10)
    assert world.events[0] == CellJoined("cell-0", 4, CellKind.CORE)
    assert [event.may_return for event in world.events[1:]] == [True, True, True, True, False]
    assert world.events[-1].reason.startswith("no memory.")


async def test_a_cell_that_gives_no_answer_is_lost_and_taken_back_when_it_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_module, "POLL_TIMEOUT_S", 0.01)
    status = CellStatus("cell-0", CellState.STALE, -1, True, 0, 4)
    world.cell.status = Method(status, for_ever, status)
    world.limit_cells(1)
    attending = asyncio.create_task(world.performer().attend(world.events.append))
    await until(lambda: len(world.events) == 3)
    attending.cancel()
    joined, lost, again = world.events
    assert joined == again == CellJoined("cell-0", 4, CellKind.CORE)
    assert isinstance(lost, CellLost)
    assert lost.may_return
    assert "gave no answer within 0.01 s" in lost.reason


async def test_an_actor_without_restarts_does_not_come_back() -> None:
    actor = Actor(__ray_ready__=Method(unavailable(), ActorDiedError()))
    assert not await cells_module.comes_back(actor)


async def test_only_groups_that_may_be_trained_are_remembered(world: World) -> None:
    performer = world.performer()
    for ready in (True, False):
        world.shard.finish_group = Method(GroupResult("g000000", ready, "", 2, 2, 1, 1, 0.5, (0.0, 1.0), 0))
        await performer.perform(OpenGroup(SPEC, 0), world.events.append)
        await performer.perform(ScoreGroup("g000000"), world.events.append)
        assert isinstance(world.events[-1], GroupScored)
        assert ("g000000" in performer._specs) is ready


async def test_an_attempt_always_goes_to_the_same_runner(world: World) -> None:
    world.num_runners = 3
    seen = []
    for _ in range(2):  # a performer that was made anew
        performer = world.performer()
        for run in range(6):
            await performer.perform(StartRun(f"g000000-r{run}", 0, "g000000", 0, "cell-0"), world.events.append)
        seen.append([[spec.run_id for (spec,) in runner.run.calls] for runner in world.runners])
        for runner in world.runners:
            runner.run.calls.clear()
    assert seen[0] == seen[1]
    assert [len(runs) for runs in seen[0]] == [2, 2, 2]


async def test_a_run_that_ended_while_there_was_no_scheduler_is_told_from_the_record(world: World) -> None:
    world.shard.open_attempt = Method("")
    await world.performer().perform(START, world.events.append)
    assert world.events == [RunStarted("g000000-r0", 0), RunEnded("g000000-r0", 0, Outcome.FINISHED, 1.0)]
    assert world.runner.run.calls == []
    assert world.shard.finish_run.calls == []


async def test_a_recorded_run_is_forgotten_by_its_runner_and_not_before(world: World) -> None:
    def check() -> Any:
        assert world.runner.forget.calls == []
        return asyncio.sleep(0, Outcome.FINISHED)

    world.shard.finish_run = Method(check)
    await world.performer().perform(START, world.events.append)
    assert world.runner.forget.calls == [([("g000000-r0", 0)],)]


def recovered(**changes: Any) -> Recovered:
    fields = {"groups": (SPEC,), "scored": (), "attempts": (), "started": (), "cells": ("cell-0",), "training": ()}
    return Recovered(**{**fields, **changes})


async def test_a_run_goes_on_that_its_runner_still_has_and_is_lost_where_the_runner_died_too(world: World) -> None:
    for held, outcome in ((["g000000-r0"], Outcome.FINISHED), ([], Outcome.RUNNER_LOSS)):
        world.events.clear()
        world.runner.run.calls.clear()
        world.runner.keep_only = Method([(run_id, 0) for run_id in held])
        world.shard.finish_run = Method(outcome)
        performer = world.performer()
        attempts = (("g000000-r0", 0),)
        await performer.recover(recovered(attempts=attempts, started=attempts))
        assert world.runner.keep_only.calls == [(list(attempts),)]
        await performer.perform(START, world.events.append)
        assert len(world.runner.run.calls) == len(held)
        assert world.events[-1].outcome is outcome
        assert world.shard.finish_run.calls[0][0].outcome is outcome


async def test_a_run_that_was_about_to_start_is_started_after_a_recovery(world: World) -> None:
    performer = world.performer()
    await performer.recover(recovered(attempts=(("g000000-r0", 0),)))
    await performer.perform(START, world.events.append)
    assert world.events == [RunStarted("g000000-r0", 0), RunEnded("g000000-r0", 0, Outcome.FINISHED, 1.0)]


async def test_a_runner_that_is_restarted_does_not_keep_the_job_from_going_on(world: World) -> None:
    world.runner.keep_only = Method(unavailable())
    await world.performer().recover(recovered(attempts=(("g000000-r0", 0),)))


async def test_rewards_scored_before_a_recovery_count_in_the_step(world: World) -> None:
    performer = world.performer()
    result = GroupResult("g000000", True, "", 2, 2, 1, 1, 0.5, (0.0, 1.0), 0)
    await performer.recover(recovered(scored=(result,)))
    assert performer._recorder._rewards == [0.0, 1.0]
    assert performer._specs == {"g000000": SPEC}


async def test_satellites_that_were_in_training_are_in_it_again(world: World) -> None:
    satellites = world.config.trainer.model_copy(update={"satellites": True})
    world.config = world.config.model_copy(update={"trainer": satellites})
    performer = world.performer()
    await performer.recover(recovered(cells=("cell-0", "cell-1"), training=("cell-0", "cell-1")))
    assert list(performer._team._in_training) == ["cell-1"]
    fresh = CellStatus("cell-1", CellState.STALE, -1, True, 0, 4)
    world.cell.status = Method(fresh)  # it died meanwhile, too
    await attended(performer, world, lambda: len(world.events) > 1)
    assert list(performer._team._in_training) == []


async def test_a_cell_that_was_up_reports_itself_and_a_fresh_one_joins(world: World) -> None:
    world.limit_cells(1)
    for version, state, event in (
        (3, CellState.SERVING, CellReported("cell-0", 4, 3)),
        (3, CellState.STALE, CellReported("cell-0", 4, -1)),
        (-1, CellState.STALE, CellJoined("cell-0", 4, CellKind.CORE)),
    ):
        world.events.clear()
        world.cell.status = Method(CellStatus("cell-0", state, version, True, 0, 4))
        performer = world.performer()
        await performer.recover(recovered())
        await attended(performer, world, lambda: len(world.events) > 0)
        assert world.events == [event]


async def test_a_cell_that_was_down_when_the_scheduler_died_joins(world: World) -> None:
    world.limit_cells(1)
    world.cell.status = Method(CellStatus("cell-0", CellState.SERVING, 3, True, 0, 4))
    performer = world.performer()
    await performer.recover(recovered(cells=()))
    await attended(performer, world, lambda: len(world.events) > 0)
    assert world.events == [CellJoined("cell-0", 4, CellKind.CORE)]


async def test_a_cell_whose_slots_change_reports_them(world: World) -> None:
    world.limit_cells(1)
    joined, fewer = (CellStatus("cell-0", CellState.SERVING, 3, True, 0, slots) for slots in (4, 2))
    world.cell.status = Method(joined, joined, fewer)
    await attended(world.performer(), world, lambda: len(world.events) > 1)
    assert world.events == [CellJoined("cell-0", 4, CellKind.CORE), CellReported("cell-0", 2, 3)]


async def attended(performer: ClusterPerformer, world: World, condition: Callable[[], bool]) -> None:
    attending = asyncio.create_task(performer.attend(world.events.append))
    await until(condition, 10)
    for _ in range(20):
        await asyncio.sleep(0)
    attending.cancel()
    await asyncio.wait([attending])


async def test_an_action_on_a_cell_waits_until_the_cell_was_looked_at(world: World) -> None:
    world.limit_cells(1)
    world.cell.start = Method(EngineError("no memory."))
    performer = world.performer()
    await performer.recover(recovered())
    switching = asyncio.create_task(performer.perform(SwitchCell("cell-0", CellRole.TRAIN, 1.0), world.events.append))
    await asyncio.sleep(0)
    assert not switching.done()
    await asyncio.wait_for(performer.attend(world.events.append), 10)
    with pytest.raises(EngineError, match="not up"):
        await switching
    assert [event.may_return for event in world.events] == [True, True, True, False]


async def test_a_checkpoint_is_committed_when_the_ranks_have_saved_it(world: World) -> None:
    resume = ResumeState(step=4, version=2)
    world.mailbox.submit = Method("/elsewhere/step-000004")
    await world.performer().perform(SaveCheckpoint(4, True, (2,), resume), world.events.append)
    assert world.mailbox.submit.calls == [(commands.SaveCheckpoint(4, 2, export=True, kept_steps=(2,)),)]
    assert read_commit(world.folder) == Commit("step-000004", resume)
    assert world.events == [CheckpointSaved(4)]


async def test_a_checkpoint_waits_for_no_shard_that_is_away(world: World) -> None:
    world.mailbox.submit = Method("step-000004")
    world.shard.note_checkpoint = Method(for_ever)
    action = SaveCheckpoint(4, True, (), ResumeState(step=4, version=2))
    saving = asyncio.create_task(world.performer().perform(action, world.events.append))
    await until(lambda: world.events == [CheckpointSaved(4)], 10)
    saving.cancel()
    world.shard.note_checkpoint = Method(unavailable())
    await world.performer().perform(action, world.events.append)


async def test_the_best_checkpoint_is_marked_by_the_ranks(world: World) -> None:
    await world.performer().perform(MarkBest(4, 0.5), world.events.append)
    assert world.mailbox.submit.calls == [(commands.MarkBest(4, 0.5),)]
    assert world.events == [BestMarked(4)]


async def test_a_mark_that_is_newer_than_the_commit_counts_when_the_job_is_resumed(world: World) -> None:
    world.mailbox.submit = Method("step-000004")
    resume = ResumeState(step=4, version=4, best_eval_step=0, best_eval_reward=0.25)
    await world.performer().perform(SaveCheckpoint(4, True, (), resume), world.events.append)
    checkpoints = world.folder / "trainer" / "checkpoints"
    (checkpoints / "step-000004" / EXPORT).mkdir(parents=True)
    mark_best(checkpoints, Best(4, 0.5))
    commit = read_commit(world.folder)
    assert commit is not None
    resumed = with_best(commit.resume, checkpoints)
    assert (resumed.best_eval_step, resumed.best_eval_reward) == (4, 0.5)
