"""Canonical messages: what every dialect is parsed into, and what the run's shard matches and renders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message. ``arguments`` is an object, never a JSON string."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One canonical message. Text parts of a message are joined; equality is structural."""

    role: str
    """'system', 'user', 'assistant' or 'tool'; 'developer' becomes 'system'."""
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """On a tool message: the call that it answers."""


@dataclass(frozen=True, slots=True)
class CanonicalRequest:
    """A harness's model request, freed of its dialect."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Function tools in OpenAI's form (name, description, parameters)."""
    stream: bool = False
    include_usage: bool = False
    """The client asked for a usage chunk at the end of a stream."""
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_p, max_tokens, stop, seed ... as the harness asked for them, under OpenAI's names."""
    agent_id: str = ""
    """Which of the harness's agents asks, where a header of its names it."""
    unused_fields: tuple[str, ...] = ()
    """Names of fields that were accepted and recorded, but change nothing."""
