"""A shard and cells in this process, behind the proxy's ``Backends``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import AccessError, ContextLengthError, EngineError
from services.common.ids import RunId
from services.common.types import CellRoute, CellState, RouteTable
from services.proxy.backends import Cell, Routes, Shard
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trajectory.types import CallRecord, CallTicket, PartialAnswer, SharedAnswer

RUN = RunId("g000001-r0")
KEY = f"{RUN}.0123456789abcdef0123456789abcdef"
PROMPT = object()
"""Stands for an object ref: the proxy must pass it on untouched."""


def word(index: int) -> str:
    """The text of token ``index`` of every answer."""
    return f"w{index} "


@dataclass(eq=False)
class FakeShard:
    """Hands out tickets for known keys and keeps what it is given."""

    keys: set[str] = field(default_factory=lambda: {KEY}, repr=False)
    max_tokens: int = 5
    num_prompt_tokens: int = 11
    max_model_len: int = 4096
    append_gate: asyncio.Event | None = None
    """Appending waits for it."""
    append_error: Exception | None = None
    appending: asyncio.Event = field(default_factory=asyncio.Event)
    records: list[CallRecord] = field(default_factory=list)
    abandoned: list[tuple[str, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Calls that were abandoned because no cell could complete them."""
    requests: list[CanonicalRequest] = field(default_factory=list)
    partials: list[PartialAnswer] = field(default_factory=list)
    undelivered: list[str] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        if key not in self.keys:
            raise AccessError("unknown key")
        if self.num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(self.num_prompt_tokens, self.max_model_len)
        self.requests.append(request)
        call_id = f"{run_id}-a0-c{len(self.requests) - 1}"
        sampling = Sampling(max_tokens=self.max_tokens, stop=tuple(request.requested_sampling.get("stop", ())))
        return CallTicket(call_id, run_id, 0, PROMPT, self.num_prompt_tokens, 3, None, sampling, True)

    async def append_call(self, record: CallRecord) -> None:
        self.appending.set()
        if self.append_gate is not None:
            await self.append_gate.wait()
        if self.append_error is not None:
            raise self.append_error
        self.records.append(record)

    async def abandon_call(
        self, call_id: str, reason: str, *, engine_lost: bool = False, partial: PartialAnswer | None = None
    ) -> None:
        self.abandoned.append((call_id, reason))
        self.lost += [call_id] if engine_lost else []
        self.partials += [partial] if partial is not None else []

    async def shared_answer(self, run_id: str, call_id: str) -> SharedAnswer | None:
        return None

    async def note_undelivered(self, call_id: str) -> None:
        self.undelivered.append(call_id)

    async def renew_calls(self, call_ids: Sequence[str]) -> None:
        self.renewed += call_ids

    async def count_tokens(self, run_id: str, key: str, request: CanonicalRequest) -> int:
        if key not in self.keys:
            raise AccessError("unknown key")
        return self.num_prompt_tokens


@dataclass
class FakeCell:
    """Answers token i with the word i, from where another cell stopped; fails as it is told."""

    version: int = 1
    dies_after: int | None = None
    """Tokens after which the cell is lost."""
    aborts_after: int | None = None
    """Tokens after which it is drained."""
    hangs_after: int | None = None
    """Tokens after which nothing comes any more."""
    finish_reason: str = "length"
    requests: list[GenerateRequest] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stepping: asyncio.Semaphore | None = None
    """Each token waits for one permit."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        self.prompts.append(prompt_ref)
        if len(request.generated_ids) == request.sampling.max_tokens:
            yield GenerateChunk((), (), "", self.version, "length")
        for made, index in enumerate(range(len(request.generated_ids), request.sampling.max_tokens)):
            if made == self.dies_after:
                raise EngineError("the cell is lost.")
            if made == self.aborts_after:
                yield GenerateChunk((), (), "", self.version, "abort")
                return
            if made == self.hangs_after:
                await asyncio.Event().wait()
            if self.stepping is not None:
                await self.stepping.acquire()
            is_last = index + 1 == request.sampling.max_tokens
            reason = self.finish_reason if is_last else None
            yield GenerateChunk((index,), (-0.5,), word(index), self.version, reason, 7 if made == 0 else 0)

    async def abort(self, call_id: str) -> None:
        self.aborted.append(call_id)


class FakeBackends:
    """One shard and some cells, all SERVING at first."""

    def __init__(self, shard: FakeShard, **cells: FakeCell) -> None:
        self.shard, self.cells = shard, cells
        self._routes = Routes()
        self.publish(dict.fromkeys(cells, CellState.SERVING))

    def publish(self, states: dict[str, CellState]) -> None:
        """A new route table. The first cell named has the most free slots."""
        rows = tuple(
            CellRoute(name, name, state, self.cells[name].version, 100 - index)
            for index, (name, state) in enumerate(states.items())
        )
        self._routes.offer(RouteTable(self._routes.table.epoch + 1, rows))

    @property
    def routes(self) -> Routes:
        return self._routes

    def shard_for(self, run_id: RunId) -> Shard:
        return self.shard

    def cell(self, actor_name: str) -> Cell:
        return self.cells[actor_name]
