"""Replays what real harnesses sent (tests/fixtures/captures) as a shard would take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.common.types import VersionSpan
from services.proxy.conversation import stable_messages
from services.proxy.dialects import Dialect
from services.proxy.dialects.anthropic import ANTHROPIC
from services.proxy.dialects.openai_chat import OPENAI_CHAT
from services.proxy.dialects.openai_responses import OPENAI_RESPONSES
from services.proxy.renderer import HfRenderer
from services.proxy.session import Bridge
from services.proxy.types import CanonicalRequest, Message, ParsedAnswer
from services.trajectory.encoding import CallRow
from services.trajectory.live import AttemptLog, Matched
from services.trajectory.types import CallRecord, TokenIds

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"
FILES = sorted(CAPTURES.glob("*/*.json"))
SCENARIOS = sorted({f"{path.parent.name}/{path.stem[:-3]}" for path in FILES})

_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/v1/responses": OPENAI_RESPONSES,
    "/v1/messages": ANTHROPIC,
}


@dataclass(frozen=True)
class Capture:
    """One request as it was sent."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    reply: str

    @property
    def is_refused(self) -> bool:
        """The server said that the context is too long."""
        return self.reply == "ctx"

    def parse(self) -> CanonicalRequest:
        return _DIALECTS[self.path.partition("?")[0]].parse(self.body, self.headers)


def load(path: Path) -> Capture:
    given = json.loads(path.read_text())
    headers = {name.lower(): value for name, value in given["headers"].items()}
    return Capture(given["seq"], given["path"], headers, given["body"], given["scripted_reply"])


def scenario(name: str) -> list[Capture]:
    """The captures of a scenario ("codex/cx-multi"), in order."""
    return [load(path) for path in FILES if f"{path.parent.name}/{path.stem[:-3]}" == name]


def answer_to(request: CanonicalRequest, later: Sequence[CanonicalRequest]) -> Message:
    """The answer that a harness must have got: the one that a later request shows behind the same messages."""
    for one in later:
        shown = one.messages[len(request.messages) :]
        is_next = stable_messages(one.messages)[: len(request.messages)] == stable_messages(request.messages)
        if is_next and shown and shown[0].role == "assistant" and one.tools == request.tools:
            return shown[0]
    return Message("assistant", "That is all.")


@dataclass(frozen=True)
class Replayed:
    """One call of a replay."""

    number: int
    call_id: str
    """Empty if it was refused."""
    matched: Matched
    parent: int | None
    """The number of the request that it continues."""
    ids: TokenIds
    """Its prompt and its answer."""


class Replay:
    """Takes requests as a shard does. Answers are what the model would have written in the template's own form."""

    def __init__(self, renderer: HfRenderer) -> None:
        self.renderer = renderer
        self.bridge = Bridge(renderer)
        self.log = AttemptLog("g-r0", 0, None)
        self.calls: list[Replayed] = []
        self.rows: dict[str, CallRow] = {}

    def take(self, number: int, request: CanonicalRequest, answer: Message | None) -> Replayed:
        """Match a request and store its answer; None: it is refused."""
        matched = self.log.match(request, self.bridge)
        numbers = {one.call_id: one.number for one in self.calls}
        parent = None if matched.call is None else numbers[matched.call.call_id]
        call_id, ids = "", matched.prompt.ids
        if answer is not None:
            output_ids = np.asarray(self.renderer.encode(sampled_text(answer)), dtype=np.int32)
            row = self.log.row(_record(self.log.begin(matched).call_id, matched, answer, output_ids))
            self.log.complete(row)
            call_id, ids = row.record.call_id, np.concatenate([ids, output_ids])
            self.rows[call_id] = row
        self.calls.append(Replayed(number, call_id, matched, parent, ids))
        return self.calls[-1]


def replay(renderer: HfRenderer, captures: Sequence[Capture]) -> Replay:
    """A whole scenario; each call is complete before the next is made."""
    made = Replay(renderer)
    requests = [one.parse() for one in captures]
    for at, (capture, request) in enumerate(zip(captures, requests, strict=True)):
        answer = None if capture.is_refused else answer_to(request, requests[at + 1 :])
        made.take(capture.number, request, answer)
    return made


def sampled_text(answer: Message) -> str:
    """An answer as ``templates.TOOLS_AND_REASONING`` renders it, to the end of its turn."""
    thought = f"<think>\n{answer.reasoning}\n</think>\n" if answer.reasoning else ""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {to_json(call.arguments)}}}\n</tool_call>'
        for call in answer.tool_calls
    ]
    return f"{thought}{answer.content}{''.join(calls)}<|im_end|>"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_text(capture: Capture, old: str, new: str) -> Capture:
    """A capture in whose body a text (a whole one) is another one."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(one) for name, one in value.items()}
        if isinstance(value, list):
            return [changed(one) for one in value]
        return new if value == old else value

    body = changed(capture.body)
    assert body != capture.body
    return replace(capture, body=body)


def _record(call_id: str, matched: Matched, answer: Message, output_ids: TokenIds) -> CallRecord:
    return CallRecord(
        call_id=call_id,
        run_id="g-r0",
        attempt=0,
        parent_call_id=None,
        request={},
        prompt_ids=matched.prompt.ids,
        output_ids=output_ids,
        logprobs=np.zeros(len(output_ids), dtype=np.float32),
        version_spans=(VersionSpan(1, len(output_ids)),),
        output_text=sampled_text(answer),
        finish_reason="stop",
        trainable=True,
        cells=("rollout-0",),
        started_at_s=0.0,
        ended_at_s=1.0,
        answer=ParsedAnswer(answer.content, answer.reasoning, answer.tool_calls),
    )
