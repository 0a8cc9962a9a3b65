"""The vendors' own Python clients against the listener, the app, the parser and the shard: tools, errors, cuts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import anthropic
import httpx2
import openai
import pytest

from services.common.errors import JobError
from services.common.types import CellState
from tests.unit.proxy.live_world import ANSWERS, DEADLINE_S, LiveProxy, Model
from tests.unit.proxy.templates import TOOLS_AND_REASONING
from tests.waiting import until, wait_until

TEXT, TOOL_TURN, TWO_CALLS = ANSWERS[0], ANSWERS[1], ANSWERS[2]
ARGUMENTS = {"command": "ls -la", "at": [1, {"x": "é"}]}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
HTTP = httpx2.Client(timeout=DEADLINE_S, trust_env=False)
"""Of all clients of this module: making one takes long."""
RETRY = {"x-stainless-retry-count": "1"}
CUT = (httpx2.TransportError, openai.APIConnectionError, anthropic.APIConnectionError)
"""What a client raises for a connection that was lost."""


@dataclass(frozen=True)
class Got:
    """An answer, whatever its dialect."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, Any], ...]
    """Names and arguments of tool calls."""
    stop: str
    items: list[Any]
    """The answer and results of its tools, as the next request carries them."""


class Vendor(Protocol):
    """One dialect by its official client. ``said``: the items of the request."""

    errors: ClassVar[Any]
    """The client's module."""
    tools: ClassVar[list[Any]]

    def __init__(self, proxy: LiveProxy, *, key: str = "", max_retries: int = 0, url: str = "") -> None: ...

    def whole(self, said: list[Any], **more: Any) -> Got: ...

    def streamed(self, said: list[Any], **more: Any) -> Got:
        """By the client's helper that puts a stream together."""
        ...

    def pieces(self, said: list[Any], **more: Any) -> Iterator[str]:
        """The text of a stream as it comes. Closing the iterator closes the stream."""
        ...

    async def whole_async(self, said: list[Any]) -> None: ...


class Chat:
    """Chat Completions."""

    errors: ClassVar[Any] = openai
    tools: ClassVar[list[Any]] = [
        {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS, "strict": True}}
    ]

    def __init__(self, proxy: LiveProxy, *, key: str = "", max_retries: int = 0, url: str = "") -> None:
        self.settings: dict[str, Any] = {
            "base_url": f"{url or proxy.url}/v1",
            "api_key": key or proxy.key,
            "max_retries": max_retries,
            "timeout": DEADLINE_S,
            "_strict_response_validation": True,
        }
        self.client = openai.OpenAI(**self.settings, http_client=HTTP)

    def whole(self, said: list[Any], **more: Any) -> Got:
        return self._got(self.client.chat.completions.create(model="m", messages=said, tools=self.tools, **more))

    def streamed(self, said: list[Any], **more: Any) -> Got:
        with self.client.chat.completions.stream(model="m", messages=said, tools=self.tools, **more) as stream:
            return self._got(stream.get_final_completion())

    def pieces(self, said: list[Any], **more: Any) -> Iterator[str]:
        asked: Any = {"model": "m", "messages": said, "stream": True, **more}
        with self.client.chat.completions.create(**asked) as stream:
            for chunk in stream:
                yield from (choice.delta.content for choice in chunk.choices if choice.delta.content)

    async def whole_async(self, said: list[Any]) -> None:
        await openai.AsyncOpenAI(**self.settings).chat.completions.create(model="m", messages=said)

    @staticmethod
    def _got(completion: Any) -> Got:
        (choice,) = completion.choices
        message, calls = choice.message, choice.message.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
        return Got(
            message.content or "",
            getattr(message, "reasoning_content", None) or "",
            tuple((call.function.name, json.loads(call.function.arguments)) for call in calls),
            choice.finish_reason,
            [message.to_dict(), *results],
        )


