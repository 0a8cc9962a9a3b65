"""Tidegate's side of the proxy benchmark: the proxy as a job deploys it, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from services.common.ids import GroupId, JobId, make_cell_id, make_run_id
from services.common.names import RAY_NAMESPACE, rollout_actor, shard_actor
from services.common.types import CellRoute, CellState, RouteTable
from services.job.proxy import end_proxy, reserved_place, serve_running, start_proxy
from services.proxy.config import ProxyConfig
from services.proxy.deployment import ProxySettings
from services.rollout.coalesce import coalesced
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trajectory.actor import TrajectoryShard
from services.trajectory.call_desk import INLINE_PROMPT_BYTES
from services.trajectory.config import TrajectoryConfig
from services.trajectory.types import GroupSpec

JOB = JobId("proxy-benchmark")
CELL = make_cell_id(0)
MODEL_NAME = "policy"
MAX_MODEL_LEN = 1 << 21
"""No prompt of the benchmark is too long."""
_START_TIMEOUT_S = 120.0


class ScriptedCell:
    """A cell whose engine takes no time: the same answer each time, a token at a time, up to ``max_tokens``. What the
    engine made is put together as a real cell does."""

    def __init__(self, token_ids: Sequence[int], pieces: Sequence[str]) -> None:
        self._token_ids, self._pieces = tuple(token_ids), tuple(pieces)
        self._taken_at_s = 0.0

    async def generate(
        self, request: GenerateRequest, prompt_ids: NDArray[np.int32]
    ) -> AsyncGenerator[GenerateChunk, None]:
        prompt_ids.tolist()  # what an engine takes is a list
        self._taken_at_s = time.monotonic()
        num_tokens = min(request.sampling.max_tokens, len(self._token_ids))
        async with contextlib.aclosing(coalesced(self._sample(num_tokens), request.hold_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sample(self, num_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        for at in range(num_tokens):
            reason = "stop" if at + 1 == num_tokens else None
            yield GenerateChunk((self._token_ids[at],), (-0.5,), self._pieces[at], 1, reason)
            await asyncio.sleep(0)

    async def abort(self, call_id: str) -> None:
        return None

    async def taken_at_s(self) -> float:
        """When the last prompt was in hand, on the machine's monotonic clock."""
        return self._taken_at_s


class Prompts:
    """Stands for a shard that has matched: prompts as tickets carry them."""

    def __init__(self, num_tokens: int) -> None:
        self._ids = np.arange(num_tokens, dtype=np.int32)

    async def ticket(self, num_tokens: int) -> tuple[float, Any]:
        """When the prompt was whole, on the machine's monotonic clock, and what the ticket says of it."""
        ids = self._ids[:num_tokens].copy()
        return time.monotonic(), ids if ids.nbytes <= INLINE_PROMPT_BYTES else [ray.put(ids)]


class OneTable:
    """A scheduler that has one cell and nothing to decide."""

    def check_job(self, job_id: str) -> None:
        return None

    async def watch_routes(self) -> AsyncIterator[RouteTable]:
        yield route_table()
        await asyncio.Event().wait()


def route_table() -> RouteTable:
    return RouteTable(1, (CellRoute(CELL, rollout_actor(JOB, CELL), CellState.SERVING, 1, 64),))


@dataclass(frozen=True, slots=True)
class Script:
    """The answer of every call."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text of each token."""


def shard_arguments(folder: str, model_path: str, max_tokens: int) -> tuple[Any, ...]:
    """The arguments of the one shard, with the store's defaults."""
    return JOB, 0, TrajectoryConfig(), folder, model_path, Sampling(max_tokens=max_tokens), MAX_MODEL_LEN


def group_of_runs(num_runs: int) -> GroupSpec:
    group_id = GroupId("g000000")
    return GroupSpec(group_id, "task", tuple(make_run_id(group_id, index) for index in range(num_runs)), 1)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that serves."""

    host: str
    port: int
    keys: tuple[str, ...]
    """One for each run."""


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A small cluster of the benchmark's own."""
    with tempfile.TemporaryDirectory(prefix="tgb", dir="/tmp") as folder:  # socket paths have to be short
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, namespace=RAY_NAMESPACE, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def deployed(script: Script, model_path: str, folder: Path, num_runs: int) -> Iterator[Proxy]:
    """The proxy under Ray Serve, its shard and its cell actors of the cluster. One replica, one shard, one cell."""
    options = {"namespace": RAY_NAMESPACE, "num_cpus": 0, "max_concurrency": 1000}
    arguments = shard_arguments(str(folder), model_path, len(script.token_ids))
    shard = ray.remote(TrajectoryShard).options(name=shard_actor(JOB, 0), **options).remote(*arguments, as_ref=ray.put)
    cell = (
        ray.remote(ScriptedCell)
        .options(name=rollout_actor(JOB, CELL), **options)
        .remote(script.token_ids, script.pieces)
    )
    spec = group_of_runs(num_runs)
    ray.get(shard.open_group.remote(spec), timeout=_START_TIMEOUT_S)
    keys = ray.get([shard.open_attempt.remote(run_id, 0) for run_id in spec.run_ids], timeout=_START_TIMEOUT_S)
    with (
        _scheduler() as address,
        serve_running(own_cluster=True),
        reserved_place(ProxyConfig(tool_parser="none", reasoning_parser="none")) as place,
    ):
        start_proxy(ProxySettings(JOB, place.config, MODEL_NAME, 1, address, "token", model_path), place)
        try:
            yield Proxy(place.config.host, place.config.port, tuple(keys))
        finally:
            end_proxy(JOB)
            ray.get(shard.close.remote())
            for actor in (shard, cell):
                ray.kill(actor)


@contextlib.contextmanager
def _scheduler() -> Iterator[str]:
    """The gRPC server that the proxy's routes come from, in a thread; its address."""
    from services.scheduler.servicer import serve_scheduler

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = serve_scheduler(OneTable(), host="127.0.0.1", port=0, token="token")  # type: ignore[arg-type]
    server, address = asyncio.run_coroutine_threadsafe(starting, loop).result(_START_TIMEOUT_S)
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(grace=None), loop).result(_START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
