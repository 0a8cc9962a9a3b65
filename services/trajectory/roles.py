"""What each call of a run was made for: the main conversation, a subagent's, or a summary of either.

A header of the harness that names its agent is believed. Without one the content decides: a conversation that is begun
with the text of an answer goes on from that summary; one whose first prompt an earlier answer wrote (into a tool call)
was delegated; conversations with the same system prompt, or the same tools, are of one agent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.proxy.conversation import stable_messages
from services.proxy.types import Message
from services.trajectory.records import messages_of, tools_of
from services.trajectory.types import CallRecord, CallRole

MIN_CARRIED_CHARS = 40
"""Shorter texts are found anywhere: they show no connection."""
_MIN_LINE_CHARS = 20
MAX_OPENING_CHARS = 1 << 17
"""A conversation that goes on from a summary has it near its beginning; all of a long one would take seconds."""
_MAX_CANDIDATES = 32
_SUMMARY_OF = {CallRole.MAIN: CallRole.MAIN_SUMMARY, CallRole.SUBAGENT: CallRole.SUBAGENT_SUMMARY}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: what is needed of the first request of one."""

    system: str
    """Digest of the system prompt: a shard has thousands of runs, each with a long one."""
    tool_names: tuple[str, ...]
    text: str
    """Of the messages behind the system prompt, at most ``MAX_OPENING_CHARS``."""
    prompt: str
    """The last user message."""


@dataclass(slots=True)
class _Conversation:
    """Calls that continue one another, from a call without a parent."""

    first_call: str
    agent_id: str
    system: str
    tool_names: tuple[str, ...]
    is_delegated: bool
    summary: str | None
    """The call whose answer it goes on from."""
    agent: int
    """Conversations of one agent have one number."""
    num_calls: int = 0


@dataclass
class RoleBook:
    """The evidence of one attempt's calls, in the order in which they were completed."""

    _conversations: list[_Conversation] = field(default_factory=list)
    _conversation_of: dict[str, int] = field(default_factory=dict)
    _candidates: dict[str, str] = field(default_factory=dict)
    """Answers that nothing continues yet, the newest last."""

    def add(
        self, call_id: str, parent_call_id: str | None, agent_id: str, opening: Opening | None, answer: str
    ) -> None:
        """Note a completed call. ``opening`` is needed of a call without a parent only."""
        if parent_call_id is None:
            self._conversation_of[call_id] = self._begin(call_id, agent_id, opening or Opening("", (), "", ""))
        else:
            self._conversation_of[call_id] = self._conversation_of[parent_call_id]
            self._candidates.pop(parent_call_id, None)
        self._conversations[self._conversation_of[call_id]].num_calls += 1
        if len(answer.strip()) >= MIN_CARRIED_CHARS:
            self._candidates[call_id] = answer
            if len(self._candidates) > _MAX_CANDIDATES:
                del self._candidates[next(iter(self._candidates))]

    def roles(self) -> dict[str, CallRole]:
        """The role of every call, as far as can be seen now."""
        main = self._main_agent()
        roles = {
            call_id: CallRole.MAIN if self._conversations[number].agent == main else CallRole.SUBAGENT
            for call_id, number in self._conversation_of.items()
        }
        for conversation in self._conversations:
            if conversation.summary is not None:
                roles[conversation.summary] = _SUMMARY_OF[roles[conversation.first_call]]
        return roles

    def _begin(self, call_id: str, agent_id: str, opening: Opening) -> int:
        summary = self._summary_for(agent_id, opening.text)
        is_delegated = summary is None and self._is_delegated(opening.prompt)
        same = self._same_agent(agent_id, opening, is_delegated)
        if same is None and summary is not None:
            same = self._conversations[self._conversation_of[summary]]
        agent = len(self._conversations) if same is None else same.agent
        self._conversations.append(
            _Conversation(call_id, agent_id, opening.system, opening.tool_names, is_delegated, summary, agent)
        )
        return len(self._conversations) - 1

    def _summary_for(self, agent_id: str, text: str) -> str | None:
        for call_id, answer in reversed(self._candidates.items()):
            if self._conversations[self._conversation_of[call_id]].agent_id == agent_id and is_carried(answer, text):
                return call_id
        return None

    def _is_delegated(self, prompt: str) -> bool:
        prompt = prompt.strip()
        if len(prompt) < MIN_CARRIED_CHARS:
            return False
        forms = {prompt, json.dumps(prompt)[1:-1], json.dumps(prompt, ensure_ascii=False)[1:-1]}
        return any(form in answer for answer in self._candidates.values() for form in forms)

    def _same_agent(self, agent_id: str, opening: Opening, is_delegated: bool) -> _Conversation | None:
        """The newest conversation of the same agent: by the harness's word, else by system prompt and tools."""
        for known in reversed(self._conversations):
            if known.agent_id != agent_id:
                continue
            if agent_id:
                return known
            is_alike = known.system == opening.system or (
                opening.tool_names != () and known.tool_names == opening.tool_names
            )
            if is_alike and not is_delegated:
                return known
        return None

    def _main_agent(self) -> int:
        """Not delegated, unnamed, with tools, the one with the most calls, the first."""
        if not self._conversations:
            return -1
        delegated = {conversation.agent for conversation in self._conversations if conversation.is_delegated}
        num_calls: Counter[int] = Counter()
        for conversation in self._conversations:
            num_calls[conversation.agent] += conversation.num_calls

        def rank(conversation: _Conversation) -> tuple[bool, bool, bool, int]:
            return (
                conversation.agent not in delegated,
                not conversation.agent_id,
                bool(conversation.tool_names),
                num_calls[conversation.agent],
            )

        return max(self._conversations, key=rank).agent  # max keeps the first of equals


def is_carried(answer: str, text: str) -> bool:
    """Whether a text contains an answer, or the better half of it by lines: harnesses cut and frame summaries."""
    answer = answer.strip()
    if len(answer) < MIN_CARRIED_CHARS:
        return False
    if answer in text:
        return True
    lines = [line.strip() for line in answer.splitlines() if len(line.strip()) >= _MIN_LINE_CHARS]
    num_carried = sum(len(line) for line in lines if line in text)
    return num_carried >= MIN_CARRIED_CHARS and 2 * num_carried >= len(answer)


def opening_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Opening:
    """The opening of a request."""
    messages = stable_messages(messages)
    told = [message.content for message in messages if message.role != "system"]
    asked = [message.content for message in messages if message.role == "user"]
    system = "\n".join(message.content for message in messages if message.role == "system")
    return Opening(
        system=hashlib.blake2b(system.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(),
        tool_names=tuple(sorted(str(tool.get("function", tool).get("name", "")) for tool in tools)),
        text="\n".join(told)[:MAX_OPENING_CHARS],
        prompt=asked[-1] if asked else "",
    )


def roles_of(calls: Sequence[CallRecord]) -> dict[str, CallRole]:
    """The role of each call of an attempt, from its stored records in the order in which they were completed."""
    book = RoleBook()
    for call in calls:
        opening = None
        if call.parent_call_id is None:
            opening = opening_of(messages_of(call.request), tools_of(call.request))
        book.add(call.call_id, call.parent_call_id, call.agent_id, opening, call.output_text)
    return book.roles()
