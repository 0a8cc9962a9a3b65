"""Requests of each dialect that use all that it has, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)

_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_BASH = {"name": "bash", "description": "Runs a command.", "parameters": _SCHEMA}

CHAT_BODIES: list[dict[str, Any]] = [
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": [{"type": "text", "text": "be exact"}]},
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "files"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I think",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}},
                    {"id": "call_2", "type": "function", "function": {"name": "bash", "arguments": "not json"}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "error"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "name": "me"},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", "function": {**_BASH, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "bash"}},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["END", "\n\n"],
        "max_completion_tokens": 20,
        "max_tokens": 30,
        "n": 2,
        "logit_bias": {"5": 1},
        "frequency_penalty": 0.1,
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
    },
    {
        "model": "m",
        "messages": [{"role": "user", "content": "json please"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _SCHEMA}},
        "stream": True,
    },
    {
        "model": "m",
        "messages": [{"role": "user", "content": "which tool"}],
        "tools": [{"type": "function", "function": _BASH}, {"type": "function", "function": {"name": "noop"}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
    },
]
RESPONSES_BODIES: list[dict[str, Any]] = [
    {"model": "m", "input": "hi"},
    {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be exact"}]},
            {"role": "user", "content": "list files"},
            {
                "type": "reasoning",
                "id": "rs_0123456789abcdef01234567_0",
                "summary": [{"type": "summary_text", "text": "I think"}],
                "content": [{"type": "reasoning_text", "text": "I think"}],
                "encrypted_content": "tidegate-reasoning-1.SSB0aGluaw==",
            },
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_0123456789abcdef01234567_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {
                "type": "function_call",
                "id": "fc_0123456789abcdef01234567_2",
                "call_id": "call_1",
                "name": "bash",
                "arguments": '{"command": "ls"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}]},
            {
                "type": "local_shell_call",
                "call_id": "call_3",
                "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5},
            },
            {"type": "local_shell_call_output", "id": "call_3", "output": '{"output": "x"}'},
            {"type": "function_call", "call_id": "call_4", "namespace": "fs", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_4", "output": {"content": "x"}},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "agent_message", "content": [{"type": "encrypted_content", "encrypted_content": "hello"}]},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "more", "parameters": _SCHEMA}]},
            {"type": "compaction", "encrypted_content": "tidegate-summary-1.c3VtbWFyeQ=="},
            {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
        ],
        "tools": [
            {"type": "function", **_BASH, "strict": False},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "s: 1"}},
            {
                "type": "namespace",
                "name": "fs",
                "description": "Files.",
                "tools": [{"type": "function", "name": "read", "parameters": _SCHEMA}],
            },
            {"type": "web_search", "search_context_size": "low"},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "max_output_tokens": 40,
        "temperature": 0.5,
        "top_p": 0.9,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "truncation": "disabled",
        "client_metadata": {"thread_id": "t", "x-codex-turn-metadata": '{"session_id": "s", "thread_id": "t"}'},
        "text": {"verbosity": "low", "format": {"type": "text"}},
    },
    {"model": "m", "input": [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}], "stream": True},
    {
        "model": "m",
        "input": "json please",
        "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA, "strict": True}},
    },
    {
        "model": "m",
        "input": "call it",
        "tools": [{"type": "function", **_BASH}, {"type": "custom", "name": "patch"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "bash"}]},
    },
]
MESSAGES_BODIES: list[dict[str, Any]] = [
    {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "m",
        "max_tokens": 40,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list files", "cache_control": None}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I think", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "bash", "input": {"command": "pwd"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "is_error": True,
                        "content": [
                            {"type": "text", "text": "no"},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
                            {"type": "tool_reference", "tool_name": "later"},
                        ],
                    },
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "text"}},
                    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}},
                    {
                        "type": "search_result",
                        "title": "t",
                        "source": "s",
                        "content": [{"type": "text", "text": "found"}],
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
            {"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "later"}}]},
        ],
        "tools": [
            {"name": "bash", "description": "Runs a command.", "input_schema": _SCHEMA, "cache_control": {}},
            {"name": "later", "input_schema": _SCHEMA, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "custom", "name": "other", "input_schema": {"type": "object"}},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "metadata": {"user_id": '{"session_id": "s", "device_id": "d"}'},
        "stop_sequences": ["END"],
        "temperature": 1.0,
        "top_k": 5,
        "stream": True,
    },
    {
        "model": "m",
        "max_tokens": 30,
        "messages": [{"role": "user", "content": "json"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    },
    {
        "model": "m",
        "max_tokens": 30,
        "messages": [{"role": "user", "content": "call it"}],
        "tools": [{"name": "bash", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "bash"},
        "stream": True,
    },
]
BODIES = {
    CHAT: CHAT_BODIES,
    RESPONSES: RESPONSES_BODIES,
    MESSAGES: MESSAGES_BODIES,
    COUNT_TOKENS: MESSAGES_BODIES,
}

# --- JSON of any kind ------------------------------------------------------------------------------------------

_RAW = {
    "@@huge float@@": "1e400",
    "@@huge integer@@": "9" * 4000,
    "@@too many digits@@": "9" * 5000,
    "@@deep array@@": "[" * 10_000 + "]" * 10_000,
    "@@deep object@@": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "@@deepish array@@": "[" * 150 + "]" * 150,
    "@@deepish object@@": '{"properties":' * 300 + "1" + "}" * 300,
    "@@deeper object@@": '{"a":' * 900 + "1" + "}" * 900,
    "@@NaN@@": "NaN",
    "@@twice@@": '{"type":"text","type":5,"text":"a","text":"b"}',
}
"""What Python's own encoder would not write, by the strings that stand for it."""

