"""Elastic scheduling against the published figures: ``python -m benchmarks.elastic --json`` prints one object.

- ``cases.<name>``: whole jobs: hours of the baselines, of the paper's elastic rule and of Tidegate's ``sorted``
  one, their ratios, the staleness over 400 steps, and the lower bound on the paper rule's time.
- ``ablation.<row>``: hours of the first 12 steps; ``relations.<row/base>``: the published ratio beside ours.
- ``best``: the gain of ``sorted`` over the paper's rule on seeds that were not used in its design.
- ``decision_ms``: how long the core takes for one event with 256 cells and 10,000 unfinished runs.

Everything runs on one core. Hours are simulated, so they do not depend on the machine; ``decision_ms`` does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import published
from services.common.ids import JobId, make_cell_id
from services.common.types import CellKind
from services.scheduler.actions import Decision, ScoreGroup, StartRun, SwitchCell
from services.scheduler.events import (
    CellDrained,
    CellJoined,
    CellServing,
    Event,
    GroupScored,
    PublicationEnded,
    RunEnded,
    RunStarted,
)
from services.scheduler.options import JobOptions, Policy
from services.scheduler.sim.config import SimConfig, load_sim_config
from services.scheduler.sim.engine import simulate
from services.scheduler.sim.result import SimResult
from services.scheduler.state import JobState
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "sim"
SEEDS = (0, 1)
"""Of the cases and the ablation: those that the parameters were fitted with."""
FRESH_SEEDS = tuple(range(1000, 1020))
"""Used nowhere else."""
T_95_ONE_SIDED_19 = 1.729
"""Student's t with 19 degrees of freedom: 95% of its mass lies below."""
STALENESS_STEPS = 400


def load(name: str) -> SimConfig:
    return load_sim_config(CONFIGS / f"{name}.yaml", [])


def run(config: SimConfig, seed: int) -> SimResult:
    result = simulate(config.model_copy(update={"seed": seed}))
    if result.status != "finished":
        raise SystemExit(f"{config.name}, seed {seed}: {result.status}: {result.reason}")
    return result


def mean_hours(config: SimConfig, seeds: tuple[int, ...] = SEEDS) -> float:
    return statistics.fmean(run(config, seed).hours for seed in seeds)


def case(name: str) -> dict[str, float]:
    """One of the paper's experiments under four policies."""
    elastic = [run(load(name), seed) for seed in SEEDS]
    elastic_hours = statistics.fmean(result.hours for result in elastic)
    async_hours, colocate_hours = mean_hours(load(f"{name}-async")), mean_hours(load(f"{name}-colocate"))
    long = run(long_job(load(name)), seed=0)
    return {
        "async_hours": async_hours,
        "colocate_hours": colocate_hours,
        "elastic_hours": elastic_hours,
        "best_hours": mean_hours(load(f"{name}-best")),
        "async_ratio": async_hours / elastic_hours,
        "colocate_ratio": colocate_hours / elastic_hours,
        "mean_staleness": long.staleness.mean_after_first_burst,
        "max_staleness": long.staleness.maximum,
        "lower_bound_hours": statistics.fmean(result.lower_bound.hours for result in elastic),
        "over_lower_bound": elastic_hours / statistics.fmean(result.lower_bound.hours for result in elastic),
    }


