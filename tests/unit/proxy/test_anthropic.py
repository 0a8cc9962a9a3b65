from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxy.conversation import stable_messages
from services.proxy.dialects import InvalidRequestError
from services.proxy.dialects.anthropic import ANTHROPIC
from services.proxy.dialects.fields import to_json
from services.proxy.types import CallPurpose, CanonicalRequest, Message, ToolCall, ToolChoice, ToolMode

CACHED = {"cache_control": {"type": "ephemeral"}}
BASH = {"name": "bash", "description": "Runs it.", "input_schema": {"type": "object"}}
BASH_FUNCTION = {
    "type": "function",
    "function": {"name": "bash", "description": "Runs it.", "parameters": {"type": "object"}},
}


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **more}


def parse(**more: Any) -> CanonicalRequest:
    return ANTHROPIC.parse(ask(**more), {})


def messages(*sent: dict[str, Any], **more: Any) -> tuple[Message, ...]:
    return ANTHROPIC.parse_count({"model": "m", "messages": list(sent), **more}, {}).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(*blocks: Any, call_id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": list(blocks), **more}


# --- messages --------------------------------------------------------------------------------------------------


def test_text_is_the_same_as_a_string_and_as_blocks() -> None:
    assert messages({"role": "user", "content": "hi"}) == messages(user(text("hi"))) == (Message("user", "hi"),)


def test_system_blocks_become_one_message_in_front() -> None:
    sent = messages(user(text("hi")), system=[text("be brief", **CACHED), text("be kind")])
    assert sent == (Message("system", "be brief\nbe kind"), Message("user", "hi"))
    assert messages(user(text("hi")), system="") == (Message("user", "hi"),)


def test_changing_billing_block_does_not_change_what_is_matched() -> None:
    def sent(build: str) -> tuple[Message, ...]:
        billing = text(f"x-anthropic-billing-header: cc_version={build}; cc_entrypoint=cli;")
        return messages(user(text("hi")), system=[billing, text("be brief", **CACHED)])

    assert sent("1.a") != sent("1.b")
    assert stable_messages(sent("1.a")) == stable_messages(sent("1.b"))
    assert stable_messages(sent("1.a"))[0] == Message("system", "be brief")


def test_moved_cache_markers_change_nothing() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"a": 1}}

    def sent(*marked: int) -> CanonicalRequest:
        marks: list[dict[str, Any]] = [CACHED if at in marked else {} for at in range(5)]
        return parse(
            system=[text("be brief", **marks[0])],
            tools=[{**BASH, **marks[1]}],
            messages=[
                user(text("hi", **marks[2])),
                {"role": "assistant", "content": [{**call, **marks[3]}]},
                user(result(text("out", **marks[4]), **marks[4])),
            ],
        )

    assert sent(0, 2) == sent(1, 3) == sent(4) == sent()


def test_answer_comes_back_with_reasoning_text_and_calls() -> None:
    sent = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "why", "signature": "whatever"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("so"),
            {"type": "tool_use", "id": "t1", "name": "bash", "input": {"a": [1]}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "t2", "name": "bash", "input": {}},
        ],
    }
    calls = (ToolCall("t1", "bash", {"a": [1]}), ToolCall("t2", "bash", {}))
    assert messages(sent) == (Message("assistant", "so", "why", calls),)


def test_text_that_a_client_kept_in_two_blocks_has_no_joint() -> None:
    assert messages({"role": "assistant", "content": [text("one\n"), text("two")]}) == (
        Message("assistant", "one\ntwo"),
    )


@pytest.mark.parametrize("content", [[], "", [text("(no content)")]])
def test_empty_answer_comes_back_empty(content: Any) -> None:
    assert messages({"role": "assistant", "content": content}) == (Message("assistant", ""),)


def test_tool_results_become_tool_messages_in_the_order_of_the_blocks() -> None:
    sent = user(
        result(text("a"), text("b"), is_error=False),
        {"type": "tool_result", "tool_use_id": "t2", "content": "c"},
        {"type": "tool_result", "tool_use_id": "t3"},
        text("and"),
        text("now"),
        result(text("d"), call_id="t4"),
    )
    assert messages(sent) == (
        Message("tool", "a\nb", tool_call_id="t1"),
        Message("tool", "c", tool_call_id="t2"),
        Message("tool", "", tool_call_id="t3"),
        Message("user", "and\nnow"),
        Message("tool", "d", tool_call_id="t4"),
    )


