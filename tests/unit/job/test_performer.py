"""The performer against actors that are plain objects: what it does when one of them dies, hangs or refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from services.common.errors import EngineError, MachineError
from services.common.ids import JobId
from services.common.types import CellKind, CellState
from services.job import performer as performer_module
from services.job.commit import Commit, read_commit, with_best
from services.job.config import JobConfig, TasksConfig
from services.job.performer import ClusterPerformer, Surroundings
from services.rollout.types import CellStatus, RunResult, Task
from services.scheduler.actions import AbortRuns, MarkBest, OpenGroup, SaveCheckpoint, ScoreGroup, StartRun
from services.scheduler.events import (
    BestMarked,
    CellJoined,
    CellLost,
    CheckpointSaved,
    Event,
    GroupScored,
    RunEnded,
    RunStarted,
)
from services.scheduler.types import ResumeState
from services.trainer import commands
from services.trainer.checkpoint import EXPORT, Best, mark_best
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult, GroupSpec

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
        )
        self.runner = Actor(run=Method(FINISHED), cancel=Method(None), __ray_ready__=Method(True))
        self.cell = Actor(start=Method("127.0.0.1:1"), status=Method(None), __ray_ready__=Method(True))
        self.mailbox = Actor(submit=Method(None))
        self.config = JobConfig(tasks=TasksConfig(train="tasks"))
        self.folder = folder

    def performer(self) -> ClusterPerformer:
        surroundings = Surroundings(
            job_id=JobId("j"),
            config=self.config,
            folder=str(self.folder),
            ingress_url="http://127.0.0.1:1",
            grpc_token="t",
            train_tasks=(Task("t", "/t", "do it", 10, 10, 1 << 30),),
            heldout_tasks=(),
            num_runners=1,
        )
        return ClusterPerformer(surroundings, self.find)

    def find(self, name: str) -> Any:
        kinds = {"shard-0": self.shard, "runner-0": self.runner, "rollout": self.cell, "train": self.mailbox}
        return kinds[name.rpartition("/")[2]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for name in ("_POLL_S", "_RESTART_PAUSE_S"):
        monkeypatch.setattr(performer_module, name, 0.001)
    return World(tmp_path)


async def test_a_run_ends_with_the_outcome_that_its_shard_recorded(world: World) -> None:
    await world.performer().perform(START, world.events.append)
    assert world.events == [RunStarted("g000000-r0", 0), RunEnded("g000000-r0", 0, Outcome.FINISHED, 1.0)]
    [(spec,)] = world.runner.run.calls
    assert spec.base_url == "http://127.0.0.1:1/j/run/g000000-r0.key"
    assert world.shard.close_attempt.calls == [("g000000-r0", 0)]


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
    monkeypatch.setattr(performer_module, "_START_MARGIN_S", 0.01)
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


async def test_an_actor_without_restarts_does_not_come_back() -> None:
    actor = Actor(__ray_ready__=Method(unavailable(), ActorDiedError()))
    assert not await performer_module._comes_back(actor)


async def test_only_groups_that_may_be_trained_are_remembered(world: World) -> None:
    performer = world.performer()
    for ready in (True, False):
        world.shard.finish_group = Method(GroupResult("g000000", ready, "", 2, 2, 1, 1, 0.5, (0.0, 1.0), 0))
        await performer.perform(OpenGroup(SPEC, 0), world.events.append)
        await performer.perform(ScoreGroup("g000000"), world.events.append)
        assert isinstance(world.events[-1], GroupScored)
        assert ("g000000" in performer._specs) is ready


async def test_a_checkpoint_is_committed_when_the_ranks_have_saved_it(world: World) -> None:
    resume = ResumeState(step=4, version=2)
    world.mailbox.submit = Method("/elsewhere/step-000004")
    await world.performer().perform(SaveCheckpoint(4, True, (2,), resume), world.events.append)
    assert world.mailbox.submit.calls == [(commands.SaveCheckpoint(4, 2, export=True, kept_steps=(2,)),)]
    assert read_commit(world.folder) == Commit("step-000004", resume)
    assert world.events == [CheckpointSaved(4)]


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
