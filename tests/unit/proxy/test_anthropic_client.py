"""The official Anthropic client against the proxy, over a loopback connection."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest

from services.common.errors import TurnLimitError
from services.common.types import CellState
from services.proxy.types import CanonicalRequest, Delta, DeltaKind, Message, ParsedAnswer, ToolCall
from tests.unit.proxy.conftest import DEADLINE_S, Serve, Server
from tests.unit.proxy.fakes import KEY, RUN, FakeBackends, FakeCell, FakeShard, word
from tests.waiting import until

WHOLE = "".join(word(index) for index in range(5))
HI: list[Any] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": HI}
TOOL: Any = {"name": "bash", "input_schema": {"type": "object"}}


def client(server: Server, key: str = KEY, max_retries: int = 0) -> anthropic.AsyncAnthropic:
    """The key goes by the client's own header."""
    return anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=max_retries, timeout=DEADLINE_S)


class ThinkingParser:
    """Finds in every answer the same reasoning and two tool calls, behind the text that the model wrote."""

    def reader(self, request: CanonicalRequest, call_id: str) -> ThinkingReader:
        return ThinkingReader(call_id)


class ThinkingReader:
    def __init__(self, call_id: str) -> None:
        self._calls = tuple(ToolCall(f"call_{call_id}_{at}", "bash", {"at": at, "ls": "é"}) for at in range(2))
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        reasoning = [] if self._texts else [Delta(DeltaKind.REASONING, "first I "), Delta(DeltaKind.REASONING, "think")]
        self._texts.append(text)
        return [*reasoning, Delta(DeltaKind.TEXT, text)]

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        calls = [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in self._calls]
        return calls, ParsedAnswer("".join(self._texts), "first I think", self._calls)


async def streamed(asking: anthropic.AsyncAnthropic, **more: Any) -> anthropic.types.Message:
    async with asking.messages.stream(**{**ASK, **more}) as stream:
        return await stream.get_final_message()


async def whole(asking: anthropic.AsyncAnthropic, **more: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = await asking.messages.create(**{**ASK, **more})
    return message


ask_both_ways = pytest.mark.parametrize("ask", [streamed, whole])


# --- calls that go well ----------------------------------------------------------------------------------------


@ask_both_ways
async def test_official_client_gets_a_message(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell(finish_reason="stop"))) as server:
        message = await ask(client(server))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": WHOLE}]
    assert (message.id, message.stop_reason) == (f"msg_{RUN}-a0-c0", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 7, 5)


@ask_both_ways
async def test_tool_turn_sent_back_is_the_answer_that_was_made(serve: Serve, ask: Any) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell(finish_reason="stop")), ThinkingParser()) as server:
        asking = client(server)
        message = await ask(asking, tools=[TOOL], system="be brief")
        assert message.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
            for block in message.content
            if block.type == "tool_use"
        ]
        history = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        await ask(asking, tools=[TOOL], system="be brief", messages=history)
    first, second = shard.requests
    calls = ThinkingReader(f"{RUN}-a0-c0").finish()[1].tool_calls
    assert second.messages == (
        *first.messages,
        Message("assistant", WHOLE, "first I think", calls),
        *(Message("tool", "done", tool_call_id=call.call_id) for call in calls),
    )
    assert second.tools == first.tools


async def test_stream_and_body_make_equal_messages(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell(finish_reason="stop")), ThinkingParser()) as server:
        one, other = await streamed(client(server)), await whole(client(server))
    one_dict, other_dict = one.to_dict(), other.to_dict()
    for message in (one_dict, other_dict):
        message.pop("id")
        for block in message["content"]:  # type: ignore[attr-defined]
            block.pop("id", None)
    assert one_dict == other_dict