def test_media_in_a_tool_result_leave_a_note_and_those_in_a_message_are_refused() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    parsed = parse(messages=[user(result(text("see"), image, pdf))])
    assert "[image" in parsed.messages[0].content
    assert "[document" in parsed.messages[0].content
    assert parsed.unused_fields == ("tool_result.document", "tool_result.image")
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.1\.image: Could not process image"):
        parse(messages=[user(text("see"), image)])
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.0\.document: .*does not support PDF input"):
        parse(messages=[user(pdf)])


def test_documents_and_search_results_of_text_are_text() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}}
    found = {"type": "search_result", "title": "F", "source": "http://f", "content": [text("z")]}
    assert messages(user(plain, blocks, found)) == (Message("user", "T\nbody\nx\ny\nF\nhttp://f\nz"),)
    assert messages(user(result(plain, found))) == (Message("tool", "T\nbody\nF\nhttp://f\nz", tool_call_id="t1"),)


def test_system_messages_stand_where_they_were_sent() -> None:
    sent = messages(
        user(text("hi")),
        {"role": "system", "content": "mode: plan", "clear_at": "never"},
        {"role": "system", "content": [text("a"), {"type": "tool_removal", "tool": {"name": "x"}}]},
        {"role": "system", "content": []},
    )
    assert sent == (Message("user", "hi"), Message("system", "mode: plan"), Message("system", "a"))


def test_messages_of_one_role_in_a_row_stay_apart() -> None:
    assert messages(user(text("a")), user(text("b"))) == (Message("user", "a"), Message("user", "b"))


def test_lone_surrogates_are_replaced() -> None:
    sent = json.loads(r'[{"role": "user", "content": "a\ud83d b\ud83d\ude42"}]')
    assert messages(*sent) == (Message("user", "a\ufffd b🙂"),)


# --- tools -----------------------------------------------------------------------------------------------------


def test_custom_tools_take_openais_form_and_the_vendors_own_are_recorded() -> None:
    parsed = parse(
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {**BASH, "type": "custom", "eager_input_streaming": True},
            {"type": "bash_20250124", "name": "shell"},
        ]
    )
    assert parsed.tools == (BASH_FUNCTION,)
    assert parsed.unused_fields == (
        "tools.eager_input_streaming",
        "tools[0]:web_search_20250305",
        "tools[2]:bash_20250124",
    )


def test_deferred_tool_is_told_where_a_block_names_it_and_the_tools_stay_as_they_were() -> None:
    deferred = {"name": "mail", "input_schema": {"type": "object"}, "defer_loading": True}
    before = parse(tools=[BASH])
    named = user(result({"type": "tool_reference", "tool_name": "mail"}))
    after = parse(tools=[BASH, deferred], messages=[named])
    assert after.tools == before.tools == (BASH_FUNCTION,)
    assert '{"name":"mail","parameters":{"type":"object"}}' in after.messages[0].content


def test_deferred_tools_are_offered_where_the_search_for_them_would_run_at_the_vendor() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    parsed = parse(tools=[search, {**BASH, "defer_loading": True}])
    assert parsed.tools == (BASH_FUNCTION,)


@pytest.mark.parametrize(
    ("sent", "choice"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(is_parallel=False)),
        ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
        (
            {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
            ToolChoice(ToolMode.REQUIRED, "bash", False),
        ),
    ],
)
def test_tool_choice(sent: dict[str, Any], choice: ToolChoice) -> None:
    assert parse(tools=[BASH], tool_choice=sent).tool_choice == choice


# --- other fields ----------------------------------------------------------------------------------------------


def test_sampling_is_recorded_under_openais_names() -> None:
    parsed = parse(temperature=1, top_p=0.5, top_k=4, stop_sequences=["END", "\n\n"], stream=True)
    assert parsed.requested_sampling == {
        "max_tokens": 9,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 4,
        "stop": ["END", "\n\n"],
    }
    assert parsed.stream


