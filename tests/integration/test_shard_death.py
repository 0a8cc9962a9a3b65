"""Trajectory shards as a job runs them, killed with -9: nothing acknowledged is lost, and only their own runs wait."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from services.common.ids import JobId
from services.common.names import RAY_NAMESPACE, shard_actor
from services.proxy.backends import Routes
from services.rollout.types import RunResult
from services.trainer.cell import fetch_micro_step
from services.trainer.commands import MicroStepAt
from services.trainer.types import MicroStep
from services.trajectory.call_desk import INLINE_PROMPT_BYTES
from services.trajectory.config import TrajectoryConfig
from services.trajectory.store import list_runs, read_run
from services.trajectory.types import CallRecord, GroupResult, GroupSpec
from tests.integration.shard_world import (
    Asked,
    Books,
    Kill,
    Load,
    answer_to,
    group_ids_of,
    kill,
    kill_under_load,
    serves_again,
    start_cell,
    start_shard,
)
from tests.ray_cluster import start_ray
from tests.unit.trajectory.world import make_result, run_to_end
from tests.waiting import until

pytestmark = pytest.mark.cluster

NUM_KILLS = 20
RESTART_DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    temp_dir = tempfile.mkdtemp(prefix="tgd-", dir="/tmp")  # unix sockets want a short path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a runtime_env would make every process start later
        start_ray(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            _temp_dir=temp_dir,
        )
        yield
        ray.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)


@dataclass
class Ordeal:
    """What came of a shard's many deaths."""

    folder: Path
    books: Books
    kills: list[Kill]
    settled: list[GroupResult]
    micro_steps: list[MicroStep]


