"""Scores the work of a run: the task's tests/test.sh, in a sandbox without any network, on a copy of the workspace."""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from services.rollout.config import SandboxConfig
from services.rollout.sandbox import run_sandboxed
from services.rollout.sandbox_command import WORKSPACE, ExitReason, Limits, Mount, SandboxRequest
from services.rollout.types import Task
from services.rollout.workspaces import copy_tree, remove_tree
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

TESTS = "/tests"
LOGS = "/logs/verifier"
_MAX_REWARD_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said, or why it said nothing."""

    reward: float | None
    failure: Outcome | None
    """VERIFIER_FAILURE, VERIFIER_TIMEOUT or CANCELLED; None with a reward."""
    detail: str
    wall_s: float
    """All evaluations together."""


def verify(
    task: Task, workspace: Path, run_dir: Path, sandbox: SandboxConfig, cancel: threading.Event | None = None
) -> Verdict:
    """Evaluate the kept workspace; a failed evaluation is repeated as the outcome table says, each on a fresh copy.

    A reward that is missing, not a number, or left by a script that a signal ended is a failure, never a zero.
    """
    wall_s = 0.0
    evaluation = 0
    while True:
        evaluation += 1
        verdict = _evaluate(task, workspace, run_dir / f"verifier-{evaluation}", sandbox, cancel)
        wall_s += verdict.wall_s
        retries = OUTCOME_TABLE[verdict.failure].max_retries if verdict.failure else 0
        if evaluation > retries:
            detail = verdict.detail if verdict.failure is None else f"{verdict.detail} (evaluations: {evaluation})"
            return Verdict(verdict.reward, verdict.failure, detail, wall_s)


def _evaluate(
    task: Task, workspace: Path, folder: Path, sandbox: SandboxConfig, cancel: threading.Event | None
) -> Verdict:
    app, logs, scratch = folder / "app", folder / "logs", folder / "scratch"
    try:
        remove_tree(folder)
        for part in (logs, scratch):
            part.mkdir(parents=True)
        copy_tree(workspace, app)
        result = run_sandboxed(_request(task, app, logs, scratch, sandbox), sandbox.kind, cancel)
        (folder / "stdout").write_bytes(result.stdout)
        (folder / "stderr").write_bytes(result.stderr)
    except OSError as error:
        return Verdict(None, Outcome.VERIFIER_FAILURE, f"verifier: {error}", 0.0)
    finally:
        for part in (app, scratch):
            remove_tree(part)
    match result.reason:
        case ExitReason.CANCELLED:
            return Verdict(None, Outcome.CANCELLED, "cancelled during verification", result.wall_s)
        case ExitReason.TIMEOUT:
            return Verdict(None, Outcome.VERIFIER_TIMEOUT, f"verifier {result.detail}", result.wall_s)
        case ExitReason.EXITED if not result.signalled:
            reward, detail = read_reward(logs)
            if reward is not None:
                return Verdict(reward, None, f"reward {reward:g}", result.wall_s)
            detail = f"verifier ended with {result.detail}: {detail}"
        case _:
            detail = f"verifier: {result.detail}"
    return Verdict(None, Outcome.VERIFIER_FAILURE, detail, result.wall_s)


def _request(task: Task, app: Path, logs: Path, scratch: Path, sandbox: SandboxConfig) -> SandboxRequest:
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
            timeout_s=task.verifier_timeout_s,
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
            text = _read_untrusted(logs / name)
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


def _read_untrusted(path: Path) -> str:
    """The text of a small regular file; the verifier ran what a policy wrote, so a link or a pipe is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        data = file.read(_MAX_REWARD_FILE_BYTES + 1)
    if len(data) > _MAX_REWARD_FILE_BYTES:
        raise OSError(f"larger than {_MAX_REWARD_FILE_BYTES} bytes")
    return data.decode()
