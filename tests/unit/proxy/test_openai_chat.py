from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from services.proxy.dialects import DialectError, openai_chat
from services.proxy.types import Message, ToolCall


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


def parse_messages(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return openai_chat.parse({"model": "m", "messages": list(messages)}).messages


def test_text_parts_are_joined_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert parse_messages({"role": "developer", "content": parts}, {"role": "user", "content": "c"}) == (
        Message("system", "a\nb"),
        Message("user", "c"),
    )


def test_tool_call_arguments_become_an_object() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "i", "type": "function", "function": {"name": "bash", "arguments": arguments}}

    sent = {"role": "assistant", "content": None, "tool_calls": [call('{"a": [1]}'), call(""), call({"b": 2})]}
    (message,) = parse_messages(sent)
    assert message.content == ""
    assert [one.arguments for one in message.tool_calls] == [{"a": [1]}, {}, {"b": 2}]


@pytest.mark.parametrize("malformed", ['{"a": ', "[1]", "plain", '"text"'])
def test_malformed_arguments_are_kept(malformed: str) -> None:
    assert openai_chat.parse_arguments(malformed) == {openai_chat.RAW_ARGUMENTS: malformed}


def test_reasoning_is_kept_under_either_name() -> None:
    first, second = parse_messages(
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "assistant", "content": "x", "reasoning": "why not"},
    )
    assert (first.reasoning, second.reasoning) == ("why", "why not")


def test_tool_messages_and_tools_are_taken_over() -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    parsed = openai_chat.parse(
        {
            "model": "m",
            "tools": [tool],
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "bash", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "out"}]},
            ],
        }
    )
    assert parsed.tools == (tool,)
    assert parsed.messages == (
        Message("assistant", "", tool_calls=(ToolCall("1", "bash", {}),)),
        Message("tool", "out", tool_call_id="1"),
    )


def test_sampling_is_recorded_under_one_name_each() -> None:
    parsed = openai_chat.parse(
        body(temperature=0, top_p=1, max_tokens=50, max_completion_tokens=40, stop="END", seed=3, top_k=None)
    )
    assert parsed.requested_sampling == {"temperature": 0, "top_p": 1, "max_tokens": 40, "stop": ["END"], "seed": 3}


def test_unknown_fields_are_accepted_and_named() -> None:
    parsed = openai_chat.parse(
        body(store=False, wibble=1, user=None, stream=True, stream_options={"include_usage": True})
    )
    assert parsed.unused_fields == ("store", "wibble")
    assert parsed.stream
    assert parsed.include_usage


def test_lone_surrogates_are_replaced_and_pairs_are_kept() -> None:
    (message,) = parse_messages(json.loads('{"role": "user", "content": "a\\ud83d b\\ud83d\\ude42"}'))
    assert message.content == "a\ufffd b🙂"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ([], None),
        ({"messages": [{"role": "user", "content": "x"}]}, None),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": ["x"]}, "messages.[0]"),
        (body(messages=[{"role": "robot", "content": "x"}]), "messages.[0].role"),
        (body(messages=[{"role": "user", "content": 3}]), "messages.[0].content"),
        (
            body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages.[0].content.[0].type",
        ),
        (body(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "messages.[0].content.[0].type"),
        (body(messages=[{"role": "tool", "content": "x"}]), "messages.[0].tool_call_id"),
        (
            body(messages=[{"role": "assistant", "tool_calls": [{"function": 1}]}]),
            "messages.[0].tool_calls[0].function",
        ),
        (body(n=2), "n"),
        (body(n="1"), "n"),
        (body(stream="yes"), "stream"),
        (body(temperature=3), "temperature"),
        (body(temperature="hot"), "temperature"),
        (body(top_p=-0.1), "top_p"),
        (body(max_tokens=0), "max_tokens"),
        (body(max_tokens=True), "max_tokens"),
        (body(stop=[1]), "stop"),
        (body(seed="x"), "seed"),
        (body(tools=[{"type": "web_search"}]), "tools[0].type"),
        (body(tools=[{"type": "function"}]), "tools[0].function"),
    ],
)
def test_invalid_requests_get_openais_own_error(bad: Any, param: str | None) -> None:
    with pytest.raises(DialectError) as caught:
        openai_chat.parse(bad)
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_context_length_error_is_worded_as_harnesses_expect_it() -> None:
    refusal = openai_chat.context_length_exceeded(5000, 4096)
    assert refusal.status == 400
    assert refusal.body["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in refusal.body["error"]["message"]


def test_dialect_errors_survive_pickling() -> None:
    copy = pickle.loads(pickle.dumps(openai_chat.overloaded()))
    assert (copy.status, copy.body) == (503, openai_chat.overloaded().body)


def test_stream_holds_role_text_finish_usage_and_done_in_this_order() -> None:
    head = openai_chat.Head("c-1", 7, "m")
    stream = openai_chat.stream_head(head) + openai_chat.stream_text(head, "line\nbreak")
    stream += openai_chat.stream_tail(head, "length", openai_chat.usage(10, 2, 8))
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"] and chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "line\nbreak"},
        {},
        [],
    ]
    assert chunks[2]["choices"][0]["finish_reason"] == "length"
    assert chunks[3]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-c-1"}
