"""Shards as Ray actors, a cell whose answers tell what it was asked, and harnesses that keep the shards busy."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray

from services.common.errors import JobError, NotFoundError
from services.common.ids import JobId, RunId, make_cell_id, make_group_id, shard_of
from services.common.names import RAY_NAMESPACE, rollout_actor, shard_actor
from services.common.types import CellRoute, CellState, RouteTable
from services.proxy.backends import RayBackends, Routes, Shard
from services.proxy.calls import CallServer, Piece
from services.proxy.parsing import PlainParser
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateChunk, GenerateRequest
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.types import CallRecord, CallTicket
from tests.unit.trajectory.world import END, SAMPLING, CharRenderer, ask
from tests.waiting import until

NUM_SHARDS = 2
VERSION = 3
_CALL_TIMEOUT_S = 30.0
_TURNS_OF_A_CONVERSATION = 6


def start_shard(job_id: JobId, index: int, folder: Path, **options: Any) -> Any:
    """A shard as a job starts it, but with a renderer that needs no model, and restarts without end."""
    arguments: dict[str, Any] = {"key_secret": "s" * 64, "renderer": CharRenderer(), **options}
    config = arguments.pop("config", TrajectoryConfig(num_shards=NUM_SHARDS))
    return (
        ray.remote(TrajectoryShard)
        .options(
            num_cpus=0,
            name=shard_actor(job_id, index),
            namespace=RAY_NAMESPACE,
            max_concurrency=1000,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(job_id, index, config, str(folder), "", SAMPLING, 1_000_000, as_ref=ray.put, **arguments)
    )


def pid_of(shard: Any) -> Any:
    """A reference of the pid of a shard's process; it resolves once the shard serves."""
    return shard.__ray_call__.remote(lambda _: os.getpid())


async def kill(shard: Any) -> int:
    """Kill -9 a shard's process; the pid that it had."""
    pid: int = await pid_of(shard)
    os.kill(pid, signal.SIGKILL)
    return pid


async def serves_again(shard: Any, killed_pid: int, timeout_s: float) -> None:
    """Wait for the process in the place of one that was killed."""
    async with asyncio.timeout(timeout_s):
        while await pid_of(shard) == killed_pid:  # it was asked before it was seen to be dead
            pass


class Asked:
    """A shard's methods as they are called where there is no Ray between."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard

    def __getattr__(self, method: str) -> Any:
        return getattr(self._shard, method).remote


def group_ids_of(shard_index: int, number: int) -> list[str]:
    """The first groups that lie on a shard."""
    ids = (str(make_group_id(index)) for index in itertools.count())
    own = (group_id for group_id in ids if shard_of(RunId(f"{group_id}-r0"), NUM_SHARDS) == shard_index)
    return list(itertools.islice(own, number))


# -- the cell ---------------------------------------------------------------------------------------------------------


def answer_to(call_id: str, prompt_ids: NDArray[np.int32]) -> tuple[str, NDArray[np.int32], NDArray[np.float32]]:
    """The only right answer to a prompt under a call's id: its text, its ids, their log-probabilities."""
    digest = zlib.crc32(call_id.encode(), zlib.crc32(np.asarray(prompt_ids, dtype="<i4").tobytes()))
    text = f"{digest:08x}" * (1 + digest % 4)
    ids = np.asarray([*map(ord, text), END], dtype=np.int32)
    rng = np.random.default_rng(digest)
    return text, ids, -rng.exponential(size=len(ids)).astype(np.float32)