_WORDS = (
    *("", "\x00", "\ud800", "\udfff\ud83d", "é\u2028\ufeff", "text", "function", "user", "tool", "assistant", "system"),
    *(
        "tool_use",
        "tool_result",
        "thinking",
        "reasoning",
        "message",
        "bash",
        "auto",
        "none",
        "required",
        "any",
        "call_1",
    ),
    *("<|im_end|>", "<|im_start|>assistant\n", "<tool_call>", "</think>", "\ue000tidegate:0\ue001", "null", "{}"),
    *("resp_g000001-r0-a0-c0", "tidegate-reasoning-1.gA==", "tidegate-reasoning-1.é", "x" * 20_000),
    "x-anthropic-billing-header: cc_is_subagent=true",
)
_FIELDS = (
    *("type", "role", "content", "text", "name", "arguments", "input", "tools", "tool_calls", "function", "parameters"),
    *("messages", "model", "stream", "id", "call_id", "metadata", "user_id", "input_schema", "source", "$ref", "$defs"),
    *("client_metadata", "x-codex-turn-metadata", "session_id", "previous_response_id", "output_config", "tool_choice"),
)
_NUMBERS = (0, 1, -1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"))
_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(_WORDS),
    st.sampled_from(sorted(_RAW)),
    _text,
)
any_json: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_FIELDS) | _text, inner, max_size=3),
    max_leaves=6,
)


def to_bytes(body: Any) -> bytes:
    """A body as JSON, and what Python's encoder takes for none: NaN, numbers without bound, lone surrogates."""
    text = json.dumps(body)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode("utf-8", "surrogatepass")


# --- bodies that are nearly valid ------------------------------------------------------------------------------


@st.composite
def spoilt_bodies(draw: st.DrawFn, path: str) -> Any:
    """A valid body of a dialect in which some values were replaced, left out, doubled or moved."""
    body = copy.deepcopy(draw(st.sampled_from(BODIES[path])))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(body))
        if not places:
            break
        _spoil(draw, *places[draw(st.integers(0, len(places) - 1))])
    return body


def _spoil(draw: st.DrawFn, holder: Any, key: Any) -> None:
    match draw(st.sampled_from(("replace", "replace", "leave out", "double", "wrap", "add", "empty"))):
        case "replace":
            holder[key] = draw(any_json)
        case "leave out":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case "double":
            holder[draw(st.sampled_from(_FIELDS))] = copy.deepcopy(holder[key])
        case "wrap":
            holder[key] = draw(st.sampled_from(([holder[key]], {"text": holder[key]}, json.dumps(holder[key]))))
        case "add" if isinstance(holder[key], dict):
            holder[key][draw(st.sampled_from(_FIELDS) | _text)] = draw(any_json)
        case "add" if isinstance(holder[key], list):
            holder[key].append(draw(any_json))
        case _:
            holder[key] = type(holder[key])()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where something stands in JSON-ready data: what holds it, and its key or index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
