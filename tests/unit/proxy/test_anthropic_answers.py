from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.proxy.dialects import Refusal, RefusalKind
from services.proxy.dialects.anthropic import ANTHROPIC
from services.proxy.dialects.anthropic_answers import model_list, token_count
from services.proxy.dialects.fields import to_json
from services.proxy.types import Choice, Delta, DeltaKind, ParsedAnswer, ToolCall
from services.proxy.types import Message as CanonicalMessage
from tests.unit.proxy.anthropic_fakes import (
    ASK,
    USAGE,
    client,
    deltas_of,
    failing_client,
    head,
    stream_of,
    streamed_message,
    whole_message,
)

CALLS = (ToolCall("call_1", "bash", {"command": "ls"}), ToolCall("call_2", "stop", {}))


def events(stream: str) -> list[dict[str, Any]]:
    """The data of each event, whose name must be its type."""
    found = []
    for block in stream.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def outline(stream: str) -> list[str]:
    return [
        event["type"] + (f" {event['index']}" if "index" in event else "") + (f" {delta}" if delta else "")
        for event in events(stream)
        for delta in [event.get("delta", {}).get("type") or event.get("content_block", {}).get("type")]
    ]


# --- the form of an answer -------------------------------------------------------------------------------------


def test_events_come_in_the_vendors_order() -> None:
    answer = ParsedAnswer("so", "why", CALLS)
    assert outline(stream_of(Choice(0, answer, "stop"), deltas_of(answer))) == [
        "message_start",
        "ping",
        "content_block_start 0 thinking",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 signature_delta",
        "content_block_stop 0",
        "content_block_start 1 text",
        "content_block_delta 1 text_delta",
        "content_block_stop 1",
        "content_block_start 2 tool_use",
        "content_block_delta 2 input_json_delta",
        "content_block_stop 2",
        "content_block_start 3 tool_use",
        "content_block_delta 3 input_json_delta",
        "content_block_stop 3",
        "message_delta",
        "message_stop",
    ]


def test_body_and_events_are_of_the_official_types() -> None:
    answer = ParsedAnswer("so", "why", CALLS)
    choice = Choice(0, answer, "stop")
    Message.model_validate(ANTHROPIC.body(head(), [choice], USAGE), strict=True)
    event_type: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    for event in events(stream_of(choice, deltas_of(answer))):
        if event["type"] != "ping":  # which the client skips before it looks at its form
            event_type.validate_python(event, strict=True)


def test_text_goes_out_at_once_and_tool_calls_with_the_end() -> None:
    stream = ANTHROPIC.stream(head())
    stream.begin(USAGE)
    assert "text_delta" in stream.delta(0, Delta(DeltaKind.TEXT, "so"))
    assert stream.delta(0, Delta(DeltaKind.TOOL_CALL, tool_call=CALLS[0])) == ""
    answer = ParsedAnswer("so", tool_calls=CALLS[:1])
    assert '"name":"bash"' in stream.end([Choice(0, answer, "stop")], USAGE)


