"""Canonical requests and answers: what every dialect is parsed into and answered from, what a shard matches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common.packed import Packed


@dataclass(frozen=True, slots=True)
class ToolCall(Packed):
    """A tool call of an assistant message. ``arguments`` is an object, never a JSON string."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message(Packed):
    """One canonical message. Text parts of a message are joined; equality is structural."""

    role: str
    """'system', 'user', 'assistant' or 'tool'; 'developer' becomes 'system'."""
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """On a tool message: the call that it answers."""


class ToolMode(StrEnum):
    """Whether an answer may call tools."""

    AUTO = "auto"
    NONE = "none"
    """It may not: what looks like a call is text."""
    REQUIRED = "required"
    """It must: the answer is made under a grammar, and not trained."""


@dataclass(frozen=True, slots=True)
class ToolChoice(Packed):
    """What a harness allows of its tools in one answer."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    """With REQUIRED: the one tool that must be called; empty: any."""
    is_parallel: bool = True
    """False: at most one call an answer."""


class CallPurpose(StrEnum):
    """What a call is for, as far as its headers, its body or its form tell."""

    TURN = "turn"
    """A turn of an agent's conversation, or not told."""
    COMPACTION = "compaction"
    """It writes the summary from which its conversation will go on."""
    SIDE = "side"
    """A title, a memory, a check: beside the work, never trained."""


@dataclass(frozen=True, slots=True)
class Lineage(Packed):
    """Who asks, where a harness tells. Empty strings: not told."""

    session_id: str = ""
    agent_id: str = ""
    """Empty for the main agent of a harness that names its other agents only."""
    parent_agent_id: str = ""
    purpose: CallPurpose = CallPurpose.TURN


@dataclass(frozen=True, slots=True)
class CanonicalRequest(Packed):
    """A harness's model request, freed of its dialect."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function tools in OpenAI's form (type, function: name, description, parameters)."""
    stream: bool = False
    include_usage: bool = False
    """The client asked for a usage chunk at the end of a stream."""
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_p, max_tokens, stop, seed ... as the harness asked for them, under OpenAI's names."""
    tool_choice: ToolChoice = ToolChoice()
    response_schema: dict[str, Any] | None = None
    """JSON schema that the answer's text must satisfy; ``{"type": "object"}``: any JSON object. None: free text."""
    num_choices: int = 1
    """``n``: so many independent answers."""
    choice: int = 0
    """Which of them one call makes."""
    previous_call_id: str = ""
    """The stored call behind whose answer ``messages`` stand (Responses' ``previous_response_id``)."""
    num_instructions: int = 0
    """Leading system messages that hold for this request only; one that names it as its previous has its own."""
    lineage: Lineage = Lineage()
    is_retry: bool = False
    """The client says that it sends this request again."""
    unused_fields: tuple[str, ...] = ()
    """Names of fields that were accepted and recorded, but change nothing."""
    answer_form: dict[str, Any] = field(default_factory=dict)
    """What its dialect's answers need to know besides: small, JSON-ready, read by that dialect alone."""


class DeltaKind(StrEnum):
    """What a piece of an answer is."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. Tool calls come whole."""

    kind: DeltaKind
    text: str = ""
    """Of REASONING and TEXT."""
    tool_call: ToolCall | None = None
    """Of TOOL_CALL."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer(Packed):
    """An answer's text, told apart: reasoning first, then text, then tool calls."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed_calls: int = 0
    """What began as tool calls but could not be read; it is part of ``text``."""

    @property
    def message(self) -> Message:
        """The answer as the message that a harness sends back."""
        return Message("assistant", self.text, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, over all its choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Of the prompt: already in a prefix cache."""
    num_reasoning_tokens: int = 0
    """Of the output."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    index: int
    answer: ParsedAnswer
    finish_reason: str
    """'stop' or 'length'."""
    stop_string: str = ""
    """The stop string that ended it; empty: the model ended its turn, or a limit did."""