async def test_client_counts_tokens_and_lists_models(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        asking = client(server)
        assert (await asking.messages.count_tokens(model="m", messages=HI)).input_tokens == 11
        assert [model.id async for model in asking.models.list()] == ["model-x"]


async def test_query_string_of_the_beta_client_changes_nothing(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        message = await client(server).beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
        assert message.content[0].text == WHOLE
        assert (await client(server).beta.messages.count_tokens(model="m", messages=HI)).input_tokens == 11


async def test_silent_stream_carries_pings(serve: Serve) -> None:
    cell = FakeCell(stepping=asyncio.Semaphore(0))
    async with serve(FakeBackends(FakeShard(), a=cell), keep_alive_s=0.05) as server:
        headers = {"x-api-key": KEY}
        body = {**ASK, "stream": True}
        async with server.http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
            seen = ""
            async for piece in response.aiter_text():
                seen += piece
                if seen.count("event: ping") == 2:
                    for _ in range(5):
                        cell.stepping.release()  # type: ignore[union-attr]
    assert seen.startswith("event: ping")
    assert seen.index("message_start") < seen.index("message_stop")


# --- calls that do not -----------------------------------------------------------------------------------------


@ask_both_ways
async def test_wrong_key_is_an_authentication_error(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        with pytest.raises(anthropic.AuthenticationError):
            await ask(client(server, key=f"{RUN}.wrong"))


@ask_both_ways
async def test_too_long_prompt_is_told_in_the_words_that_make_harnesses_compact(serve: Serve, ask: Any) -> None:
    async with serve(FakeBackends(FakeShard(num_prompt_tokens=5000), a=FakeCell())) as server:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client(server))
    assert caught.value.body["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"  # type: ignore[index]


async def test_invalid_request_names_the_field(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role: Input should be"):
            await whole(client(server), messages=[{"role": "robot", "content": "hi"}])


async def test_limit_of_calls_is_final_for_a_client_that_tries_again(serve: Serve) -> None:
    class LimitedShard(FakeShard):
        num_asked = 0

        async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> Any:
            self.num_asked += 1
            raise TurnLimitError(3)

    shard = LimitedShard()
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        with pytest.raises(anthropic.BadRequestError, match="has made 3 model calls"):
            await whole(client(server, max_retries=2))
    assert shard.num_asked == 1


@ask_both_ways
async def test_no_cell_in_time_is_overloaded_and_tried_again(serve: Serve, ask: Any) -> None:
    cells = FakeBackends(FakeShard(), a=FakeCell())
    cells.publish({"a": CellState.STALE})
    async with serve(cells, call_timeout_s=0.2) as server:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await ask(client(server))
        assert caught.value.status_code == 529
        assert caught.value.response.headers["retry-after"] == "1"
        trying = asyncio.create_task(ask(client(server, max_retries=4)))
        await until(lambda: len(cells.shard.abandoned) == 2)
        cells.publish({"a": CellState.SERVING})
        assert (await trying).content[0].text == WHOLE


async def test_stream_that_is_lost_midway_is_cut_and_never_looks_whole(serve: Serve) -> None:
    texts: list[str] = []
    shard = FakeShard()

    async def read(asking: anthropic.AsyncAnthropic) -> None:
        async with asking.messages.stream(**ASK) as stream:
            async for text in stream.text_stream:
                texts.append(text)

    async with serve(FakeBackends(shard, a=FakeCell(hangs_after=2)), call_timeout_s=0.5) as server:
        with pytest.raises((httpx2.RemoteProtocolError, anthropic.APIConnectionError)):
            await read(client(server))
    assert "".join(texts) == word(0) + word(1)
    assert shard.records == []


async def test_client_that_stops_reading_aborts_its_call(serve: Serve) -> None:
    shard, cell = FakeShard(), FakeCell(hangs_after=2)
    async with serve(FakeBackends(shard, a=cell)) as server:
        async with client(server).messages.stream(**ASK) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: bool(cell.aborted and shard.abandoned))
    assert cell.aborted == [f"{RUN}-a0-c0"]
    assert shard.records == []