def test_usage_is_split_as_the_vendor_splits_it_at_both_ends_of_a_stream() -> None:
    answer = ParsedAnswer("so")
    first, *_, last, _ = events(stream_of(Choice(0, answer, "stop"), deltas_of(answer)))
    assert first["message"]["usage"] == {
        "input_tokens": 20,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 10,
        "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert (last["usage"]["output_tokens"], last["usage"]["output_tokens_details"]["thinking_tokens"]) == (9, 4)
    assert last["usage"] == ANTHROPIC.body(head(), [Choice(0, answer, "stop")], USAGE)["usage"]


@pytest.mark.parametrize(
    ("finish_reason", "stop_string", "calls", "expected"),
    [
        ("stop", "", (), ("end_turn", None)),
        ("stop", "", CALLS, ("tool_use", None)),
        ("length", "", (), ("max_tokens", None)),
        ("length", "", CALLS, ("max_tokens", None)),
        ("stop", "END", (), ("stop_sequence", "END")),
        ("stop", "of the job", (), ("end_turn", None)),
    ],
)
def test_stop_reason(
    finish_reason: str, stop_string: str, calls: tuple[ToolCall, ...], expected: tuple[str, str | None]
) -> None:
    choice = Choice(0, ParsedAnswer("so", tool_calls=calls), finish_reason, stop_string)
    asked = head(requested_sampling={"stop": ["END"]})
    body = ANTHROPIC.body(asked, [choice], USAGE)
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    delta = events(stream_of(choice, deltas_of(choice.answer), asked))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


@pytest.mark.parametrize("answer", [ParsedAnswer(""), ParsedAnswer("\n\n", " \n")])
def test_answer_of_white_space_has_no_block(answer: ParsedAnswer) -> None:
    choice = Choice(0, answer, "stop")
    assert outline(stream_of(choice, deltas_of(answer))) == ["message_start", "ping", "message_delta", "message_stop"]
    message = whole_message(choice)
    assert (message.content, message.stop_reason) == ([], "end_turn")


def test_white_space_before_text_is_kept_and_opens_no_block_of_its_own() -> None:
    answer = ParsedAnswer("\n\nso", "why")
    message = streamed_message(Choice(0, answer, "stop"), deltas_of(answer, size=1))
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "\n\nso"  # type: ignore[union-attr]


def test_message_has_the_calls_id_and_the_models_name() -> None:
    message = whole_message(Choice(0, ParsedAnswer("so"), "stop"))
    assert (message.id, message.model, message.role) == ("msg_g000001-r0-a0-c1", "m", "assistant")


def test_keep_alive_is_an_event_that_the_client_skips() -> None:
    assert events(ANTHROPIC.keep_alive) == [{"type": "ping"}]
    answer = ParsedAnswer("so")
    stream = ANTHROPIC.keep_alive + stream_of(Choice(0, answer, "stop"), deltas_of(answer))
    with client(stream, "text/event-stream").messages.stream(**ASK) as read:
        assert read.get_final_text() == "so"


# --- round trips through the official client -------------------------------------------------------------------

TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TOOL_CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(TEXT, JSON, max_size=3)), max_size=3
).map(lambda calls: tuple(ToolCall(f"call_{at}", name, given) for at, (name, given) in enumerate(calls)))
ANSWERS = st.builds(ParsedAnswer, text=TEXT, reasoning=TEXT, tool_calls=TOOL_CALLS)


def canonical(message: Message) -> CanonicalMessage:
    """What the dialect makes of a message that the client sends back as it got it."""
    sent = json.loads(to_json(message.to_dict()))
    history = [{"role": sent["role"], "content": sent["content"]}, {"role": "user", "content": "go on"}]
    return ANTHROPIC.parse({"model": "m", "max_tokens": 9, "messages": history}, {}).messages[0]


@given(answer=ANSWERS, size=st.integers(1, 7))
def test_answer_sent_back_is_the_answer_streamed_or_not(answer: ParsedAnswer, size: int) -> None:
    choice = Choice(0, answer, "stop")
    streamed, whole = streamed_message(choice, deltas_of(answer, size)), whole_message(choice)
    assert streamed.to_dict() == whole.to_dict()
    sent_back = canonical(streamed)
    assert sent_back.tool_calls == answer.tool_calls
    for got, made in ((sent_back.content, answer.text), (sent_back.reasoning, answer.reasoning)):
        assert got == made if made.strip() else got == ""


@given(answer=ANSWERS, order=st.randoms(use_true_random=False))
def test_pieces_in_any_order_make_the_same_message(answer: ParsedAnswer, order: Any) -> None:
    """Blocks may then be several, but what is sent back is the same."""
    kinds = {kind: [one for one in deltas_of(answer, 2) if one.kind is kind] for kind in DeltaKind}
    turns = [kind for kind, deltas in kinds.items() for _ in deltas]
    order.shuffle(turns)
    sent_back = canonical(streamed_message(Choice(0, answer, "stop"), [kinds[kind].pop(0) for kind in turns]))
    assert (sent_back.content.strip(), sent_back.reasoning.strip()) == (answer.text.strip(), answer.reasoning.strip())
    assert sent_back.tool_calls == answer.tool_calls


