"""Answers in the formats of vLLM's parsers: a stream says what the whole answer says, and no text is lost."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.answer_formats import REASONING_FORMATS, TOOL_FORMATS, UNUSABLE_PARSERS, structure_tokens
from services.proxy.parsing.calls import tool_call_id
from services.proxy.parsing.vllm_parser import VllmParser, VllmParsers
from services.proxy.types import CanonicalRequest, DeltaKind, ParsedAnswer, ToolChoice, ToolMode
from tests.unit.proxy.formats import CALLS, ONE_CALL_ONLY, TOOLS, WRITERS, Call, marked_tokenizer

CALL_ID = "g000000-r0-a0-c7"
REQUEST = CanonicalRequest("openai_chat", "m", (), tools=TOOLS)
SIMPLE: tuple[Call, ...] = (("run", {"command": "ls", "timeout": 5}), ("look", {"path": "/"}))
"""Without a bracket: phi4's parser ends its array at the first."""
CALLS_OF = {name: SIMPLE if name == "phi4_mini_json" else CALLS for name in WRITERS}
HEADLESS = frozenset({"pythonic", "llama4_pythonic", "xlam", "gigachat3", "kimi_k3", "inkling"})
"""Of these vLLM takes a call with text before it for text, or drops the text."""
KNOWN = [name for name in WRITERS if TOOL_FORMATS[name].openers]
MARKED = [name for name, form in REASONING_FORMATS.items() if form.end]
NEEDS_OTHER_TOKENIZER = frozenset({"poolside_v1", "olmo3", "k2_horizon", "hy_v3", "hy_v4"})


@functools.cache
def vllm(tool: str = "", reasoning: str = "") -> VllmParsers:
    return VllmParsers("", tool, reasoning, lambda _path: marked_tokenizer())


def parser(tool: str = "", reasoning: str = "", *, is_open: bool = False) -> VllmParser:
    return VllmParser(vllm(tool, reasoning), tool, reasoning, is_open=is_open)


def read(of: VllmParser, pieces: Sequence[str], request: CanonicalRequest = REQUEST) -> ParsedAnswer:
    """The answer, whose deltas are checked to be the answer."""
    reader = of.reader(request, CALL_ID)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)]
    last, answer = reader.finish()
    deltas += last
    assert "".join(delta.text for delta in deltas if delta.kind is DeltaKind.REASONING) == answer.reasoning
    assert "".join(delta.text for delta in deltas if delta.kind is DeltaKind.TEXT) == answer.text
    assert tuple(delta.tool_call for delta in deltas if delta.tool_call is not None) == answer.tool_calls
    kinds = [kind for kind, _ in itertools.groupby(deltas, key=lambda delta: delta.kind)]
    assert kinds == sorted(kinds, key=list(DeltaKind).index), "reasoning, then text, then calls"
    assert all(delta.text or delta.tool_call is not None for delta in deltas)
    return answer


def calls_in(answer: ParsedAnswer) -> tuple[Call, ...]:
    return tuple((call.name, call.arguments) for call in answer.tool_calls)


def cut(text: str, ends: list[int]) -> list[str]:
    places = sorted({min(end, len(text)) for end in ends} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def test_every_parser_of_vllm_that_reads_text_has_a_format() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {*TOOL_FORMATS} == {*ToolParserManager.list_registered()} - UNUSABLE_PARSERS
    assert {*REASONING_FORMATS} == {*ReasoningParserManager.list_registered()} - UNUSABLE_PARSERS


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in ("hy_v3", "hy_v4")])
def test_openers_and_tokens_are_those_of_vllms_grammars(name: str) -> None:
    """For the parsers that vLLM declares as grammars: where content ends there, an opener stands here."""
    from vllm.parser.engine.parser_engine_config import ParserState
    from vllm.tool_parsers import ToolParserManager

    engine = getattr(ToolParserManager.get_tool_parser(name)(marked_tokenizer()), "_parser_engine", None)
    form = TOOL_FORMATS[name]
    if engine is None or not form.openers:
        return
    config = engine.parser_engine_config
    leave = {
        terminal
        for (state, terminal), transition in config.transitions.items()
        if state is ParserState.CONTENT and transition.next_state not in (ParserState.CONTENT, ParserState.REASONING)
    }
    literals = [config.terminals[terminal] for terminal in leave]
    spelled = [text for one in literals for text in ((one,) if isinstance(one, str) else one)]
    assert all(text.startswith(form.openers) for text in spelled)
    assert all(any(text.startswith(opener) for text in spelled) for opener in form.openers)
    tokens = [text for text in config.token_id_terminals.values() if text.startswith(("<|", "[", "<｜"))]
    assert {*tokens} <= structure_tokens()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("num_calls", [1, 2])
