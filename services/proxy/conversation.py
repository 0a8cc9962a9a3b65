"""Which stored call a request continues: conversations as a tree of messages, kept as digests only.

A harness sends its whole history with every call. A walk down the tree costs one digest and one look-up a message;
what was seen before is neither rendered nor compared again, and no message's text is kept.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from services.common.errors import InvariantError
from services.proxy.types import Message

_ROLES = {"user": 1, "assistant": 2, "system": 3}
"""Part of the seed of a plain message's digest."""
_BILLING_HEADER = "x-anthropic-billing-header"
_MARSHAL_VERSION = 2
"""Ten times as fast as canonical JSON, and equal for what was sent alike; later versions depend on object identity."""


def stable_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages as they are matched and rendered: without the billing line that changes with every request.

    The very same sequence where there is no such line.
    """
    billed = [at for at, one in enumerate(messages) if one.role == "system" and _BILLING_HEADER in one.content.lower()]
    if not billed:
        return messages
    stable = list(messages)
    for at in billed:
        stable[at] = _without_billing(stable[at])
    return tuple(stable)


def without_cut_answers(messages: Sequence[Message]) -> Sequence[Message]:
    """A conversation without what a harness kept of an answer that was cut, in front of the whole one that it got when
    it asked again. The very same sequence where there is nothing of the kind."""
    cut = {at for at in range(len(messages) - 1) if _is_cut(messages[at], messages[at + 1])}
    return tuple(one for at, one in enumerate(messages) if at not in cut) if cut else messages


def _is_cut(message: Message, following: Message) -> bool:
    return (
        message.role == following.role == "assistant"
        and not message.tool_calls
        and following.content.strip().startswith(message.content.strip())
        and following.reasoning.strip().startswith(message.reasoning.strip())
    )


@dataclass(frozen=True, slots=True)
class Walk:
    """A request's way through the tree of messages."""

    nodes: tuple[int, ...]
    """The node of each prefix of the messages."""
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Continued:
    """A stored call as a request continues it."""

    call_id: str
    num_messages: int
    """Of the stored call's request: in a request that continues it, the answer stands at this index."""


@dataclass(slots=True)
class _Node:
    """A prefix of a conversation."""

    parent: int
    depth: int
    """Number of messages."""
    key: bytes
    """Digest that structurally equal prefixes share."""
    ordinal: int
    """Tool calls before this message."""
    root: int
    """The empty prefix with the same tools."""
    tool_call_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Answered:
    call_id: str
    node: int
    """Of the last message of its request."""
    reasoning: bytes
    tools: int


