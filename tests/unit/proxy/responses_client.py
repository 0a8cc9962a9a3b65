"""OpenAI's official client in front of the Responses dialect, with nothing of the proxy between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx2
import openai

from services.proxy.dialects import Head, InvalidRequestError, Refusal
from services.proxy.dialects.openai_responses import OPENAI_RESPONSES
from services.proxy.types import CanonicalRequest, Choice, Delta, DeltaKind, ParsedAnswer, Usage

USAGE = Usage(num_prompt_tokens=11, num_output_tokens=7, num_cached_tokens=3, num_reasoning_tokens=2)


@dataclass
class Vendor:
    """Gives one answer to every request and keeps what it was asked."""

    answer: ParsedAnswer = field(default_factory=lambda: ParsedAnswer("hello"))
    deltas: Sequence[Delta] | None = None
    """What a stream is made of; None: the answer, whole."""
    finish_reason: str = "stop"
    refusal: Refusal | None = None
    call_id: str = "g000001-r0-a0-c0"
    requests: list[CanonicalRequest] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    @cached_property
    def client(self) -> Any:
        """A client that refuses answers which do not fit its own types."""
        transport = httpx2.MockTransport(self._handle)
        return openai.OpenAI(
            base_url="http://vendor/v1",
            api_key="unused",
            max_retries=0,
            http_client=httpx2.Client(transport=transport),
            _strict_response_validation=True,
        )

    def _handle(self, http: httpx2.Request) -> httpx2.Response:
        try:
            request = OPENAI_RESPONSES.parse(json.loads(http.content), http.headers)
        except InvalidRequestError as error:
            return self._refuse(error.refusal)
        self.requests.append(request)
        if self.refusal is not None:
            return self._refuse(self.refusal)
        head = Head(self.call_id, 1_700_000_000, request)
        choice = Choice(0, self.answer, self.finish_reason)
        if not request.stream:
            return httpx2.Response(200, json=OPENAI_RESPONSES.body(head, [choice], USAGE))
        stream = OPENAI_RESPONSES.stream(head)
        deltas = whole_deltas(self.answer) if self.deltas is None else self.deltas
        text = stream.begin(Usage(11, 0, 3)) + OPENAI_RESPONSES.keep_alive
        text += "".join(stream.delta(0, delta) for delta in deltas) + stream.end([choice], USAGE)
        self.streams.append(text)
        return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})

    @staticmethod
    def _refuse(refusal: Refusal) -> httpx2.Response:
        error = OPENAI_RESPONSES.error(refusal)
        return httpx2.Response(error.status, json=error.body)


def whole_deltas(answer: ParsedAnswer) -> list[Delta]:
    """An answer in as few pieces as it can come in."""
    parts = ((DeltaKind.REASONING, answer.reasoning), (DeltaKind.TEXT, answer.text))
    texts = [Delta(kind, text) for kind, text in parts if text]
    return texts + [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in answer.tool_calls]


def parse(body: dict[str, Any], **headers: str) -> CanonicalRequest:
    """A body as it is parsed, with a model added."""
    return OPENAI_RESPONSES.parse({"model": "m", **body}, headers)


def events_of(stream: str) -> list[dict[str, Any]]:
    """The data of a stream's events. Their ``event`` lines are checked."""
    found = []
    for block in stream.split("\n\n"):
        lines = block.split("\n")
        if len(lines) == 2:
            data = json.loads(lines[1].removeprefix("data: "))
            assert lines[0] == f"event: {data['type']}"
            found.append(data)
    return found
