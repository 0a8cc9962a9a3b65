"""Token in, token out: prompts are built on the ids that were sampled, never on a new rendering of them.

A request that continues a stored call gets that call's prompt ids, its output ids, and the tokens of only the
text that the chat template puts behind the model's own output. Where the model's text is canonical
(``encode(decode(ids)) == ids``) the result equals the rendering of the whole conversation; where it is not, the
sampled ids are the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from services.common.errors import TemplateError
from services.proxy.conversation import stable_messages
from services.proxy.types import CanonicalRequest, Message

TokenIds = NDArray[np.int32]

_ALWAYS_WHOLE = 16
"""Conversations of so few messages are rendered as a whole."""
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

    @property
    def is_thread_safe(self) -> bool:
        """Several threads may render and encode at once."""
        ...


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A completed call, as a prompt is built on it."""

    call_id: str
    num_messages: int
    """Of its request: in a request that continues it, its answer stands at this index."""
    history: tuple[TokenIds, ...]
    """Its prompt and its answer, int32, in pieces whose concatenation they are."""
    last_output_id: int
    """The last token that the model sampled: its end of turn, unless it was cut. -1 if it sampled none."""


class Prompt(NamedTuple):
    """A prompt's tokens and how they came about."""

    ids: TokenIds
    """int32 ``[num_prompt_tokens]``."""
    num_new_tokens: int
    """Tokens at the end that were tokenised for this prompt; the others are stored ids."""
    is_false_fork: bool
    """The conversation continues a stored call, but the template does not let its tail be told apart, so the
    whole was rendered again."""


class Bridge:
    """Builds prompts on stored calls.

    What a chat template puts behind an answer hardly ever depends on what stands far before it, and rendering a long
    conversation costs time in each call. So only a window of it is rendered: its head, the last user message before
    the answer, the answer, and what is new. Short conversations and, of long ones, each whose length passes a power
    of two are rendered as a whole too and compared; a template that once differs is rendered as a whole from then on.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._is_windowed = True

    def prompt(self, matched: StoredCall | None, request: CanonicalRequest) -> Prompt:
        """The prompt of a request, built on the stored ids of the call that it continues.

        Only new text is tokenised. Raises ``TemplateError`` if the chat template refuses the messages.
        """
        messages = stable_messages(request.messages)
        tail = None if matched is None else self._tail(matched.num_messages, messages, request.tools)
        if matched is None or tail is None:
            text = self._renderer.render(messages, request.tools, add_generation_prompt=True)
            rendered = self._renderer.encode(text)
            return Prompt(np.asarray(rendered, dtype=np.int32), len(rendered), is_false_fork=matched is not None)
        tail_ids = np.asarray(_tail_ids(self._renderer, matched, tail), dtype=np.int32)
        return Prompt(np.concatenate([*matched.history, tail_ids]), len(tail_ids), is_false_fork=False)

    def _tail(self, at: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str | None:
        is_checked = len(messages) <= _ALWAYS_WHOLE or at.bit_length() != len(messages).bit_length()
        if not self._is_windowed:
            return _tail_text(self._renderer, at, messages, tools)
        window, window_at = _window(messages, at)
        tail = _tail_text(self._renderer, window_at, window, tools)
        if tail is None or is_checked:
            whole = _tail_text(self._renderer, at, messages, tools)
            self._is_windowed = whole == tail
            return whole
        return tail


def _window(messages: Sequence[Message], at: int) -> tuple[tuple[Message, ...], int]:
    """The part of a conversation that what follows its answer ``at`` is rendered in, and where the answer is in it."""
    num_head = next((index for index, one in enumerate(messages[:at]) if one.role != "system"), at)
    asked = next((index for index in range(at - 1, num_head - 1, -1) if messages[index].role == "user"), None)
    head = messages[:num_head] if asked is None else (*messages[:num_head], messages[asked])
    return (*head, *messages[at:]), len(head)


def _tail_text(renderer: Renderer, at: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str | None:
    """What the template puts behind the model's own output ``at`` in a conversation: the end of its turn and
    everything new.

    The answer is rendered as a mark that occurs nowhere else, and the text behind the mark is taken, so a
    template that changes earlier turns (drops old reasoning, say) is no obstacle. A template that refuses tool
    messages without their calls is rendered as it is, if its rendering only grows. None if neither works.
    """
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
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]], at: int, marked: Message
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
    last = matched.last_output_id
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
