"""Reading fields of JSON bodies, for every dialect. What is wrong is an ``InvalidRequestError`` naming the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from services.proxy.dialects import InvalidRequestError

_T = TypeVar("_T")

RAW_ARGUMENTS = "__raw_arguments__"
"""Key under which a tool call's arguments are kept when they are no JSON object."""


def given_fields(body: Any) -> dict[str, Any]:
    """A body's fields without those that are null."""
    if not isinstance(body, dict):
        raise InvalidRequestError("We could not parse the JSON body of your request. It must be an object.")
    return {name: value for name, value in body.items() if value is not None}


def invalid(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{param}'. {message}", param=param, code="invalid_value")


def typed(value: Any, kind: type[_T], param: str, expected: str) -> _T:
    """The value, if it is of that type."""
    if not isinstance(value, kind):
        raise wrong_type(param, expected)
    return value


def wrong_type(param: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid type for '{param}': expected {expected}.", param=param, code="invalid_type")


def number(value: Any, param: str) -> float:
    """A finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(param, "a number")
    try:
        return float(value)
    except OverflowError:
        raise invalid(param, "The number is too large.") from None


def integer(value: Any, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(param, "an integer")
    return value


def number_between(given: Mapping[str, Any], name: str, low: float, high: float) -> None:
    """Check an optional number."""
    if name in given and not low <= number(given[name], name) <= high:
        raise invalid(name, f"Expected a number from {low:g} to {high:g}.")


def clean(text: str) -> str:
    """Text without lone surrogates, which JSON can carry but no tokenizer takes."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def clean_json(value: Any) -> Any:
    """JSON-ready data with all its text cleaned; numbers that JSON has not (NaN, 1e999) become their names."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): clean_json(item) for key, item in value.items()}
    return value


def parse_arguments(given: Any) -> dict[str, Any]:
    """A tool call's arguments as an object; what is no JSON object is kept under ``RAW_ARGUMENTS``."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            value = given
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {RAW_ARGUMENTS: clean_json(given)}
    cleaned: dict[str, Any] = clean_json(value)
    return cleaned


def stop_strings(given: Any, param: str) -> list[str]:
    """One stop string or several, as a list without empty ones."""
    stops = [given] if isinstance(given, str) else typed(given, list, param, "a string or an array of strings")
    return [clean(typed(one, str, param, "a string")) for one in stops if one != ""]


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether a client of the Stainless kind (OpenAI's and Anthropic's own) says that it tries again."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and count.strip("0") != ""


def to_json(value: Any) -> str:
    """Compact JSON, text as it is but for what some clients take for the end of a line, and so of an event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if text.isascii():
        return text
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
