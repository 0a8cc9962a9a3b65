"""Finds the function that scores: by dotted path, or by the name of an entry point."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from services.common.errors import ConfigError

ENTRY_POINT_GROUP = "tidegate.scorers"


def find_function(path: str) -> Callable[..., Any]:
    """The function that ``rollout.scoring.path`` names. Raises ``ConfigError``. Importing it runs its module's code."""
    try:
        function = _import(path) if ":" in path else _entry_point(path)
    except ConfigError:
        raise
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"rollout.scoring.path: cannot import {path!r} ({type(error).__name__}: {error}).",
            "Install its package, or name its folder in rollout.scoring.python_path.",
        ) from error
    try:
        inspect.signature(function).bind("run", "workspace")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rollout.scoring.path: {path!r} cannot be called as function(run, workspace): {error}.",
            "Give it two arguments.",
        ) from error
    return function


def _import(path: str) -> Callable[..., Any]:
    module_name, _, names = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"rollout.scoring.path: {path!r} is a {type(found).__name__}.", "Name a function.")
    function: Callable[..., Any] = found
    return function


def _entry_point(name: str) -> Callable[..., Any]:
    known = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in known:
        raise ConfigError(
            f"rollout.scoring.path: no installed package has an entry point {name!r} in the group "
            f"{ENTRY_POINT_GROUP!r} (found: {', '.join(sorted(known)) or 'none'}).",
            "Install the package that has it, or write package.module:function.",
        )
    found: Callable[..., Any] = known[name].load()
    return found
