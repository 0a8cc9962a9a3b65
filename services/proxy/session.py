"""Token in, token out: prompts are built on the ids that were sampled, never on a new rendering of them.

A request that continues a stored call gets that call's prompt ids, its output ids, and the tokens of only the
text that the chat template puts behind the model's own output. Where the model's text is canonical
(``encode(decode(ids)) == ids``) the result equals the rendering of the whole conversation; where it is not, the
sampled ids are the truth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from services.common.errors import TemplateError
from services.proxy.types import CanonicalRequest, Message, ToolCall

TokenIds = NDArray[np.int32]

_BILLING_HEADER = "x-anthropic-billing-header"
_SENTINEL = "\ue000tidegate:{}\ue001"


class Renderer(Protocol):
    """The chat template and the tokenizer of one model."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises ``TemplateError`` if the template refuses it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens may stand; nothing is added at its ends."""
        ...

    @property
    def end_of_turn(self) -> Mapping[int, str]:
        """The tokens at which a model's answer stops: id and text."""
        ...


@dataclass(frozen=True)
class StoredCall:
    """A completed call, as far as later prompts can be built on it."""

    call_id: str
    messages: tuple[Message, ...]
    """The messages of its request."""
    answer: Message
    """The assistant message as the harness saw it."""
    prompt_ids: TokenIds
    """int32 ``[num_prompt_tokens]``."""
    output_ids: TokenIds
    """int32 ``[num_output_tokens]``, the end-of-turn token included where it was sampled."""
    finish_reason: str
    """'stop' or 'length'."""
    tools: tuple[dict[str, Any], ...] = ()

    @cached_property
    def key(self) -> bytes:
        """Digest of the conversation up to and with the answer; equal for structurally equal conversations."""
        return prefix_keys((*self.messages, self.answer), self.tools)[-1]


class Prompt(NamedTuple):
    """A prompt's tokens and how they came about."""

    ids: TokenIds
    """int32 ``[num_prompt_tokens]``."""
    num_new_tokens: int
    """Tokens at the end that were tokenised for this prompt; the others are stored ids."""
    is_false_fork: bool
    """The conversation continues a stored call, but the template does not let its tail be told apart, so the
    whole was rendered again."""


