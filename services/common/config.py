"""Loading of configuration files: YAML, ``dotted.key=value`` overrides, errors that name the key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from services.common.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


def load_config(model: type[ModelT], path: Path, overrides: Sequence[str] = ()) -> ModelT:
    """Read ``path``, apply ``key.sub=value`` overrides (values are YAML), and validate.

    Raises ``ConfigError`` naming the key, what is wrong with it, and the nearest known key for an unknown one.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", "See examples/configs for some.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}.", "Mind indentation and colons.") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys.", "See examples/configs for some.")
    return parse_config(model, data, overrides, str(path))


def parse_config(model: type[ModelT], data: dict[str, Any], overrides: Sequence[str], source: str) -> ModelT:
    """``load_config`` of data that is there already; it takes the overrides. ``source`` names it in messages."""
    for override in overrides:
        _apply_override(data, override)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_describe(error, model, source), "Nothing was started; mend the configuration.") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value.", "Example: trainer.steps=8")
    *parents, leaf = key.split(".")
    target = data
    for parent in parents:
        child = {} if target.get(parent) is None else target[parent]  # a section may stand there empty
        target[parent] = child
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} holds a value, not a section.", "Check the key.")
        target = child
    try:
        target[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML ({error}).", "Quote it.") from None


def _describe(error: ValidationError, model: type[BaseModel], source: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = "unknown key" + _nearest(str(item["loc"][-1]), model)
        elif item["type"] == "tuple_type":
            text = "must be a list, as [first, second]"
        elif item["type"] in ("model_type", "model_attributes_type"):
            text = f"is a section; set its keys, as {key}.KEY=value"
        lines.append(f"  {key or '(top)'}: {text}")
    return f"{source}:\n" + "\n".join(lines) + "\n"


def _nearest(name: str, model: type[BaseModel]) -> str:
    known = _field_names(model)
    if name in known:  # of another section, or of another choice
        return ""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def _field_names(model: type[BaseModel]) -> set[str]:
    names = set(model.model_fields)
    for field in model.model_fields.values():
        for section in sections_of(field.annotation):
            names |= _field_names(section)
    return names


def sections_of(annotation: object) -> list[type[BaseModel]]:
    """The models that a field may hold: one for a section, several for a choice, none for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in sections_of(argument)]
