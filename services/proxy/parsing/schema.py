"""The JSON schema that a forced answer is made to satisfy. Pure."""

from __future__ import annotations

import json
from typing import Any

from services.proxy.types import CanonicalRequest, ToolMode


def required_schema(request: CanonicalRequest) -> str | None:
    """The schema of an answer as JSON text: of a forced tool call, or of the text that the request asks for. None:
    the model may say what it likes.

    A named tool: its arguments. Any tool: an array of ``{name, parameters}``.
    """
    if request.tool_choice.mode is ToolMode.REQUIRED and request.tools:
        return json.dumps(_calls_schema(request), sort_keys=True)
    if request.response_schema is not None:
        return json.dumps(request.response_schema, sort_keys=True)
    return None


def _calls_schema(request: CanonicalRequest) -> dict[str, Any]:
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    name = request.tool_choice.name
    if name in functions:
        return _parameters(functions[name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [one]}, "parameters": _parameters(function)},
            "required": ["name", "parameters"],
        }
        for one, function in functions.items()
    ]
    most = {} if request.tool_choice.is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
