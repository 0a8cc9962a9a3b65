from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from services.proxy.dialects import Head, InvalidRequestError, Refusal, RefusalKind
from services.proxy.dialects.fields import RAW_ARGUMENTS, parse_arguments
from services.proxy.dialects.openai_chat import OPENAI_CHAT
from services.proxy.types import (
    CanonicalRequest,
    Choice,
    Delta,
    DeltaKind,
    Message,
    ParsedAnswer,
    ToolCall,
    ToolChoice,
    ToolMode,
    Usage,
)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


def parse_messages(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return OPENAI_CHAT.parse({"model": "m", "messages": list(messages)}, {}).messages


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
    assert parse_arguments(malformed) == {RAW_ARGUMENTS: malformed}


def test_reasoning_is_kept_under_either_name() -> None:
    first, second = parse_messages(
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "assistant", "content": "x", "reasoning": "why not"},
    )
    assert (first.reasoning, second.reasoning) == ("why", "why not")


def test_tool_messages_and_tools_are_taken_over() -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    parsed = OPENAI_CHAT.parse(
        {
            "model": "m",
            "tools": [tool],
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "bash", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "out"}]},
            ],
        },
        {},
    )
    assert parsed.tools == (tool,)
    assert parsed.messages == (
        Message("assistant", "", tool_calls=(ToolCall("1", "bash", {}),)),
        Message("tool", "out", tool_call_id="1"),
    )


def test_sampling_is_recorded_under_one_name_each() -> None:
    parsed = OPENAI_CHAT.parse(
        body(temperature=0, top_p=1, max_tokens=50, max_completion_tokens=40, stop="END", seed=3, top_k=None), {}
    )
    assert parsed.requested_sampling == {"temperature": 0, "top_p": 1, "max_tokens": 40, "stop": ["END"], "seed": 3}


def test_unknown_fields_are_accepted_and_named() -> None:
    parsed = OPENAI_CHAT.parse(
        body(store=False, wibble=1, user=None, stream=True, stream_options={"include_usage": True}), {}
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
        (body(n=0), "n"),
        (body(n=99), "n"),
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
        (body(tool_choice="some"), "tool_choice"),
        (body(tool_choice="required"), "tool_choice"),
        (body(tool_choice={"type": "function", "function": {"name": "x"}}), "tool_choice"),
        (body(parallel_tool_calls=1), "parallel_tool_calls"),
        (body(response_format={"type": "xml"}), "response_format.type"),
    ],
)
def test_invalid_requests_get_openais_own_error(bad: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        OPENAI_CHAT.parse(bad, {})
    answer = OPENAI_CHAT.error(pickle.loads(pickle.dumps(caught.value)).refusal)
    error = answer.body["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}


def test_choices_and_forced_answers_are_taken_over() -> None:
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    named = OPENAI_CHAT.parse(
        body(
            tools=[tool], tool_choice={"type": "function", "function": {"name": "bash"}}, parallel_tool_calls=False, n=3
        ),
        {"x-stainless-retry-count": "1"},
    )
    assert named.tool_choice == ToolChoice(ToolMode.REQUIRED, "bash", is_parallel=False)
    assert (named.num_choices, named.is_retry) == (3, True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shaped = OPENAI_CHAT.parse(
        body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}), {}
    )
    assert (shaped.response_schema, shaped.is_retry) == (schema, False)
    assert OPENAI_CHAT.parse(body(response_format={"type": "json_object"}), {}).response_schema == {"type": "object"}


def test_context_length_error_is_worded_as_harnesses_expect_it() -> None:
    answer = OPENAI_CHAT.error(Refusal(RefusalKind.CONTEXT_LENGTH, num_prompt_tokens=5000, max_model_len=4096))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in answer.body["error"]["message"]


@pytest.mark.parametrize("kind", RefusalKind)
def test_every_refusal_has_a_status_and_words(kind: RefusalKind) -> None:
    answer = OPENAI_CHAT.error(Refusal(kind, "what happened"))
    assert 400 <= answer.status < 600
    assert answer.body["error"]["message"]


def events_of(request: CanonicalRequest, deltas: list[tuple[int, Delta]], choices: list[Choice]) -> list[str]:
    stream = OPENAI_CHAT.stream(Head("c-1", 7, request))
    usage = Usage(10, 2, 8)
    text = stream.begin(usage) + "".join(stream.delta(*delta) for delta in deltas) + stream.end(choices, usage)
    *events, rest = text.split("\n\n")
    assert rest == ""
    return events


def test_stream_holds_role_text_finish_usage_and_done_in_this_order() -> None:
    request = OPENAI_CHAT.parse(body(stream=True, stream_options={"include_usage": True}), {})
    answer = ParsedAnswer("line\nbreak")
    *events, done = events_of(request, [(0, Delta(DeltaKind.TEXT, answer.text))], [Choice(0, answer, "length")])
    assert done == "data: [DONE]"
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


def test_reasoning_and_tool_calls_come_back_as_they_were_sent() -> None:
    request = OPENAI_CHAT.parse(body(n=2), {})
    calls = (ToolCall("call_1", "bash", {"a": "\u00fc"}), ToolCall("call_2", "bash", {}))
    answer = ParsedAnswer("", "because", calls)
    choices = [Choice(0, ParsedAnswer("plain"), "stop"), Choice(1, answer, "stop")]
    sent = OPENAI_CHAT.body(Head("c-1", 7, request), choices, Usage(10, 5))["choices"]
    assert [choice["finish_reason"] for choice in sent] == ["stop", "tool_calls"]
    assert parse_messages(sent[1]["message"]) == (answer.message,)
    deltas = [Delta(DeltaKind.REASONING, "because"), *(Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in calls)]
    events = events_of(request, [(1, delta) for delta in deltas], choices)[:-1]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    told = [chunk["delta"] for chunk in chunks if chunk["index"] == 1]
    assert [call["index"] for delta in told for call in delta.get("tool_calls", [])] == [0, 1]
    assert [call["id"] for delta in told for call in delta.get("tool_calls", [])] == ["call_1", "call_2"]
    assert told[1] == {"reasoning_content": "because"}


def test_line_ends_of_unicode_split_no_event() -> None:
    request = OPENAI_CHAT.parse(body(stream=True), {})
    text = "a\x85b\u2028c\u2029d"
    stream = OPENAI_CHAT.stream(Head("c-1", 7, request)).delta(0, Delta(DeltaKind.TEXT, text))
    assert len(stream.splitlines()) == 2
    assert json.loads(stream.removeprefix("data: "))["choices"][0]["delta"] == {"content": text}