def test_json_schema_is_honoured_under_its_old_and_its_new_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    new = parse(output_config={"format": form, "effort": "high"})
    assert new.response_schema == parse(output_format=form).response_schema == schema
    assert new.unused_fields == ("output_config.effort",)


def test_fields_that_change_nothing_are_named() -> None:
    parsed = parse(
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        service_tier="auto",
        wibble=1,
        container=None,
        messages=[user(result(text("no such file"), is_error=True))],
    )
    assert parsed.unused_fields == (
        "context_management",
        "metadata",
        "service_tier",
        "thinking",
        "tool_result.is_error",
        "wibble",
    )


def test_lineage_and_retries_are_read_from_headers() -> None:
    headers = {
        "x-claude-code-session-id": "s",
        "x-claude-code-agent-id": "a",
        "x-stainless-retry-count": "2",
    }
    parsed = ANTHROPIC.parse(ask(), headers)
    assert (parsed.lineage.session_id, parsed.lineage.agent_id) == ("s", "a")
    assert parsed.is_retry
    claude_code = {"x-claude-code-session-id": "s", "x-stainless-retry-count": "0"}
    probe = ANTHROPIC.parse(ask(max_tokens=1), claude_code)
    assert probe.lineage.purpose is CallPurpose.SIDE
    assert not probe.is_retry


def test_counting_needs_no_max_tokens_and_takes_an_unfinished_answer() -> None:
    body = {"model": "m", "messages": [{"role": "assistant", "content": "so"}], "tools": [BASH]}
    parsed = ANTHROPIC.parse_count(body, {})
    assert parsed.requested_sampling == {}
    assert parsed.tools == (BASH_FUNCTION,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "body: Input should be a valid dictionary"),
        ({**ask(), "model": None}, "model: Field required"),
        ({**ask(), "model": 3}, "model: Input should be a valid string"),
        ({**ask(), "max_tokens": None}, "max_tokens: Field required"),
        (ask(max_tokens=0), "max_tokens: Input should be greater than or equal to 1"),
        (ask(max_tokens=True), "max_tokens: Input should be a valid integer"),
        (ask(temperature=1.5), "temperature: Input should be less than or equal to 1"),
        (ask(temperature=float("nan")), "temperature: Input should be greater than or equal to 0"),
        (ask(top_k=0.5), "top_k: Input should be a valid integer"),
        (ask(stop_sequences="END"), "stop_sequences: Input should be a valid list"),
        (ask(stop_sequences=[""]), "stop_sequences: each stop sequence must contain at least one character"),
        (ask(stream="yes"), "stream: Input should be a valid boolean"),
        (ask(messages=None), "messages: Field required"),
        (ask(messages=[]), "messages: at least one message is required"),
        (ask(messages=["x"]), "messages.0: Input should be a valid dictionary"),
        (ask(messages=[{"role": "robot", "content": "x"}]), "messages.0.role: Input should be 'user', "),
        (ask(messages=[{"role": "user"}]), "messages.0.content: Field required"),
        (ask(messages=[{"role": "user", "content": 3}]), "messages.0.content: Input should be a valid string or"),
        (ask(messages=[user({"text": "x"})]), "messages.0.content.0.type: Field required"),
        (ask(messages=[user(text(3))]), "messages.0.content.0.text: Input should be a valid string"),  # type: ignore[arg-type]
        (ask(messages=[user({"type": "video"})]), "messages.0.content.0: Input tag 'video' found using 'type'"),
        (ask(messages=[user({"type": "tool_use"})]), "messages.0.content.0: Input tag 'tool_use' found"),
        (ask(messages=[user({"type": "tool_result"})]), "messages.0.content.0.tool_use_id: Field required"),
        (ask(messages=[{"role": "assistant", "content": "so"}]), "messages: this model cannot go on"),
        (ask(messages=[{"role": "system", "content": []}]), "messages: at least one message must have content"),
        (ask(system=3), "system: Input should be a valid string or a valid list"),
        (ask(tools=[{"name": "x"}]), "tools.0.custom.input_schema: Field required"),
        (ask(tools=[BASH, BASH]), "tools: Tool names must be unique."),
        (ask(tool_choice={"type": "some"}), "tool_choice: Input tag 'some' found using 'type'"),
        (ask(tool_choice={"type": "any"}), "tool_choice.any: there is no tool to use"),
        (
            ask(tools=[BASH], tool_choice={"type": "tool", "name": "x"}),
            "tool_choice.tool.name: Tool 'x' not found in provided tools",
        ),
        (ask(output_format={"type": "xml"}), "output_format: Input tag 'xml' found using 'type'"),
        (ask(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema: Field required"),
    ],
)
def test_invalid_requests_get_the_vendors_own_error(bad: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ANTHROPIC.parse(bad, {})
    answer = ANTHROPIC.error(caught.value.refusal)
    assert answer.status == 400
    assert answer.body["type"] == "error"
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert answer.body["error"]["message"].startswith(message)
    assert "request_id" in answer.body


# --- any input -------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["x", "", "\ud800", "bash", "t1"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "x", "\ud800"]), inner),
    max_leaves=4,
)


