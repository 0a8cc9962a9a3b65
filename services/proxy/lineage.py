"""Who makes a model call, and what for: read from headers and bodies, harness by harness.

What a harness says of itself is believed; a form that nothing else has (a cap of one token, a summary prompt's
marker) is the second way. What needs the run's other calls is judged in ``services.trajectory.roles``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.proxy.types import CallPurpose, Lineage

_CODEX_METADATA = "x-codex-turn-metadata"
_CODEX_SIDE_KINDS = frozenset({"memory", "memories", "memory_consolidation", "prewarm", "title"})
_COMPACTION_KINDS = frozenset({"compact", "compaction"})
_CLAUDE_SUBAGENT = "cc_is_subagent=true"
_CLAUDE_UNNAMED_SUBAGENT = "subagent"


def lineage_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    """The lineage of a request. Header names are in lower case; nothing in headers or body makes it raise."""
    if "x-claude-code-session-id" in headers or _is_claude_code(body):
        return _claude_code(headers, body)
    codex = _codex_metadata(headers, body)
    if codex or "thread-id" in headers:
        return _codex(headers, codex)
    if "x-session-id" in headers or "x-session-affinity" in headers:
        return _opencode(headers, body)
    return Lineage(session_id=headers.get("session_id", ""), purpose=_purpose(body))


def _claude_code(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    user = _object(_mapping(body.get("metadata")).get("user_id"))
    agent_id = headers.get("x-claude-code-agent-id", "")
    if not agent_id and any(_CLAUDE_SUBAGENT in text for text in _system_texts(body)):
        agent_id = _CLAUDE_UNNAMED_SUBAGENT
    return Lineage(
        session_id=headers.get("x-claude-code-session-id", "") or _text(user.get("session_id")),
        agent_id=agent_id,
        parent_agent_id=headers.get("x-claude-code-parent-agent-id", ""),
        purpose=_purpose(body),
    )


def _is_claude_code(body: Mapping[str, Any]) -> bool:
    return any("x-anthropic-billing-header" in text for text in _system_texts(body))


def _codex_metadata(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """What Codex says in a header, or else in the copy that its body has."""
    client = _mapping(body.get("client_metadata"))
    told = _object(headers.get(_CODEX_METADATA)) or _object(client.get(_CODEX_METADATA))
    return {**client, **told} if told or "thread_id" in client else {}


def _codex(headers: Mapping[str, str], metadata: Mapping[str, Any]) -> Lineage:
    session = headers.get("session-id", "") or _text(metadata.get("session_id"))
    thread = headers.get("thread-id", "") or _text(metadata.get("thread_id"))
    parent = headers.get("x-codex-parent-thread-id", "") or _text(metadata.get("parent_thread_id"))
    kinds = {_text(metadata.get("request_kind")), headers.get("x-openai-subagent", "")}
    if kinds & _COMPACTION_KINDS:
        purpose = CallPurpose.COMPACTION
    elif kinds & _CODEX_SIDE_KINDS:
        purpose = CallPurpose.SIDE
    else:
        purpose = CallPurpose.TURN
    return Lineage(
        session_id=session,
        agent_id="" if thread == session else thread,
        parent_agent_id="" if parent == session else parent,
        purpose=purpose,
    )


def _opencode(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    session = headers.get("x-session-id", "") or headers.get("x-session-affinity", "")
    parent = headers.get("x-parent-session-id", "")
    return Lineage(
        session_id=parent or session,
        agent_id=session if parent else "",
        purpose=_purpose(body),
    )


def _purpose(body: Mapping[str, Any]) -> CallPurpose:
    """By form: what asks for one token checks a quota or warms a cache."""
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    return CallPurpose.SIDE if 1 in limits and not body.get("tools") else CallPurpose.TURN


def _system_texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts of the system prompt of a body in Anthropic's form."""
    system = body.get("system")
    for block in system if isinstance(system, list) else [system]:
        yield _text(block.get("text")) if isinstance(block, Mapping) else _text(block)


def _object(value: Any) -> Mapping[str, Any]:
    """A JSON object, or its text; anything else is an empty one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return _mapping(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
