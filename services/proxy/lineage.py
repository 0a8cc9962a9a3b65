"""Who makes a model call, and what for: read from headers and bodies, harness by harness (docs/lineage.md).

What a harness says of itself is believed. Where it says nothing, the words with which harnesses ask for summaries and
titles tell what a call is for. What needs the run's other calls is judged in ``services.trajectory.roles``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.proxy.types import CallPurpose, Lineage

_CLAUDE_BILLING = "x-anthropic-billing-header"
_CLAUDE_SUBAGENT = "cc_is_subagent=true"
_CLAUDE_CLASSES = {
    "main": CallPurpose.TURN,
    "subagent": CallPurpose.TURN,
    "workflow": CallPurpose.TURN,
    "compaction": CallPurpose.COMPACTION,
    "auxiliary": CallPurpose.SIDE,
    "side_reply": CallPurpose.SIDE,
}
"""Of ``x-claude-code-request-class``: sent if the harness runs with ``CLAUDE_CODE_GATEWAY_HINT_HEADERS=1``."""
UNNAMED_SUBAGENT = "subagent"
"""The agent of a call that is said to be a subagent's, but not which one's."""

_CODEX_METADATA = "x-codex-turn-metadata"
_CODEX_PURPOSES = {
    "compaction": CallPurpose.COMPACTION,
    "compact": CallPurpose.COMPACTION,
    "memory": CallPurpose.SIDE,
    "memory_consolidation": CallPurpose.SIDE,
    "prewarm": CallPurpose.SIDE,
    "guardian": CallPurpose.SIDE,
    "thread_title": CallPurpose.SIDE,
}
"""Of the request kind, the kind of subagent and the thread's source."""

_SUMMARY_SYSTEMS = (
    "You are a helpful AI assistant tasked with summarizing conversations",  # Claude Code, opencode
    "You are a context summarization a",  # pi: assistant; opencode: agent
    "You are the component that summarizes",  # Qwen Code
    "*Briefly* summarize this partial conversation",  # aider
)
_SUMMARY_REQUESTS = (
    "your task is to create a detailed summary of",  # Claude Code
    "you are performing a context checkpoint compaction",  # Codex
    "produce the <state_snapshot>",  # Qwen Code
    "create a new anchored summary from the conversation",  # opencode
    "you are about to hand off your work to another ai agent",  # terminus-2
    "you are maintaining a context-aware state summary",  # OpenHands
)
"""In lower case."""
_SIDE_SYSTEMS = (
    "You are a title generator",  # opencode
    "Generate a concise, sentence-case title",  # Claude Code, Qwen Code
    "You are now acting as the managed memory extraction subagent",  # Qwen Code
    "You are performing a managed memory dream",  # Qwen Code
    "You are selecting memories that will be useful",  # Claude Code, Qwen Code
)
_SIDE_REQUESTS = (
    "You are now acting as the memory extraction subagent",  # Claude Code
    "[SUGGESTION MODE:",  # Claude Code
    "The user stepped away and is coming back",  # Claude Code
)
_SIDE_TOOLS = ["respond_in_schema"]
"""Qwen Code asks for titles and verdicts by this one tool."""
_MAX_SEEN_CHARS = 8192
"""Of a request's last text: its words stand before or behind what is to be summarised."""


def lineage_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    """The lineage of a request. Header names are in lower case; nothing in headers or body makes it raise."""
    if "x-claude-code-session-id" in headers or any(_CLAUDE_BILLING in text for text in _system_texts(body)):
        return _claude_code(headers, body)
    codex = _codex_metadata(headers, body)
    if codex:
        return _codex(codex, body)
    if "x-session-id" in headers or "x-session-affinity" in headers:
        return _opencode(headers, body)
    return Lineage(session_id=headers.get("session_id", ""), purpose=_purpose(body))