def test_calls_are_read_as_they_were_written(name: str, num_calls: int) -> None:
    calls = CALLS_OF[name][: 1 if name in ONE_CALL_ONLY else num_calls]
    answer = read(parser(name), [WRITERS[name](calls)])
    assert calls_in(answer) == calls
    assert [call.call_id for call in answer.tool_calls] == [tool_call_id(CALL_ID, one) for one in range(len(calls))]
    assert (answer.text, answer.reasoning, answer.num_malformed_calls) == ("", "", 0)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in HEADLESS])
@pytest.mark.parametrize("head", ["I look.\n\n", "\n\nI look, {a: [1]}: ", "x"])
def test_text_before_calls_stays_as_it_is(name: str, head: str) -> None:
    if TOOL_FORMATS[name].is_plain and "{" in head:
        pytest.skip("a brace begins a call of this format")
    answer = read(parser(name), list(head + WRITERS[name](CALLS_OF[name][:1])))
    assert calls_in(answer) == CALLS_OF[name][:1]
    assert answer.text == head


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "text", ["", "\n", "Just text.\n", "  if (a < b) { return [1, 2]; }  \n", "<tool", "f(a=1)", "[", "<"]
)
def test_an_answer_without_calls_is_text_character_by_character(name: str, text: str) -> None:
    answer = read(parser(name), list(text))
    assert (answer.text, answer.tool_calls, answer.num_malformed_calls) == (text, (), 0)


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_cut_inside_a_call_is_text(name: str) -> None:
    calls = CALLS_OF[name][: 1 if name in ONE_CALL_ONLY else 2]
    text = f"{WRITERS[name](calls)}"
    for end in range(len(text)):
        answer = read(parser(name), [text[:end]])
        assert {*map(repr, calls_in(answer))} <= {*map(repr, calls)}
        assert answer.tool_calls or answer.text == text[:end] or TOOL_FORMATS[name].wraps_text


@pytest.mark.parametrize("name", [name for name in KNOWN if not TOOL_FORMATS[name].is_plain])
def test_what_begins_as_a_call_and_is_none_is_text_and_counted(name: str) -> None:
    opener = TOOL_FORMATS[name].openers[0]
    for body in ("", "{", "]", '{"name": 3, "arguments": {}}', "\ud7ff{{{", '[{"name": "run", "arguments": "x"}]'):
        text = f"So:\n{opener}{body}"
        answer = read(parser(name), list(text))
        assert (answer.text, answer.tool_calls, answer.num_malformed_calls >= 1) == (text, (), True)


@pytest.mark.parametrize("arguments", ["[1]", "null", '"{}"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1'])
def test_arguments_that_are_no_object_make_all_calls_of_the_answer_text(arguments: str) -> None:
    good = WRITERS["hermes"](CALLS[:1])
    text = f'{good}\n<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    assert read(parser("hermes"), [text]) == ParsedAnswer(text, num_malformed_calls=2)


@pytest.mark.parametrize("name", ["hermes", "glm45", "minimax_m2", "qwen3_coder", "kimi_k2", "internlm"])
def test_a_tool_that_was_not_offered_is_called_all_the_same(name: str) -> None:
    calls = (("destroy", {"path": "/"}),)
    answer = read(parser(name), [WRITERS[name](calls)])
    assert (calls_in(answer), answer.num_malformed_calls) == (calls, 0)


