"""OpenAI Responses: requests as harnesses and the official client send them, answers as they take them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent

from services.proxy.dialects import InvalidRequestError, Refusal, RefusalKind
from services.proxy.dialects.openai_responses import OPENAI_RESPONSES, previous_response_not_found
from services.proxy.dialects.openai_responses_ids import seal_reasoning
from services.proxy.dialects.openai_responses_items import COMPACTION_PROMPT, SUMMARY_PREFIX
from services.proxy.types import (
    CallPurpose,
    Delta,
    DeltaKind,
    Message,
    ParsedAnswer,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from tests.unit.proxy.responses_client import Vendor, events_of, parse, whole_deltas

examples = settings(max_examples=40, deadline=None)

LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "run"},
    ],
}
TOOLS = [LOOK, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]


# --- round trips ------------------------------------------------------------------------------------------------

_texts = st.text(st.characters(codec="utf-8"), max_size=30)
_words = _texts.filter(bool)
_arguments = st.dictionaries(_texts, st.none() | st.integers() | _texts | st.lists(_texts, max_size=2), max_size=3)


@st.composite
def _calls(draw: st.DrawFn) -> tuple[ToolCall, ...]:
    calls = []
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["look", "apply_patch", "agents__spawn", "agents__run", "not_offered"]))
        is_custom = name in ("apply_patch", "agents__run")
        arguments = (
            draw(st.builds(lambda text: {"input": text}, _texts) | _arguments) if is_custom else draw(_arguments)
        )
        calls.append(ToolCall(f"call_{index:024x}", name, arguments))
    return tuple(calls)


_answers = st.builds(ParsedAnswer, text=_texts, reasoning=_texts, tool_calls=_calls())


@st.composite
def _cut_answers(draw: st.DrawFn) -> tuple[ParsedAnswer, list[Delta]]:
    """An answer and the pieces in which it came."""
    answer = draw(_answers)
    pieces = []
    for delta in whole_deltas(answer):
        at = draw(st.integers(0, len(delta.text))) if delta.text else 0
        cut = [delta] if delta.tool_call else [Delta(delta.kind, delta.text[:at]), Delta(delta.kind, delta.text[at:])]
        pieces += cut
    return answer, pieces


def _ask(vendor: Vendor, *, stream: bool, **more: Any) -> Response:
    """An answer as the official client holds it in the end."""
    body: dict[str, Any] = {"model": "m", "input": "hi", "tools": TOOLS, **more}
    if not stream:
        whole: Response = vendor.client.responses.create(**body)
        return whole
    with vendor.client.responses.stream(**body) as events:
        final: Response = events.get_final_response()
    return final


def _sent_back(response: Response, *, keeps_sealed: bool, keeps_ids: bool) -> list[dict[str, Any]]:
    items = [item.model_dump(mode="json", exclude_unset=True) for item in response.output]
    for item in items:
        item.pop("parsed_arguments", None)
        if not keeps_sealed:
            item.pop("encrypted_content", None)
        if not keeps_ids:
            item.pop("id", None)
    return items


@pytest.mark.parametrize("stream", [False, True])
@examples
@given(answered=_cut_answers(), keeps_sealed=st.booleans(), keeps_ids=st.booleans())
def test_an_answer_sent_back_is_the_message_that_was_made(
    stream: bool, answered: tuple[ParsedAnswer, list[Delta]], keeps_sealed: bool, keeps_ids: bool
) -> None:
    answer, deltas = answered
    custom = [call for call in answer.tool_calls if call.name in ("apply_patch", "agents__run")]
    keeps_ids |= any(call.arguments.keys() != {"input"} or type(call.arguments["input"]) is not str for call in custom)
    vendor = Vendor(answer, deltas)
    back = _sent_back(_ask(vendor, stream=stream), keeps_sealed=keeps_sealed, keeps_ids=keeps_ids)
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in answer.tool_calls
    ]
    vendor.client.responses.create(
        model="m",
        tools=TOOLS,
        input=[{"role": "user", "content": "hi"}, *back, *outputs, {"role": "user", "content": "on"}],
    )
    expected = (
        *vendor.requests[0].messages,
        answer.message,
        *(Message("tool", "done", tool_call_id=call.call_id) for call in answer.tool_calls),
        Message("user", "on"),
    )
    assert vendor.requests[1].messages == expected


@examples
@given(answered=_cut_answers())
def test_a_stream_ends_with_the_body_of_an_answer_that_is_not_streamed(
    answered: tuple[ParsedAnswer, list[Delta]],
) -> None:
    vendor = Vendor(*answered)
    streamed, whole = _ask(vendor, stream=True), _ask(vendor, stream=False)
    assert streamed.to_dict() | {"output": []} == whole.to_dict() | {"output": []}
    assert [_plain(item) for item in streamed.output] == [_plain(item) for item in whole.output]


def _plain(item: Any) -> dict[str, Any]:
    plain: dict[str, Any] = item.model_dump(mode="json", exclude={"parsed_arguments"}, warnings=False)
    for part in plain.get("content") or []:
        part.pop("parsed", None)
    return plain


@examples
@given(answered=_cut_answers())
def test_events_of_a_stream_are_numbered_and_each_item_ends(answered: tuple[ParsedAnswer, list[Delta]]) -> None:
    vendor = Vendor(*answered)
    final = _ask(vendor, stream=True)
    events = events_of(vendor.streams[0])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events].count("response.completed") == 1 == len(events[-1:])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert len({item["id"] for item in done}) == len(done) == len(final.output) > 0
    assert all(len(item["id"]) <= 64 for item in done)


def test_text_behind_a_call_comes_back_joined_to_the_text_before_it() -> None:
    call = ToolCall("call_1", "look", {})
    deltas = [Delta(DeltaKind.TEXT, "a"), Delta(DeltaKind.TOOL_CALL, tool_call=call), Delta(DeltaKind.TEXT, "b")]
    response = _ask(Vendor(ParsedAnswer("ab", tool_calls=(call,)), deltas), stream=True)
    assert [item.type for item in response.output] == ["message", "function_call", "message"]
    back = _sent_back(response, keeps_sealed=True, keeps_ids=True)
    assert parse({"input": back}).messages == (Message("assistant", "ab", tool_calls=(call,)),)


def test_calls_that_a_harness_mixes_with_their_outputs_stay_one_answer() -> None:
    calls = (ToolCall("call_1", "look", {}), ToolCall("call_2", "look", {"a": 1}))
    first, second = _sent_back(
        _ask(Vendor(ParsedAnswer("", tool_calls=calls)), stream=False), keeps_sealed=True, keeps_ids=True
    )
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
    mixed = parse({"input": [first, outputs[0], second, outputs[1]]})
    assert mixed.messages == parse({"input": [first, second, *outputs]}).messages
    assert mixed.messages[0].tool_calls == calls


def test_two_answers_in_a_row_stay_two() -> None:
    items = [
        item
        for call_id in ("g000001-r0-a0-c0", "g000001-r0-a0-c1")
        for item in _sent_back(_ask(Vendor(call_id=call_id), stream=False), keeps_sealed=True, keeps_ids=True)
    ]
    assert parse({"input": items}).messages == (Message("assistant", "hello"),) * 2


def test_the_same_answer_again_has_the_same_ids() -> None:
    vendor = Vendor(ParsedAnswer("a", "b", (ToolCall("call_1", "look", {}),)))
    assert _ask(vendor, stream=True).to_dict()["output"] == _ask(vendor, stream=True).to_dict()["output"]


# --- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_vendors_names(stream: bool) -> None:
    usage = _ask(Vendor(), stream=stream).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 2)


def test_an_answer_cut_by_its_limit_is_incomplete() -> None:
    vendor = Vendor(ParsedAnswer("hal"), finish_reason="length")
    whole = _ask(vendor, stream=False)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(vendor.client.responses.create(model="m", input="hi", tools=TOOLS, stream=True))
    assert isinstance(events[-1], ResponseIncompleteEvent)
    assert events[-1].response.to_dict() == whole.to_dict()
    assert whole.output[0].to_dict()["status"] == "incomplete"


def test_an_answer_repeats_what_it_was_asked() -> None:
    asked: dict[str, Any] = {
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "max_output_tokens": 64,
        "temperature": 0.5,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "truncation": "auto",
        "store": False,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
    }
    response: dict[str, Any] = _ask(Vendor(), stream=False, **asked).to_dict()
    assert {name: response[name] for name in asked} == asked
    assert response["id"] == "resp_g000001-r0-a0-c0"
    assert [tool["name"] for tool in response["tools"]] == ["look", "apply_patch", "agents__spawn", "agents__run"]


def test_calls_go_back_to_the_tools_behind_them() -> None:
    calls = (
        ToolCall("call_1", "agents__spawn", {"a": "ü"}),
        ToolCall("call_2", "apply_patch", {"input": "*** Begin Patch"}),
        ToolCall("call_3", "agents__run", {"input": "x"}),
        ToolCall("call_4", "mcp__server__tool", {}),
    )
    items = [item.to_dict() for item in _ask(Vendor(ParsedAnswer("", tool_calls=calls)), stream=False).output]
    assert [(item["type"], item["name"], item.get("namespace")) for item in items] == [
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "apply_patch", None),
        ("custom_tool_call", "run", "agents"),
        ("function_call", "mcp__server__tool", None),
    ]
    assert items[0]["arguments"] == '{"a":"ü"}'
    assert items[1]["input"] == "*** Begin Patch"
    assert [item["call_id"] for item in items] == [call.call_id for call in calls]


def test_events_come_in_the_vendors_order() -> None:
    vendor = Vendor(ParsedAnswer("ok", "hm"))
    events = list(vendor.client.responses.create(model="m", input="hi", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert isinstance(events[-1], ResponseCompletedEvent)


# --- compaction -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_compaction_gives_one_item_that_stands_for_the_history(stream: bool) -> None:
    vendor = Vendor(ParsedAnswer("the gist", "hm"))
    asked: list[Any] = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    response = _ask(vendor, stream=stream, input=asked, tool_choice="required")
    request = vendor.requests[0]
    assert request.messages == (Message("user", "hi"), Message("user", COMPACTION_PROMPT))
    assert request.lineage.purpose is CallPurpose.COMPACTION
    assert request.tool_choice.mode is ToolMode.NONE
    assert [item.type for item in response.output] == ["compaction"]
    back = _sent_back(response, keeps_sealed=True, keeps_ids=True)
    assert parse({"input": [*back, {"role": "user", "content": "on"}]}).messages == (
        Message("user", f"{SUMMARY_PREFIX}the gist"),
        Message("user", "on"),
    )


def test_a_compaction_that_is_being_written_does_not_look_dead() -> None:
    deltas = [Delta(DeltaKind.TEXT, "the "), Delta(DeltaKind.TEXT, "gist")]
    vendor = Vendor(ParsedAnswer("the gist"), deltas)
    _ask(vendor, stream=True, input=[{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}])
    assert vendor.streams[0].count(OPENAI_RESPONSES.keep_alive) == 1 + len(deltas)


def test_a_summary_that_others_sealed_is_left_out() -> None:
    request = parse({"input": [{"type": "compaction", "encrypted_content": "gAAA"}, {"role": "user", "content": "a"}]})
    assert request.messages == (Message("user", "a"),)
    assert request.unused_fields == ("input.compaction",)


# --- input items ------------------------------------------------------------------------------------------------

ITEMS: list[tuple[str, list[dict[str, Any]], tuple[Message, ...]]] = [
    ("roles", [{"role": "developer", "content": "a"}, {"role": "system", "content": "b"}], (
        Message("system", "a"), Message("system", "b"))),
    ("parts", [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        (Message("user", "a\nb"),)),
    ("a refusal", [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        (Message("assistant", "no"),)),
    ("reasoning that others sealed", [
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}],
         "content": None, "encrypted_content": "FAKEENC"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
    ], (Message("assistant", "", "hm", (ToolCall("c", "look", {"a": 1}),)), Message("tool", "seen", tool_call_id="c"))),
    ("reasoning text before its summary", [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "whole"}]},
        {"role": "assistant", "content": "a"},
    ], (Message("assistant", "a", "whole"),)),
    ("reasoning with no text", [{"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "a"}], (Message("user", "a"),)),
    ("sealed reasoning wins", [
        {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("whole\n")},
        {"role": "assistant", "content": "a"}], (Message("assistant", "a", "whole\n"),)),
    ("a namespace", [{"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents",
        "arguments": ""}], (Message("assistant", "", tool_calls=(ToolCall("c", "agents__spawn", {}),)),)),
    ("a custom tool", [{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}],
        (Message("assistant", "", tool_calls=(ToolCall("c", "apply_patch", {"input": "{}"}),)),
         Message("tool", "ok", tool_call_id="c"))),
    ("a local shell", [
        {"type": "local_shell_call", "id": "l", "call_id": "c", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c", "output": "x"}],
        (Message("assistant", "", tool_calls=(ToolCall("c", "local_shell", {"command": ["ls"]}),)),
         Message("tool", "x", tool_call_id="c"))),
    ("an agent's message", [{"type": "agent_message", "author": "/lead", "recipient": "/lead/a", "content": [
        {"type": "input_text", "text": "Payload:"}, {"type": "encrypted_content", "encrypted_content": "do it"}]}],
        (Message("user", "Payload:\ndo it"),)),
    ("hosted tools' items", [{"type": "web_search_call", "id": "w", "status": "completed"},
        {"role": "user", "content": "a"}], (Message("user", "a"),)),
]  # fmt: skip


@pytest.mark.parametrize(("items", "messages"), [row[1:] for row in ITEMS], ids=[row[0] for row in ITEMS])
def test_items_become_messages(items: list[dict[str, Any]], messages: tuple[Message, ...]) -> None:
    assert parse({"input": items}).messages == messages


def test_instructions_lead_and_hold_for_one_request() -> None:
    request = parse({"instructions": "be brief", "input": "hi", "previous_response_id": "resp_g000001-r0-a0-c12"})
    assert request.messages == (Message("system", "be brief"), Message("user", "hi"))
    assert request.num_instructions == 1
    assert request.previous_call_id == "g000001-r0-a0-c12"


def test_lone_surrogates_are_replaced() -> None:
    request = parse({"input": [{"role": "user", "content": "\ud800a"}], "metadata": {"\ud800": "\udfff"}})
    assert request.messages == (Message("user", "\ufffda"),)
    json.dumps(request.answer_form).encode()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_do_no_harm(number: str) -> None:
    tool = '{"type":"function","name":"a","parameters":{"a":%s}}' % number  # noqa: UP031 - braces
    body = json.loads(f'{{"input":"hi","metadata":{{"a":{number}}},"tools":[{tool}],"top_k":{number}}}')
    request = parse(body)
    json.dumps([request.answer_form, request.tools, request.requested_sampling], allow_nan=False)


def test_no_character_of_an_answer_ends_a_line_of_its_stream() -> None:
    text = "".join(map(chr, [0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029])) + "é"
    vendor = Vendor(ParsedAnswer(text, text, (ToolCall("call_1", "look", {"a": text}),)))
    back = _sent_back(_ask(vendor, stream=True), keeps_sealed=False, keeps_ids=False)
    assert parse({"input": back}).messages[0] == vendor.answer.message
    lines = vendor.streams[0].splitlines()
    assert all(line.startswith(("event: ", "data: {", ": keep-alive")) for line in lines if line)


# --- tools and settings -----------------------------------------------------------------------------------------


def test_tools_become_functions() -> None:
    request = parse({"input": "hi", "tools": TOOLS})
    functions = [tool["function"] for tool in request.tools]
    assert [function["name"] for function in functions] == ["look", "apply_patch", "agents__spawn", "agents__run"]
    assert functions[0] == {"name": "look", "parameters": LOOK["parameters"]}
    assert functions[1]["parameters"]["required"] == ["input"]
    assert functions[2]["description"] == "agents__*: Other agents.\n\nStarts one."
    assert request.unused_fields == ("tools.web_search",)


def test_a_grammar_is_told_to_the_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: A+"}
    (tool,) = parse({"input": "hi", "tools": [{**PATCH, "format": grammar}]}).tools
    assert "lark grammar:\nstart: A+" in tool["function"]["parameters"]["properties"]["input"]["description"]


def test_tools_among_the_items_are_tools_too() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS]},
        {"role": "user", "content": "hi"},
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS, LOOK]},
    ]
    request = parse({"input": items, "tool_choice": {"type": "function", "name": "look"}})
    assert [tool["function"]["name"] for tool in request.tools] == ["agents__spawn", "agents__run", "look"]
    assert request.messages == (Message("user", "hi"),)


ALL = [
    {"type": "function", "name": "look"},
    {"type": "custom", "name": "apply_patch"},
    {"type": "function", "name": "spawn", "namespace": "agents"},
    {"type": "custom", "name": "agents__run"},
]


@pytest.mark.parametrize(
    ("chosen", "choice", "is_kept"),
    [
        ("auto", ToolChoice(), True),
        ("none", ToolChoice(ToolMode.NONE), True),
        ("required", ToolChoice(ToolMode.REQUIRED), True),
        ({"type": "function", "name": "look"}, ToolChoice(ToolMode.REQUIRED, "look"), True),
        ({"type": "function", "name": "spawn"}, ToolChoice(ToolMode.REQUIRED, "agents__spawn"), True),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice(ToolMode.REQUIRED, "apply_patch"), True),
        ({"type": "web_search"}, ToolChoice(), False),
        ({"type": "allowed_tools", "mode": "auto", "tools": ALL}, ToolChoice(), True),
        ({"type": "allowed_tools", "mode": "auto", "tools": ALL[:2]}, ToolChoice(), False),
        ({"type": "allowed_tools", "mode": "required", "tools": ALL[:2]}, ToolChoice(ToolMode.REQUIRED), False),
        ({"type": "allowed_tools", "mode": "required", "tools": ALL[:1]}, ToolChoice(ToolMode.REQUIRED, "look"), True),
    ],
)
def test_tool_choices(chosen: Any, choice: ToolChoice, is_kept: bool) -> None:
    request = parse({"input": "hi", "tools": TOOLS, "tool_choice": chosen})
    assert request.tool_choice == choice
    assert ("tool_choice" not in request.unused_fields) is is_kept


def test_sampling_has_chat_completions_names() -> None:
    request = parse(
        {"input": "hi", "max_output_tokens": 16, "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False}
    )
    assert request.requested_sampling == {"max_tokens": 16, "temperature": 0.5, "top_p": 0.9}
    assert not request.tool_choice.is_parallel


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}, {"type": "array"}),
    ],
)
def test_text_formats(form: dict[str, Any], schema: dict[str, Any] | None) -> None:
    request = parse({"input": "hi", "text": {"format": form, "verbosity": "low"}})
    assert request.response_schema == schema
    assert request.unused_fields == ("text.verbosity",)


def test_what_changes_nothing_is_recorded() -> None:
    given = {"store": False, "include": ["reasoning.encrypted_content"], "client_metadata": {}, "user": None}
    assert parse({"input": "hi", **given}).unused_fields == ("client_metadata", "include", "store")


def test_a_client_that_tries_again_says_so() -> None:
    assert not parse({"input": "hi"}).is_retry
    assert parse({"input": "hi"}, **{"x-stainless-retry-count": "1"}).is_retry


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": "hi", "model": ""}, "model", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": [5]}, "input[0]", "invalid_type"),
        ({"input": [{}]}, "input[0].type", "invalid_value"),
        ({"input": [{"type": "riddle"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"type": []}]}, "input[0].type", "invalid_value"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type",
            "invalid_value"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id", "missing_required_parameter"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id",
            "missing_required_parameter"),
        ({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "a"}]}, "input[1]", "invalid_value"),
        ({"input": "hi", "max_output_tokens": 15}, "max_output_tokens", "integer_below_min_value"),
        ({"input": "hi", "temperature": 3}, "temperature", "invalid_value"),
        ({"input": "hi", "metadata": []}, "metadata", "invalid_type"),
        ({"input": "hi", "background": True}, "background", "invalid_value"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": "hi", "prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"input": "hi", "previous_response_id": "resp"}, "previous_response_id", "previous_response_not_found"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"input": "hi", "tools": [{"type": "wand"}]}, "tools[0].type", "invalid_value"),
        ({"input": "hi", "tools": [LOOK, {"type": "custom", "name": "look"}]}, "tools[1].name", "invalid_value"),
        ({"input": "hi", "tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice",
            "invalid_value"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema",
            "missing_required_parameter"),
    ],
)  # fmt: skip
def test_what_the_vendor_refuses_is_refused_with_its_error(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(body)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_image_that_a_tool_gave_is_named_instead_of_shown() -> None:
    output = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    request = parse({"input": [{"type": "function_call_output", "call_id": "c", "output": output}]})
    assert request.messages[0].content == "a\n[left out: image, for this model takes text only]"
    assert request.unused_fields == ("input.input_image",)


def test_an_image_in_a_message_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]})
    assert caught.value.param == "input[0].content[0].image_url"


def test_a_reference_to_an_item_is_not_found() -> None:
    vendor = Vendor()
    with pytest.raises(openai.NotFoundError, match="not found"):
        vendor.client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Refusal(RefusalKind.INVALID_REQUEST, "no", "input", "c"), openai.BadRequestError, "c"),
        (Refusal(RefusalKind.INVALID_KEY), openai.AuthenticationError, "invalid_api_key"),
        (Refusal(RefusalKind.CONTEXT_LENGTH, num_prompt_tokens=9, max_model_len=8), openai.BadRequestError,
            "context_length_exceeded"),
        (Refusal(RefusalKind.BODY_TOO_LARGE, max_body_bytes=9), openai.APIStatusError, "request_too_large"),
        (Refusal(RefusalKind.TURN_LIMIT), openai.BadRequestError, "turn_limit_reached"),
        (Refusal(RefusalKind.RATE_LIMITED), openai.RateLimitError, "rate_limit_exceeded"),
        (Refusal(RefusalKind.OVERLOADED), openai.InternalServerError, "overloaded"),
        (Refusal(RefusalKind.SERVER_ERROR), openai.InternalServerError, None),
        (Refusal(RefusalKind.NOT_FOUND), openai.NotFoundError, "unknown_url"),
        (Refusal(RefusalKind.METHOD_NOT_ALLOWED), openai.APIStatusError, "method_not_supported"),
        (previous_response_not_found("resp_x").refusal, openai.BadRequestError, "previous_response_not_found"),
    ],
)  # fmt: skip
def test_each_refusal_raises_the_clients_error(refusal: Refusal, error: type[openai.APIStatusError], code: str) -> None:
    vendor = Vendor(refusal=refusal)
    for stream in (False, True):
        with pytest.raises(error) as caught:
            vendor.client.responses.create(model="m", input="hi", stream=stream)
        assert caught.value.code == code
    answer = OPENAI_RESPONSES.error(refusal)
    assert answer.body["error"].keys() == {"message", "type", "param", "code"}


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_make_codex_compact() -> None:
    error = OPENAI_RESPONSES.error(Refusal(RefusalKind.CONTEXT_LENGTH)).body["error"]
    assert error["message"].startswith("Your input exceeds the context window of this model.")


# --- any body ---------------------------------------------------------------------------------------------------

_scalars = st.none() | st.booleans() | st.integers(-3, 20) | st.text(max_size=5)
_json = _scalars | st.lists(_scalars, max_size=2) | st.dictionaries(st.sampled_from(["type", "role", "text"]), _scalars)
_KINDS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "local_shell_call",
    "agent_message", "additional_tools", "compaction", "compaction_trigger", "item_reference", "web_search_call",
    "input_text", "input_image", "function", "custom", "namespace", "web_search", "allowed_tools",
]  # fmt: skip
_FIELDS = [
    "id", "call_id", "role", "content", "summary", "name", "namespace", "arguments", "input", "output", "action",
    "tools", "encrypted_content", "parameters", "format", "description", "mode",
]  # fmt: skip
_objects = st.dictionaries(
    st.sampled_from(_FIELDS), _json | st.lists(st.fixed_dictionaries({"type": st.sampled_from(_KINDS)}))
).flatmap(lambda given: st.sampled_from(_KINDS).map(lambda kind: {**given, "type": kind}))


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {"model": st.just("m"), "input": st.lists(_objects, max_size=4) | _json},
        optional={
            "tools": st.lists(_objects, max_size=3) | _json,
            "tool_choice": _objects | _json,
            "text": st.fixed_dictionaries({"format": _objects | _json}) | _json,
            "instructions": _json,
            "metadata": _json,
            "previous_response_id": _json,
            "stream": _json,
        },
    )
)
def test_any_body_is_parsed_or_refused(body: dict[str, Any]) -> None:
    try:
        request = OPENAI_RESPONSES.parse(body, {})
    except InvalidRequestError:
        return
    json.dumps(request.answer_form)
    assert request.messages
