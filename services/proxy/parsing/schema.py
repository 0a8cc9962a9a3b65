"""The JSON schema under which an answer is generated, where a request forces its form."""

from __future__ import annotations

import json
from typing import Any

from services.common.errors import RequestError
from services.proxy.types import CanonicalRequest, ToolMode

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def is_forced(request: CanonicalRequest) -> bool:
    """Whether the answer must be a tool call."""
    return request.tool_choice.mode is ToolMode.REQUIRED and bool(request.tools)


def may_call(request: CanonicalRequest) -> bool:
    """Whether the answer may have tool calls."""
    return request.tool_choice.mode is not ToolMode.NONE and bool(request.tools)


def is_masked(request: CanonicalRequest) -> bool:
    """Whether the answer is made under a grammar: ``required_schema`` has one."""
    return is_forced(request) or (request.response_schema is not None and not may_call(request))


def required_schema(request: CanonicalRequest) -> str | None:
    """The JSON schema, as text, that a grammar mask must enforce on the whole answer; None: the answer is free.

    A forced tool: an object of its arguments. Any tool: an array of objects with ``name`` and ``parameters``. Else the
    response's own schema, unless the answer may call tools: a mask would forbid that. Raises ``RequestError`` for a
    schema that nests too deeply.
    """
    try:
        schema = _schema(request)
        return None if schema is None else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError("a JSON schema of the request nests too deeply.", "Send a flatter one.") from error


def _schema(request: CanonicalRequest) -> dict[str, Any] | None:
    if is_forced(request):
        return _named(request) if request.tool_choice.name else _any_tool(request)
    return None if may_call(request) else request.response_schema


def _named(request: CanonicalRequest) -> dict[str, Any]:
    name = request.tool_choice.name
    return next((_parameters(tool) for tool in request.tools if _function(tool).get("name") == name), _NO_ARGUMENTS)


def _any_tool(request: CanonicalRequest) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    items = []
    for index, tool in enumerate(request.tools):
        parameters = _parameters(tool)
        if _has_reference(parameters):  # its references start at its own root, which is not the root of the whole
            definitions[f"tool{index}"] = _moved(parameters, f"#/$defs/tool{index}")
            parameters = {"$ref": f"#/$defs/tool{index}"}
        name = {"type": "string", "enum": [_function(tool).get("name", "")]}
        items.append(
            {
                "type": "object",
                "properties": {"name": name, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": items[0] if len(items) == 1 else {"anyOf": items},
    }
    if not request.tool_choice.is_parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = _function(tool).get("parameters")
    return parameters if isinstance(parameters, dict) and parameters else _NO_ARGUMENTS


def _has_reference(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(_has_reference(value) for value in schema.values())
    return isinstance(schema, list) and any(_has_reference(value) for value in schema)


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references into itself start at ``root``."""
    if isinstance(schema, list):
        return [_moved(value, root) for value in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
