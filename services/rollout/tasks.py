"""Task folders in Harbor's format.

NAME/instruction.md          what the agent is asked to do
NAME/task.toml               [metadata], [agent].timeout_sec, [verifier].timeout_sec, [environment].memory_mb
NAME/tests/test.sh           the verifier; it writes its reward to /logs/verifier/reward.txt or reward.json (optional
                             where the job scores otherwise)
NAME/environment/files/      optional: copied into the workspace before the run
NAME/environment/Dockerfile  optional: ignored here, the sandbox has the host's programs
NAME/solution/solve.sh       optional: a reference solution
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.rollout.types import Task

DEFAULT_AGENT_TIMEOUT_S = 600.0
DEFAULT_VERIFIER_TIMEOUT_S = 600.0
DEFAULT_MEMORY_MB = 2048
_MAX_INSTRUCTION_BYTES = 1 << 20


def load_task_set(folder: str | Path, *, needs_verifier: bool = True) -> list[Task]:
    """All tasks of a folder, sorted by name. ``needs_verifier``: each must have a tests/test.sh.

    Raises ConfigError when the folder holds none, or one that cannot be used. Files and hidden folders are skipped.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(
            f"task folder {root} does not exist.",
            "Set tasks.train (or heldout) to a folder that holds task folders; a relative path starts at the "
            "configuration file.",
        )
    if (root / "instruction.md").exists():
        raise ConfigError(
            f"{root} is a task, not a folder of tasks.", f"Write {root.parent} to take all that are in it."
        )
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise ConfigError(
            f"{root} holds no task.", "Put one folder a task in it, each with instruction.md, task.toml, tests/test.sh."
        )
    return [load_task(path, needs_verifier=needs_verifier) for path in folders]


def load_task(folder: str | Path, *, needs_verifier: bool = True) -> Task:
    """The task in ``folder``, checked. Raises ConfigError that names the file and what to write in it."""
    path = Path(folder).resolve()
    instruction = _read_instruction(path / "instruction.md")
    settings = _read_toml(path / "task.toml")
    if needs_verifier and not (path / "tests" / "test.sh").is_file():
        raise ConfigError(
            f"{path / 'tests' / 'test.sh'} is missing.",
            "Add a script that writes a number to /logs/verifier/reward.txt.",
        )
    files = path / "environment" / "files"
    if files.exists() and not files.is_dir():
        raise ConfigError(f"{files} is not a folder.", "Its content is copied into the workspace; make it a folder.")
    read = _Reader(path / "task.toml", settings)
    return Task(
        name=path.name,
        path=str(path),
        instruction=instruction,
        agent_timeout_s=read.positive("agent", "timeout_sec", DEFAULT_AGENT_TIMEOUT_S),
        verifier_timeout_s=read.positive("verifier", "timeout_sec", DEFAULT_VERIFIER_TIMEOUT_S),
        memory_bytes=int(read.positive("environment", "memory_mb", DEFAULT_MEMORY_MB)) << 20,
        metadata={key: _as_text(value) for key, value in read.table("metadata").items()},
    )


def _read_instruction(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is missing.", "Write in it what the agent is to do.")
    if path.stat().st_size > _MAX_INSTRUCTION_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_INSTRUCTION_BYTES} bytes.", "Put data in environment/files.")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}).", "Save it as UTF-8.") from error
    if not text:
        raise ConfigError(f"{path} is empty.", "Write in it what the agent is to do.")
    return text


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing.", "Add it; an empty file takes every default.")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", "Correct that line.") from error


class _Reader:
    """Typed access to a task.toml; keys that Tidegate does not use are left alone, for Harbor has many."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings

    def table(self, name: str) -> dict[str, Any]:
        table = self._settings.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{self._path}: '{name}' is {_type_name(table)}.", f"Make it a table: [{name}].")
        return table

    def positive(self, table: str, key: str, default: float) -> float:
        value = self.table(table).get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._path}: [{table}].{key} is {_type_name(value)}.", "Write a number.")
        if not 0 < value < float("inf"):
            raise ConfigError(f"{self._path}: [{table}].{key} is {value}.", "Write a finite number above 0.")
        return float(value)


def _type_name(value: object) -> str:
    return f"{value!r} (a {type(value).__name__})"


def _as_text(value: object) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
