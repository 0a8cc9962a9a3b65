"""Tool calls out of what a model, or a parser of its text, wrote."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from services.proxy.types import ToolCall

_NO_NAME = re.compile(r"""[\s\[\]{}()<>"'`]""")
"""What no vendor takes in a tool's name; in a model's text it is a piece of syntax that was not understood."""


_INNER_MARKS = (
    ("<parameter", "</parameter"),
    ("<function", "</function"),
    ("<invoke", "</invoke"),
    ("<arg_key>", "</arg_key>"),
    ("<arg_value>", "</arg_value>"),
    ("<tool_call>", "</tool_call>"),
)
_MAX_OPEN_MARKS = 32
_NESTED = re.compile(r"(?:[{\[]\s*(?:[^\s{}\[\]:]{1,64}\s*:\s*)?){65}")
"""Brackets within brackets, with nothing but keys between."""


class MalformedCallError(ValueError):
    """What began as a tool call is none."""


def is_runaway(text: str) -> bool:
    """Whether a text begins marks or brackets over and over without ending them, as a model does that repeats itself.
    vLLM's parsers take minutes for some kilobytes of that, and nothing can stop them."""
    is_open = any(text.count(begin) - text.count(end) > _MAX_OPEN_MARKS for begin, end in _INNER_MARKS)
    return is_open or _NESTED.search(text) is not None


def tool_call_id(call_id: str, ordinal: int) -> str:
    """The id of an answer's tool call ``ordinal``: the same whenever the answer of ``call_id`` is read."""
    return f"call_{hashlib.sha256(f'{call_id}/{ordinal}'.encode()).hexdigest()[:24]}"


def make_call(call_id: str, ordinal: int, name: str, arguments: str) -> ToolCall:
    """A tool call of its name and the text of its arguments. Raises ``MalformedCallError``."""
    return checked_call(call_id, ordinal, name, read_json(arguments))


def checked_call(call_id: str, ordinal: int, name: Any, arguments: Any) -> ToolCall:
    """A tool call of its name and its arguments. Raises ``MalformedCallError``."""
    if not isinstance(name, str) or not name.strip() or _NO_NAME.search(name.strip()):
        raise MalformedCallError(f"{name!r} is no name of a tool")
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the arguments of a call of {name!r} are no JSON object")
    return ToolCall(tool_call_id(call_id, ordinal), name.strip(), arguments)


def read_json(text: str) -> Any:
    """A JSON value that can be sent on as JSON: no NaN, no half of a surrogate pair. Raises ``MalformedCallError``."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise MalformedCallError(f"not JSON: {error}") from error
    return value


def _refuse(name: str) -> None:
    raise MalformedCallError(f"{name} is no JSON")