def _claude_code(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    user = _object(_mapping(body.get("metadata")).get("user_id"))
    agent_id = headers.get("x-claude-code-agent-id", "")
    if not agent_id and any(_CLAUDE_BILLING in text and _CLAUDE_SUBAGENT in text for text in _system_texts(body)):
        agent_id = UNNAMED_SUBAGENT
    purpose = _CLAUDE_CLASSES.get(headers.get("x-claude-code-request-class", ""))
    if "x-claude-code-compaction" in headers:
        purpose = CallPurpose.COMPACTION
    elif body.get("max_tokens") in (0, 1):
        purpose = CallPurpose.SIDE  # it checks a quota or warms a cache
    return Lineage(
        session_id=headers.get("x-claude-code-session-id", "") or _text(user.get("session_id")),
        agent_id=agent_id,
        parent_agent_id=headers.get("x-claude-code-parent-agent-id", ""),
        purpose=purpose or _purpose(body),
    )


def _codex_metadata(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """What Codex says: in headers, in the JSON of one of them, and in copies of both in the body. Headers win."""
    client = _mapping(body.get("client_metadata"))
    if not (_CODEX_METADATA in client or "thread_id" in client or _CODEX_METADATA in headers or "thread-id" in headers):
        return {}
    named = {
        "session_id": headers.get("session-id") or client.get("session_id"),
        "thread_id": headers.get("thread-id") or client.get("thread_id"),
        "parent_thread_id": headers.get("x-codex-parent-thread-id") or client.get("x-codex-parent-thread-id"),
        "subagent": headers.get("x-openai-subagent") or client.get("x-openai-subagent"),
        "is_memory": headers.get("x-openai-memgen-request"),
    }
    told = _object(headers.get(_CODEX_METADATA)) or _object(client.get(_CODEX_METADATA))
    return {**client, **told, **{name: value for name, value in named.items() if value}}


def _codex(told: Mapping[str, Any], body: Mapping[str, Any]) -> Lineage:
    session, thread = _text(told.get("session_id")), _text(told.get("thread_id"))
    parent = _text(told.get("parent_thread_id"))
    kinds = [_text(told.get(name)) for name in ("request_kind", "subagent", "subagent_kind", "thread_source")]
    purposes = {_CODEX_PURPOSES[kind] for kind in kinds if kind in _CODEX_PURPOSES}
    if told.get("is_memory") == "true":
        purposes.add(CallPurpose.SIDE)
    if CallPurpose.SIDE in purposes:
        purpose = CallPurpose.SIDE
    elif purposes or _last_item(body).get("type") == "compaction_trigger":
        purpose = CallPurpose.COMPACTION
    else:
        purpose = _purpose(body)
    agent_id = "" if thread == session else thread
    if not agent_id and told.get("thread_source") == "subagent":
        agent_id = _text(told.get("agent_name")) or UNNAMED_SUBAGENT
    return Lineage(session, agent_id, "" if parent == session else parent, purpose)


def _opencode(headers: Mapping[str, str], body: Mapping[str, Any]) -> Lineage:
    session = headers.get("x-session-id", "") or headers.get("x-session-affinity", "")
    is_child = "x-parent-session-id" in headers
    # the parent may be a child itself, but only its own calls tell: it is named as they name it
    return Lineage(
        session_id=session,
        agent_id=session if is_child else "",
        parent_agent_id=headers.get("x-parent-session-id", ""),
        purpose=_purpose(body),
    )


def _purpose(body: Mapping[str, Any]) -> CallPurpose:
    """What a call is for, by its own form and words."""
    systems = [text.lstrip() for text in _system_texts(body)]
    if any(text.startswith(_SUMMARY_SYSTEMS) for text in systems):
        return CallPurpose.COMPACTION
    asked = _last_asked(body)
    ends = f"{asked[:_MAX_SEEN_CHARS]}\n{asked[-_MAX_SEEN_CHARS:]}".lower()
    if any(words in ends for words in _SUMMARY_REQUESTS):
        return CallPurpose.COMPACTION
    if any(text.startswith(_SIDE_SYSTEMS) for text in systems) or asked.lstrip().startswith(_SIDE_REQUESTS):
        return CallPurpose.SIDE
    return CallPurpose.SIDE if _tool_names(body) == _SIDE_TOOLS else CallPurpose.TURN


def _system_texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts of the system prompt, in whichever dialect."""
    yield from _texts(body.get("system"))
    yield from _texts(body.get("instructions"))
    for item in _items(body):
        item = _mapping(item)
        if item.get("role") not in ("system", "developer"):
            return
        yield from _texts(item.get("content"))


def _last_asked(body: Mapping[str, Any]) -> str:
    """The last text of the last message, if it is the user's."""
    item = _last_item(body)
    if item.get("role") != "user":
        return ""
    texts = list(_texts(item.get("content")))
    return texts[-1] if texts else ""


def _last_item(body: Mapping[str, Any]) -> Mapping[str, Any]:
    items = _items(body)
    return _mapping(items[-1]) if items else {}


def _items(body: Mapping[str, Any]) -> list[Any]:
    """The messages or input items of a body."""
    for name in ("messages", "input"):
        given = body.get(name)
        if isinstance(given, list):
            return given
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
    return []


def _texts(content: Any) -> Iterator[str]:
    """The texts of a message: it is one, or has parts with one."""
    for part in content if isinstance(content, list) else [content]:
        text = part if isinstance(part, str) else _mapping(part).get("text")
        if isinstance(text, str):
            yield text


def _tool_names(body: Mapping[str, Any]) -> list[str]:
    tools = body.get("tools")
    given = [_mapping(tool) for tool in tools] if isinstance(tools, list) else []
    return [_text(_mapping(tool.get("function", tool)).get("name")) for tool in given]


def _object(value: Any) -> Mapping[str, Any]:
    """A JSON object, or the text of one; anything else is an empty one."""
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
