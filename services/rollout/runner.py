"""Runs one attempt: workspace, harness in its sandbox, salvage, score. What a run does is data, never an error.

run_dir/workspace/       the agent's work; removed at the end if the job does not keep it, unless it has no score
run_dir/logs/            harness.stdout, harness.stderr (the last 256 KiB each), agent/ (what the harness wrote)
run_dir/harness.json     how the harness ended; all of these are synced to disk before anything is scored or removed
run_dir/verifier-N/      stdout, stderr and logs/ of each evaluation
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.harness import HarnessPlaces, config_dir_of, plan_harness
from services.rollout.sandbox import run_sandboxed
from services.rollout.sandbox_command import (
    WORKSPACE,
    ExitReason,
    Limits,
    Mount,
    SandboxExit,
    SandboxRequest,
    inside_url,
    proxy_address,
)
from services.rollout.scoring.base import ScoredRunView
from services.rollout.scoring.contents import tree_digest, walk
from services.rollout.scoring.evaluate import BY_TASKS, ScoringSetup, Verdict, evaluate
from services.rollout.types import RunResult, RunSpec
from services.rollout.workspaces import copy_tree, open_tree, remove_tree, sync
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

CONFIG = "/config"
INSTRUCTION = "/run/tidegate/instruction.md"
AGENT_LOGS = "/logs/agent"

_MAX_ANSWER_BYTES = 64 << 10
_MAX_FILES_SYNCED = 1000
_HARNESS_DOING = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of files in a folder that a harness can write to."""
_OUTCOMES = {
    ExitReason.TIMEOUT: Outcome.HARNESS_TIMEOUT,
    ExitReason.TOTAL_TIMEOUT: Outcome.WALL_TIMEOUT,
    ExitReason.DIED: Outcome.SANDBOX_DEATH,
    ExitReason.MEMORY: Outcome.OUT_OF_MEMORY,
    ExitReason.PROCESSES: Outcome.OUT_OF_MEMORY,
    ExitReason.DISK: Outcome.OUT_OF_MEMORY,
    ExitReason.CANCELLED: Outcome.CANCELLED,
    ExitReason.NOT_STARTED: Outcome.SETUP_FAILURE,
}


def run_attempt(
    spec: RunSpec,
    harness: HarnessConfig,
    sandbox: SandboxConfig,
    cancel: threading.Event | None = None,
    *,
    keep_workspace: bool = True,
    scoring: ScoringSetup = BY_TASKS,
    run_timeout_s: float | None = None,
    harness_ended: Callable[[], None] = lambda: None,
) -> RunResult:
    """Execute one attempt of a run to its final outcome. Blocks; nothing of it runs any more when it returns.

    The harness has the smaller of the task's and the configuration's time, and no more than is left of
    ``run_timeout_s`` (which counts from now; None: no such limit). Whatever it left is salvaged first and, where the
    outcome table says so, scored. ``cancel`` ends the attempt within a fraction of a second. Without
    ``keep_workspace`` the work is removed at the end, unless it is without a score and nobody cancelled the run.
    ``harness_ended`` is called where scoring begins.
    """
    result = _execute(spec, harness, sandbox, cancel or threading.Event(), scoring, run_timeout_s, harness_ended)
    is_lost = result.reward is None and result.outcome not in (Outcome.CANCELLED, Outcome.SETUP_FAILURE)
    if keep_workspace or is_lost:
        return result
    remove_tree(Path(result.workspace))
    return replace(result, workspace="")


def _execute(
    spec: RunSpec,
    harness: HarnessConfig,
    sandbox: SandboxConfig,
    cancel: threading.Event,
    scoring: ScoringSetup,
    run_timeout_s: float | None,
    harness_ended: Callable[[], None],
) -> RunResult:
    start_s = time.monotonic()
    run_dir = Path(spec.run_dir)
    try:
        request = _prepare(spec, harness, sandbox)
    except (OSError, ValueError) as error:
        return _result(spec, start_s, Outcome.SETUP_FAILURE, f"cannot prepare the run: {error}")
    if run_timeout_s is not None:
        left_s = max(0.0, run_timeout_s - (time.monotonic() - start_s))
        request = replace(request, limits=replace(request.limits, total_timeout_s=left_s))
    ended = run_sandboxed(request, sandbox.kind, cancel)
    outcome = outcome_of(ended)
    try:
        _salvage(run_dir, outcome, ended)
    except OSError as error:
        return _result(spec, start_s, Outcome.RUNNER_LOSS, f"cannot keep the run's work: {error}", ended)
    if not OUTCOME_TABLE[outcome].scored:
        return _result(spec, start_s, outcome, ended.detail, ended)
    harness_ended()
    verdict = _score(spec, outcome, ended, sandbox, cancel, scoring)
    detail = f"{ended.detail}; {verdict.detail}"
    return _result(spec, start_s, verdict.score.failure or outcome, detail, ended, verdict)


def outcome_of(ended: SandboxExit) -> Outcome:
    """The outcome of a harness's end."""
    if ended.reason is ExitReason.EXITED:
        return Outcome.FINISHED if ended.exit_code == 0 else Outcome.HARNESS_CRASH
    return _OUTCOMES[ended.reason]


