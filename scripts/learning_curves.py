#!/usr/bin/env python3
"""Does it matter for learning how the pool is shared? Runs the tiny task under each policy and compares the curves.

usage: learning_curves.py [--runs FOLDER] [--seeds 0 1] [--steps 20] [--phi 0.5] [--mu 2] [--image FILE] [--json]

Every policy gets the same tasks, seeds, steps, phi and mu, so the same mean staleness phi + (mu - 1)/2. All cells can
train (``trainer.satellites``). Jobs that FOLDER holds already are not run again: an interrupted script goes on.

A job's curve is the mean reward of the groups that each step trained, from its journal; groups whose rewards are all
equal are trained, too, so that every policy counts every run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from services.common.config import load_config
from services.common.errors import TidegateError
from services.job.config import JobConfig
from services.scheduler.journal import read_journal

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "examples" / "configs" / "tiny.yaml"
POLICIES = {
    "async": ("scheduler.policy.mode=async", "scheduler.policy.train_cells=1"),
    "colocate": ("scheduler.policy.mode=colocate",),
    "elastic": ("scheduler.policy.mode=elastic",),
}
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Curve:
    """What one job learned."""

    policy: str
    seed: int
    reward_mean_by_step: tuple[float, ...]
    """Of the groups that the step trained."""
    staleness_mean_steps: float
    """Steps between the version that a group was dispatched under and the one it was trained on. After the first
    burst: before it nothing can be stale."""
    staleness_max_steps: int
    satellite_share: float
    """Of all micro-steps."""

    @property
    def final_reward(self) -> float:
        """Mean over the last half of the steps."""
        return fmean(self.reward_mean_by_step[len(self.reward_mean_by_step) // 2 :])


def main() -> int:
    arguments = parse_arguments()
    curves = []
    for seed in arguments.seeds:
        for policy in POLICIES:
            output = arguments.runs / f"{policy}-{seed}"
            if not is_finished(output / "latest", arguments.steps):
                run_job(policy, seed, output, arguments)
            curves.append(read_curve(policy, seed, output / "latest", arguments.mu))
            report = sys.stderr if arguments.json else sys.stdout
            print(describe(curves[-1]), file=report, flush=True)
    verdict = compare(curves)
    draw(curves, arguments, arguments.image)
    if arguments.json:
        print(json.dumps({"curves": [asdict(curve) for curve in curves], **verdict}, indent=2))
    else:
        print_verdict(verdict)
        print(f"drawn: {arguments.image}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/learning-curves"), help="folder of the jobs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--phi", type=float, default=0.5, help="scheduler.carry_over_steps")
    parser.add_argument("--mu", type=int, default=2, help="scheduler.steps_per_burst")
    parser.add_argument("--image", type=Path, default=REPOSITORY / "docs" / "images" / "learning-curves.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every job, as of `tidegate train`")
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2:
        parser.error("give two seeds or more: without a spread between seeds nothing can be compared")
    if arguments.steps < 2 * arguments.mu:
        parser.error("give at least two bursts of steps")
    return arguments


# -- jobs -------------------------------------------------------------------------------------------------------------


def overrides_of(policy: str, seed: int, output: Path, arguments: argparse.Namespace) -> list[str]:
    """What a job changes of the tiny configuration."""
    return [
        *POLICIES[policy],
        f"name=curves-{policy}",
        f"seed={seed}",
        f"output.dir={output}",
        f"trainer.steps={arguments.steps}",
        "trainer.satellites=true",
        "trajectory.micro_step_tokens=16",
        "rollout.cells.num_cells=3",
        f"scheduler.carry_over_steps={arguments.phi}",
        f"scheduler.steps_per_burst={arguments.mu}",
        "scheduler.on_equal_rewards=keep",
        *arguments.overrides,
    ]


def run_job(policy: str, seed: int, output: Path, arguments: argparse.Namespace) -> None:
    """Run one job to its end; its output goes to ``train.log``."""
    overrides = overrides_of(policy, seed, output.resolve(), arguments)
    load_config(JobConfig, CONFIG, overrides)  # a mistake is told here, not in a log
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "services.cli", "train", str(CONFIG), *overrides]
    with (output / "train.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"the job of {policy}, seed {seed} ended with exit code {code}: see {output / 'train.log'}")


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a folder holds a job that trained so many steps."""
    path = folder / "summary.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text(encoding="utf-8"))
    return bool(summary["status"] == "finished" and summary["steps_completed"] == steps)


def read_curve(policy: str, seed: int, folder: Path, steps_per_burst: int) -> Curve:
    """The curve of a finished job, from its journal and its metrics."""
    scored: dict[str, Any] = {}
    dispatched: dict[str, int] = {}
    rewards: dict[int, list[float]] = {}
    staleness: dict[int, list[int]] = {}
    for record in read_journal(folder):
        if record.kind == "GroupScored":
            result = record.payload["result"]
            scored[result["group_id"]] = result["rewards"]
        for decision in record.decisions:
            said = decision.payload
            if decision.action == "OpenGroup":
                dispatched[said["spec"]["group_id"]] = said["spec"]["version"]
            elif decision.action == "TrainStep":
                step = said["step"]
                for group_id in said["group_ids"]:
                    rewards.setdefault(step, []).extend(scored[group_id])
                    staleness.setdefault(step, []).append(step - 1 - dispatched[group_id])
    late = [steps for step, found in staleness.items() if step > steps_per_burst for steps in found]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shares = [line["satellite_share"] for line in map(json.loads, lines) if line["kind"] == "step"]
    means = tuple(fmean(rewards[step]) for step in sorted(rewards))
    return Curve(policy, seed, means, fmean(late), max(late), fmean(shares))


