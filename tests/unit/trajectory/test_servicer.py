"""TrajectoryService over real gRPC, on a real store that a shard is writing."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import AccessError, ConfigError, MachineError, NotFoundError, TidegateError
from services.common.grpc import channel, serve
from services.pb import trajectory_pb2, trajectory_pb2_grpc
from services.trajectory import servicer
from services.trajectory.actor import TrajectoryShard
from services.trajectory.client import TrajectoryClient
from services.trajectory.outcome import Outcome
from services.trajectory.paths import calls_of_run, trajectories_of
from services.trajectory.servicer import SERVICE_NAME, TrajectoryServicer, trajectory_service
from services.trajectory.source import StoreSource
from services.trajectory.store import RunFilter
from tests.unit.trajectory.stored_job import JOB_ID, RICH, make_job
from tests.unit.trajectory.world import ask, call, make_spec, open_shard

TOKEN = "token-of-this-test"


@dataclass
class Job:
    """A job whose shard is open, with a server that reads its store."""

    folder: Path
    shard: TrajectoryShard
    address: str
    client: TrajectoryClient


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "job"
    asyncio.run(make_job(folder))
    return folder


@pytest.fixture
async def job(stored: Path, tmp_path: Path) -> AsyncIterator[Job]:
    folder = tmp_path / "job"
    shutil.copytree(stored, folder)
    shard = open_shard(folder / "trajectory", max_model_len=1_000_000)
    add, name = trajectory_service(JOB_ID, folder)
    server, address = await serve([add], [name], host="127.0.0.1", port=0, token=TOKEN)
    client = TrajectoryClient(address, TOKEN, deadline_s=10.0)
    yield Job(folder, shard, address, client)
    await client.close()
    await server.stop(grace=None)
    await shard.close()


async def listed(client: TrajectoryClient, page_size: int = 0, **filters: Any) -> list[str]:
    return [run.run_id async for run in client.summaries(RunFilter(**filters), page_size)]


# -- what is answered -------------------------------------------------------------------------------------------------


async def test_a_run_comes_with_its_group_and_selection(job: Job) -> None:
    summary, group, score = await job.client.run(RICH)
    (stored_run,) = [run for run in StoreSource(job.folder).list_runs(RunFilter()) if run.run_id == RICH]
    assert summary == stored_run
    assert summary.selection is not None
    assert summary.selection.num_targets > 0
    assert group == StoreSource(job.folder).group("g000000")
    assert score == StoreSource(job.folder).score(summary)
    assert score.details == {"tests": {"passed": 3}}
    assert job.client.job_id == JOB_ID


async def test_summaries_come_page_by_page_and_filtered(job: Job) -> None:
    runs = [run.run_id for run in StoreSource(job.folder).list_runs(RunFilter())]
    for page_size in (0, 1, 3, 8):
        assert await listed(job.client, page_size) == runs
    assert await listed(job.client, 1, group_id="g000001") == ["g000001-r0", "g000001-r1"]
    assert await listed(job.client, outcome=Outcome.VERIFIER_FAILURE) == ["e000002-r1"]
    assert await listed(job.client, unfinished=True) == ["g000003-r0", "g000003-r1"]
    assert await listed(job.client, is_eval=False, task_name="task") == [run for run in runs if run[0] == "g"]
    assert await listed(job.client, task_name="another") == []


async def test_calls_are_streamed_as_they_are_stored(job: Job) -> None:
    streamed = [row async for row in job.client.calls(RICH)]
    _, stored_rows = StoreSource(job.folder).read_calls(RICH)
    assert len(streamed) == len(stored_rows) == 8
    for one, other in zip(streamed, stored_rows, strict=True):
        assert one.record.request == other.record.request
        assert one.new_prompt_ids.tolist() == other.new_prompt_ids.tolist()
        assert one.record.output_ids.tolist() == other.record.output_ids.tolist()
        assert one.record.logprobs.tobytes() == other.record.logprobs.tobytes()
        assert one.record.version_spans == other.record.version_spans
        assert (one.record.parent_call_id, one.record.output_text) == (
            other.record.parent_call_id,
            other.record.output_text,
        )


async def test_the_tree_has_roles_and_fates_without_tokens(job: Job) -> None:
    shape = await job.client.tree(RICH)
    summary, rows = StoreSource(job.folder).read_calls(RICH)
    run = calls_of_run(rows, summary.selection)
    assert {node.call_id: (node.role, node.fate) for node in shape.nodes} == {
        call_id: (run.roles[call_id], run.fates[call_id]) for call_id in run.by_id
    }
    assert shape.num_unique_tokens == run.num_tokens
    assert shape.num_trajectories == len(trajectories_of(run)) == 5


async def test_what_a_shard_writes_meanwhile_is_seen(job: Job) -> None:
    await job.shard.open_group(make_spec(9))
    key = await job.shard.open_attempt("g000009-r0", 0)
    contents = ["do it"]
    for at in range(5):
        await call(job.shard, "g000009-r0", key, ask(*contents), f"answer {at}")
        contents += [f"answer {at}", "go on"]
        assert len([row async for row in job.client.calls("g000009-r0")]) == at + 1
    assert (await job.client.run("g000009-r0"))[0].num_calls == 5


async def test_runs_are_read_while_no_shard_is_there(job: Job) -> None:
    await job.shard.close()
    assert len(await listed(job.client)) == 8
    assert len([row async for row in job.client.calls(RICH)]) == 8


async def test_a_store_that_comes_later_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    add, name = trajectory_service(JOB_ID, folder)
    server, address = await serve([add], [name], host="127.0.0.1", port=0, token=TOKEN)
    client = TrajectoryClient(address, TOKEN)
    with pytest.raises(NotFoundError):
        await listed(client)
    shard = open_shard(folder / "trajectory")
    await shard.open_group(make_spec(0))
    assert await listed(client) == ["g000000-r0", "g000000-r1"]
    await shard.close()
    await client.close()
    await server.stop(grace=None)


# -- what is refused --------------------------------------------------------------------------------------------------


async def refused(job: Job, method: str, **fields: Any) -> grpc.StatusCode:
    """The status with which a request ends."""
    async with channel(job.address, TOKEN) as opened:
        stub: Any = trajectory_pb2_grpc.TrajectoryServiceStub(opened)
        request = getattr(trajectory_pb2, f"{method}Request")(**fields)
        call = getattr(stub, method)(request)
        answer = call.read() if method == "StreamCalls" else call
        with pytest.raises(grpc.RpcError) as error:
            await answer
        code: grpc.StatusCode = error.value.code()
        return code


@pytest.mark.parametrize(
    ("method", "fields", "code"),
    [
        ("GetRun", {"run_id": "g000077-r0"}, "NOT_FOUND"),
        ("GetRun", {"run_id": "no run"}, "NOT_FOUND"),
        ("GetRun", {"run_id": RICH, "job_id": "another"}, "NOT_FOUND"),
        ("GetRun", {}, "INVALID_ARGUMENT"),
        ("StreamCalls", {"run_id": "g000077-r0"}, "NOT_FOUND"),
        ("StreamCalls", {"run_id": RICH, "job_id": "another"}, "NOT_FOUND"),
        ("StreamCalls", {"run_id": RICH, "attempt": 3}, "NOT_FOUND"),
        ("StreamCalls", {}, "INVALID_ARGUMENT"),
        ("StreamCalls", {"run_id": RICH, "attempt": -1}, "INVALID_ARGUMENT"),
        ("GetTree", {"run_id": "g000077-r0"}, "NOT_FOUND"),
        ("ListRunSummaries", {"outcome": "victory"}, "INVALID_ARGUMENT"),
        ("ListRunSummaries", {"limit": -1}, "INVALID_ARGUMENT"),
        ("ListRunSummaries", {"limit": 1001}, "INVALID_ARGUMENT"),
        ("ListRunSummaries", {"page_token": "g000077-r0"}, "INVALID_ARGUMENT"),
        ("ListRunSummaries", {"job_id": "another"}, "NOT_FOUND"),
    ],
)
async def test_bad_requests_end_with_their_status(job: Job, method: str, fields: dict[str, Any], code: str) -> None:
    assert (await refused(job, method, **fields)).name == code


async def test_errors_reach_a_client_as_they_were(job: Job) -> None:
    with pytest.raises(NotFoundError, match="no run g000077-r0"):
        await job.client.run("g000077-r0")
    with pytest.raises(NotFoundError):
        [row async for row in job.client.calls("g000077-r0")]
    with pytest.raises(ConfigError, match=r"not in 0\.\.1000"):
        await listed(job.client, 5000)


async def test_nothing_is_read_without_the_token(job: Job) -> None:
    stranger = TrajectoryClient(job.address, "a-wrong-one")
    with pytest.raises(AccessError):
        await stranger.run(RICH)
    with pytest.raises(AccessError):
        [row async for row in stranger.calls(RICH)]
    await stranger.close()
    async with grpc.aio.insecure_channel(job.address) as opened:
        health: Any = health_pb2_grpc.HealthStub(opened)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


# -- threads and streams ----------------------------------------------------------------------------------------------


class SlowSource(StoreSource):
    """A store whose reading takes until it is let go."""

    let_go = threading.Event()

    def list_runs(self, filters: RunFilter):  # type: ignore[no-untyped-def]
        self.let_go.wait(20.0)
        return super().list_runs(filters)


async def test_slow_reading_holds_up_nothing_else_of_the_server(job: Job) -> None:
    add = trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server
    slow = TrajectoryServicer(JOB_ID, lambda: SlowSource(job.folder, JOB_ID))
    adds = [lambda server: add(slow, server)]
    server, address = await serve(adds, [SERVICE_NAME], host="127.0.0.1", port=0, token=TOKEN)
    client = TrajectoryClient(address, TOKEN, deadline_s=0.3)
    asked = [asyncio.create_task(client.run(RICH)) for _ in range(5)]
    async with grpc.aio.insecure_channel(address) as opened:
        health: Any = health_pb2_grpc.HealthStub(opened)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for task in asked:
        with pytest.raises(MachineError, match="deadline"):
            await task
    SlowSource.let_go.set()
    patient = TrajectoryClient(address, TOKEN, deadline_s=20.0)
    assert (await patient.run(RICH))[0].run_id == RICH
    for one in (client, patient):
        await one.close()
    await server.stop(grace=None)


async def test_streams_are_limited_and_end_with_their_clients(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_STREAMS", 2)
    key = await job.shard.open_attempt("g000003-r1", 0)
    for at in range(25):  # more than flow control lets through while nobody reads
        await call(job.shard, "g000003-r1", key, ask(f"{at}" + "x" * 200_000), "y")
    idle = [job.client.calls("g000003-r1") for _ in range(2)]
    for stream in idle:
        await anext(stream)
    with pytest.raises(TidegateError, match=r"resource_exhausted.*try again"):
        await anext(job.client.calls("g000003-r1"))
    assert len(await listed(job.client)) == 8, "other requests go on"
    for stream in idle:
        await stream.aclose()

    async def is_free() -> bool:
        try:
            return len([row async for row in job.client.calls("g000003-r1")]) == 25
        except TidegateError:
            return False

    async with asyncio.timeout(30.0):
        while not await is_free():  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)