class DigestCell:
    """A cell's rollout side. Most calls take no time, some take as long as a shard needs to come back."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def generate(
        self, request: GenerateRequest, prompt_ids: NDArray[np.int32]
    ) -> AsyncGenerator[GenerateChunk, None]:
        text, ids, logprobs = answer_to(request.call_id, prompt_ids)
        begun, half = len(request.generated_ids), len(text) // 2
        if begun < half:
            yield _chunk(text, ids, logprobs, begun, half)
        await asyncio.sleep(self._rng.uniform(0.5, 4.0) if self._rng.random() < 0.03 else 0.2)
        yield _chunk(text, ids, logprobs, max(begun, half), len(ids), "stop")

    async def abort(self, call_id: str) -> None:
        """Nothing is kept of a call."""


def _chunk(
    text: str, ids: NDArray[np.int32], logprobs: NDArray[np.float32], start: int, stop: int, finish: str | None = None
) -> GenerateChunk:
    return GenerateChunk(
        tuple(ids[start:stop].tolist()), tuple(logprobs[start:stop].tolist()), text[start:stop], VERSION, finish
    )


def start_cell(job_id: JobId) -> tuple[Any, Routes]:
    """The only cell of a job, and the way to it."""
    name = rollout_actor(job_id, make_cell_id(0))
    options = {"num_cpus": 0, "name": name, "namespace": RAY_NAMESPACE, "max_concurrency": 1000}
    cell = ray.remote(DigestCell).options(**options).remote(seed=7)
    return cell, Routes(RouteTable(1, (CellRoute(make_cell_id(0), name, CellState.SERVING, VERSION, 100),)))


# -- what is known outside of the shards ------------------------------------------------------------------------------


@dataclass
class Books:
    """What the proxy was told and what it said."""

    tickets: dict[str, CallTicket] = field(default_factory=dict)
    sent: dict[str, CallRecord] = field(default_factory=dict)
    """Calls that a shard was asked to store."""
    acknowledged: dict[str, CallRecord] = field(default_factory=dict)
    """Calls that it said to be durable."""
    num_acknowledged: Counter[int] = field(default_factory=Counter)
    """By shard."""
    num_refused: Counter[str] = field(default_factory=Counter)
    """Calls that a harness had to ask for again, by the error."""


class _NotingShard:
    """A shard of which is noted what goes to it and comes from it."""

    def __init__(self, shard: Shard, index: int, books: Books) -> None:
        self._shard = shard
        self._index = index
        self._books = books

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        ticket = await self._shard.match_call(run_id, key, request)
        if ticket.is_shared:
            return ticket
        assert ticket.call_id not in self._books.tickets, f"{ticket.call_id} was given to two calls"
        self._books.tickets[ticket.call_id] = ticket
        return ticket

    async def append_call(self, record: CallRecord) -> None:
        assert record.call_id not in self._books.sent
        self._books.sent[record.call_id] = record
        await self._shard.append_call(record)
        self._books.acknowledged[record.call_id] = record
        self._books.num_acknowledged[self._index] += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)


class NotingBackends(RayBackends):
    """A proxy replica's way to the shards and the cell."""

    def __init__(self, job_id: JobId, routes: Routes, books: Books) -> None:
        super().__init__(job_id, NUM_SHARDS, routes)
        self._books = books

    def shard_for(self, run_id: RunId) -> Shard:
        noting = _NotingShard(super().shard_for(run_id), shard_of(run_id, NUM_SHARDS), self._books)
        return cast(Shard, noting)


# -- harnesses --------------------------------------------------------------------------------------------------------


class Load:
    """Harnesses that ask, one call after the other in each of their conversations, and again where they are refused."""

    def __init__(
        self, job_id: JobId, routes: Routes, keys: Mapping[str, str], *, num_conversations: int, padding: str = ""
    ) -> None:
        """``keys`` by run. Each run has so many conversations at a time: its main one, and subagents. ``padding``
        makes each question longer."""
        self._padding = padding
        self.books = Books()
        self._server = CallServer(job_id, NotingBackends(job_id, routes, self.books), PlainParser(), _CALL_TIMEOUT_S)
        self._is_over = False
        self._tasks = [
            asyncio.create_task(self._converse(RunId(run_id), key, f"agent {number} of {run_id}"))
            for run_id, key in keys.items()
            for number in range(num_conversations)
        ]

    async def until_acknowledged(self, shard_index: int, number: int, timeout_s: float) -> None:
        """Wait for so many acknowledged calls more. Raises what befell a harness meanwhile."""
        wanted = self.books.num_acknowledged[shard_index] + number
        await until(lambda: self._is_broken or self.books.num_acknowledged[shard_index] >= wanted, timeout_s)
        if self._is_broken:
            await self.end()

    async def end(self) -> None:
        """Let every harness get its last answer."""
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    @property
    def _is_broken(self) -> bool:
        return any(task.done() for task in self._tasks)

    async def _converse(self, run_id: RunId, key: str, name: str) -> None:
        contents: list[str] = []
        number = 0
        while not self._is_over:
            if len(contents) >= 2 * _TURNS_OF_A_CONVERSATION:  # it compacts its history
                contents = [f"{name} went on from {contents[-1]}"]
            else:
                contents.append(f"{name} asks {number}{self._padding}")
            number += 1
            contents.append(await self._answer(run_id, key, ask(*contents)))

    async def _answer(self, run_id: RunId, key: str, request: CanonicalRequest) -> str:
        pieces: list[Piece] = []
        while True:
            try:
                await self._server.serve(run_id, key, request, pieces.append)
            except (JobError, NotFoundError) as error:  # what a harness sees as an overloaded server
                self.books.num_refused[type(error).__name__] += 1
                await asyncio.sleep(0.05)
            else:
                finished = pieces[-1].finished
                assert finished is not None
                return finished.answer.text


@dataclass(frozen=True)
class Kill:
    """A shard's death under load."""

    until_process_s: float
    """Until a new process served."""
    until_call_s: float
    """Until a call of one of its runs was acknowledged again."""
    num_elsewhere: int
    """Calls of the other shard that were acknowledged before there was a new process."""


async def kill_under_load(shard: Any, index: int, load: Load, timeout_s: float) -> Kill:
    """Kill a shard's process now, and wait until it serves its runs again."""
    other = 1 - index
    pid = await kill(shard)
    started_s, before = time.monotonic(), load.books.num_acknowledged[other]
    await serves_again(shard, pid, timeout_s)
    until_process_s = time.monotonic() - started_s
    num_elsewhere = load.books.num_acknowledged[other] - before
    await load.until_acknowledged(index, 1, timeout_s)
    return Kill(until_process_s, time.monotonic() - started_s, num_elsewhere)
