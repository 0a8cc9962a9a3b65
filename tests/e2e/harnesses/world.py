"""The live proxy over a real shard and a scripted cell, and what must hold of a run that a harness made through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import prometheus_client
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import EngineError
from services.common.ids import JobId, RunId
from services.proxy.app import create_app
from services.proxy.backends import Shard
from services.proxy.config import ProxyConfig
from services.proxy.parsing import AnswerParser, SlowReader
from services.proxy.parsing.load import load_parser
from services.proxy.types import CanonicalRequest
from services.rollout.text_stream import TextStream
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.roles import roles_of
from services.trajectory.store import read_run
from services.trajectory.types import CallRecord, CallRole, CallTicket, GroupSpec
from tests.e2e.harnesses.model import Script, answer_ids, renderer, say, write_model
from tests.unit.proxy.fakes import FakeBackends, FakeCell, FakeShard
from tests.waiting import until

JOB = JobId("harness-job")
RUN = RunId("g000001-r0")
VERSION = 7
_CHUNK_TOKENS = 3


@dataclass(frozen=True)
class Generated:
    """What the engine saw in one stay of a call, and what it had of the answer at its end."""

    call_id: str
    prompt_ids: tuple[int, ...]
    num_given: int
    """Tokens of the answer that were there before."""
    output_ids: tuple[int, ...]
    is_whole: bool


@dataclass
class ScriptedCell(FakeCell):
    """A cell whose engine is the script. Text goes out as a real cell sends it."""

    script: Script = field(default_factory=Script)
    version: int = VERSION
    loses: int | None = None
    """Which call (counted from 0) it loses in the middle of the answer, again and again until ``is_well``."""
    is_well: bool = False
    generated: list[Generated] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        if request.call_id not in self.call_ids:
            self.call_ids.append(request.call_id)
        is_lost = self.call_ids.index(request.call_id) == self.loses and not self.is_well
        prompt_ids = tuple(int(one) for one in prompt_ref)
        ids = answer_ids(self.script.next_answer(renderer().decode(prompt_ids)))[: request.sampling.max_tokens]
        num_given = len(request.generated_ids)
        assert tuple(ids[:num_given]) == request.generated_ids, "what another stay made belongs to this answer"
        text = TextStream(say, request.sampling.stop)
        for token in request.generated_ids:
            text.feed(token)
        end = len(ids) // 2 if is_lost else len(ids)
        at = num_given
        try:
            while at < end:
                piece = tuple(ids[at : at + _CHUNK_TOKENS])[: end - at]
                at += len(piece)
                is_last = at == len(ids)
                said = "".join(map(text.feed, piece)) + (text.finish() if is_last else "")
                reason = None if not is_last else "stop" if piece[-1] in renderer().end_of_turn else "length"
                yield GenerateChunk(piece, tuple(-0.25 for _ in piece), said, self.version, reason)
                await asyncio.sleep(0)
            if is_lost:
                raise EngineError("the cell is lost.")
        finally:
            self.generated.append(Generated(request.call_id, prompt_ids, num_given, tuple(ids[:at]), at == len(ids)))


@dataclass(frozen=True)
class Exchange:
    """One HTTP exchange as it went over the wire."""

    method: str
    path: str
    status: int
    headers: dict[str, str]
    request: bytes
    response: bytes
    is_whole: bool

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects of the response, be it one body or a stream of events."""
        text = self.response.decode()
        found = re.findall(r"(?m)^data: (\{.*\})\r?$", text) if "data: " in text else [text]
        return [json.loads(one) for one in found if one.strip().startswith("{")]

    @property
    def usage(self) -> dict[str, int]:
        """The token counts that the client was told last, under the names 'prompt' and 'output'."""
        told: dict[str, int] = {}
        for one in self.objects:
            for holder in (one, one.get("message"), one.get("response")):
                usage = holder.get("usage") if isinstance(holder, dict) else None
                for name, number in (usage or {}).items():
                    if name in ("prompt_tokens", "input_tokens"):
                        told["prompt"] = number
                    elif name in ("completion_tokens", "output_tokens"):
                        told["output"] = number
        return told

    @property
    def call_id(self) -> str:
        """The call that the answer names."""
        for one in self.objects:
            for holder in (one, one.get("message"), one.get("response")):
                found = re.match(r"(?:chatcmpl-|resp_|msg_)(.+)", str((holder or {}).get("id", "")))
                if found:
                    return found[1]
        return ""


