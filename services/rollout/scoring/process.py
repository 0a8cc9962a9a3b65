"""Scoring in a process of its own: whatever a function or a server does, its time, memory and end are bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import services
from services.common.errors import ConfigError
from services.rollout.sandbox import run_sandboxed
from services.rollout.sandbox_command import ExitReason, Limits, SandboxExit, SandboxRequest
from services.rollout.scoring.base import MAX_DETAILS_BYTES, Score, ScoredRunView, invalid
from services.rollout.scoring.config import FunctionScoring, JudgeScoring
from services.rollout.scoring.harbor import read_untrusted
from services.trajectory.outcome import Outcome

_PROJECT = str(Path(services.__path__[0]).resolve().parent)
_WORKER = ("-P", "-m", "services.rollout.scoring.worker")  # -P: nothing is imported from the working directory
_JUDGE_MEMORY_BYTES = 1 << 30
_JUDGE_PROCESSES = 16
_MAX_FILE_BYTES = 1 << 30
_CHECK_TIMEOUT_S = 120.0


class ProcessScorer:
    """Scores with a function or a judge; its process group is killed at the time limit and when it is cancelled."""

    def __init__(
        self,
        config: FunctionScoring | JudgeScoring,
        folder: Path,
        cancel: threading.Event,
        *,
        job_dir: str = "",
        api_key: str = "",
    ) -> None:
        """``folder`` takes stdout, stderr and the result of the evaluation."""
        self._config = config
        self._folder = folder
        self._cancel = cancel
        self._job_dir = job_dir
        self._api_key = api_key

    def score(self, run: ScoredRunView, workspace: Path) -> Score:
        """Evaluate one copy of a workspace. Raises ``OSError`` where the evaluation's own files cannot be written."""
        scratch = self._folder / "scratch"
        scratch.mkdir(parents=True)
        request = {
            "kind": self._config.kind,
            "config": self._config.model_dump(mode="json"),
            "run": asdict(run),
            "workspace": str(workspace),
            "job_dir": self._job_dir,
        }
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        ended = run_sandboxed(self._request(scratch), "none", self._cancel)
        (self._folder / "stdout").write_bytes(ended.stdout)
        (self._folder / "stderr").write_bytes(ended.stderr)
        return self._score_of(ended, scratch / "result.json")

    def _request(self, scratch: Path) -> SandboxRequest:
        config = self._config
        if isinstance(config, FunctionScoring):
            env = worker_env(config.python_path)
            memory_bytes, max_processes = config.memory_bytes, config.max_processes
        else:
            env = worker_env(())
            memory_bytes, max_processes = _JUDGE_MEMORY_BYTES, _JUDGE_PROCESSES
            if config.api_key_env and self._api_key:
                env[config.api_key_env] = self._api_key
        return SandboxRequest(
            command=(sys.executable, *_WORKER, str(scratch / "request.json"), str(scratch / "result.json")),
            workspace=str(scratch),
            scratch=str(scratch),
            env=env,
            limits=Limits(
                timeout_s=config.timeout_s,
                memory_bytes=memory_bytes,
                max_processes=max_processes,
                workspace_bytes=_MAX_FILE_BYTES,
            ),
        )

    def _score_of(self, ended: SandboxExit, result: Path) -> Score:
        match ended.reason:
            case ExitReason.CANCELLED:
                return invalid("cancelled during scoring", Outcome.CANCELLED)
            case ExitReason.TIMEOUT:
                return invalid(f"scorer {ended.detail}", Outcome.VERIFIER_TIMEOUT)
            case ExitReason.EXITED if ended.exit_code == 0:
                return _read_score(result)
            case ExitReason.EXITED:
                said = ended.stderr.decode(errors="replace").strip().splitlines()
                return invalid(f"scorer ended with {ended.detail}: {said[-1][:200] if said else 'it said nothing'}")
            case _:
                return invalid(f"scorer {ended.detail}")


def _read_score(path: Path) -> Score:
    try:
        fields: dict[str, Any] = json.loads(read_untrusted(path, 2 * MAX_DETAILS_BYTES))
        failure = Outcome(fields["failure"]) if fields["failure"] else None
        return Score(**{**fields, "failure": failure})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return invalid(f"scorer left no score: {error}")


def worker_env(python_path: tuple[str, ...]) -> dict[str, str]:
    """The environment of a worker: this process's, with the folders to import from as absolute paths."""
    inherited: Mapping[str, str] = os.environ
    folders = [*python_path, _PROJECT, *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    absolute = [folder for folder in folders if folder and Path(folder).is_absolute()]
    return {**inherited, "PYTHONPATH": os.pathsep.join(dict.fromkeys(absolute))}


def check_function(config: FunctionScoring) -> None:
    """Raises ``ConfigError`` if the function cannot be found or called. Its module is imported by another process."""
    for folder in config.python_path:
        if not Path(folder).is_dir():
            raise ConfigError(f"rollout.scoring.python_path: {folder} is not a folder.", "Correct the path.")
    command = [sys.executable, *_WORKER, "--check", config.path]
    try:
        done = subprocess.run(
            command,
            env=worker_env(config.python_path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"rollout.scoring.path: {config.path!r} was not imported within {_CHECK_TIMEOUT_S:g} s.",
            "Keep what its module does at import short.",
        ) from None
    if done.returncode == 0:
        return
    lines = done.stdout.strip().splitlines()
    try:
        message, hint = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else "it said nothing"
        message = f"rollout.scoring.path: {config.path!r} cannot be imported ({why})."
        hint = "Import it in a Python of this environment to see why."
    raise ConfigError(message, hint)
