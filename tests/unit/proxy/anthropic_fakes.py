"""The official Anthropic client over a transport that answers with what a dialect made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2

from services.proxy.dialects import ErrorAnswer, Head
from services.proxy.dialects.anthropic import ANTHROPIC
from services.proxy.dialects.fields import to_json
from services.proxy.types import CanonicalRequest, Choice, Delta, DeltaKind, Message, ParsedAnswer, Usage

USAGE = Usage(num_prompt_tokens=30, num_output_tokens=9, num_cached_tokens=10, num_reasoning_tokens=4)
ASK: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def head(**request: Any) -> Head:
    canonical = CanonicalRequest("anthropic", "m", (Message("user", "hi"),), **request)
    return Head("g000001-r0-a0-c1", 1_700_000_000, canonical)


def client(content: str, media_type: str, status: int = 200) -> anthropic.Anthropic:
    """A client that gets one and the same answer to all that it asks."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, headers={"content-type": media_type}, content=content.encode())

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    return anthropic.Anthropic(base_url="http://proxy", api_key="k", max_retries=0, http_client=transport)


def failing_client(error: ErrorAnswer) -> anthropic.Anthropic:
    return client(to_json(error.body), "application/json", error.status)


def deltas_of(answer: ParsedAnswer, size: int = 3) -> list[Delta]:
    """An answer as a parser hands it on, in pieces of ``size`` characters."""
    pieces = [
        Delta(kind, text[at : at + size])
        for kind, text in ((DeltaKind.REASONING, answer.reasoning), (DeltaKind.TEXT, answer.text))
        for at in range(0, len(text), size)
    ]
    return pieces + [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in answer.tool_calls]


def stream_of(choice: Choice, deltas: Sequence[Delta], of: Head | None = None) -> str:
    """All events of a streamed answer."""
    stream = ANTHROPIC.stream(of or head())
    begin = stream.begin(Usage(USAGE.num_prompt_tokens, 0, USAGE.num_cached_tokens))
    return begin + "".join(stream.delta(0, delta) for delta in deltas) + stream.end([choice], USAGE)


def streamed_message(choice: Choice, deltas: Sequence[Delta]) -> anthropic.types.Message:
    """The message that the official client makes of the events."""
    with client(stream_of(choice, deltas), "text/event-stream").messages.stream(**ASK) as stream:
        return stream.get_final_message()


def whole_message(choice: Choice) -> anthropic.types.Message:
    """The message that the official client makes of a body."""
    body = to_json(ANTHROPIC.body(head(), [choice], USAGE))
    message: anthropic.types.Message = client(body, "application/json").messages.create(**ASK)
    return message
