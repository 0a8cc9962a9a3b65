"""Tool calls are objects with a name and an id that never changes; what is none is not called one."""

from __future__ import annotations

import json
import re

import pytest

from services.proxy.dialects.fields import to_json
from services.proxy.parsing.calls import MalformedCallError, checked_call, is_runaway, make_call, tool_call_id
from services.proxy.parsing.forced import ForcedReader
from services.proxy.types import CanonicalRequest, Delta, DeltaKind, ParsedAnswer, ToolCall, ToolChoice, ToolMode
from tests.unit.proxy.formats import TOOLS

CALL_ID = "g000000-r0-a0-c7"


def forced(text: str, name: str = "", is_parallel: bool = True) -> tuple[list[Delta], ParsedAnswer]:
    choice = ToolChoice(ToolMode.REQUIRED, name, is_parallel)
    reader = ForcedReader(CanonicalRequest("openai_chat", "m", (), tools=TOOLS, tool_choice=choice), CALL_ID)
    assert [reader.feed(character) for character in text] == [[]] * len(text)
    return reader.finish()


def test_ids_depend_on_the_call_and_the_ordinal_alone() -> None:
    ids = [tool_call_id(CALL_ID, ordinal) for ordinal in range(3)]
    assert ids == [tool_call_id(CALL_ID, ordinal) for ordinal in range(3)]
    assert len({*ids, tool_call_id("g000000-r0-a0-c8", 0)}) == 4
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", one) for one in ids)


@pytest.mark.parametrize(
    "arguments",
    ["", "{", "[]", "null", '"text"', '{"a": NaN}', '{"a": -Infinity}', '{"a": "\\ud800"}', '{"\\udfff": 1}', "{}x",
     '{"a": ' * 5000, "[" * 100_000],
)  # fmt: skip
def test_arguments_that_are_no_json_object_are_malformed(arguments: str) -> None:
    with pytest.raises(MalformedCallError):
        make_call(CALL_ID, 0, "run", arguments)


@pytest.mark.parametrize("name", ["", "  \n", None, 3, ["run"], "[", '{"name"', "a b"])
def test_a_call_without_a_name_is_malformed(name: object) -> None:
    with pytest.raises(MalformedCallError):
        checked_call(CALL_ID, 0, name, {})


def test_a_call_can_be_sent_on() -> None:
    call = make_call(
        CALL_ID, 0, " run ", '{"a": [1, {"b": "\\ud83e\\udd8a"}], "c": 1e5, "d": 123456789012345678901234567890}'
    )
    assert call == ToolCall(
        tool_call_id(CALL_ID, 0), "run", {"a": [1, {"b": "🦊"}], "c": 1e5, "d": 123456789012345678901234567890}
    )
    assert json.loads(to_json(call.arguments).encode()) == call.arguments


def test_a_forced_tool_gets_the_object_as_its_arguments() -> None:
    deltas, answer = forced('{"command": "ls"}', name="run")
    (call,) = answer.tool_calls
    assert (call.name, call.arguments, call.call_id) == ("run", {"command": "ls"}, tool_call_id(CALL_ID, 0))
    assert deltas == [Delta(DeltaKind.TOOL_CALL, tool_call=call)]
    assert (answer.text, answer.num_malformed_calls) == ("", 0)


def test_any_forced_tools_are_an_array_of_calls() -> None:
    text = '[{"name": "run", "parameters": {"command": "ls"}},\n {"name": "look", "parameters": {}}]'
    _, answer = forced(text)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("run", {"command": "ls"}), ("look", {})]
    _, first = forced(text, is_parallel=False)
    assert first.tool_calls == answer.tool_calls[:1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"command": "l', "run"),
        ("[1]", "run"),
        ("[]", ""),
        ("{}", ""),
        ('[{"name": "run", "parameters": {}}, {"name": "lo', ""),
        ('[{"name": "run"}]', ""),
        ('[{"parameters": {}}]', ""),
        ("[3]", ""),
    ],
)
def test_a_forced_answer_that_was_cut_is_text(text: str, name: str) -> None:
    deltas, answer = forced(text, name)
    assert answer == ParsedAnswer(text, num_malformed_calls=1)
    assert deltas == [Delta(DeltaKind.TEXT, text)]


def test_a_forced_answer_without_a_token_is_empty() -> None:
    assert forced("") == ([], ParsedAnswer("", num_malformed_calls=1))


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>" + "<parameter=a>" * 1000,
        "<tool_call>" * 100,
        '{"a":' * 100,
        "[" * 100,
        "call:f" + "{a:" * 100,
        "{ " * 100,
    ],
)
def test_a_text_that_begins_and_never_ends_is_runaway(text: str) -> None:
    assert is_runaway(text)


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>" + "<parameter=a>x</parameter>" * 1000 + "</function>",
        json.dumps({"content": "\x1b[31mred " * 500}),
        "<parameter=content>" + "<td>" * 500 + "if (a[0]) { b[i] = {1: [2]}; " * 500 + "</parameter>",
        '{"a": ' * 40 + "1" + "}" * 40,
        "x" * 100_000,
        "[x " * 100_000,
        '{"k": "v", ' * 20_000,
    ],
)
def test_long_and_bracketed_texts_are_not(text: str) -> None:
    assert not is_runaway(text)
