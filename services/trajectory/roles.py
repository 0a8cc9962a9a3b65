"""What each call of a run was made for: the main conversation, a subagent's, a summary of either, or beside the work.

What the harness says is believed (``services.proxy.lineage``). Where it says nothing the content decides: a
conversation that is begun with the text of an answer goes on from that summary; one whose first prompt an earlier
answer wrote (into a tool call) was delegated; conversations with the same system prompt, or the same tools, are of one
agent; a few calls without tools that nobody delegated are beside the work of an agent that has tools.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.proxy.conversation import stable_messages
from services.proxy.types import CallPurpose, Message, ParsedAnswer
from services.trajectory.records import messages_of, tools_of
from services.trajectory.types import CallRecord, CallRole

MIN_CARRIED_CHARS = 40
"""Shorter texts are found anywhere: they show no connection."""
_MIN_LINE_CHARS = 20
_MAX_LINES = 64
"""So many lines of a long answer, evenly spread, stand for all: each is looked for in the whole opening."""
MAX_OPENING_CHARS = 1 << 17
"""A conversation that goes on from a summary has it near its beginning; all of a long one would take seconds."""
_MAX_CANDIDATES = 32
MAX_SIDE_CALLS = 3
"""A conversation of more calls does work of its own."""
_PROMPT_END_CHARS = 200
_MIN_PROMPT_CHARS = 10
"""Shorter prompts are found anywhere."""
_ANY_MAIN = -1
"""In place of an agent's number: the main agent, whichever that is."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: what is needed of the first request of one."""

    system: str
    """Digest of the system prompt, empty without one: a shard has thousands of runs, each with a long one."""
    tool_names: tuple[str, ...]
    text: str
    """Of the messages behind the system prompt, at most ``MAX_OPENING_CHARS``."""
    prompt: str
    """The last user message."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that nothing continues yet."""

    text: str
    """As the harness saw it: a conversation may go on from it."""
    told: str
    """All that it says, in tool calls too: it may delegate work."""


