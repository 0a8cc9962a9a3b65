"""The Harbor verifier: the task's tests/test.sh, in a sandbox without any network."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from pathlib import Path
from typing import Any

from services.rollout.config import SandboxConfig
from services.rollout.sandbox import run_sandboxed
from services.rollout.sandbox_command import WORKSPACE, ExitReason, Limits, Mount, SandboxRequest
from services.rollout.scoring.base import Score, ScoredRunView, evaluation_timeout_s, invalid
from services.rollout.scoring.config import HarborScoring
from services.rollout.types import Task
from services.trajectory.outcome import Outcome

TESTS = "/tests"
LOGS = "/logs/verifier"
_MAX_REWARD_FILE_BYTES = 4096


class HarborScorer:
    """Runs tests/test.sh on the workspace; the number that it leaves is the reward.

    A reward that is missing, not a number, or left by a script that a signal ended is a failure, never a zero.
    """

    def __init__(self, config: HarborScoring, sandbox: SandboxConfig, folder: Path, cancel: threading.Event) -> None:
        """``folder`` takes stdout, stderr and logs/ of the evaluation."""
        self._config = config
        self._sandbox = sandbox
        self._folder = folder
        self._cancel = cancel

    def score(self, run: ScoredRunView, workspace: Path) -> Score:
        """Evaluate one copy of a workspace. Raises ``OSError`` where the evaluation's own files cannot be written."""
        logs, scratch = self._folder / "logs", self._folder / "scratch"
        for part in (logs, scratch):
            part.mkdir(parents=True)
        limit_s = evaluation_timeout_s(self._config, run.task)
        request = _request(run.task, limit_s, workspace, logs, scratch, self._sandbox)
        result = run_sandboxed(request, self._sandbox.kind, self._cancel)
        (self._folder / "stdout").write_bytes(result.stdout)
        (self._folder / "stderr").write_bytes(result.stderr)
        match result.reason:
            case ExitReason.CANCELLED:
                return invalid("cancelled during verification", Outcome.CANCELLED)
            case ExitReason.TIMEOUT:
                return invalid(f"verifier {result.detail}", Outcome.VERIFIER_TIMEOUT)
            case ExitReason.EXITED if not result.signalled:
                reward, reason = read_reward(logs)
                if reward is not None:
                    return Score(reward, True, details=read_details(logs))
                return invalid(f"verifier ended with {result.detail}: {reason}")
            case _:
                return invalid(f"verifier: {result.detail}")


def _request(
    task: Task, limit_s: float, app: Path, logs: Path, scratch: Path, sandbox: SandboxConfig
) -> SandboxRequest:
    tests = Mount(str(Path(task.path, "tests")), TESTS)
    verdicts = Mount(str(logs), LOGS, writable=True)
    app_seen = WORKSPACE if sandbox.kind == "bubblewrap" else str(app)
    return SandboxRequest(
        command=("/bin/bash", f"{tests.seen(sandbox.kind)}/test.sh"),
        workspace=str(app),
        scratch=str(scratch),
        env={"TESTS_DIR": tests.seen(sandbox.kind), "LOGS_DIR": verdicts.seen(sandbox.kind), "APP_DIR": app_seen},
        mounts=(tests, verdicts),
        limits=Limits(
            timeout_s=limit_s,
            memory_bytes=min(task.memory_bytes, sandbox.memory_bytes),
            max_processes=sandbox.max_processes,
            # the copy of the workspace counts too; a full one leaves the verifier some room
            workspace_bytes=2 * sandbox.workspace_bytes,
        ),
    )


def read_reward(logs: Path) -> tuple[float | None, str]:
    """The number in reward.txt, else under "reward" in reward.json; or None and why there is none."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = read_untrusted(logs / name, _MAX_REWARD_FILE_BYTES)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            return None, f"{name} cannot be read: {error}"
        try:
            value = float(text) if name == "reward.txt" else float(json.loads(text)["reward"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None, f"{name} holds no number: {text.strip()[:60]!r}"
        if not math.isfinite(value):
            return None, f"{name} holds {value}"
        return value, ""
    return None, "it left no reward.txt or reward.json"


def read_details(logs: Path) -> dict[str, Any]:
    """What else the verifier left in reward.json; empty if it is not there or cannot be used."""
    try:
        found = json.loads(read_untrusted(logs / "reward.json", _MAX_REWARD_FILE_BYTES))
        json.dumps(found, allow_nan=False)
    except (OSError, ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return {}
    return {key: value for key, value in found.items() if key != "reward"} if isinstance(found, dict) else {}


def read_untrusted(path: Path, max_bytes: int) -> str:
    """The text of a small regular file that a policy may have made; a link or a pipe is refused.

    Raises ``OSError`` for anything that is no such file, ``UnicodeDecodeError`` for one that is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"larger than {max_bytes} bytes")
    return data.decode()