@dataclass
class ConversationIndex:
    """The conversations of one attempt of a run.

    Structurally equal means: the same tools, roles and contents (an assistant's without surrounding white space),
    tool calls equal by value whatever their ids, tool messages answering the same calls. Reasoning is left out, for
    harnesses drop it.
    """

    _nodes: list[_Node] = field(default_factory=list)
    _children: dict[bytes, int] = field(default_factory=dict)
    """Digest of a prefix and a message as it was sent -> the prefix with that message."""
    _tools: dict[bytes, int] = field(default_factory=dict)
    """Digest of a set of tools, as it was sent and in its canonical form -> the node of its empty prefix."""
    _answers: dict[bytes, list[_Answered]] = field(default_factory=dict)
    """Structural key of request and answer -> the calls that had them, oldest first."""
    _by_call: dict[str, _Answered] = field(default_factory=dict)

    def walk(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Walk:
        """The way of a request; what is new of it is noted. ``messages`` are stable ones (``stable_messages``)."""
        return self._walk(self._root(tools), messages)

    def walk_on(self, call_id: str, num_shared: int, messages: Sequence[Message]) -> Walk:
        """The way of a request whose first ``num_shared`` messages and whose tools are those of a stored call's."""
        answered = self._answered(call_id)
        node = answered.node
        while self._nodes[node].depth > num_shared:
            node = self._nodes[node].parent
        return self._walk(node, messages)

    def match(self, walk: Walk) -> Continued | None:
        """The stored call that a request continues: the longest request plus answer that begins it.

        Of several equal ones that with the same reasoning wins, then the newest.
        """
        for index in range(len(walk.nodes) - 1, 0, -1):
            found = self._answers.get(self._nodes[walk.nodes[index]].key)
            if found:
                reasoning = _digest(walk.messages[index].reasoning.strip())
                best = next((one for one in reversed(found) if one.reasoning == reasoning), found[-1])
                return Continued(best.call_id, self._nodes[best.node].depth)
        return None

    def num_shared(self, call_id: str, walk: Walk) -> int:
        """Leading messages of a request that were sent just so with a stored call."""
        on_way = set(walk.nodes)
        node = self._answered(call_id).node
        while self._nodes[node].depth and node not in on_way:
            node = self._nodes[node].parent
        return self._nodes[node].depth

    def shares_tools(self, call_id: str, tools: Sequence[dict[str, Any]]) -> bool:
        return self._answered(call_id).tools == self._root(tools)

    def add(self, call_id: str, node: int, answer: Message) -> None:
        """Note that a call was answered whose request's way ends at ``node``."""
        (whole,) = self._walk(node, (answer,)).nodes
        answered = _Answered(call_id, node, _digest(answer.reasoning.strip()), self._nodes[node].root)
        self._by_call[call_id] = answered
        self._answers.setdefault(self._nodes[whole].key, []).append(answered)

    def _walk(self, node: int, messages: Sequence[Message]) -> Walk:
        nodes = []
        known, roles, digest = self._children.get, _ROLES, xxhash.xxh3_128_digest
        for message in messages:  # once for each message of each request: hence no call of a function of ours
            role = roles.get(message.role)
            content = message.content.encode("utf-8", "surrogatepass")
            if role is None or message.tool_calls or message.reasoning or message.tool_call_id:
                edge = digest(content, 4 * node) + _rest_as_sent(message)
            else:
                edge = digest(content, 4 * node + role)
            below = known(edge)
            if below is None:
                below = self._children[edge] = self._add(node, message)
            node = below
            nodes.append(node)
        return Walk(tuple(nodes), messages)

    def _add(self, parent: int, message: Message) -> int:
        above = self._nodes[parent]
        ordinal = above.ordinal + len(above.tool_call_ids)
        answered = self._ordinal_of(parent, message.tool_call_id) if message.tool_call_id else None
        content = message.content.strip() if message.role == "assistant" else message.content
        calls = [[call.name, call.arguments, ordinal + at] for at, call in enumerate(message.tool_calls)]
        key = _digest(above.key.hex() + _canonical_json([message.role, content, calls, answered]))
        ids = tuple(call.call_id for call in message.tool_calls)
        self._nodes.append(_Node(parent, above.depth + 1, key, ordinal, above.root, ids))
        return len(self._nodes) - 1

    def _ordinal_of(self, node: int, tool_call_id: str) -> int | str:
        """Which of the conversation's tool calls a tool message answers; the id itself if there is none."""
        while self._nodes[node].depth:
            at = self._nodes[node]
            if tool_call_id in at.tool_call_ids:
                return at.ordinal + at.tool_call_ids.index(tool_call_id)
            node = at.parent
        return tool_call_id

    def _root(self, tools: Sequence[dict[str, Any]]) -> int:
        sent = xxhash.xxh3_128_digest(marshal.dumps(list(tools), _MARSHAL_VERSION))
        node = self._tools.get(sent)
        if node is None:
            key = _digest(_canonical_json(list(tools)))
            if key not in self._tools:
                self._tools[key] = len(self._nodes)
                self._nodes.append(_Node(-1, 0, key, 0, self._tools[key]))
            node = self._tools[sent] = self._tools[key]
        return node

    def _answered(self, call_id: str) -> _Answered:
        answered = self._by_call.get(call_id)
        if answered is None:
            raise InvariantError(f"no answered call {call_id} in this conversation")
        return answered


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))  # a cut stream may leave half a pair


def _rest_as_sent(message: Message) -> bytes:
    """Digest of all of a message but its content."""
    calls: list[list[Any]] = [[call.call_id, call.name, call.arguments] for call in message.tool_calls]
    return _digest(_canonical_json([message.role, message.tool_call_id, message.reasoning, calls]))


def _without_billing(message: Message) -> Message:
    lines = message.content.splitlines(keepends=True)
    kept = [line for line in lines if not line.lstrip().lower().startswith(_BILLING_HEADER)]
    return replace(message, content="".join(kept))


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