def test_without_tools_or_with_none_allowed_calls_are_text() -> None:
    text = f"a {WRITERS['hermes'](CALLS)}"
    for request in (
        CanonicalRequest("openai_chat", "m", ()),
        CanonicalRequest("openai_chat", "m", (), tools=TOOLS, tool_choice=ToolChoice(ToolMode.NONE)),
    ):
        assert read(parser("hermes"), list(text), request) == ParsedAnswer(text)
        assert parser("hermes").reader(request, CALL_ID).feed(text)[0].text == text


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("kimi_k3", "<|open|>response<|sep|>So [1].\n<|close|>response<|sep|>"),
        ("inkling", "<|message_model|><|content_text|>So [1].\n<|end_message|>"),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_text_that_stands_between_marks_is_unwrapped(name: str, wrapped: str, tools: Any) -> None:
    request = CanonicalRequest("openai_chat", "m", (), tools=tools)
    assert read(parser(name), list(wrapped), request) == ParsedAnswer("So [1].\n")
    both = wrapped + WRITERS[name](CALLS)
    answer = read(parser(name), list(both), request)
    assert (calls_in(answer), answer.text.strip()) == ((CALLS, "So [1].") if tools else ((), both))


def test_only_the_first_call_counts_where_calls_must_not_be_parallel() -> None:
    request = CanonicalRequest("openai_chat", "m", (), tools=TOOLS, tool_choice=ToolChoice(is_parallel=False))
    answer = read(parser("hermes"), [WRITERS["hermes"](CALLS)], request)
    assert (calls_in(answer), answer.text, answer.num_malformed_calls) == (CALLS[:1], "", 0)


def test_a_forced_answer_is_json_whatever_the_models_format() -> None:
    request = CanonicalRequest("openai_chat", "m", (), tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED, "run"))
    for name in ("", "hermes", "mistral"):
        answer = read(parser(name, "qwen3", is_open=True), list('{"command": "ls"}'), request)
        assert calls_in(answer) == (("run", {"command": "ls"}),)


def test_an_answer_under_a_schema_is_text() -> None:
    request = CanonicalRequest("openai_chat", "m", (), response_schema={"type": "object"})
    assert read(parser("hermes", "qwen3", is_open=True), list('{"a": "<think>"}'), request).text == '{"a": "<think>"}'


@pytest.mark.parametrize("name", [name for name in MARKED if name not in NEEDS_OTHER_TOKENIZER])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_what_vllm_reads(name: str, is_open: bool) -> None:
    """But for white space at its end, which some of vLLM's parsers drop."""
    if is_open and name in ("mistral", "minimax_m3"):
        pytest.skip("vLLM's parser of whole answers wants the start mark")
    form = REASONING_FORMATS[name]
    start = "" if is_open else form.start
    for text in (f"{start}\nwhy <b>\n{form.end}so", f"{start}why{form.end}", f"{start}why so"):
        answer = read(parser("", name, is_open=is_open), list(text), CanonicalRequest("openai_chat", "m", ()))
        reasoning, content = vllm("", name).reasoning(text, ())
        if name == "step3":  # vLLM's leaves the start mark in
            reasoning = reasoning.removeprefix(form.start)
        assert (answer.reasoning.rstrip(), answer.text) == (reasoning.rstrip(), content)


def test_reasoning_streams_before_it_ends() -> None:
    reader = parser("hermes", "qwen3").reader(REQUEST, CALL_ID)
    deltas = [reader.feed(piece) for piece in ("<thi", "nk>I ", "think", "</th", "ink>\n\nSo", " <tool_", "call>")]
    assert [[(str(one.kind), one.text) for one in some] for some in deltas] == [
        [], [("reasoning", "I ")], [("reasoning", "think")], [], [("text", "\n\nSo")], [("text", " ")], []
    ]  # fmt: skip