class Responses:
    """Responses."""

    errors: ClassVar[Any] = openai
    tools: ClassVar[list[Any]] = [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": True}]

    def __init__(self, proxy: LiveProxy, *, key: str = "", max_retries: int = 0, url: str = "") -> None:
        self.settings = Chat(proxy, key=key, max_retries=max_retries, url=url).settings
        self.client = openai.OpenAI(**self.settings, http_client=HTTP)

    def whole(self, said: list[Any], **more: Any) -> Got:
        return self._got(self.client.responses.create(model="m", input=said, tools=self.tools, **more))

    def streamed(self, said: list[Any], **more: Any) -> Got:
        with self.client.responses.stream(model="m", input=said, tools=self.tools, **more) as stream:
            return self._got(stream.get_final_response())

    def pieces(self, said: list[Any], **more: Any) -> Iterator[str]:
        asked: Any = {"model": "m", "input": said, "stream": True, **more}
        with self.client.responses.create(**asked) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    yield event.delta

    async def whole_async(self, said: list[Any]) -> None:
        await openai.AsyncOpenAI(**self.settings).responses.create(model="m", input=said)

    @staticmethod
    def _got(response: Any) -> Got:
        calls = [item for item in response.output if item.type == "function_call"]
        thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.summary]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
        return Got(
            response.output_text,
            "".join(thoughts),
            tuple((call.name, json.loads(call.arguments)) for call in calls),
            response.status,
            [*(item.to_dict() for item in response.output), *results],
        )


class Messages:
    """Messages."""

    errors: ClassVar[Any] = anthropic
    tools: ClassVar[list[Any]] = [{"name": "bash", "input_schema": PARAMETERS}]

    def __init__(self, proxy: LiveProxy, *, key: str = "", max_retries: int = 0, url: str = "") -> None:
        self.settings: dict[str, Any] = {
            "base_url": url or proxy.url,
            "api_key": key or proxy.key,
            "max_retries": max_retries,
            "timeout": DEADLINE_S,
            "_strict_response_validation": True,
        }
        self.client = anthropic.Anthropic(**self.settings, http_client=HTTP)

    def whole(self, said: list[Any], **more: Any) -> Got:
        asked: Any = {"model": "m", "max_tokens": 400, "messages": said, "tools": self.tools, **more}
        return self._got(self.client.messages.create(**asked))

    def streamed(self, said: list[Any], **more: Any) -> Got:
        asked: Any = {"model": "m", "max_tokens": 400, "messages": said, "tools": self.tools, **more}
        with self.client.messages.stream(**asked) as stream:
            return self._got(stream.get_final_message())

    def pieces(self, said: list[Any], **more: Any) -> Iterator[str]:
        asked: Any = {"model": "m", "max_tokens": 400, "messages": said, **more}
        with self.client.messages.stream(**asked) as stream:
            yield from stream.text_stream

    async def whole_async(self, said: list[Any]) -> None:
        asked: Any = {"model": "m", "max_tokens": 400, "messages": said}
        await anthropic.AsyncAnthropic(**self.settings).messages.create(**asked)

    @staticmethod
    def _got(message: Any) -> Got:
        calls = [block for block in message.content if block.type == "tool_use"]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
        return Got(
            "".join(block.text for block in message.content if block.type == "text"),
            "".join(block.thinking for block in message.content if block.type == "thinking"),
            tuple((call.name, call.input) for call in calls),
            message.stop_reason,
            [
                {"role": "assistant", "content": [block.to_dict() for block in message.content]},
                *([{"role": "user", "content": results}] if results else []),
            ],
        )


VENDORS: list[type[Vendor]] = [Chat, Responses, Messages]
each_vendor = pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.__name__)
both_ways = pytest.mark.parametrize("way", ["streamed", "whole"])


def ask(asking: Vendor, way: str, said: list[Any], **more: Any) -> Got:
    got: Got = getattr(asking, way)(said, **more)
    return got


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveProxy]:
    """For tests that leave nothing behind but calls of a run of their own."""
    folder = tmp_path_factory.mktemp("clients")
    with LiveProxy(folder, TOOLS_AND_REASONING, max_tokens=400, max_body_bytes=1 << 16) as made:
        yield made


@pytest.fixture
def proxy(shared: LiveProxy) -> Iterator[LiveProxy]:
    shared.begin_run()
    model = shared.model
    model.death = JobError
    for known in (model.requests, model.prompts, model.aborted):
        known.clear()
    yield shared
    model.dies_after = model.hangs_after = model.stepping = None
    shared.publish(CellState.SERVING)
    assert shared.faults.told == [], shared.faults.told[0]


# --- tools ---------------------------------------------------------------------------------------------------------