# --- errors ----------------------------------------------------------------------------------------------------

EXCEPTIONS: dict[RefusalKind, tuple[type[anthropic.APIStatusError], str]] = {
    RefusalKind.INVALID_REQUEST: (anthropic.BadRequestError, "invalid_request_error"),
    RefusalKind.INVALID_KEY: (anthropic.AuthenticationError, "authentication_error"),
    RefusalKind.CONTEXT_LENGTH: (anthropic.BadRequestError, "invalid_request_error"),
    RefusalKind.BODY_TOO_LARGE: (anthropic.APIStatusError, "request_too_large"),
    RefusalKind.BODY_TIMEOUT: (anthropic.APIStatusError, "timeout_error"),
    RefusalKind.TURN_LIMIT: (anthropic.BadRequestError, "invalid_request_error"),
    RefusalKind.RATE_LIMITED: (anthropic.RateLimitError, "rate_limit_error"),
    RefusalKind.OVERLOADED: (anthropic.InternalServerError, "overloaded_error"),
    RefusalKind.SERVER_ERROR: (anthropic.InternalServerError, "api_error"),
    RefusalKind.NOT_FOUND: (anthropic.NotFoundError, "not_found_error"),
    RefusalKind.METHOD_NOT_ALLOWED: (anthropic.APIStatusError, "invalid_request_error"),
}
RETRIED_STATUS = {408, 429, 500, 529}


@pytest.mark.parametrize("kind", list(RefusalKind))
def test_every_refusal_is_the_right_error_of_the_official_client(kind: RefusalKind) -> None:
    expected, name = EXCEPTIONS[kind]
    refusal = Refusal(kind, num_prompt_tokens=9000, max_model_len=4096, max_body_bytes=7)
    error = ANTHROPIC.error(refusal)
    with pytest.raises(expected) as caught:
        failing_client(error).messages.create(**ASK)
    if kind is not RefusalKind.BODY_TOO_LARGE:  # documented, but not among the client's types
        ErrorResponse.model_validate(caught.value.body, strict=True)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == name
    assert caught.value.body["error"]["message"]
    retried = (RefusalKind.BODY_TIMEOUT, RefusalKind.RATE_LIMITED, RefusalKind.OVERLOADED, RefusalKind.SERVER_ERROR)
    is_final = kind not in retried
    assert (error.status not in RETRIED_STATUS) == is_final


def test_context_error_is_nothing_but_the_words_that_make_harnesses_compact() -> None:
    refusal = Refusal(RefusalKind.CONTEXT_LENGTH, num_prompt_tokens=5000, max_model_len=4096)
    assert ANTHROPIC.error(refusal).body["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"


def test_prompt_that_fits_without_an_answer_gets_the_other_context_error() -> None:
    refusal = Refusal(RefusalKind.CONTEXT_LENGTH, num_prompt_tokens=4000, max_model_len=4096)
    message = ANTHROPIC.error(refusal).body["error"]["message"]
    assert message.startswith("input length and `max_tokens` exceed context limit: 4000 + 97 > 4096,")


# --- other endpoints -------------------------------------------------------------------------------------------


def test_official_client_reads_a_token_count() -> None:
    answering = client(to_json(token_count(41)), "application/json")
    assert answering.messages.count_tokens(model="m", messages=ASK["messages"]).input_tokens == 41


def test_official_client_reads_the_list_of_models() -> None:
    body = model_list(["m-1"], 1_700_000_000, max_model_len=4096)
    (model,) = client(to_json(body), "application/json").models.list()
    assert (model.id, model.type, model.max_input_tokens) == ("m-1", "model", 4096)
    assert model.created_at.isoformat() == "2023-11-14T22:13:20+00:00"