def mostly(valid: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 31).flatmap(lambda roll: ANYTHING if roll == 13 else valid)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object of such fields, any of which may be anything."""
    return mostly(st.fixed_dictionaries({name: mostly(field) for name, field in fields.items()}))


def block(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return some(type=st.just(kind), **fields)


TEXT = block("text", text=WORDS)
TEXTS = WORDS | st.lists(TEXT, max_size=2)
SOURCE = block("text", data=WORDS) | block("content", content=TEXTS) | block("base64", data=WORDS)
FOUND = block("document", title=WORDS, source=SOURCE) | block("search_result", title=WORDS, source=WORDS, content=TEXTS)
NAMED = block("tool_reference", tool_name=WORDS) | block("image", source=SOURCE)
RESULT = block("tool_result", tool_use_id=WORDS, content=WORDS | st.lists(TEXT | FOUND | NAMED, max_size=3))
TOOL = some(name=WORDS, description=WORDS, input_schema=st.just({}))
ADDED = block("tool_addition", tool=some(name=WORDS) | some(definition=TOOL)) | block("tool_removal")
ANSWER = (
    TEXT
    | block("thinking", thinking=WORDS)
    | block("redacted_thinking")
    | block("tool_use", id=WORDS, name=WORDS, input=ANYTHING)
)
MESSAGE = (
    some(role=st.just("user"), content=WORDS | st.lists(TEXT | FOUND | RESULT, max_size=4))
    | some(role=st.just("assistant"), content=WORDS | st.lists(ANSWER, max_size=4))
    | some(role=st.just("system"), content=WORDS | st.lists(TEXT | ADDED, max_size=2))
)
FIELDS = some(
    messages=st.lists(MESSAGE, min_size=1, max_size=3),
    system=TEXTS,
    tools=st.lists(TOOL | block("web_search_20250305"), max_size=2),
    tool_choice=block("auto") | block("tool", name=WORDS),
    output_config=some(format=block("json_schema", schema=st.just({}))),
    stop_sequences=st.lists(WORDS, max_size=1),
    temperature=st.floats(0, 1),
)


@given(fields=FIELDS, is_count=st.booleans())
def test_any_body_is_read_or_refused(fields: Any, is_count: bool) -> None:
    body = {**ask(), **fields} if isinstance(fields, dict) else fields
    try:
        parsed = (ANTHROPIC.parse_count if is_count else ANTHROPIC.parse)(body, {})
    except InvalidRequestError as error:
        answer = ANTHROPIC.error(error.refusal)
        assert answer.status == 400
        to_json(answer.body).encode()
    else:
        assert parsed.messages
        to_json([parsed.unused_fields, parsed.tools, parsed.response_schema, parsed.requested_sampling]).encode()
        for message in parsed.messages:
            calls = [[call.call_id, call.name, call.arguments] for call in message.tool_calls]
            to_json([message.content, message.reasoning, message.tool_call_id, calls]).encode()