@dataclass(slots=True)
class _Conversation:
    """Calls that continue one another, from a call without a parent."""

    first_call: str
    agent_id: str
    purpose: CallPurpose
    """Of its first call."""
    opening: Opening
    """Without its text."""
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
    _purposes: dict[str, CallPurpose] = field(default_factory=dict)
    """Of the calls that are no turns."""
    _candidates: dict[str, _Answer] = field(default_factory=dict)
    """Answers that nothing continues yet, the newest last."""

    def add_call(self, record: CallRecord, opening: Opening | None) -> None:
        """Note a completed call. ``opening`` is needed of a call without a parent only."""
        self.add(
            record.call_id,
            record.parent_call_id,
            record.agent_id,
            opening,
            record.output_text if record.answer is None else record.answer.text,
            told=None if record.answer is None else _told(record.answer),
            purpose=record.purpose,
            parent_agent_id=record.parent_agent_id,
        )

    def add(
        self,
        call_id: str,
        parent_call_id: str | None,
        agent_id: str,
        opening: Opening | None,
        answer: str,
        *,
        told: str | None = None,
        purpose: CallPurpose = CallPurpose.TURN,
        parent_agent_id: str = "",
    ) -> None:
        """Note a completed call. ``told``: the answer with what its tool calls say; None: ``answer`` is all of it."""
        if purpose is CallPurpose.TURN and self._purposes.get(parent_call_id or "") is CallPurpose.SIDE:
            purpose = CallPurpose.SIDE  # what goes on from a side call is beside the work too
        if purpose is not CallPurpose.TURN:
            self._purposes[call_id] = purpose
        if parent_call_id is None:
            opening = opening or Opening("", (), "", "")
            number = self._begin(call_id, agent_id, opening, purpose, bool(parent_agent_id))
        else:
            number = self._conversation_of[parent_call_id]
            if agent_id and agent_id != self._conversations[number].agent_id:
                number = self._fork(call_id, agent_id, self._conversations[number].opening, purpose)
            elif purpose is not CallPurpose.SIDE:
                self._candidates.pop(parent_call_id, None)
        self._conversation_of[call_id] = number
        self._conversations[number].num_calls += 1
        if purpose is not CallPurpose.SIDE and len((told or answer).strip()) >= MIN_CARRIED_CHARS:
            self._candidates[call_id] = _Answer(answer, answer if told is None else told)
            if len(self._candidates) > _MAX_CANDIDATES:
                del self._candidates[next(iter(self._candidates))]

    def roles(self) -> dict[str, CallRole]:
        """The role of every call, as far as can be seen now."""
        main = self._main_agent()
        beside = self._beside(main)
        carried = self._carried(main, beside)
        roles: dict[str, CallRole] = {}
        for call_id, number in self._conversation_of.items():
            purpose = self._purposes.get(call_id, CallPurpose.TURN)
            is_main = carried.get(call_id, self._conversations[number].agent in (main, _ANY_MAIN))
            if purpose is CallPurpose.SIDE or (number in beside and call_id not in carried):
                roles[call_id] = CallRole.SIDE
            elif purpose is CallPurpose.COMPACTION or call_id in carried:
                roles[call_id] = CallRole.MAIN_SUMMARY if is_main else CallRole.SUBAGENT_SUMMARY
            else:
                roles[call_id] = CallRole.MAIN if is_main else CallRole.SUBAGENT
        return roles

    def _begin(self, call_id: str, agent_id: str, opening: Opening, purpose: CallPurpose, is_child: bool) -> int:
        number = len(self._conversations)
        summary, is_delegated, agent = None, is_child, number
        if purpose is CallPurpose.COMPACTION:
            agent = self._compacted_agent(agent_id, opening.text, number)
        elif purpose is CallPurpose.TURN:
            summary = self._summary_for(agent_id, opening.text)
            is_delegated |= summary is None and self._is_delegated(opening.prompt)
            source = None if summary is None else self._conversations[self._conversation_of[summary]]
            same = self._same_agent(agent_id, opening, is_delegated, source) or source
            agent = number if same is None else same.agent
        opening = Opening(opening.system, opening.tool_names, "", opening.prompt.strip()[-_PROMPT_END_CHARS:])
        self._conversations.append(_Conversation(call_id, agent_id, purpose, opening, is_delegated, summary, agent))
        return number

    def _fork(self, call_id: str, agent_id: str, opening: Opening, purpose: CallPurpose) -> int:
        """A conversation of an agent that was given another one's history."""
        number = len(self._conversations)
        same = next((one for one in reversed(self._conversations) if one.agent_id == agent_id), None)
        agent = number if same is None else same.agent
        self._conversations.append(_Conversation(call_id, agent_id, purpose, opening, True, None, agent))
        return number

    def _summary_for(self, agent_id: str, text: str) -> str | None:
        for call_id, answer in reversed(self._candidates.items()):
            asked_by = self._conversations[self._conversation_of[call_id]].agent_id
            if asked_by == agent_id and is_carried(answer.text, text):
                return call_id
        return None

    def _is_delegated(self, prompt: str) -> bool:
        prompt = prompt.strip()
        if len(prompt) < MIN_CARRIED_CHARS:
            return False
        forms = _told_forms(prompt)
        return any(form in answer.told for answer in self._candidates.values() for form in forms)

    def _same_agent(
        self, agent_id: str, opening: Opening, is_delegated: bool, source: _Conversation | None
    ) -> _Conversation | None:
        """The newest conversation of the same agent: by the harness's word, else by system prompt and tools, and of
        such rather that of the summary that it goes on from, or else one that was not delegated."""
        named = [one for one in self._conversations if one.agent_id == agent_id and one.purpose is CallPurpose.TURN]
        if agent_id:
            return named[-1] if named else None
        alike = [] if is_delegated else [one for one in named if _is_alike(one.opening, opening)]

        def rank(one: _Conversation) -> tuple[bool, bool]:
            return source is not None and one.agent == source.agent, not one.is_delegated

        return max(reversed(alike), key=rank, default=None)

    def _compacted_agent(self, agent_id: str, text: str, number: int) -> int:
        """The agent whose conversation a request of its own summarises: the one whose prompt its text begins with."""
        known = [one for one in self._conversations if one.agent_id == agent_id and one.purpose is CallPurpose.TURN]
        if agent_id:
            return known[-1].agent if known else number
        found: list[tuple[int, bool, int]] = []
        for one in known:
            at = text.find(one.opening.prompt) if len(one.opening.prompt) >= _MIN_PROMPT_CHARS else -1
            if at >= 0:
                found.append((at, not one.opening.tool_names, one.agent))
        return min(found)[2] if found else _ANY_MAIN

    def _main_agent(self) -> int:
        """Not delegated, unnamed, with tools, the one with the most calls, the first."""
        turns = [one for one in self._conversations if one.purpose is CallPurpose.TURN]
        if not turns:
            return _ANY_MAIN
        delegated = {conversation.agent for conversation in turns if conversation.is_delegated}
        num_calls: Counter[int] = Counter()
        for conversation in turns:
            num_calls[conversation.agent] += conversation.num_calls

        def rank(conversation: _Conversation) -> tuple[bool, bool, bool, int]:
            return (
                conversation.agent not in delegated,
                not conversation.agent_id,
                bool(conversation.opening.tool_names),
                num_calls[conversation.agent],
            )

        return max(turns, key=rank).agent  # max keeps the first of equals

    def _beside(self, main: int) -> set[int]:
        """The conversations that are no agent's: without tools, unnamed, not delegated, short, beside a main agent
        with tools."""
        with_tools = {one.agent for one in self._conversations if one.opening.tool_names}
        if main not in with_tools:
            return set()
        agents = {one.agent for one in self._conversations if one.agent_id or one.is_delegated} | with_tools
        return {
            number
            for number, one in enumerate(self._conversations)
            if one.purpose is CallPurpose.TURN and one.agent not in agents and one.num_calls <= MAX_SIDE_CALLS
        }

    def _carried(self, main: int, beside: set[int]) -> dict[str, bool]:
        """The calls from whose answers conversations go on, and whether the main one does."""
        carried: dict[str, bool] = {}
        for number, one in enumerate(self._conversations):
            if one.summary is not None and number not in beside:
                carried[one.summary] = carried.get(one.summary, False) or one.agent == main
        return carried


