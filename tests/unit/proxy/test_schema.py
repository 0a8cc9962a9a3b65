"""The schema of a forced answer admits what the request asks for and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import RequestError
from services.proxy.parsing.schema import is_masked, required_schema
from services.proxy.types import CanonicalRequest, ToolChoice, ToolMode
from tests.unit.proxy.formats import TOOLS

ANSWER = {"type": "object", "properties": {"title": {"type": "string"}}}
REQUIRED = ToolChoice(ToolMode.REQUIRED)
NODE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "key": {"$ref": "#/$defs/Key"}},
    "required": ["key"],
    "$defs": {"Key": {"enum": ["x"]}},
}


def schema_of(**request: Any) -> Any:
    made = CanonicalRequest("openai_chat", "m", (), **request)
    text = required_schema(made)
    assert is_masked(made) == (text is not None)
    return None if text is None else json.loads(text)


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.NONE])
def test_a_free_answer_has_none(mode: ToolMode) -> None:
    assert schema_of() is None
    assert schema_of(tools=TOOLS, tool_choice=ToolChoice(mode)) is None
    assert schema_of(tool_choice=REQUIRED) is None


def test_a_named_tool_has_that_of_its_arguments() -> None:
    assert (
        schema_of(tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED, "run")) == TOOLS[0]["function"]["parameters"]
    )
    bare = ({"type": "function", "function": {"name": "f"}},)
    assert schema_of(tools=bare, tool_choice=ToolChoice(ToolMode.REQUIRED, "f")) == {"type": "object", "properties": {}}


def test_any_tool_has_an_array_of_calls() -> None:
    schema = schema_of(tools=TOOLS, tool_choice=REQUIRED)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert names == [["run"], ["look"]]
    assert schema_of(tools=TOOLS, tool_choice=ToolChoice(ToolMode.REQUIRED, is_parallel=False))["maxItems"] == 1


def test_a_response_has_its_own_unless_the_answer_may_call_tools() -> None:
    assert schema_of(response_schema=ANSWER) == ANSWER
    assert schema_of(response_schema=ANSWER, tools=TOOLS, tool_choice=ToolChoice(ToolMode.NONE)) == ANSWER
    assert schema_of(response_schema=ANSWER, tools=TOOLS) is None
    assert schema_of(response_schema=ANSWER, tools=TOOLS, tool_choice=REQUIRED)["type"] == "array"


def test_a_grammar_of_it_takes_calls_and_refuses_others() -> None:
    """By xgrammar, which enforces it in vLLM; references of a tool's schema start at that schema."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string as takes

    tree = {"type": "function", "function": {"name": "tree", "parameters": NODE}}
    text = required_schema(CanonicalRequest("openai_chat", "m", (), tools=(*TOOLS, tree), tool_choice=REQUIRED))
    grammar = xgrammar.Grammar.from_json_schema(text)
    for good in (
        '[{"name": "tree", "parameters": {"left": {"key": "x"}, "key": "x"}}]',
        '[{"name": "look", "parameters": {"path": "/"}}, {"name": "run", "parameters": {"command": "ls"}}]',
    ):
        assert takes(grammar, good)
    for bad in (
        "[]",
        '[{"name": "other", "parameters": {}}]',
        '[{"name": "run", "parameters": {}}]',
        '[{"name": "tree", "parameters": {"key": "y"}}]',
        '[{"name": "run"}]',
    ):
        assert not takes(grammar, bad)


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError):
        schema_of(response_schema=deep)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(RequestError):
        schema_of(tools=(tool,), tool_choice=REQUIRED)
