"""The proxy as it runs in a job: replicas that Ray Serve keeps alive, actors behind, routes over gRPC."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import ray

from services.common.errors import MachineError
from services.common.ids import CellId, JobId
from services.common.names import RAY_NAMESPACE, rollout_actor, shard_actor
from services.common.types import CellRoute, CellState, RouteTable
from services.job.proxy import ProxyPlace, end_proxy, reserved_place, serve_running, start_proxy
from services.proxy.config import ProxyConfig
from services.proxy.deployment import ProxySettings
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateRequest
from services.scheduler.servicer import serve_scheduler
from services.trajectory.types import CallRecord, CallTicket
from tests.ray_cluster import start_ray
from tests.unit.proxy.certificates import self_signed
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

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request: GenerateRequest, prompt_ref: Any):  # type: ignore[no-untyped-def, override]
        assert isinstance(prompt_ref, np.ndarray)
        async for chunk in super().generate(request, None):
            yield chunk
            await self.gate.wait()

    async def hold(self) -> None:
        """Let every call stop behind its first token."""
        self.gate.clear()

    async def go_on(self) -> None:
        self.gate.set()

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
        with serve_running(own_cluster=False):
            yield Path(folder)
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
def scheduler() -> Iterator[str]:
    """The address of a scheduler with a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = serve_scheduler(Scheduler(), host="127.0.0.1", port=0, token="t")  # type: ignore[arg-type]
    server, address = asyncio.run_coroutine_threadsafe(starting, loop).result(DEADLINE_S)
    yield address
    asyncio.run_coroutine_threadsafe(server.stop(grace=None), loop).result(DEADLINE_S)
    loop.call_soon_threadsafe(loop.stop)


def settings_of(place: ProxyPlace, scheduler: str, job_id: JobId = JOB) -> ProxySettings:
    return ProxySettings(job_id, place.config, "model-x", 1, scheduler, "t")


@pytest.fixture(scope="module")
def place(actors: dict[str, Any], scheduler: str) -> Iterator[ProxyPlace]:
    with reserved_place(ProxyConfig(call_timeout_s=8, num_replicas=2)) as place:
        start_proxy(settings_of(place, scheduler), place)
        yield place
        end_proxy(JOB)


@pytest.fixture(scope="module")
def url(place: ProxyPlace) -> str:
    return place.harness_url


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


def replicas(place: ProxyPlace) -> set[int]:
    """Ids of this test's processes that listen on the proxy's port."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        listens = any(one.status == psutil.CONN_LISTEN and one.laddr.port == place.config.port for one in connections)
        found |= {process.pid} if listens else set()
    return found


def num_listening(place: ProxyPlace) -> int:
    """Sockets that listen on the proxy's port, by the kernel's table: a killed process lets go of them last."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{place.config.port:04X}") and row[3] == "0A" for row in rows)


def test_a_killed_replica_costs_its_own_streams_and_is_replaced(
    place: ProxyPlace, url: str, actors: dict[str, Any]
) -> None:
    cells = [actors["cell-0"], actors["cell-1"]]
    ray.get([cell.hold.remote() for cell in cells])
    before = replicas(place)
    assert len(before) == 2
    streams: list[list[str]] = [[] for _ in range(16)]
    with ThreadPoolExecutor(len(streams)) as pool:
        streaming = [pool.submit(stream, url, pieces) for pieces in streams]
        wait_until(lambda: all(streams), what="every stream has begun")
        psutil.Process(min(before)).send_signal(signal.SIGKILL)
        wait_until(lambda: num_listening(place) == 1, poll_s=0.005)
        ray.get([cell.go_on.remote() for cell in cells])
        messages: Any = [{"role": "user", "content": "new"}]
        answers = [client(url).chat.completions.create(model="m", messages=messages) for _ in range(10)]
        failures = [one.exception(DEADLINE_S) for one in streaming]
    assert {answer.choices[0].message.content for answer in answers} == {WHOLE}
    assert all((error is None) == ("[DONE]" in "".join(text)) for error, text in zip(failures, streams, strict=True))
    assert all(error is None or isinstance(error, httpx.TransportError) for error in failures)
    assert 0 < sum(error is None for error in failures) < len(failures)
    wait_until(lambda: len(replicas(place)) == 2)
    assert min(before) not in replicas(place)


def test_dead_cells_call_goes_on_at_the_other(url: str, actors: dict[str, Any]) -> None:
    ray.kill(actors["cell-0"])
    pieces: list[str] = []
    stream(url, pieces)
    events = [line[6:] for line in "".join(pieces).split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == WHOLE


def test_two_jobs_of_a_cluster_have_ports_and_lives_of_their_own(
    place: ProxyPlace, url: str, scheduler: str, actors: dict[str, Any], tmp_path: Path
) -> None:
    other = JobId("other-job")
    cert, key = self_signed(tmp_path)
    trust = ssl.create_default_context(cafile=str(cert))
    with (
        pytest.raises(MachineError, match=rf"proxy\.port: 127\.0\.0\.1:{place.config.port} cannot be used"),
        reserved_place(ProxyConfig(port=place.config.port)),
    ):
        pass
    with reserved_place(ProxyConfig(tls_cert=str(cert), tls_key=str(key))) as other_place:
        start_proxy(settings_of(other_place, scheduler, other), other_place)
        assert other_place.harness_url.startswith("https://")
        assert httpx.get(f"{other_place.harness_url}/healthz", verify=trust).json()["job_id"] == other
        assert httpx.get(f"{url}/healthz").json()["job_id"] == JOB
        end_proxy(other)
        wait_until(lambda: replicas(other_place) == set())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{other_place.harness_url}/healthz", verify=trust)
    assert httpx.get(f"{url}/healthz").json()["job_id"] == JOB


def test_keys_stand_in_no_log_of_the_cluster(url: str, cluster: Path) -> None:
    secret = KEY.rpartition(".")[2].encode()
    httpx.post(f"{url}/run/{KEY}/v1/chat/completions", content=b"{")
    httpx.get(f"{url}/run/{KEY}/nothing")
    logs = [path for path in cluster.glob("session_*/logs/**/*") if path.is_file()]
    assert any(path.match("serve/*") for path in logs)
    told = [(path.name, line) for path in logs for line in path.read_bytes().splitlines() if secret in line]
    assert told == []
