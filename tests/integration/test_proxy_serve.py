"""The proxy as it runs in a job: Ray Serve in front, actors behind, routes over gRPC."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from ray import serve

from services.common.ids import CellId, JobId
from services.common.names import RAY_NAMESPACE, rollout_actor, route_prefix, serve_application, shard_actor
from services.common.types import CellRoute, CellState, RouteTable
from services.proxy.config import ProxyConfig
from services.proxy.deployment import ProxySettings, proxy_application
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateRequest
from services.scheduler.servicer import serve_scheduler
from services.trajectory.types import CallRecord, CallTicket
from tests.ray_cluster import start_ray
from tests.unit.proxy.fakes import KEY, RUN, FakeCell, FakeShard, word
from tests.waiting import wait_until

JOB = JobId("serve-test")
WHOLE = "".join(word(index) for index in range(5))
DEADLINE_S = 60.0

pytestmark = pytest.mark.cluster


class Shard(FakeShard):
    """The fake shard as an actor: its prompt is an object in the store."""

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        ticket = await super().match_call(run_id, key, request)
        return CallTicket(
            ticket.call_id, run_id, 0, ray.put(np.arange(11, dtype=np.int32)), 11, 3, None, ticket.sampling, True
        )

    async def seen(self) -> tuple[list[CallRecord], list[tuple[str, str]]]:
        return self.records, self.abandoned


class Cell(FakeCell):
    """The fake cell as an actor: it insists on getting the array itself."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any):  # type: ignore[no-untyped-def, override]
        assert isinstance(prompt_ref, np.ndarray)
        async for chunk in super().generate(request, None):
            yield chunk

    async def seen(self) -> list[str]:
        return self.aborted

    async def tell(self, **how: Any) -> None:
        for name, value in how.items():
            setattr(self, name, value)


class Scheduler:
    """Gives one route table, then nothing more."""

    def check_job(self, job_id: str) -> None:
        return None

    async def watch_routes(self) -> AsyncIterator[RouteTable]:
        cells = tuple(
            CellRoute(name, rollout_actor(JOB, CellId(name)), CellState.SERVING, 1, slots)
            for name, slots in (("cell-0", 9), ("cell-1", 5))
        )
        yield RouteTable(1, cells)
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgp", dir="/tmp") as folder:
        start_ray(num_cpus=2, include_dashboard=False, _temp_dir=folder, namespace=RAY_NAMESPACE, log_to_driver=False)
        yield Path(folder)
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def actors(cluster: Path) -> dict[str, Any]:
    options = {"namespace": RAY_NAMESPACE, "num_cpus": 0, "max_concurrency": 100}
    return {
        "shard": ray.remote(Shard).options(name=shard_actor(JOB, 0), **options).remote(),
        "cell-0": ray.remote(Cell).options(name=rollout_actor(JOB, CellId("cell-0")), **options).remote(),
        "cell-1": ray.remote(Cell).options(name=rollout_actor(JOB, CellId("cell-1")), **options).remote(),
    }


@pytest.fixture(scope="module")
def url(actors: dict[str, Any]) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)  # the scheduler's own loop
    thread.start()
    starting = serve_scheduler(Scheduler(), host="127.0.0.1", port=0, token="t")  # type: ignore[arg-type]
    server, address = asyncio.run_coroutine_threadsafe(starting, loop).result(DEADLINE_S)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = ProxySettings(JOB, ProxyConfig(call_timeout_s=4), "model-x", 1, address, "t")
    serve.run(proxy_application(settings), name=serve_application(JOB), route_prefix=route_prefix(JOB))
    base = f"http://127.0.0.1:{port}{route_prefix(JOB)}"
    wait_until(lambda: httpx.get(f"{base}/healthz").json().get("epoch") == 1)
    yield base
    asyncio.run_coroutine_threadsafe(server.stop(grace=None), loop).result(DEADLINE_S)
    loop.call_soon_threadsafe(loop.stop)


def client(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/run/{key}/v1", api_key="x", max_retries=0, timeout=DEADLINE_S)


def stream(url: str, into: list[str], stop_after: int | None = None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with httpx.stream("POST", f"{url}/run/{KEY}/v1/chat/completions", json=body, timeout=DEADLINE_S) as response:
        for piece in response.iter_text():
            into.append(piece)
            if stop_after is not None and len(into) >= stop_after:
                return


def tell(actor: Any, **how: Any) -> None:
    ray.get(actor.tell.remote(**how))


def test_official_client_through_serve(url: str, actors: dict[str, Any]) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client(url).chat.completions.create(model="m", messages=messages)
    chunks = client(url).chat.completions.create(model="m", messages=messages, stream=True)
    assert answer.choices[0].message.content == WHOLE
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WHOLE
    with pytest.raises(openai.AuthenticationError):
        client(url, f"{RUN}.wrong").chat.completions.create(model="m", messages=messages)


def test_drained_cells_call_goes_on_at_the_other(url: str, actors: dict[str, Any]) -> None:
    tell(actors["cell-0"], aborts_after=2)
    pieces: list[str] = []
    stream(url, pieces)
    tell(actors["cell-0"], aborts_after=None)
    assert pieces[-1].endswith("data: [DONE]\n\n")
    record = ray.get(actors["shard"].seen.remote())[0][-1]
    assert record.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert record.cells == ("cell-0", "cell-1")


def test_harness_that_disconnects_aborts_its_call(url: str, actors: dict[str, Any]) -> None:
    tell(actors["cell-0"], hangs_after=2)
    num_before = len(ray.get(actors["shard"].seen.remote())[1])
    stream(url, [], stop_after=1)
    wait_until(lambda: len(ray.get(actors["shard"].seen.remote())[1]) == num_before + 1)
    wait_until(lambda: len(ray.get(actors["cell-0"].seen.remote())) >= 1)


def test_lost_stream_is_cut_and_never_ended_politely(url: str, actors: dict[str, Any]) -> None:
    tell(actors["cell-0"], hangs_after=2)
    pieces: list[str] = []
    with pytest.raises(httpx.RemoteProtocolError):
        stream(url, pieces)
    tell(actors["cell-0"], hangs_after=None)
    text = "".join(pieces)
    assert word(1) in text
    assert "[DONE]" not in text


def test_dead_cells_call_goes_on_at_the_other(url: str, actors: dict[str, Any]) -> None:
    ray.kill(actors["cell-0"])
    pieces: list[str] = []
    stream(url, pieces)
    events = [line[6:] for line in "".join(pieces).split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == WHOLE


def test_keys_stand_in_no_log_of_the_cluster(url: str, cluster: Path) -> None:
    secret = KEY.rpartition(".")[2].encode()
    logs = [path for path in cluster.glob("session_*/logs/**/*") if path.is_file()]
    assert any(path.match("serve/*") for path in logs)
    told = [(path.name, line) for path in logs for line in path.read_bytes().splitlines() if secret in line]
    assert told == []