def long_job(config: SimConfig) -> SimConfig:
    """Many steps of a quarter of the groups on a quarter of the slots: staleness is counted in steps."""
    scheduler = config.scheduler.model_copy(update={"groups_per_step": max(1, config.scheduler.groups_per_step // 4)})
    slots = tuple(max(1, number // 4) for number in config.pool.slots_by_cell)
    pool = config.pool.model_copy(update={"slots": slots})
    system = config.system.model_copy(update={"train_per_rollout": config.system.train_per_rollout * 4})
    return config.model_copy(update={"steps": STALENESS_STEPS, "scheduler": scheduler, "pool": pool, "system": system})


def gain_of_best(name: str) -> dict[str, Any]:
    """``sorted`` against the paper's rule on fresh seeds: whole jobs, the same tasks and runs for both."""
    paper, best = load(name), load(f"{name}-best")
    pairs = [(run(paper, seed), run(best, seed)) for seed in FRESH_SEEDS]
    gains = [1 - best.hours / paper.hours for paper, best in pairs]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    quartiles = [
        [result.staleness.mean_by_slowest_run_quartile for result in side] for side in zip(*pairs, strict=True)
    ]
    by_quartile = [[statistics.fmean(column) for column in zip(*side, strict=True)] for side in quartiles]
    return {
        "case": name,
        "num_seeds": len(pairs),
        "gain_mean": statistics.fmean(gains),
        "gain_lower_95": statistics.fmean(gains) - T_95_ONE_SIDED_19 * error,
        "paper_hours": statistics.fmean(paper.hours for paper, _ in pairs),
        "best_hours": statistics.fmean(best.hours for _, best in pairs),
        "paper_mean_staleness": statistics.fmean(paper.staleness.mean_after_first_burst for paper, _ in pairs),
        "best_mean_staleness": statistics.fmean(best.staleness.mean_after_first_burst for _, best in pairs),
        "paper_max_staleness": max(paper.staleness.maximum for paper, _ in pairs),
        "best_max_staleness": max(best.staleness.maximum for _, best in pairs),
        "paper_staleness_by_length_quartile": by_quartile[0],
        "best_staleness_by_length_quartile": by_quartile[1],
        "lower_bound_hours": statistics.fmean(paper.lower_bound.hours for paper, _ in pairs),
        "best_over_lower_bound": statistics.fmean(best.hours / paper.lower_bound.hours for paper, best in pairs),
        "same_tasks": all(
            sorted(group.task_index for group in paper.groups) == sorted(group.task_index for group in best.groups)
            for paper, best in pairs
        ),
        "runs_not_trained": sum(
            result.counts.dispatched_runs - result.counts.trained_runs for pair in pairs for result in pair
        ),
    }


# -- decisions --------------------------------------------------------------------------------------------------------


def decision_times(num_cells: int = 256, num_runs: int = 10_000, group_size: int = 10) -> dict[str, float]:
    """Processor milliseconds of one event, from a full pool down to the burst's training."""
    groups_per_step = num_runs // group_size // 2
    options = JobOptions(
        JobId("decisions"),
        num_cells,
        tuple(f"task-{index}" for index in range(64)),
        steps=1000,
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_concurrent_runs=num_runs,
        policy=Policy(streaming=True),
    )
    state, times_ms = JobState(options), []
    slots = math.ceil(1.1 * num_runs / num_cells)
    for index in range(num_cells):
        state.handle(CellJoined(make_cell_id(index), slots, CellKind.SATELLITE if index else CellKind.CORE), 0.0)
    for index in range(num_cells):
        state.handle(CellServing(make_cell_id(index), 0), 0.0)

    def timed(event: Event) -> list[Decision]:
        before_s = time.process_time()
        decisions = state.handle(event, 1.0)
        times_ms.append((time.process_time() - before_s) * 1000)
        return decisions

    dispatched = timed(PublicationEnded(0))
    boundary_ms = times_ms.pop()
    starts = [made.action for made in dispatched if isinstance(made.action, StartRun)]
    assert state.book.water_level == len(starts) == num_runs
    for start in starts:
        timed(RunStarted(start.run_id, 0))
    random.Random(0).shuffle(starts)
    for start in starts[: num_runs * 7 // 10]:
        answers = timed(RunEnded(start.run_id, 0, Outcome.FINISHED, 1.0))
        while answers:
            action = answers.pop().action
            if isinstance(action, ScoreGroup):
                answers += timed(GroupScored(_scored(action.group_id, group_size)))
            elif isinstance(action, SwitchCell):
                answers += timed(CellDrained(action.cell_id))
    times_ms.sort()
    return {
        "mean": statistics.fmean(times_ms),
        "p99": times_ms[int(0.99 * len(times_ms))],
        "max": times_ms[-1],
        "per_decision_at_boundary": boundary_ms / len(dispatched),
        "num_cells": num_cells,
        "num_runs": num_runs,
    }


def _scored(group_id: str, group_size: int) -> GroupResult:
    return GroupResult(group_id, True, "", group_size, group_size, 1, 1, 0.5, (0.5,), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    cases = {name: case(name) for name in published.BANDS}
    ablation = {row: mean_hours(load(f"ablation/{row}")) for row in published.rows()}
    relations = {
        relation.name: {
            "ratio": ablation[relation.row] / ablation[relation.base],
            "published": relation.ratio,
            "error": ablation[relation.row] / ablation[relation.base] / relation.ratio - 1,
        }
        for relation in published.RELATIONS
    }
    answer = {
        "cases": cases,
        "ablation": ablation,
        "relations": relations,
        "best": gain_of_best("nl2repo_122b"),
        "decision_ms": decision_times(),
    }
    answer["seconds"] = time.perf_counter() - started_s
    if arguments.json:
        print(json.dumps(answer))
        return
    _show(answer)


def _show(answer: dict[str, Any]) -> None:
    for name, figures in answer["cases"].items():
        band = published.BANDS[name]
        print(f"{name}: elastic {figures['elastic_hours']:.2f} h, sorted {figures['best_hours']:.2f} h, "
              f"async {figures['async_ratio']:.3f} ({band.async_ratio[0]:.2f}-{band.async_ratio[1]:.2f}), "
              f"colocate {figures['colocate_ratio']:.3f} ({band.colocate_ratio[0]:.2f}-{band.colocate_ratio[1]:.2f}), "
              f"staleness {figures['mean_staleness']:.3f}, at most {figures['max_staleness']}, "
              f"{figures['over_lower_bound']:.2f} x lower bound")  # fmt: skip
    for name, relation in answer["relations"].items():
        print(f"  {name} {relation['ratio']:.3f} (published {relation['published']:.3f}, {relation['error']:+.1%})")
    best, decision = answer["best"], answer["decision_ms"]
    print(f"sorted saves {best['gain_mean']:.1%} of the paper rule's time, at least {best['gain_lower_95']:.1%} (95%)")
    print(f"one event: {decision['mean']:.3f} ms on average, {decision['p99']:.3f} ms at the 99th percentile")
    print(f"{answer['seconds']:.0f} s")


if __name__ == "__main__":
    main()