def _score(
    spec: RunSpec,
    outcome: Outcome,
    ended: SandboxExit,
    sandbox: SandboxConfig,
    cancel: threading.Event,
    scoring: ScoringSetup,
) -> Verdict:
    run_dir = Path(spec.run_dir)
    workspace, logs = run_dir / "workspace", run_dir / "logs"
    run = ScoredRunView(
        task=spec.task,
        run_id=spec.run_id,
        attempt=spec.attempt,
        outcome=outcome,
        logs_dir=str(logs),
        answer=ended.stdout[-_MAX_ANSWER_BYTES:].decode(errors="replace"),
        transcript=_transcript(logs / "agent"),
        workspace_ref=_digest(workspace),
    )
    return evaluate(run, workspace, run_dir, sandbox, scoring, cancel)


def _digest(workspace: Path) -> str:
    """What is about to be scored; empty if it cannot be read, which its evaluation will say."""
    try:
        open_tree(workspace)
        return tree_digest(workspace)
    except OSError:
        return ""


def _transcript(folder: Path) -> str:
    """The largest JSON file that the harness left, or nothing."""
    try:
        sizes = {
            path: path.lstat().st_size
            for name, path in walk(folder)
            if name.endswith((".json", ".jsonl")) and stat.S_ISREG(path.lstat().st_mode)
        }
    except OSError:
        return ""
    return str(max(sizes, key=lambda path: sizes[path], default=""))


def _prepare(spec: RunSpec, harness: HarnessConfig, sandbox: SandboxConfig) -> SandboxRequest:
    """Lay out the run's folder; an attempt that was here before is removed."""
    run_dir = Path(spec.run_dir).absolute()
    remove_tree(run_dir)
    workspace, logs, scratch = run_dir / "workspace", run_dir / "logs", run_dir / "scratch"
    for folder in (logs / "agent", scratch):
        folder.mkdir(parents=True)
    files = Path(spec.task.path, "environment", "files")
    if files.is_dir():
        copy_tree(files, workspace)
    else:
        workspace.mkdir()
    (run_dir / "instruction.md").write_text(spec.task.instruction + "\n")

    kind = sandbox.kind
    instruction = Mount(str(run_dir / "instruction.md"), INSTRUCTION)
    agent_logs = Mount(str(logs / "agent"), AGENT_LOGS, writable=True)
    config = Mount(config_dir_of(harness), CONFIG)
    plan = plan_harness(
        harness,
        HarnessPlaces(
            instruction=spec.task.instruction,
            instruction_file=instruction.seen(kind),
            workspace=WORKSPACE if kind == "bubblewrap" else str(workspace),
            logs_dir=agent_logs.seen(kind),
            config_dir=config.seen(kind) if config.source else "",
            base_url=inside_url(spec.base_url, kind),
            api_key=spec.api_key,
            model=spec.model_name,
        ),
    )
    return SandboxRequest(
        command=plan.command,
        workspace=str(workspace),
        scratch=str(scratch),
        env=plan.env,
        mounts=(*plan.readonly, instruction, agent_logs, *([config] if config.source else [])),
        proxy=proxy_address(spec.base_url),
        limits=Limits(
            timeout_s=min(spec.task.agent_timeout_s, harness.timeout_s),
            memory_bytes=min(spec.task.memory_bytes, sandbox.memory_bytes),
            max_processes=sandbox.max_processes,
            workspace_bytes=sandbox.workspace_bytes,
        ),
    )


def _salvage(run_dir: Path, outcome: Outcome, ended: SandboxExit) -> None:
    """Keep what the harness left, durably, before anything is scored. The workspace is in the run's folder already."""
    logs = run_dir / "logs"
    (logs / "harness.stdout").write_bytes(ended.stdout)
    (logs / "harness.stderr").write_bytes(ended.stderr)
    remove_tree(run_dir / "scratch")
    record = {
        "outcome": outcome.value,
        "reason": ended.reason.value,
        "exit_code": ended.exit_code,
        "detail": ended.detail,
        "harness_s": round(ended.wall_s, 3),
        "peak_rss_bytes": ended.peak_rss_bytes,
    }
    partial = run_dir / "harness.json.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    sync(partial)
    _sync_logs(logs)
    partial.replace(run_dir / "harness.json")
    sync(logs)
    sync(run_dir)


def _sync_logs(logs: Path) -> None:
    """What the harness closed or nested too deeply is opened or left as it is: its doing, no failure of the set-up."""
    with contextlib.suppress(OSError):
        open_tree(logs)
    try:
        for _, path in itertools.islice(walk(logs), _MAX_FILES_SYNCED):
            sync(path)
    except OSError as error:
        if error.errno not in _HARNESS_DOING:
            raise


def _result(
    spec: RunSpec,
    start_s: float,
    outcome: Outcome,
    detail: str,
    ended: SandboxExit | None = None,
    verdict: Verdict | None = None,
) -> RunResult:
    return RunResult(
        run_id=spec.run_id,
        attempt=spec.attempt,
        outcome=outcome,
        reward=verdict.score.value if verdict else None,
        wall_s=time.monotonic() - start_s,
        harness_s=ended.wall_s if ended else 0.0,
        verifier_s=verdict.wall_s if verdict else 0.0,
        exit_code=ended.exit_code if ended else None,
        detail=detail,
        workspace=str(Path(spec.run_dir, "workspace")),
        peak_rss_bytes=ended.peak_rss_bytes if ended else 0,
        evaluated_ref=verdict.score.evaluated_ref if verdict else "",
        score_details=verdict.score.details if verdict else {},
    )