@each_vendor
@both_ways
def test_a_turn_with_reasoning_text_and_a_tool_call_arrives_whole_and_is_built_on(
    proxy: LiveProxy, vendor: type[Vendor], way: str
) -> None:
    proxy.model.script = lambda prompt: TOOL_TURN if len(proxy.model.prompts) == 1 else TEXT
    asking = vendor(proxy)
    got = ask(asking, way, says("list"))
    assert (got.text.strip(), got.calls) == ("I look.", (("bash", ARGUMENTS),))
    assert got.reasoning.strip() == "first I think about it"
    assert got.stop in ("tool_calls", "completed", "tool_use")
    last = ask(asking, way, [*says("list"), *got.items])
    assert (last.text, last.calls) == (TEXT, ())
    first, second = proxy.calls
    assert second.parent_call_id == first.call_id
    history = [*first.prompt_ids.tolist(), *first.output_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(history)] == history


@each_vendor
@both_ways
def test_parallel_calls_keep_their_order_and_have_ids_of_their_own(
    proxy: LiveProxy, vendor: type[Vendor], way: str
) -> None:
    proxy.model.script = lambda prompt: TWO_CALLS if len(proxy.model.prompts) == 1 else TEXT
    got = ask(vendor(proxy), way, says("twice"))
    assert got.calls == (("bash", ARGUMENTS), ("bash", ARGUMENTS))
    assert got.text.strip() == ""
    ask(vendor(proxy), way, [*says("twice"), *got.items])
    assert [call.parent_call_id for call in proxy.calls] == [None, proxy.calls[0].call_id]


@each_vendor
@both_ways
def test_a_malformed_call_is_text(proxy: LiveProxy, vendor: type[Vendor], way: str) -> None:
    proxy.model.script = lambda prompt: ANSWERS[3]
    got = ask(vendor(proxy), way, says("list"))
    assert (got.text.strip(), got.calls) == (ANSWERS[3], ())


# --- errors --------------------------------------------------------------------------------------------------------


@each_vendor
@both_ways
def test_each_error_is_the_clients_own_class_for_it(proxy: LiveProxy, vendor: type[Vendor], way: str) -> None:
    asking, errors = vendor(proxy, max_retries=2), vendor.errors
    with pytest.raises(errors.AuthenticationError):
        ask(vendor(proxy, key=f"{proxy.run_id}.wrong"), way, says("hi"))
    with pytest.raises(errors.BadRequestError, match=r"(?i)too long|context"):
        ask(asking, way, says("word " * 5000))
    with pytest.raises(errors.BadRequestError, match="role"):
        ask(asking, way, [{"role": "robot", "content": "hi"}])
    with pytest.raises(errors.NotFoundError):
        ask(vendor(proxy, url=f"{proxy.url}/nowhere"), way, says("hi"))
    with pytest.raises(errors.APIStatusError) as too_large:
        ask(asking, way, says("x" * (1 << 16)))
    assert too_large.value.status_code == 413
    assert proxy.model.requests == []


@each_vendor
def test_too_many_calls_at_once_are_tried_again_when_the_proxy_says_so(tmp_path: Path, vendor: type[Vendor]) -> None:
    model = Model(lambda prompt: TEXT, stepping=asyncio.Semaphore(0))
    with LiveProxy(tmp_path, model=model, max_ongoing_calls=1) as proxy, ThreadPoolExecutor() as threads:
        busy = threads.submit(vendor(proxy).whole, says("first"))
        wait_until(lambda: model.requests, DEADLINE_S)
        with pytest.raises(vendor.errors.RateLimitError) as refused:
            vendor(proxy).whole(says("second"))
        assert refused.value.response.headers["retry-after"] == "1"
        trying = threads.submit(vendor(proxy, max_retries=2).whole, says("third"))
        proxy.let_run()
        assert busy.result(DEADLINE_S).text == trying.result(DEADLINE_S).text == TEXT


def test_a_call_without_a_cell_is_tried_again_by_the_client_itself(tmp_path: Path) -> None:
    with LiveProxy(tmp_path, model=Model(lambda prompt: TEXT), call_timeout_s=0.5) as proxy:
        proxy.publish(CellState.STALE)
        with pytest.raises(openai.InternalServerError) as overloaded:
            Chat(proxy).streamed(says("hi"))
        assert overloaded.value.status_code == 503
        assert overloaded.value.response.headers["retry-after"] == "1"
        threading.Timer(0.7, proxy.publish, (CellState.SERVING,)).start()
        assert Chat(proxy, max_retries=9).streamed(says("hi")).text == TEXT
        assert len(proxy.calls) == 1


