"""The official OpenAI client's Responses against the proxy, over a loopback connection."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response

from services.common.errors import TurnLimitError
from services.common.types import CellState
from services.proxy.dialects.openai_responses import previous_response_not_found
from services.proxy.types import CanonicalRequest, Delta, DeltaKind, Message, ParsedAnswer, ToolCall
from tests.unit.proxy.conftest import DEADLINE_S, Serve, Server
from tests.unit.proxy.fakes import KEY, RUN, FakeBackends, FakeCell, FakeShard, word
from tests.waiting import until

WHOLE = "".join(word(index) for index in range(5))
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "custom", "name": "run"}]},
]


def client(server: Server, key: str = KEY, max_retries: int = 0) -> Any:
    """A client that refuses answers which do not fit its own types. The key goes by its own header."""
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=max_retries,
        timeout=DEADLINE_S,
        _strict_response_validation=True,
    )


class ThinkingParser:
    """Finds in every answer the same reasoning and two tool calls, behind the text that the model wrote."""

    def reader(self, request: CanonicalRequest, call_id: str) -> ThinkingReader:
        return ThinkingReader(call_id)


class ThinkingReader:
    def __init__(self, call_id: str) -> None:
        bash = ToolCall(f"call_{call_id}_0", "bash", {"command": "ls é"})
        self._calls = (bash, ToolCall(f"call_{call_id}_1", "agents__run", {"input": "go"}))
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        reasoning = [] if self._texts else [Delta(DeltaKind.REASONING, "first I "), Delta(DeltaKind.REASONING, "think")]
        self._texts.append(text)
        return [*reasoning, Delta(DeltaKind.TEXT, text)]

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        calls = [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in self._calls]
        return calls, ParsedAnswer("".join(self._texts), "first I think", self._calls)


async def streamed(asking: Any, **more: Any) -> Response:
    async with asking.responses.stream(**{"model": "m", "input": HI, **more}) as stream:
        final: Response = await stream.get_final_response()
    return final


async def whole(asking: Any, **more: Any) -> Response:
    response: Response = await asking.responses.create(**{"model": "m", "input": HI, **more})
    return response


ask_both_ways = pytest.mark.parametrize("ask", [streamed, whole])


# --- calls that go well ----------------------------------------------------------------------------------------


@ask_both_ways
async def test_official_client_gets_a_response(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell(finish_reason="stop"))) as server:
        response = await ask(client(server))
    assert response.output_text == WHOLE
    assert (response.id, response.status) == (f"resp_{RUN}-a0-c0", "completed")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (11, 5)
    assert response.usage.input_tokens_details.cached_tokens == 7


@ask_both_ways
async def test_output_sent_back_is_the_answer_that_was_made(serve: Serve, ask: Any) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell(finish_reason="stop")), ThinkingParser()) as server:
        asking = client(server)
        response = await ask(asking, tools=TOOLS, instructions="be brief")
        results = [
            {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"}
            for item in response.output
            if item.type in ("function_call", "custom_tool_call")
        ]
        items = [*HI, *response.output, *results]
        await ask(asking, tools=TOOLS, instructions="be brief", input=items)
    first, second = shard.requests
    calls = ThinkingReader(f"{RUN}-a0-c0").finish()[1].tool_calls
    assert second.messages == (
        *first.messages,
        Message("assistant", WHOLE, "first I think", calls),
        *(Message("tool", "done", tool_call_id=call.call_id) for call in calls),
    )
    assert second.tools == first.tools


async def test_stream_and_body_make_equal_responses(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell(finish_reason="stop")), ThinkingParser()) as server:
        both = [await streamed(client(server), tools=TOOLS), await whole(client(server), tools=TOOLS)]
    one, other = ([_shape(item) for item in response.output] for response in both)
    assert one == other
    assert both[0].usage == both[1].usage


def _shape(item: Any) -> dict[str, Any]:
    """An item without what only one of two calls has."""
    plain: dict[str, Any] = item.model_dump(exclude={"id", "call_id", "parsed_arguments"}, warnings=False)
    for part in plain.get("content") or []:
        part.pop("parsed", None)
    return plain


async def test_length_stop_is_an_incomplete_response(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell(finish_reason="length"))) as server:
        response = await whole(client(server))
        events = [event async for event in await client(server).responses.create(model="m", input=HI, stream=True)]
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert events[-1].response.output_text == WHOLE


async def test_previous_response_is_named_to_the_shard(serve: Serve) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        first = await whole(client(server))
        await whole(client(server), previous_response_id=first.id)
    assert [request.previous_call_id for request in shard.requests] == ["", f"{RUN}-a0-c0"]


async def test_silent_stream_is_kept_alive_by_comments(serve: Serve) -> None:
    cell = FakeCell(stepping=asyncio.Semaphore(0), finish_reason="stop")
    async with serve(FakeBackends(FakeShard(), a=cell), keep_alive_s=0.05) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"model": "m", "input": "hi", "stream": True}
        async with server.http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
            seen = ""
            async for piece in response.aiter_text():
                seen += piece
                if seen.count(": keep-alive") == 2:
                    for _ in range(5):
                        cell.stepping.release()  # type: ignore[union-attr]
    assert seen.index("response.created") < seen.index("response.completed")


# --- calls that do not -----------------------------------------------------------------------------------------


@ask_both_ways
async def test_wrong_key_is_an_authentication_error(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        with pytest.raises(openai.AuthenticationError):
            await ask(client(server, key=f"{RUN}.wrong"))


@ask_both_ways
async def test_too_long_prompt_has_the_code_that_makes_harnesses_compact(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(num_prompt_tokens=5000), a=FakeCell())) as server:
        with pytest.raises(openai.BadRequestError, match="Your input exceeds the context window") as caught:
            await ask(client(server))
    assert caught.value.code == "context_length_exceeded"


async def test_unknown_previous_response_is_refused_by_its_name(serve: Serve) -> None:
    class ForgetfulShard(FakeShard):
        async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> Any:
            raise previous_response_not_found(f"resp_{request.previous_call_id}")

    async with serve(FakeBackends(ForgetfulShard(), a=FakeCell())) as server:
        for named in (f"resp_{RUN}-a0-c7", "conv_1"):
            with pytest.raises(openai.BadRequestError, match="not found") as caught:
                await whole(client(server), previous_response_id=named)
            assert caught.value.code == "previous_response_not_found"


async def test_limit_of_calls_is_final_for_a_client_that_tries_again(serve: Serve) -> None:
    class LimitedShard(FakeShard):
        num_asked = 0

        async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> Any:
            self.num_asked += 1
            raise TurnLimitError(3)

    shard = LimitedShard()
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        with pytest.raises(openai.BadRequestError, match="has made 3 model calls"):
            await whole(client(server, max_retries=2))
    assert shard.num_asked == 1


@ask_both_ways
async def test_no_cell_in_time_is_overloaded_and_tried_again(serve: Serve, ask: Any) -> None:
    cells = FakeBackends(FakeShard(), a=FakeCell(finish_reason="stop"))
    cells.publish({"a": CellState.STALE})
    async with serve(cells, call_timeout_s=0.2) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client(server))
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        trying = asyncio.create_task(ask(client(server, max_retries=4)))
        await until(lambda: len(cells.shard.abandoned) == 2)
        cells.publish({"a": CellState.SERVING})
        assert (await trying).output_text == WHOLE


async def test_stream_that_is_lost_midway_is_cut_and_never_looks_whole(serve: Serve) -> None:
    texts: list[str] = []
    shard = FakeShard()

    async def read(asking: Any) -> None:
        async for event in await asking.responses.create(model="m", input=HI, stream=True):
            texts.append(event.delta if event.type == "response.output_text.delta" else "")

    async with serve(FakeBackends(shard, a=FakeCell(hangs_after=2)), call_timeout_s=0.5) as server:
        with pytest.raises((httpx2.RemoteProtocolError, openai.APIConnectionError)):
            await read(client(server))
    assert "".join(texts) == word(0) + word(1)
    assert shard.records == []


async def test_client_that_stops_reading_aborts_its_call(serve: Serve) -> None:
    shard, cell = FakeShard(), FakeCell(hangs_after=2)
    async with serve(FakeBackends(shard, a=cell)) as server:
        async with client(server).responses.stream(model="m", input=HI) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
        await until(lambda: bool(cell.aborted and shard.abandoned))
    assert cell.aborted == [f"{RUN}-a0-c0"]
    assert shard.records == []
