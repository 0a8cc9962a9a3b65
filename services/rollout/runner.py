"""Runs one attempt: workspace, harness in its sandbox, salvage, verifier. What a run does is data, never an error.

run_dir/workspace/       the agent's work; removed once it is scored, if the job does not keep it
run_dir/logs/            harness.stdout, harness.stderr (the last 256 KiB each), agent/ (what the harness wrote)
run_dir/harness.json     how the harness ended; written before anything is scored
run_dir/verifier-N/      stdout, stderr and logs/ of each evaluation
"""

from __future__ import annotations

import json
import threading
import time
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
from services.rollout.types import RunResult, RunSpec
from services.rollout.verifier import Verdict, verify
from services.rollout.workspaces import copy_tree, remove_tree
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

CONFIG = "/config"
INSTRUCTION = "/run/tidegate/instruction.md"
AGENT_LOGS = "/logs/agent"

_OUTCOMES = {
    ExitReason.TIMEOUT: Outcome.HARNESS_TIMEOUT,
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
) -> RunResult:
    """Execute one attempt of a run to its final outcome. Blocks; nothing of it runs any more when it returns.

    The harness has the smaller of the task's and the configuration's time. Whatever it left is salvaged first and,
    where the outcome table says so, scored. ``cancel`` ends the attempt within a fraction of a second. Without
    ``keep_workspace`` the work is removed at the end, unless its evaluation failed.
    """
    result = _execute(spec, harness, sandbox, cancel or threading.Event())
    is_unscored = OUTCOME_TABLE[result.outcome].scored and result.reward is None
    if keep_workspace or is_unscored:
        return result
    remove_tree(Path(result.workspace))
    return replace(result, workspace="")


def _execute(spec: RunSpec, harness: HarnessConfig, sandbox: SandboxConfig, cancel: threading.Event) -> RunResult:
    start_s = time.monotonic()
    run_dir = Path(spec.run_dir)
    try:
        request = _prepare(spec, harness, sandbox)
    except (OSError, ValueError) as error:
        return _result(spec, start_s, Outcome.SETUP_FAILURE, f"cannot prepare the run: {error}")
    ended = run_sandboxed(request, sandbox.kind, cancel)
    outcome = outcome_of(ended)
    try:
        _salvage(run_dir, outcome, ended)
    except OSError as error:
        return _result(spec, start_s, Outcome.SETUP_FAILURE, f"cannot keep the run's work: {error}", ended)
    if not OUTCOME_TABLE[outcome].scored:
        return _result(spec, start_s, outcome, ended.detail, ended)
    verdict = verify(spec.task, Path(request.workspace), run_dir, sandbox, cancel)
    detail = f"{ended.detail}; {verdict.detail}"
    return _result(spec, start_s, verdict.failure or outcome, detail, ended, verdict)


def outcome_of(ended: SandboxExit) -> Outcome:
    """The outcome of a harness's end."""
    if ended.reason is ExitReason.EXITED:
        return Outcome.FINISHED if ended.exit_code == 0 else Outcome.HARNESS_CRASH
    return _OUTCOMES[ended.reason]


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
    """Keep what the harness left before anything is scored. The workspace lies in the run's folder already."""
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
    partial.replace(run_dir / "harness.json")


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
        reward=verdict.reward if verdict else None,
        wall_s=time.monotonic() - start_s,
        harness_s=ended.wall_s if ended else 0.0,
        verifier_s=verdict.wall_s if verdict else 0.0,
        exit_code=ended.exit_code if ended else None,
        detail=detail,
        workspace=str(Path(spec.run_dir, "workspace")),
        peak_rss_bytes=ended.peak_rss_bytes if ended else 0,
    )
