"""The job's own record: ``metrics.jsonl``, TensorBoard events and, when configured, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from torch.utils.tensorboard import SummaryWriter

from services.common.errors import MachineError
from services.common.metrics import metric
from services.trainer.types import StepReport
from services.trajectory.types import GroupResult, LossReason


class Recorder:
    """Writes one line of ``metrics.jsonl`` for each step, weight update and held-out pass.

    The mean reward of a step is over all counted runs that were scored since the step before it, those of groups
    that were then filtered included, so that filtering does not bend the curve.
    """

    def __init__(self, folder: Path, job_id: str, wandb_project: str, config: dict[str, Any]) -> None:
        self._job_id = job_id
        self._lines = _open_lines(folder / "metrics.jsonl")
        self._board = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._wandb = _open_wandb(wandb_project, job_id, folder, config) if wandb_project else None
        self._rewards: list[float] = []
        self._lost: Counter[str] = Counter()
        self._num_left_out = 0

    def group_scored(self, result: GroupResult) -> None:
        """Take note of a training group's rewards, why it is lost, and what selection left out of it."""
        self._rewards.extend(result.rewards)
        self._num_left_out += result.num_left_out
        if result.loss_reason is not None:
            self._lost[result.loss_reason] += 1

    def step_trained(self, report: StepReport, *, version: int, staleness_steps: Sequence[int]) -> dict[str, Any]:
        """Record an optimizer step; returns the line."""
        rewards, self._rewards = self._rewards, []
        lost, self._lost = self._lost, Counter()
        num_left_out, self._num_left_out = self._num_left_out, 0
        mean, sem = mean_and_sem(rewards)
        line = {
            "reward_mean": mean,
            "reward_sem": sem,
            "num_scored_runs": len(rewards),
            **{f"groups_lost_{reason}": lost[reason] for reason in LossReason if reason is not LossReason.HELD_OUT},
            "left_out_tokens": num_left_out,
            "staleness_mean_steps": sum(staleness_steps) / len(staleness_steps) if staleness_steps else None,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "clip_fraction": report.clip_fraction,
            "ratio_mean": report.ratio_mean,
            "kl_behaviour": report.kl_behaviour,
            "entropy": report.entropy,
            "logprob_abs_diff_max": report.logprob_abs_diff_max,
            "train_runs": report.num_runs,
            "train_targets": report.num_targets,
            "train_tokens": report.num_tokens,
            "train_s": report.seconds,
            "train_tokens_per_s": report.num_tokens / max(report.seconds, 1e-9),
            "version": version,
            **report.extra,
        }
        self._write("step", report.step, line)
        metric("tidegate_train_tokens_total").inc(report.num_tokens, job=self._job_id)
        metric("tidegate_train_step_seconds").observe(report.seconds, job=self._job_id)
        metric("tidegate_grad_norm").set(report.grad_norm, job=self._job_id)
        metric("tidegate_logprob_abs_diff_max").set(report.logprob_abs_diff_max, job=self._job_id)
        return line

    def weights_updated(self, step: int, **figures: Any) -> None:
        """Record the update of one cell's weights."""
        self._write("weights", step, figures, to_board=False)

    def evaluated(self, step: int, rewards_by_task: dict[str, tuple[float, ...]], pass_reward: float) -> dict[str, Any]:
        """Record a held-out pass; returns the line."""
        line = evaluation_figures(rewards_by_task, pass_reward)
        self._write("evaluation", step, line)
        return line

    def close(self) -> None:
        self._lines.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, kind: str, step: int, figures: dict[str, Any], *, to_board: bool = True) -> None:
        self._lines.write(json.dumps({"kind": kind, "step": step, "at_s": time.time(), **figures}) + "\n")
        self._lines.flush()
        if not to_board:
            return
        numbers = {
            f"{kind}/{name}": float(value)
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        if self._wandb is not None:
            self._wandb.log({**numbers, "step": step})


def _open_lines(path: Path) -> TextIO:
    """A file of lines to add to; a last line that a crash left torn stays one of its own."""
    content = path.read_bytes() if path.exists() else b""
    lines = path.open("a", encoding="utf-8")
    if content and not content.endswith(b"\n"):
        lines.write("\n")
    return lines


def mean_and_sem(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error; None where there are too few values."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def pass_at_k(num_runs: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of ``k`` runs passes (Chen et al. 2021, eq. 1)."""
    if num_runs - num_passed < k:
        return 1.0
    return 1.0 - math.comb(num_runs - num_passed, k) / math.comb(num_runs, k)


def evaluation_figures(rewards_by_task: dict[str, tuple[float, ...]], pass_reward: float) -> dict[str, Any]:
    """Pass rate, pass@k (k: the fewest scored runs of a task) and mean reward of a held-out pass.

    Runs without a valid reward are left out: a failed evaluation is not a zero.
    """
    scored = {task: rewards for task, rewards in rewards_by_task.items() if rewards}
    rewards = [reward for task in scored.values() for reward in task]
    if not rewards:
        return {"pass_rate": None, "pass_at_k": None, "k": 0, "reward_mean": None, "reward_sem": None, "num_runs": 0}
    k = min(len(task) for task in scored.values())
    passed = {task: sum(reward >= pass_reward for reward in values) for task, values in scored.items()}
    mean, sem = mean_and_sem(rewards)
    return {
        "pass_rate": sum(passed.values()) / len(rewards),
        "pass_at_k": sum(pass_at_k(len(scored[task]), passed[task], k) for task in scored) / len(scored),
        "k": k,
        "reward_mean": mean,
        "reward_sem": sem,
        "num_runs": len(rewards),
        "num_tasks": len(scored),
    }


def check_wandb(project: str) -> None:
    """Raise ``MachineError`` if a W&B project is configured and its client is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise MachineError(
            "output.wandb_project is set, but wandb is not installed.", "pip install 'tidegate[wandb]', or unset it."
        )


def _open_wandb(project: str, job_id: str, folder: Path, config: dict[str, Any]) -> Any:
    import wandb

    return wandb.init(project=project, name=job_id, dir=str(folder), config=config)
