"""From a harness configuration to a command that can run: placeholders, environment, what it must be able to read.

An empty command means mini-swe-agent with the project's own configuration, out of an environment of its own: Tidegate
neither imports nor changes it.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError, MachineError
from services.rollout.config import HarnessConfig
from services.rollout.sandbox_command import BASE_ENV, Mount

HARNESS_DIR_VARIABLE = "TIDEGATE_HARNESS_DIR"
"""Environment variable that names the folder of installed harnesses; else it is ``.harness`` in the project."""

_PROJECT = Path(__file__).resolve().parents[2]
_MINI_CONFIG_DIR = _PROJECT / "examples" / "harness" / "mini-swe-agent"
_MINI_COMMAND = (
    "{harness_dir}/bin/mini",
    "--config={config_dir}/config.yaml",
    "--model=openai/{model}",
    "--yolo",
    "--exit-immediately",
    "--output={logs_dir}/trajectory.json",
    "--task={instruction}",
)
_MINI_ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_BASE": "{base_url}/v1",
    "OPENAI_API_KEY": "{api_key}",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class HarnessPlaces:
    """The values of the placeholders, as the harness process sees them."""

    instruction: str
    instruction_file: str
    workspace: str
    logs_dir: str
    """Writable; kept with the run."""
    config_dir: str
    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class HarnessPlan:
    """A harness, ready to be started in any sandbox."""

    command: tuple[str, ...]
    env: dict[str, str]
    config_dir: str
    """Host folder to mount read-only, or empty."""
    readonly: tuple[Mount, ...]
    """Host paths that the harness must be able to read."""


def harness_dir() -> Path:
    """Where the default harness is installed (see ``make harness``)."""
    return Path(os.environ.get(HARNESS_DIR_VARIABLE) or _PROJECT / ".harness", "mini").absolute()


def plan_harness(config: HarnessConfig, places: HarnessPlaces) -> HarnessPlan:
    """The command, environment and mounts of one run of the harness."""
    command, env, readonly = config.command, dict(config.env), [*config.readonly_paths]
    values = {name: getattr(places, name) for name in HarnessPlaces.__slots__}
    if not command:
        values["harness_dir"] = str(harness_dir())
        command, env = _MINI_COMMAND, {**_MINI_ENV, **env}
        readonly += _paths_of_environment(harness_dir())
    return HarnessPlan(
        command=tuple(fill(part, values) for part in command),
        env={name: fill(value, values) for name, value in env.items()},
        config_dir=config_dir_of(config),
        readonly=tuple(Mount(path, path) for path in dict.fromkeys(readonly)),
    )


def config_dir_of(config: HarnessConfig) -> str:
    """The host folder with the harness's own configuration, absolute; empty if there is none."""
    if config.config_dir:
        return str(Path(config.config_dir).absolute())
    return "" if config.command else str(_MINI_CONFIG_DIR)


def fill(template: str, values: dict[str, str]) -> str:
    """Replace ``{name}`` by its value in one pass (values are not searched); other braces stay as they are."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _paths_of_environment(folder: Path) -> list[str]:
    """A virtual environment and, where it lies outside the system's folders, the Python that it was made from."""
    paths = [str(folder)]
    python = Path(folder, "bin", "python")
    base = python.resolve().parent.parent
    if python.exists() and not base.is_relative_to("/usr"):
        paths.append(str(base))
    return paths


def check_harness(config: HarnessConfig) -> None:
    """Raises MachineError if the harness is not installed, ConfigError if a path in its configuration is wrong."""
    if not config.command and not (harness_dir() / "bin" / "mini").is_file():
        raise MachineError(
            f"harness not installed: {harness_dir()} holds no mini-swe-agent.",
            f"Run `make harness`, set {HARNESS_DIR_VARIABLE}, or configure rollout.harness.command.",
        )
    if (folder := config_dir_of(config)) and not Path(folder).is_dir():
        raise ConfigError(f"rollout.harness.config_dir: {folder} is not a folder.", "Correct the path.")
    for path in config.readonly_paths:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise ConfigError(f"rollout.harness.readonly_paths: {path} does not exist.", "Write existing full paths.")
    if config.command and not _can_run(config):
        raise MachineError(
            f"harness not installed: cannot find '{config.command[0]}'.",
            "Install it, or write its full path in rollout.harness.command and its folder in readonly_paths.",
        )


def _can_run(config: HarnessConfig) -> bool:
    program = fill(config.command[0], {"config_dir": config_dir_of(config)})
    return "{" in program or shutil.which(program, path=BASE_ENV["PATH"]) is not None
