"""What ``tidegate plan`` answers: with these durations, which policy and which numbers take the fewest hours?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.common.errors import ConfigError
from services.scheduler.sim.config import CsvWorkload, SimConfig
from services.scheduler.sim.result import SimResult

MIN_CELLS = 3
MIN_TAIL_RATIO = 1.15
"""Mean of the slowest run of a group over the mean of all: below, there is little tail to harvest."""
MIN_GAIN = 0.05
_NEAR_TIMEOUT = 0.98
_MAX_SHARE_AT_TIMEOUT = 0.25
_ASSUMED_TRAIN_SHARE = 0.3
"""Training for each cell-second of full rollout, where the user gives no figure."""


MAX_MEAN_STALENESS_STEPS = 8
"""A plan tries about twice as many pairs of phi and mu, each under every policy."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What the user has, and wants."""

    base: SimConfig
    """Its pool, workload, system costs, groups and steps; policies and cell counts are varied."""
    mean_staleness_steps: float

    def __post_init__(self) -> None:
        if self.mean_staleness_steps < 0:
            raise ConfigError(f"a mean staleness of {self.mean_staleness_steps:g} cannot be.", "Give 0 or more.")
        if self.mean_staleness_steps > MAX_MEAN_STALENESS_STEPS:
            raise ConfigError(
                f"a mean staleness of {self.mean_staleness_steps:g} steps is more than a plan tries.",
                f"Give at most {MAX_MEAN_STALENESS_STEPS}; one such setting can be simulated (tidegate simulate).",
            )
        if self.base.pool.standalone_cells or len(set(self.base.pool.slots_by_cell)) > 1:
            raise ConfigError(
                "a plan varies the number of cells, so all of them are alike.",
                "Leave pool.standalone_cells at 0 and give one number of slots; simulate other pools one by one.",
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting that is simulated."""

    label: str
    """``async``, ``colocate``, ``elastic (paper)`` or ``elastic (sorted)``."""
    config: SimConfig


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What one setting takes."""

    policy: str
    num_cells: int
    slots: int
    """Of each cell."""
    train_cells: int | None
    """``async`` only."""
    carry_over_steps: float
    steps_per_burst: int
    hours: float
    mean_staleness_steps: float
    max_staleness_steps: int
    training_share: float
    """Of the cells' time."""

    @property
    def is_elastic(self) -> bool:
        return self.policy.startswith("elastic")


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """All settings, fastest first, and what to make of them."""

    rows: tuple[PlanRow, ...]
    recommended: PlanRow
    gain_over_others: float
    """Of the fastest elastic setting, in hours saved over the fastest other one; may be negative."""
    lower_bound_hours: float
    """Of the recommended setting."""
    tail_ratio: float
    """Mean of the slowest run of a group over the mean of all runs."""
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def staleness_pairs(mean_staleness_steps: float) -> list[tuple[float, int]]:
    """(phi, mu) with phi + (mu - 1) / 2 equal to the mean staleness."""
    num_pairs = math.floor(2 * mean_staleness_steps + 1e-9) + 1
    return [(mean_staleness_steps - (mu - 1) / 2, mu) for mu in range(1, num_pairs + 1)]


def cell_counts(num_cells: int, slots: int) -> list[tuple[int, int]]:
    """(cells, slots of each) for half as many cells, as many and twice as many, with the same total of slots."""
    total = num_cells * slots
    counts = dict.fromkeys((max(1, num_cells // 2), num_cells, num_cells * 2))
    return [(count, total // count) for count in counts if total % count == 0]


def assumed_train_per_rollout(slots: int) -> float:
    """Cell-seconds of training for each second of a run, if nothing is known."""
    return _ASSUMED_TRAIN_SHARE / slots


def train_splits(num_cells: int, slots: int, train_per_rollout: float) -> list[int]:
    """Cells that train in a fixed split: those around the one at which training and rollout are in balance."""
    share = train_per_rollout * slots / (1 + train_per_rollout * slots)
    balanced = math.floor(share * num_cells)
    return [count for count in range(balanced, balanced + 3) if 1 <= count < num_cells] or [1] * (num_cells > 1)


def candidates(question: PlanQuestion) -> list[Candidate]:
    """Every setting that is worth a look. All have the same runs, the same total of slots and the same staleness."""
    base, slots = question.base, question.base.pool.slots_by_cell[0]
    found = []
    for num_cells, cell_slots in cell_counts(base.pool.num_cells, slots):
        # a cell of half the size takes twice as long for the same training
        train_per_rollout = base.system.train_per_rollout * num_cells / base.pool.num_cells
        splits = train_splits(num_cells, cell_slots, train_per_rollout)
        policies: list[tuple[str, dict[str, Any]]] = [
            *(("async", {"mode": "async", "train_cells": count}) for count in splits),
            ("colocate", {"mode": "colocate"}),
            ("elastic (paper)", {"mode": "elastic", "rule": "paper"}),
            ("elastic (sorted)", {"mode": "elastic", "rule": "sorted"}),
        ]
        for phi, mu in staleness_pairs(question.mean_staleness_steps):
            for label, policy in policies:
                data = base.model_dump()
                data["pool"] |= {"num_cells": num_cells, "slots": cell_slots}
                data["system"] |= {"train_per_rollout": train_per_rollout}
                data["scheduler"] |= {
                    "policy": policy,
                    "carry_over_steps": phi,
                    "steps_per_burst": mu,
                    "max_staleness_steps": max(base.scheduler.max_staleness_steps, math.ceil(phi + mu)),
                }
                found.append(Candidate(label, SimConfig.model_validate(data)))
    return found


def row_of(candidate: Candidate, result: SimResult) -> PlanRow:
    """Raises ``ConfigError`` for a job that did not come to its end."""
    if result.status != "finished":
        raise ConfigError(
            f"the simulated job ({candidate.label}) ended as {result.status}: {result.reason}.",
            "Lower the failures that were configured.",
        )
    config = candidate.config
    policy = config.scheduler.policy
    return PlanRow(
        policy=candidate.label,
        num_cells=config.pool.num_cells,
        slots=config.pool.slots_by_cell[0],
        train_cells=policy.train_cells if policy.mode == "async" else None,
        carry_over_steps=config.scheduler.carry_over_steps,
        steps_per_burst=config.scheduler.steps_per_burst,
        hours=result.hours,
        mean_staleness_steps=result.staleness.mean_after_first_burst,
        max_staleness_steps=result.staleness.maximum,
        training_share=result.utilisation.training,
    )


def conclude(
    question: PlanQuestion, simulated: Sequence[tuple[Candidate, SimResult]], durations_s: Sequence[float]
) -> PlanAnswer:
    """The recommended setting, and warnings where the scheme does not pay. ``durations_s``: all that were measured."""
    rows = sorted(
        ((row_of(candidate, result), result) for candidate, result in simulated), key=lambda pair: pair[0].hours
    )
    recommended, result = rows[0]
    elastic = min(row.hours for row, _ in rows if row.is_elastic)
    other = min(row.hours for row, _ in rows if not row.is_elastic)
    gain = 1 - elastic / other if other > 0 else 0.0
    tail_ratio = result.slowest_of_group_mean_s / result.run_mean_s if result.run_mean_s > 0 else 1.0
    return PlanAnswer(
        rows=tuple(row for row, _ in rows),
        recommended=recommended,
        gain_over_others=gain,
        lower_bound_hours=result.lower_bound.hours,
        tail_ratio=tail_ratio,
        warnings=tuple(_warnings(question, gain, tail_ratio, durations_s)),
    )


def _warnings(question: PlanQuestion, gain: float, tail_ratio: float, durations_s: Sequence[float]) -> list[str]:
    base, found = question.base, []
    num_cells = base.pool.num_cells
    if num_cells < MIN_CELLS:
        found.append(
            f"{num_cells} cells are few: with fewer than {MIN_CELLS} cells there is hardly a step between all in "
            "rollout and all in training."
        )
    if tail_ratio < MIN_TAIL_RATIO:
        found.append(
            f"the slowest run of a group takes only {tail_ratio:.2f} times the mean: there is little tail, in which "
            "cells could leave rollout early."
        )
    longest_s = max(durations_s, default=0.0)
    share = sum(seconds >= _NEAR_TIMEOUT * longest_s for seconds in durations_s) / max(1, len(durations_s))
    if share > _MAX_SHARE_AT_TIMEOUT:
        found.append(f"{share:.0%} of the runs end at the longest duration, {longest_s:g} s: most likely a timeout.")
    runs = (question.mean_staleness_steps + 1) * base.scheduler.groups_per_step * base.scheduler.group_size
    slots = sum(base.pool.slots_by_cell)
    if runs < slots:
        found.append(
            f"about {runs:.0f} runs are outstanding for {slots} slots: slots stay empty; raise groups_per_step."
        )
    if gain < MIN_GAIN:
        found.append(
            f"the elastic scheme {'gains only' if gain >= 0 else 'loses'} {abs(gain):.1%} against the faster of async "
            f"and colocate: it does not pay here."
        )
    if isinstance(base.workload, CsvWorkload) and not base.workload.task_column and len(durations_s) > 1:
        found.append(
            "the durations name no task, so runs of a group are drawn as if they had nothing in common; name the "
            "column of the task to keep what they share."
        )
    return found