@pytest.fixture(scope="module")
def ordeal(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    """Shard 0 of two is killed twenty times while harnesses make calls of the runs of both; then all groups end."""
    return asyncio.run(_ordeal(tmp_path_factory.mktemp("store")))


async def _ordeal(folder: Path) -> Ordeal:
    job_id, moments = JobId("killed"), random.Random(11)
    shards = [start_shard(job_id, index, folder) for index in (0, 1)]
    cell, routes = start_cell(job_id)
    group_ids = [(shard, group_id) for index, shard in enumerate(shards) for group_id in group_ids_of(index, 2)]
    keys = {}
    for shard, group_id in group_ids:
        spec = _spec(group_id)
        await shard.open_group.remote(spec)
        keys.update({run_id: await shard.open_attempt.remote(run_id, 0) for run_id in spec.run_ids})
    load = Load(job_id, routes, keys, num_conversations=2)
    kills = []
    for _ in range(NUM_KILLS):
        await load.until_acknowledged(0, moments.randrange(1, 16), RESTART_DEADLINE_S)
        kills.append(await kill_under_load(shards[0], 0, load, RESTART_DEADLINE_S))
    await load.end()
    settled, micro_steps = [], []
    for shard, group_id in group_ids:
        for reward, run_id in enumerate(_spec(group_id).run_ids):
            await shard.finish_run.remote(make_result(run_id, float(reward)))
        settled.append(await shard.finish_group.remote(group_id))
        for index in range(await shard.num_micro_steps.remote(group_id)):
            micro_steps.append(await (await shard.micro_step.remote(group_id, index)))
    for actor in (*shards, cell):
        ray.kill(actor)
    return Ordeal(folder, load.books, kills, settled, micro_steps)


def _spec(group_id: str) -> GroupSpec:
    return GroupSpec(group_id, "task", (f"{group_id}-r0", f"{group_id}-r1"), 3)


def _stored(folder: Path) -> dict[str, CallRecord]:
    """All calls of a store."""
    stored: dict[str, CallRecord] = {}
    for summary in list_runs(str(folder)):
        _, calls = read_run(str(folder), summary.run_id)
        assert len(calls) == summary.num_calls
        for call in calls:
            assert (call.run_id, call.call_id in stored) == (summary.run_id, False)
            stored[call.call_id] = call
    return stored


def test_a_shard_that_is_killed_twenty_times_under_load_loses_and_doubles_nothing(ordeal: Ordeal) -> None:
    books, stored = ordeal.books, _stored(ordeal.folder)
    assert books.acknowledged.keys() <= stored.keys() <= books.sent.keys()
    for call_id, call in stored.items():
        sent, ticket = books.sent[call_id], books.tickets[call_id]
        assert (call.run_id, call.output_text, call.version_spans) == (
            sent.run_id,
            sent.output_text,
            sent.version_spans,
        )
        assert call.output_ids.tobytes() == sent.output_ids.tobytes()
        assert call.logprobs.tobytes() == sent.logprobs.tobytes()
        assert (call.parent_call_id, len(call.prompt_ids)) == (ticket.parent_call_id, ticket.num_prompt_tokens)
        _, ids, logprobs = answer_to(call_id, call.prompt_ids)  # right only for the prompt that the cell saw
        assert (ids.tobytes(), logprobs.tobytes()) == (call.output_ids.tobytes(), call.logprobs.tobytes())
    assert min(books.num_acknowledged.values()) > 4 * NUM_KILLS
    assert books.num_refused["NotFoundError"] > NUM_KILLS  # calls were in flight when it died


def test_while_a_shard_is_down_the_runs_of_another_go_on_and_its_own_wait_for_seconds(ordeal: Ordeal) -> None:
    assert len(ordeal.kills) == NUM_KILLS
    assert min(kill.num_elsewhere for kill in ordeal.kills) > 0
    assert max(kill.until_call_s for kill in ordeal.kills) < RESTART_DEADLINE_S


def test_groups_whose_shard_was_killed_while_they_ran_are_trained_like_any_other(ordeal: Ordeal) -> None:
    stored = _stored(ordeal.folder)
    selections = {run.run_id: run.selection for run in list_runs(str(ordeal.folder))}
    assert all(result.ready for result in ordeal.settled)
    assert sum(result.num_targets for result in ordeal.settled) == sum(step.num_targets for step in ordeal.micro_steps)
    for step in ordeal.micro_steps:
        for run in step.runs:
            selection = selections[run.run_id]
            assert selection is not None
            sampled = [len(stored[call_id].output_ids) for call_id in selection.target_call_ids]
            assert run.num_targets == selection.num_targets == sum(sampled) > 0


async def test_a_call_whose_prompt_went_with_its_shard_is_asked_for_again_at_once(
    cluster: None, tmp_path: Path
) -> None:
    job_id, spec, routes = JobId("prompt"), _spec(group_ids_of(0, 1)[0]), Routes()
    shard = start_shard(job_id, 0, tmp_path)
    cell, open_routes = start_cell(job_id)
    await shard.open_group.remote(spec)
    run_id = spec.run_ids[0]
    keys = {run_id: await shard.open_attempt.remote(run_id, 0)}
    too_long_for_a_ticket = "." * (INLINE_PROMPT_BYTES // 4)  # a token of 4 bytes each
    load = Load(job_id, routes, keys, num_conversations=1, padding=too_long_for_a_ticket)
    await until(lambda: len(load.books.tickets) == 1)  # no cell serves yet
    pid = await kill(shard)
    await serves_again(shard, pid, RESTART_DEADLINE_S)
    routes.offer(open_routes.table)
    await load.until_acknowledged(0, 1, timeout_s=30.0)
    await load.end()
    # once: by the cell, which misses the prompt, or where that came to it in time, by the shard, which misses the call
    assert sum(load.books.num_refused.values()) == 1
    assert set(load.books.num_refused) <= {"JobError", "NotFoundError"}
    for actor in (shard, cell):
        ray.kill(actor)


def _content(step: MicroStep) -> tuple[Any, ...]:
    nodes = [
        (
            one.parent,
            one.run,
            one.token_ids.tolist(),
            one.target_mask.tolist(),
            one.logprobs.tolist(),
            one.version_spans,
        )
        for one in step.nodes
    ]
    return step.micro_step_id, step.group_id, step.runs, nodes


async def _end_runs(shard: Any, spec: GroupSpec, rewards: tuple[float, float]) -> list[RunResult]:
    """Dispatch a group and let its runs end; what was said of them."""
    await shard.open_group.remote(spec)
    for run_id, reward in zip(spec.run_ids, rewards, strict=True):
        await run_to_end(Asked(shard), run_id, reward)  # type: ignore[arg-type]
    return [make_result(run_id, reward) for run_id, reward in zip(spec.run_ids, rewards, strict=True)]


async def test_the_micro_steps_of_a_ready_group_outlive_their_shard(cluster: None, tmp_path: Path) -> None:
    job_id, spec = JobId("fetched"), _spec(group_ids_of(0, 1)[0])
    shard = start_shard(job_id, 0, tmp_path, config=TrajectoryConfig(num_shards=2, micro_step_tokens=16))
    await _end_runs(shard, spec, (0.0, 1.0))
    assert (await shard.finish_group.remote(spec.group_id)).ready
    num_micro_steps = await shard.num_micro_steps.remote(spec.group_id)
    assert num_micro_steps == 2
    places = [MicroStepAt(shard_actor(job_id, 0), spec.group_id, index) for index in range(num_micro_steps)]

    async def fetched() -> list[tuple[Any, ...]]:
        steps = await asyncio.gather(*(asyncio.to_thread(fetch_micro_step, place) for place in places))
        return [_content(step) for step in steps]

    before = await fetched()
    assert before[0] != before[1]
    for has_been_trained in (False, True):
        if has_been_trained:  # whoever trained it may not have heard so, and asks again
            await shard.mark_trained.remote([spec.group_id], 1)
        pid = await kill(shard)
        assert await fetched() == before  # asked while it is down
        await serves_again(shard, pid, RESTART_DEADLINE_S)
        assert await shard.num_micro_steps.remote(spec.group_id) == num_micro_steps
        assert await fetched() == before
    ray.kill(shard)


async def test_what_was_said_of_runs_and_groups_is_answered_the_same_after_a_kill(
    cluster: None, tmp_path: Path
) -> None:
    ready, lost, late = (_spec(group_id) for group_id in group_ids_of(0, 3))
    shard = start_shard(JobId("said"), 0, tmp_path)
    told = [
        *await _end_runs(shard, ready, (0.25, 1.0)),
        *await _end_runs(shard, lost, (1.0, 1.0)),
        *await _end_runs(shard, late, (1.0, 0.0)),
    ]
    answers = [await shard.finish_group.remote(spec.group_id) for spec in (ready, lost)]
    assert [result.ready for result in answers] == [True, False]
    settling = shard.finish_group.remote(late.group_id)
    pid = await kill(shard)  # maybe with that in hand
    answers.append(await settling)
    before = list_runs(str(tmp_path))
    assert [run.advantage is not None for run in before] == [True] * 6
    assert [run.selection is not None for run in before] == [True, True, False, False, True, True]
    for is_last in (False, True):
        await serves_again(shard, pid, RESTART_DEADLINE_S)
        assert [await shard.finish_run.remote(result) for result in told] == [result.outcome for result in told]
        assert [await shard.finish_group.remote(spec.group_id) for spec in (ready, lost, late)] == answers
        for spec, runs in ((ready, before[:2]), (late, before[4:])):
            assert await shard.num_micro_steps.remote(spec.group_id) == 1
            step = await (await shard.micro_step.remote(spec.group_id, 0))
            assert {run.run_id: run.advantage for run in step.runs} == {run.run_id: run.advantage for run in runs}
        assert list_runs(str(tmp_path)) == before
        if not is_last:
            pid = await kill(shard)
    ray.kill(shard)