class Tap:
    """ASGI middleware that keeps each exchange."""

    def __init__(self, app: ASGIApp, after: Callable[[Exchange], None]) -> None:
        self._app = app
        self._after = after
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked, answered, status, is_whole = bytearray(), bytearray(), 0, False

        async def tap_receive() -> Message:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def tap_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                answered.extend(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, tap_receive, tap_send)
        finally:
            headers = {name.decode().lower(): value.decode("latin1") for name, value in scope["headers"]}
            path = str(scope["path"])
            kept = Exchange(scope["method"], path, status, headers, bytes(asked), bytes(answered), is_whole)
            self.exchanges.append(kept)
            self._after(kept)


@dataclass(frozen=True)
class Recorded:
    """What is stored of a run."""

    calls: list[CallRecord]

    @property
    def roles(self) -> Counter[CallRole]:
        return Counter(roles_of(self.calls).values())

    @property
    def openings(self) -> list[CallRecord]:
        """Calls without a parent: each begins a conversation."""
        return [call for call in self.calls if call.parent_call_id is None]

    def of_role(self, role: CallRole) -> list[CallRecord]:
        roles = roles_of(self.calls)
        return [call for call in self.calls if roles[call.call_id] is role]


@dataclass
class World:
    """One run, open for a harness."""

    shard: TrajectoryShard
    cell: ScriptedCell
    tap: Tap
    url: str
    """The proxy's, without a dialect's ``/v1``."""
    key: str
    folder: Path
    false_forks_before: float = field(default_factory=lambda: false_forks())

    def stored(self) -> Recorded:
        return Recorded(read_run(str(self.folder / "store"), RUN)[1])

    def check(self, *, num_conversations: int, num_left_behind: int = 0) -> Recorded:
        """What must hold of every run: ids as the engine saw them, each sampled once; no false fork; usage told.

        ``num_left_behind``: so many cut answers were not gone on with, for the harness asked for something else.
        """
        stored = self.stored()
        made = {one.call_id: one for one in self.cell.generated if one.is_whole}
        assert {call.call_id for call in stored.calls} == set(made)
        assert len(self.left_behind()) == num_left_behind, self.describe()
        num_sampled = sum(len(one.output_ids) - one.num_given for one in self.cell.generated)
        num_sampled -= sum(map(len, self.left_behind()))
        assert num_sampled == sum(len(call.output_ids) for call in stored.calls), "sampled once, and stored"
        for call in stored.calls:
            assert call.prompt_ids.tolist() == list(made[call.call_id].prompt_ids), f"prompt of {call.call_id}"
            assert call.output_ids.tolist() == list(made[call.call_id].output_ids), f"output of {call.call_id}"
            assert len(call.logprobs) == len(call.output_ids)
        assert false_forks() == self.false_forks_before
        assert len(stored.openings) == num_conversations, self.describe()
        self._check_extends(stored)
        self._check_usage(stored)
        return stored

    def left_behind(self) -> set[tuple[int, ...]]:
        """What was made of cut answers that nothing went on with."""
        went_on = {
            (one.prompt_ids, one.num_given) for one in self.cell.generated if len(one.output_ids) > one.num_given
        }
        cut = [one for one in self.cell.generated if not one.is_whole]
        return {one.output_ids for one in cut if (one.prompt_ids, len(one.output_ids)) not in went_on}

    def _check_extends(self, stored: Recorded) -> None:
        """Each call's prompt begins with its parent's prompt and answer."""
        by_id = {call.call_id: call for call in stored.calls}
        for call in stored.calls:
            if call.parent_call_id is not None:
                parent = by_id[call.parent_call_id]
                history = [*parent.prompt_ids.tolist(), *parent.output_ids.tolist()]
                assert call.prompt_ids.tolist()[: len(history)] == history

    def _check_usage(self, stored: Recorded) -> None:
        """Whatever usage a client was told is that of the stored ids."""
        by_id = {call.call_id: call for call in stored.calls}
        told = [one for one in self.tap.exchanges if one.is_whole and one.call_id and one.usage]
        for one in told:
            call = by_id[one.call_id]
            assert one.usage == {"prompt": len(call.prompt_ids), "output": len(call.output_ids)}, one.path

    def model_posts(self) -> list[Exchange]:
        """The exchanges in which a model's words were asked for."""
        paths = ("/chat/completions", "/responses", "/messages")
        return [one for one in self.tap.exchanges if one.method == "POST" and one.path.endswith(paths)]

    def describe(self) -> str:
        """For people: every exchange and every stored call."""
        lines = [f"{one.method} {one.path} {one.status} {one.call_id} {one.usage}" for one in self.tap.exchanges]
        stored = self.stored()
        roles = roles_of(stored.calls)
        for call in stored.calls:
            lines.append(
                f"{call.call_id} <- {call.parent_call_id} {roles[call.call_id]} agent={call.agent_id!r} "
                f"{len(call.prompt_ids)}+{len(call.output_ids)} {call.finish_reason} {call.output_text[:90]!r}"
            )
        return "\n".join(lines)