@pytest.mark.parametrize(("tool", "reasoning"), [("hermes", "qwen3"), ("kimi_k2", "kimi_k2"), ("mistral", "mistral")])
def test_a_call_in_the_middle_of_the_reasoning_ends_it(tool: str, reasoning: str) -> None:
    text = f"{REASONING_FORMATS[reasoning].start}I call.{WRITERS[tool](CALLS)}"
    answer = read(parser(tool, reasoning), list(text))
    assert (answer.reasoning, answer.text, calls_in(answer)) == ("I call.", "", CALLS)


def test_reasoning_that_only_vllm_can_tell_comes_at_the_end() -> None:
    text = "Here is my thought process: why. Here is my response: so"
    reader = parser("", "granite").reader(REQUEST, CALL_ID)
    assert [reader.feed(piece) for piece in text] == [[]] * len(text)
    _, answer = reader.finish()
    assert (answer.reasoning.strip(), answer.text.strip()) == ("why.", "so")


def test_a_parser_that_cannot_be_loaded_leaves_text() -> None:
    def fails(_path: str) -> None:
        raise OSError("no tokenizer")

    broken = VllmParser(VllmParsers("", "hermes", "granite", fails), "hermes", "granite")
    text = WRITERS["hermes"](CALLS)
    assert read(broken, [text]) == ParsedAnswer(text, num_malformed_calls=2)


PARTS = st.sampled_from(
    [
        "text ",
        "\n",
        "  ",
        "{",
        "}",
        "[",
        "]",
        '"',
        "<",
        ">",
        "</",
        "é🦊",
        "functions.",
        '{"name": "run", "arguments": {}}',
        "run",
        "=",
    ]
)


@st.composite
def _texts(draw: st.DrawFn, tool: str, reasoning: str) -> str:
    """Anything that has pieces of the formats in it: whole calls, cut ones, marks at any place."""
    form, thought = TOOL_FORMATS[tool], REASONING_FORMATS[reasoning]
    marks = [*form.openers, *form.begins, *form.closers, *form.inner, thought.start, thought.end]
    whole = WRITERS[tool](CALLS_OF[tool][:1]) if tool in WRITERS else ""
    cut_at = draw(st.integers(0, len(whole)))
    pieces = st.one_of(PARTS, st.sampled_from([*marks, whole, whole, whole[:cut_at], whole[cut_at:]]))
    return "".join(draw(st.lists(pieces, max_size=8)))


@pytest.mark.parametrize("tool", [name for name in TOOL_FORMATS if name not in ("hy_v3", "hy_v4")])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_streamed_answer_is_the_whole_answer(tool: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([name for name in REASONING_FORMATS if name not in NEEDS_OTHER_TOKENIZER]))
    text = data.draw(_texts(tool, reasoning))
    of = parser(tool, reasoning, is_open=data.draw(st.booleans()))
    whole = read(of, [text])
    assert read(of, cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == whole
    assert read(of, list(text)) == whole
    if REASONING_FORMATS[reasoning].end and not whole.tool_calls and TOOL_FORMATS[tool].openers:
        assert text.endswith(whole.text)


def test_the_same_tools_again_cost_nothing() -> None:
    def many() -> CanonicalRequest:
        properties = {f"field{index}": {"type": "string", "description": "x" * 100} for index in range(20)}
        tools = [
            {"type": "function", "function": {"name": f"t{index}", "parameters": {"properties": dict(properties)}}}
            for index in range(50)
        ]
        return CanonicalRequest("openai_chat", "m", (), tools=(*TOOLS, *tools))

    requests, text, of = [many() for _ in range(20)], WRITERS["hermes"](CALLS), parser("hermes")
    read(of, [text], requests[0])
    seconds = []
    for request in requests:
        reader = of.reader(request, CALL_ID)
        reader.feed(text)
        started_s = time.perf_counter()
        reader.finish()
        seconds.append(time.perf_counter() - started_s)
    assert min(seconds) < 0.001
