"""A synthetic run of an agent harness: a long main conversation with compactions, subagents between, tool outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.proxy.types import CanonicalRequest, Message

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("bash", "edit", "search", "task")
)
SYSTEM = "You are an agent that edits code with the help of tools. " * 40
SUBAGENT_SYSTEM = "You look into one question and report what you found. " * 20
_SYLLABLES = (
    *("con", "fig", "par", "se", "load", "_the", " err", "or", " test", "s/", "in", "dex", "(", ") ", "->", ".py:"),
    "\n",
)


@dataclass(frozen=True, slots=True)
class RunShape:
    """Calls of each part, and the size of a turn. A part of the main conversation but the last ends in a compaction."""

    main_calls: tuple[int, ...] = (30, 30, 395)
    subagent_calls: tuple[int, ...] = (10, 10, 10, 10)
    """Subagents are started in the first part of the main conversation, at even distances."""
    tool_chars: int = 2_900
    answer_chars: int = 2_900


@dataclass(frozen=True, slots=True)
class SyntheticCall:
    """A request as a harness sends it, with its whole history, and what the model answers."""

    request: CanonicalRequest
    answer: str


def synthetic_run(shape: RunShape, seed: int) -> Iterator[SyntheticCall]:
    """The calls of a run, in order. The same shape and seed give the same run."""
    rng = random.Random(seed)
    opening = [Message("system", SYSTEM), Message("user", f"Mend the failing tests. {_text(rng, 400)}")]
    history = list(opening)
    waiting = list(shape.subagent_calls)
    spacing = max(1, shape.main_calls[0] // (len(waiting) + 1))
    for part, num_calls in enumerate(shape.main_calls):
        for number in range(num_calls):
            delegates = part == 0 and bool(waiting) and (number + 1) % spacing == 0
            task = f"Find where {_text(rng, 200)} is used and report it."
            answer = _text(rng, shape.answer_chars)
            if delegates:
                answer += json.dumps({"name": "task", "arguments": {"prompt": task}})
            yield _call(history, answer)
            output = _text(rng, shape.tool_chars)
            if delegates:
                report = ""
                for call in _subagent(task, waiting.pop(0), shape, rng):
                    yield call
                    report = call.answer
                output = report
            history += [Message("assistant", answer), Message("user", output)]
        if part + 1 < len(shape.main_calls):
            history.append(Message("user", "Summarise this conversation."))
            summary = _text(rng, shape.answer_chars)
            yield _call(history, summary)
            history = [*opening, Message("user", f"Go on from this summary of what was done.\n{summary}")]


def _subagent(task: str, num_calls: int, shape: RunShape, rng: random.Random) -> Iterator[SyntheticCall]:
    history = [Message("system", SUBAGENT_SYSTEM), Message("user", task)]
    for _ in range(num_calls):
        call = _call(history, _text(rng, shape.answer_chars))
        yield replace(call, request=replace(call.request, tools=TOOLS[:3]))
        history += [Message("assistant", call.answer), Message("user", _text(rng, shape.tool_chars))]


def _call(history: Sequence[Message], answer: str) -> SyntheticCall:
    request = CanonicalRequest("openai_chat", "policy", tuple(map(_as_parsed, history)), TOOLS)
    return SyntheticCall(request, answer)


def _as_parsed(message: Message) -> Message:
    """A message with a text of its own, as a parser of the next request makes it: nothing is the same object."""
    return replace(message, content="".join((message.content[:1], message.content[1:])))


def _text(rng: random.Random, num_chars: int) -> str:
    pieces: list[str] = []
    size = 0
    while size < num_chars:
        piece = rng.choice(_SYLLABLES)
        pieces.append(piece)
        size += len(piece)
    return "".join(pieces).strip()