def describe(curve: Curve) -> str:
    return (
        f"{curve.policy:8} seed {curve.seed}: reward {curve.reward_mean_by_step[0]:.3f} -> "
        f"{curve.reward_mean_by_step[-1]:.3f}, last half {curve.final_reward:.3f}; staleness mean "
        f"{curve.staleness_mean_steps:.3f}, at most {curve.staleness_max_steps}; satellites trained "
        f"{curve.satellite_share:.0%}"
    )


# -- comparison -------------------------------------------------------------------------------------------------------


def compare(curves: Sequence[Curve]) -> dict[str, Any]:
    """Differences between policies of the mean reward over the last half, and what the seeds alone would make of it.

    A pair's curves overlap if the difference is within the interval of a t-test with the variance between seeds
    pooled over the policies.
    """
    finals = {policy: [curve.final_reward for curve in curves if curve.policy == policy] for policy in POLICIES}
    num_seeds = len(next(iter(finals.values())))
    degrees = len(finals) * (num_seeds - 1)
    seed_sd = math.sqrt(fmean([variance(values) for values in finals.values()]))
    margin = student_quantile((1 + CONFIDENCE) / 2, degrees) * seed_sd * math.sqrt(2 / num_seeds)
    pairs = {}
    for first, second in combinations(finals, 2):
        difference = fmean(finals[first]) - fmean(finals[second])
        pairs[f"{first} - {second}"] = {"difference": difference, "overlaps": abs(difference) <= margin}
    return {
        "policies": {
            policy: {
                "reward_mean_last_half": fmean(values),
                "reward_by_seed": values,
                "staleness_mean_steps": fmean(curve.staleness_mean_steps for curve in curves if curve.policy == policy),
            }
            for policy, values in finals.items()
        },
        "num_seeds": num_seeds,
        "seed_sd": seed_sd,
        "margin": margin,
        "confidence": CONFIDENCE,
        "pairs": pairs,
        "overlap": all(pair["overlaps"] for pair in pairs.values()),
    }


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t-distribution, above the median, by bisection of its integral (Simpson's rule)."""
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))

    def density(x: float) -> float:
        return scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2)

    def below(x: float, parts: int = 2000) -> float:
        width = x / parts
        inner = sum((4 if index % 2 else 2) * density(index * width) for index in range(1, parts))
        return 0.5 + width / 3 * (density(0) + inner + density(x))

    low, high = 0.0, 100.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


def print_verdict(verdict: dict[str, Any]) -> None:
    for policy, found in verdict["policies"].items():
        by_seed = ", ".join(f"{value:.3f}" for value in found["reward_by_seed"])
        print(
            f"{policy:8} reward over the last half {found['reward_mean_last_half']:.3f} (seeds {by_seed}), "
            f"mean staleness {found['staleness_mean_steps']:.3f}"
        )
    print(
        f"between the {verdict['num_seeds']} seeds of a policy: standard deviation {verdict['seed_sd']:.3f}; "
        f"differences up to {verdict['margin']:.3f} are no more than seeds make ({verdict['confidence']:.0%})"
    )
    for pair, found in verdict["pairs"].items():
        print(f"{pair}: {found['difference']:+.3f}, {'overlap' if found['overlaps'] else 'DO NOT OVERLAP'}")


# -- picture ----------------------------------------------------------------------------------------------------------


def draw(curves: Sequence[Curve], arguments: argparse.Namespace, image: Path) -> None:
    """Mean reward by step: the mean over the seeds, and a band from the lowest to the highest seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for policy, marker in zip(POLICIES, "os^", strict=True):
        mine = [curve for curve in curves if curve.policy == policy]
        by_step = list(zip(*(curve.reward_mean_by_step for curve in mine), strict=True))
        steps = range(1, len(by_step) + 1)
        staleness = fmean(curve.staleness_mean_steps for curve in mine)
        label = f"{policy} (mean staleness {staleness:.2f})"
        (line,) = axes.plot(steps, [fmean(values) for values in by_step], marker=marker, markersize=3, label=label)
        lowest, highest = [min(values) for values in by_step], [max(values) for values in by_step]
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15, linewidth=0)
    num_seeds = len(set(arguments.seeds))
    title = f"phi {arguments.phi:g}, mu {arguments.mu}; {num_seeds} seeds, bands from the lowest to the highest"
    axes.set(xlabel="optimizer step", ylabel="mean reward of the groups trained", title=title)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)
    pyplot.close(figure)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except TidegateError as error:
        raise SystemExit(f"error: {error}") from None