def stable_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages as they are matched and rendered: without the billing line that changes with every request."""
    return tuple(_without_billing(message) for message in messages)


def prefix_keys(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[bytes]:
    """For each prefix of a conversation a digest that structurally equal conversations share.

    Equal means: the same tools, roles and contents (an assistant's content without surrounding white space),
    tool calls equal by value whatever their ids, tool messages answering the same calls. Reasoning is left out,
    for harnesses drop it.
    """
    state = hashlib.blake2b(_canonical_json(list(tools)).encode(), digest_size=16)
    ordinals: dict[str, int] = {}
    keys = []
    for message in stable_messages(messages):
        state.update(_canonical_json(_comparable(message, ordinals)).encode())
        state.update(b"\x00")
        keys.append(state.digest())
    return keys


def match(
    calls: Sequence[StoredCall], messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> StoredCall | None:
    """The stored call that a request continues: the longest request plus answer that is a prefix of ``messages``.

    Of several equal ones that with the same reasoning wins, then the newest (the last of ``calls``).
    """
    keys = prefix_keys(messages, tools)
    position = {key: index for index, key in enumerate(keys)}
    candidates = [(position[call.key], order, call) for order, call in enumerate(calls) if call.key in position]
    if not candidates:
        return None
    longest = max(index for index, _, _ in candidates)
    reasoning = messages[longest].reasoning.strip()

    def preference(candidate: tuple[int, int, StoredCall]) -> tuple[bool, int]:
        return candidate[2].answer.reasoning.strip() == reasoning, candidate[1]

    return max((one for one in candidates if one[0] == longest), key=preference)[2]


def build_prompt(renderer: Renderer, matched: StoredCall | None, request: CanonicalRequest) -> Prompt:
    """The prompt of a request, built on the stored ids of the call that it continues (``match``'s answer).

    Only new text is tokenised. Raises ``TemplateError`` if the chat template refuses the messages.
    """
    messages = stable_messages(request.messages)
    if matched is not None:
        tail = _tail_text(renderer, matched, messages, request.tools)
        if tail is not None:
            tail_ids = _tail_ids(renderer, matched, tail)
            ids = np.concatenate([matched.prompt_ids, matched.output_ids, np.asarray(tail_ids, dtype=np.int32)])
            return Prompt(ids.astype(np.int32, copy=False), len(tail_ids), is_false_fork=False)
    rendered = renderer.encode(renderer.render(messages, request.tools, add_generation_prompt=True))
    return Prompt(np.asarray(rendered, dtype=np.int32), len(rendered), is_false_fork=matched is not None)


def _tail_text(
    renderer: Renderer, matched: StoredCall, messages: tuple[Message, ...], tools: Sequence[dict[str, Any]]
) -> str | None:
    """What the template puts behind the model's own output: the end of its turn and everything new.

    The answer is rendered as a mark that occurs nowhere else, and the text behind the mark is taken, so a
    template that changes earlier turns (drops old reasoning, say) is no obstacle. A template that refuses tool
    messages without their calls is rendered as it is, if its rendering only grows. None if neither works.
    """
    at = len(matched.messages)
    mark = _unused_mark(messages)
    marked = Message(role="assistant", content=mark)
    try:
        text = renderer.render((*messages[:at], marked, *messages[at + 1 :]), tools, add_generation_prompt=True)
    except TemplateError:
        text = ""
    before, found, tail = text.partition(mark)
    if found and mark not in tail and before:
        return tail
    return _tail_by_growth(renderer, messages, tools, at, marked)


def _tail_by_growth(
    renderer: Renderer, messages: tuple[Message, ...], tools: Sequence[dict[str, Any]], at: int, marked: Message
) -> str | None:
    """The tail where the rendering up to the answer is a prefix of the whole rendering, else None."""
    try:
        _, found, turn_end = renderer.render((*messages[:at], marked), tools, add_generation_prompt=False).partition(
            marked.content
        )
        history = renderer.render(messages[: at + 1], tools, add_generation_prompt=False)
        whole = renderer.render(messages, tools, add_generation_prompt=True)
    except TemplateError:
        return None
    if not found or not history.endswith(turn_end) or not whole.startswith(history):
        return None
    return turn_end + whole[len(history) :]


def _tail_ids(renderer: Renderer, matched: StoredCall, tail: str) -> list[int]:
    """Tokens of the tail, without the end-of-turn token if the model sampled it itself."""
    last = int(matched.output_ids[-1]) if len(matched.output_ids) else -1
    end_text = renderer.end_of_turn.get(last)
    if end_text is None:
        return renderer.encode(tail)  # cut by a limit or a stop string: the template's ending is still missing
    before, found, _ = tail.partition(end_text)
    if not found or before.strip():
        return renderer.encode(tail)
    ids = renderer.encode(tail[len(before) :])
    return ids[1:] if ids and ids[0] == last else ids


def _unused_mark(messages: Sequence[Message]) -> str:
    number = 0
    while any(_SENTINEL.format(number) in message.content for message in messages):
        number += 1
    return _SENTINEL.format(number)


def _without_billing(message: Message) -> Message:
    if message.role != "system" or _BILLING_HEADER not in message.content.lower():
        return message
    lines = message.content.splitlines(keepends=True)
    kept = [line for line in lines if not line.lstrip().lower().startswith(_BILLING_HEADER)]
    return replace(message, content="".join(kept))


def _comparable(message: Message, ordinals: dict[str, int]) -> list[Any]:
    """A message as data whose equality is structural; call ids become ordinals of their first appearance."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [_comparable_call(call, ordinals) for call in message.tool_calls]
    answered = ordinals.setdefault(message.tool_call_id, len(ordinals)) if message.tool_call_id else None
    return [message.role, content, calls, answered]


def _comparable_call(call: ToolCall, ordinals: dict[str, int]) -> list[Any]:
    ordinal = ordinals.setdefault(call.call_id, len(ordinals)) if call.call_id else None
    return [call.name, call.arguments, ordinal]


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
