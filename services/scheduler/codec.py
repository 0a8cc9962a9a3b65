"""Events, actions and resume states as JSON-ready data, and back. Each dataclass carries its name as ``type``."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from services.common.errors import ConfigError
from services.scheduler import actions, events, options, types
from services.trajectory.types import GroupResult, GroupSpec


def encode(value: Any) -> Any:
    """JSON-ready form of a value of the scheduler's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(data: Any, kind: type[Any] | None = None) -> Any:
    """The value that ``encode`` was given. Raises ``ConfigError`` for data that it never made.

    ``kind`` is what the data is where it does not say so (older commit records do not).
    """
    try:
        return _decode_dataclass(_KINDS[data["type"]] if kind is None else kind, data)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a record of the scheduler: {error!r}.", "Was it written by another version?") from error


def _decode_dataclass(cls: type[Any], data: dict[str, Any]) -> Any:
    hints = _HINTS[cls.__name__]
    return cls(**{name: _decode_as(hints[name], value) for name, value in data.items() if name != "type"})


def _decode_as(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict) and "type" in value:
        return _decode_dataclass(_KINDS[value["type"]], value)
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
        origin = get_origin(hint)
    if origin is tuple:
        args = get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode_as(args[0], item) for item in value)
        return tuple(_decode_as(arg, item) for arg, item in zip(args, value, strict=True))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if isinstance(value, dict) and hint in _KINDS.values():
        return _decode_dataclass(hint, value)
    return value


_KINDS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *get_args(events.Event),
        *get_args(actions.Action),
        actions.Decision,
        types.Counters,
        types.ReadyGroup,
        types.ResumeState,
        types.TaskRewards,
        options.JobOptions,
        options.Policy,
        GroupResult,
        GroupSpec,
    )
}
_HINTS = {name: get_type_hints(cls) for name, cls in _KINDS.items()}
