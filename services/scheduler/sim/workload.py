"""How long runs take. A duration depends on the seed, the task, the group and the run, never on the policy.

Two policies that are simulated with one seed thus see the same runs (common random numbers): the k-th group that is
dispatched has the same task and the same durations in both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol

from services.common.errors import ConfigError
from services.scheduler.sim.config import (
    CsvWorkload,
    LognormalPart,
    LognormalWorkload,
    MeasuredWorkload,
    MixtureWorkload,
    WorkloadConfig,
)


class Workload(Protocol):
    """Where durations come from."""

    num_tasks: int
    lost_groups: frozenset[str]
    """Groups that are not ready when they are scored, whatever the system's probabilities."""

    def durations(self, task_index: int, group: str, group_size: int) -> list[float]:
        """Seconds, one for each run of the group. ``group`` is its id, which tells training groups from held-out."""


class LognormalDurations:
    """Lognormal durations with an effect of the task and one of the run, cut at a timeout."""

    def __init__(
        self, parts: Sequence[tuple[float, LognormalPart]], timeout_s: float | None, num_tasks: int, seed: int
    ) -> None:
        """``parts``: weight and distribution of each kind of tasks."""
        self.num_tasks = num_tasks
        self.lost_groups: frozenset[str] = frozenset()
        self._weights = [weight for weight, _ in parts]
        self._parts = [part for _, part in parts]
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._seed = seed
        self._tasks: dict[int, tuple[float, float]] = {}

    def durations(self, task_index: int, group: str, group_size: int) -> list[float]:
        centre, run_sigma = self._task(task_index)
        gauss = random.Random(f"{self._seed}/durations/{group}/{task_index}").gauss
        return [min(math.exp(gauss(centre, run_sigma)), self._timeout_s) for _ in range(group_size)]

    def _task(self, task_index: int) -> tuple[float, float]:
        """Mean log-duration of a task's runs, and their standard deviation."""
        if task_index not in self._tasks:
            rng = random.Random(f"{self._seed}/task/{task_index}")
            effect = rng.gauss(0.0, 1.0)
            (part,) = rng.choices(self._parts, self._weights)
            variance = part.task_sigma**2 + part.run_sigma**2
            centre = math.log(part.mean_s) - variance / 2 + part.task_sigma * effect
            self._tasks[task_index] = (centre, part.run_sigma)
        return self._tasks[task_index]


class SampledDurations:
    """Durations drawn with replacement from those of the group's task."""

    def __init__(self, rows_by_task_s: Sequence[Sequence[float]], num_tasks: int, seed: int) -> None:
        """``num_tasks`` tasks take the rows in turn: with one row all draw from it."""
        self.num_tasks = num_tasks
        self.lost_groups: frozenset[str] = frozenset()
        self._rows_s = rows_by_task_s
        self._seed = seed

    def durations(self, task_index: int, group: str, group_size: int) -> list[float]:
        rng = random.Random(f"{self._seed}/durations/{group}/{task_index}")
        return rng.choices(self._rows_s[task_index % len(self._rows_s)], k=group_size)


class MeasuredDurations:
    """The durations of a real job: group by group as they were, then groups drawn from them."""

    def __init__(self, config: MeasuredWorkload, seed: int) -> None:
        self.num_tasks = config.num_tasks
        self.lost_groups = frozenset(config.lost_groups)
        self._groups_s = config.groups_s
        self._seed = seed

    def durations(self, task_index: int, group: str, group_size: int) -> list[float]:
        rng = random.Random(f"{self._seed}/durations/{group}/{task_index}")
        row_s = self._groups_s.get(group)
        if row_s is None:  # held-out groups repeat held-out ones, where there are some
            alike = [row for key, row in self._groups_s.items() if key[0] == group[0]]
            row_s = rng.choice(alike or list(self._groups_s.values()))
        return list(row_s) if len(row_s) == group_size else rng.choices(row_s, k=group_size)


def make_workload(config: WorkloadConfig, seed: int, rows_by_task_s: Sequence[Sequence[float]] = ()) -> Workload:
    """The workload of a configuration. ``rows_by_task_s``: what a CSV file holds (``durations.read_durations``)."""
    match config:
        case LognormalWorkload():
            return LognormalDurations([(1.0, config)], config.timeout_s, config.num_tasks, seed)
        case MixtureWorkload():
            parts = [(part.weight, part) for part in config.parts]
            return LognormalDurations(parts, config.timeout_s, config.num_tasks, seed)
        case MeasuredWorkload():
            return MeasuredDurations(config, seed)
        case CsvWorkload():
            if not rows_by_task_s:
                raise ConfigError(f"the durations of {config.path} were not read.", "Use read_durations first.")
            num_tasks = len(rows_by_task_s) if config.task_column else config.num_tasks
            return SampledDurations(rows_by_task_s, num_tasks, seed)