def false_forks() -> float:
    """Of this job, in this process."""
    return prometheus_client.REGISTRY.get_sample_value("tidegate_false_forks_total", {"job": JOB}) or 0.0


class NarrowShard:
    """The shard, whose model's context is too short for one call (counted from 0)."""

    def __init__(self, shard: TrajectoryShard, too_long: int) -> None:
        self._shard, self._too_long, self._num_calls = shard, too_long, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        is_too_long = self._num_calls == self._too_long
        self._num_calls += 1
        whole = self._shard._max_model_len
        self._shard._max_model_len = 1000 if is_too_long else whole
        try:
            return await self._shard.match_call(run_id, key, request)
        finally:
            self._shard._max_model_len = whole


@contextlib.asynccontextmanager
async def harness_world(
    folder: Path,
    script: Script,
    *,
    loses: int | None = None,
    too_long: int | None = None,
    call_timeout_s: float = 60,
) -> AsyncIterator[World]:
    """A proxy on a free loopback port, its shard, and the run whose key a harness gets.

    The cell loses the call ``loses`` for good, until an answer was cut before the eyes of the harness; the prompt of
    the call ``too_long`` does not fit. Calls are counted from 0.
    """
    model, config = folder / "model", ProxyConfig(call_timeout_s=call_timeout_s)
    write_model(model)
    sampling = Sampling(max_tokens=4096)
    shard = TrajectoryShard(JOB, 0, TrajectoryConfig(), str(folder / "store"), str(model), sampling, 400_000)
    cell = ScriptedCell(script=script, loses=loses)
    backends = FakeBackends(FakeShard(), cell=cell)
    served = shard if too_long is None else NarrowShard(shard, too_long)
    backends.shard_for = lambda run_id: cast(Shard, served)  # type: ignore[method-assign]
    await shard.open_group(GroupSpec("g000001", "task", (RUN, "g000001-r1"), VERSION))
    key = await shard.open_attempt(RUN, 0)

    def after(exchange: Exchange) -> None:
        cell.is_well |= exchange.status >= 500 or (exchange.status == 200 and not exchange.is_whole)

    parser = load_parser(model, config)
    await asyncio.to_thread(warm, parser)
    tap = Tap(create_app(JOB, config, "policy", backends, parser), after)
    outer = FastAPI(openapi_url=None)
    outer.mount(f"/{JOB}", tap)
    server = uvicorn.Server(uvicorn.Config(outer, port=0, log_level="critical", access_log=False, log_config=None))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield World(shard, cell, tap, f"http://127.0.0.1:{port}/{JOB}", key, folder)
    finally:
        server.should_exit = True
        await serving
        await shard.close()


def warm(parser: AnswerParser) -> None:
    """Have the parser import what it needs: as in a replica that has served calls already, no answer waits for it."""
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    reader = parser.reader(CanonicalRequest("openai_chat", "policy", (), tools=(tool,)), "warm")
    if isinstance(reader, SlowReader):
        reader.prepare()
