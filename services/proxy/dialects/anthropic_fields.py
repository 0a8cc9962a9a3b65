"""Reading fields of Anthropic's bodies: what is wrong is said in the vendor's own words, place first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from services.proxy.dialects import InvalidRequestError
from services.proxy.dialects.fields import clean, clean_json

_T = TypeVar("_T")

_NAMES = {str: "string", dict: "dictionary", list: "list", bool: "boolean"}


def invalid(where: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {message}", param=where)


def unexpected(kind: str, where: str, expected: str) -> InvalidRequestError:
    return invalid(
        where, f"Input tag {clean(kind)!r} found using 'type' does not match any of the expected tags: {expected}"
    )


def typed(value: Any, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        raise invalid(where, f"Input should be a valid {_NAMES[kind]}")
    return value


def required(given: Mapping[str, Any], name: str, kind: type[_T], where: str) -> _T:
    """A field that must be there and not null."""
    where = f"{where}.{name}" if where else name
    if given.get(name) is None:
        raise invalid(where, "Field required")
    return typed(given[name], kind, where)


def number(value: Any, where: str, low: float, high: float | None, *, is_integer: bool) -> float:
    """A finite number within bounds; an integer if it must be one."""
    if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float):
        raise invalid(where, f"Input should be a valid {'integer' if is_integer else 'number'}")
    if not low <= value:  # so written, it holds for NaN too
        raise invalid(where, f"Input should be greater than or equal to {low:g}")
    if high is not None and not value <= high:
        raise invalid(where, f"Input should be less than or equal to {high:g}")
    return value


def function_of(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as OpenAI's form has it."""
    name = required(tool, "name", str, where)
    if not name:
        raise invalid(f"{where}.name", "String should have at least 1 character")
    description = tool.get("description")
    schema = required(tool, "input_schema", dict, where)
    function: dict[str, Any] = {"name": clean(name)}
    if description is not None:
        function["description"] = clean(typed(description, str, f"{where}.description"))
    function["parameters"] = clean_json(schema)
    return function