def is_carried(answer: str, text: str) -> bool:
    """Whether a text contains an answer, or the better half of it by lines: harnesses cut and frame summaries."""
    answer = answer.strip()
    if len(answer) < MIN_CARRIED_CHARS:
        return False
    if answer in text:
        return True
    lines = [line.strip() for line in answer.splitlines() if len(line.strip()) >= _MIN_LINE_CHARS]
    every = -(-len(lines) // _MAX_LINES) or 1
    num_carried = every * sum(len(line) for line in lines[::every] if line in text)
    return num_carried >= MIN_CARRIED_CHARS and 2 * num_carried >= len(answer)


def opening_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Opening:
    """The opening of a request."""
    messages = stable_messages(messages)
    told = [message.content for message in messages if message.role != "system"]
    asked = [message.content for message in messages if message.role == "user"]
    system = "\n".join(message.content for message in messages if message.role == "system")
    digest = hashlib.blake2b(system.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Opening(
        system=digest if system else "",
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
        book.add_call(call, opening)
    return book.roles()


def _is_alike(one: Opening, other: Opening) -> bool:
    """Whether two conversations may be of one agent. Two without a system prompt are alike if their tools are."""
    if one.tool_names == other.tool_names and (one.tool_names or one.system == other.system):
        return True
    return one.system == other.system != ""


def _told_forms(prompt: str) -> set[str]:
    """How a prompt may stand in an answer: whole or, since harnesses put reminders before it, its last long line."""
    lines = [line.strip() for line in prompt.splitlines() if len(line.strip()) >= MIN_CARRIED_CHARS]
    wanted = {prompt, *lines[-1:]}
    return {form for one in wanted for form in (one, json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1])}


def _told(answer: ParsedAnswer) -> str:
    """An answer's text and the texts in the arguments of its tool calls."""
    return "\n".join([answer.text, *(text for call in answer.tool_calls for text in _texts(call.arguments))])


def _texts(value: Any) -> Iterator[str]:
    """Every text in JSON-ready data."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)
