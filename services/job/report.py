"""What remains of a job: ``summary.json``, ``reward.png`` and a table for the terminal."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from services.trajectory.outcome import Outcome
from services.trajectory.types import LossReason, RunSummary


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a job's ``metrics.jsonl``; a half-written last line (after a crash) is left out."""
    path = folder / "metrics.jsonl"
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def step_line_of(lines: list[dict[str, Any]], num_steps: int) -> dict[str, Any] | None:
    """The newest line of the last of ``num_steps`` steps. A job that was resumed has lines of steps that it has not
    trained again yet."""
    found = (line for line in reversed(lines) if line["kind"] == "step" and line["step"] <= num_steps)
    return next(found, None)


def newest_by_step(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in order of their steps; a step that was trained again after a resume counts once."""
    by_step = {line["step"]: line for line in lines if line["kind"] == kind}
    return [by_step[step] for step in sorted(by_step)]


def make_summary(
    *,
    job_id: str,
    status: str,
    reason: str,
    folder: Path,
    snapshot: dict[str, Any],
    runs: dict[str, Any],
    wall_s: float,
    peak_rss_bytes: int,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    ``runs`` holds ``finished``, ``failed``, ``outcomes`` and ``output_tokens``; ``peak_rss_bytes`` is the largest
    sampled sum of the resident memory of all the job's processes (shared pages count once for each).
    """
    lines = read_metrics(folder)
    steps = newest_by_step(lines, "step")
    evaluations = newest_by_step(lines, "evaluation")
    diffs = [line["logprob_abs_diff_max"] for line in steps if line["logprob_abs_diff_max"] >= 0]
    return {
        "job_id": job_id,
        "status": status,
        "reason": reason,
        "steps_completed": len(steps),
        "runs_finished": runs["finished"],
        "runs_failed": runs["failed"],
        "runs_by_outcome": runs["outcomes"],
        "groups_lost": snapshot.get("lost_groups", 0),
        "groups_lost_by_reason": _lost_by_reason(lines),
        "reward_mean_by_step": [line["reward_mean"] for line in steps],
        "reward_sem_by_step": [line["reward_sem"] for line in steps],
        "evaluations": [
            {key: line[key] for key in ("step", "pass_rate", "pass_at_k", "k", "reward_mean", "reward_sem", "num_runs")}
            for line in evaluations
        ],
        "policy_version": snapshot.get("version", 0),
        "rollout_tokens": runs["output_tokens"],
        "train_tokens": sum(line["train_tokens"] for line in steps),
        "logprob_abs_diff_max": max(diffs, default=None),
        "wall_s": wall_s,
        "peak_rss_bytes": peak_rss_bytes,
    }


def _lost_by_reason(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Why groups were lost, as the steps' lines have it; those of a step that was trained again too."""
    names = {f"groups_lost_{reason}": str(reason) for reason in LossReason}
    lost: Counter[str] = Counter()
    for line in lines:
        for name, reason in names.items():
            lost[reason] += line.get(name, 0)
    return {reason: count for reason, count in lost.items() if count}


def what_runs_say(runs: Sequence[RunSummary], folder: Path) -> str:
    """If most runs ended badly, how, with the newest one's words and where its logs are; else an empty text."""
    ended = [run for run in runs if run.outcome not in (None, Outcome.CANCELLED)]
    bad = Counter(run.outcome for run in ended if run.outcome is not Outcome.FINISHED)
    if 2 * sum(bad.values()) <= len(ended):
        return ""
    ((outcome, count),) = bad.most_common(1)
    last = [run for run in ended if run.outcome is outcome][-1]
    return (
        f"{count} of {len(ended)} runs ended with {outcome}, the last one: {last.detail}. "
        f"See {folder / 'attempts' / f'{last.run_id}-a{last.attempt}'}."
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a file that is either the old or the new one, whatever happens meanwhile."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())  # or the rename could reach the disk before the content
    scratch.replace(path)


def plot_reward(folder: Path, title: str) -> None:
    """Draw ``reward.png``: mean reward by step with its standard error, and the held-out pass rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    lines = read_metrics(folder)
    steps = [line for line in newest_by_step(lines, "step") if line["reward_mean"] is not None]
    evaluations = [line for line in newest_by_step(lines, "evaluation") if line["pass_rate"] is not None]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if steps:
        axes.errorbar(
            [line["step"] for line in steps],
            [line["reward_mean"] for line in steps],
            yerr=[line["reward_sem"] or 0 for line in steps],
            marker="o",
            markersize=3,
            capsize=2,
            label="mean reward of the training runs (± standard error)",
        )
    if evaluations:
        axes.plot(
            [line["step"] for line in evaluations],
            [line["pass_rate"] for line in evaluations],
            marker="s",
            linestyle="--",
            label="held-out pass rate",
        )
    # rewards mostly lie in [0, 1]; a task may give others
    values = [line["reward_mean"] for line in steps] + [line["pass_rate"] for line in evaluations]
    bounds = (min([0.0, *values]), max([1.02, *values]))
    axes.set(xlabel="optimizer step", ylabel="reward, pass rate", title=title, ylim=bounds)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if steps or evaluations:
        axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "reward.png")
    pyplot.close(figure)


def summary_table(summary: dict[str, Any], folder: Path) -> Table:
    """The table that a job ends with."""
    table = Table(title=f"{summary['job_id']}: {summary['status']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, value: Any) -> None:
        table.add_row(name, Text(str(value)))  # reasons may hold what rich takes for markup

    if summary["reason"]:
        row("reason", summary["reason"])
    row("optimizer steps", summary["steps_completed"])
    row("runs finished / failed", f"{summary['runs_finished']} / {summary['runs_failed']}")
    row("runs by outcome", ", ".join(f"{name} {count}" for name, count in summary["runs_by_outcome"].items()))
    rewards = summary["reward_mean_by_step"]
    row("mean reward by step", "  ".join("-" if value is None else f"{value:.3f}" for value in rewards) or "-")
    for evaluation in summary["evaluations"]:
        if evaluation["pass_rate"] is not None:
            row(
                f"held out at step {evaluation['step']}",
                f"pass rate {evaluation['pass_rate']:.3f}, pass@{evaluation['k']} {evaluation['pass_at_k']:.3f}, "
                f"mean reward {evaluation['reward_mean']:.3f} ({evaluation['num_runs']} runs)",
            )
    row("policy version", summary["policy_version"])
    row("tokens sampled / trained with prompts", f"{summary['rollout_tokens']:,} / {summary['train_tokens']:,}")
    difference = summary["logprob_abs_diff_max"]
    row("largest |engine - trainer| log-prob", "-" if difference is None else f"{difference:.2e}")
    row("wall time", f"{summary['wall_s'] / 60:.1f} min")
    row("peak memory of all processes", f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB")
    row("results", folder)
    return table