# --- cancels -------------------------------------------------------------------------------------------------------


@each_vendor
def test_a_stream_that_is_closed_aborts_its_call(proxy: LiveProxy, vendor: type[Vendor]) -> None:
    proxy.model.script, proxy.model.hangs_after = (lambda prompt: TEXT), 2
    pieces = vendor(proxy).pieces(says("hi"))
    assert next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    wait_until(lambda: proxy.model.aborted, DEADLINE_S)
    assert [request.call_id for request in proxy.model.requests] == proxy.model.aborted
    assert proxy.calls == []


@each_vendor
async def test_a_task_that_is_cancelled_aborts_its_call(proxy: LiveProxy, vendor: type[Vendor]) -> None:
    proxy.model.script, proxy.model.hangs_after = (lambda prompt: TEXT), 2
    asking = asyncio.create_task(vendor(proxy).whole_async(says("hi")))
    await until(lambda: proxy.model.is_hanging, DEADLINE_S)
    asking.cancel()
    await until(lambda: bool(proxy.model.aborted), DEADLINE_S)
    assert proxy.calls == []


# --- cuts ----------------------------------------------------------------------------------------------------------


@each_vendor
@pytest.mark.parametrize("again", ["retry", "same request", "not streamed", "shorter"])
def test_a_cut_stream_is_an_error_and_asked_again_it_is_one_generation(
    proxy: LiveProxy, vendor: type[Vendor], again: str
) -> None:
    """The call is lost for good behind some pieces. ``not streamed`` is what Claude Code does then."""
    proxy.model.script, proxy.model.dies_after = (lambda prompt: TEXT), 2
    asking, seen = vendor(proxy), []
    with pytest.raises(CUT):  # noqa: PT012 - what came before the error is kept
        for piece in asking.pieces(says("hi"), tools=vendor.tools):
            seen.append(piece)
    assert TEXT.startswith("".join(seen))
    assert seen
    proxy.model.dies_after = None
    num_tried = len(proxy.model.requests)
    more: dict[str, Any] = {"extra_headers": RETRY} if again == "retry" else {}
    if again == "shorter":
        more[{Chat: "max_tokens", Responses: "max_output_tokens"}.get(vendor, "max_tokens")] = 50
    got = ask(asking, "whole" if again in ("not streamed", "shorter") else "streamed", says("hi"), **more)
    assert got.text == TEXT
    (call,) = proxy.calls
    assert call.output_text == TEXT
    (resumed,) = proxy.model.requests[num_tried:]
    assert resumed.generated_ids
    assert call.output_ids.tolist()[: len(resumed.generated_ids)] == list(resumed.generated_ids)


@each_vendor
def test_the_clients_own_retry_of_a_lost_call_goes_on_behind_what_was_sampled(
    proxy: LiveProxy, vendor: type[Vendor]
) -> None:
    proxy.model.script, proxy.model.dies_after = (lambda prompt: TEXT), 3
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(vendor(proxy, max_retries=3).whole, says("hi"))
        wait_until(lambda: proxy.model.dies_after == 0, DEADLINE_S)
        proxy.model.dies_after = None
        assert asking.result(DEADLINE_S).text == TEXT
    assert [bool(request.generated_ids) for request in proxy.model.requests] == [False, True]
    (call,) = proxy.calls
    assert call.output_text == TEXT


@each_vendor
def test_two_clients_that_ask_the_same_at_once_share_one_generation(proxy: LiveProxy, vendor: type[Vendor]) -> None:
    proxy.model.script, proxy.model.stepping = (lambda prompt: TEXT), asyncio.Semaphore(0)
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, vendor(proxy), way, says("hi")) for way in ("streamed", "whole")]
        wait_until(lambda: proxy.model.requests, DEADLINE_S)
        proxy.let_run()
        answers = [one.result(DEADLINE_S) for one in asking]
    assert [got.text for got in answers] == [TEXT, TEXT]
    assert len(proxy.model.requests) in (1, 2)  # the second may have come when the first was done
    assert len(proxy.calls) == len(proxy.model.requests)
