"""What the core is told of a job at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from services.common.errors import ConfigError
from services.common.ids import JobId
from services.scheduler.config import AsyncPolicy, ElasticPolicy, SchedulerConfig
from services.scheduler.policy import homogeneous_cadence


class PolicyMode(StrEnum):
    """How the pool is shared between rollout and training."""

    ASYNC = "async"
    """A fixed split: the first cells only train, the others only serve."""
    COLOCATE = "colocate"
    """The whole pool (but its standalone cells) switches to training and back."""
    ELASTIC = "elastic"
    """Cells leave rollout one by one as unfinished runs ebb, and come back after the burst."""


class ElasticRule(StrEnum):
    """Which rule decides what an elastic pool does."""

    PAPER = "paper"
    """QwenGyre's: Eq. 5, Eq. 6, runs start in the order of their dispatch."""
    SORTED = "sorted"
    """The same, but tasks that take about as long are dispatched together (``services.scheduler.order``)."""


class AtStalenessBound(StrEnum):
    """What happens when an unfinished group reaches ``max_staleness_steps``."""

    WAIT = "wait"
    """The step that has to train it waits for it."""
    DROP = "drop"
    """It is dropped and replaced."""


class OnLostGroup(StrEnum):
    """What happens when a group is lost inside a burst."""

    REPLACE = "replace"
    """Another is dispatched in its place at once, under the version published last."""
    CLOSE_SHORT = "close_short"
    """A step of the burst closes with a group less; the last one of a step is replaced all the same."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How the pool is shared. (The plain form of the configuration's ``scheduler.policy``.)"""

    mode: PolicyMode = PolicyMode.ELASTIC
    streaming: bool = False
    """Groups are trained as they become ready; otherwise a step starts when all of its groups are."""
    train_cells: int = 1
    """``async``: cells that only train, the core included."""
    rule: ElasticRule = ElasticRule.PAPER
    """``elastic``."""
    window_bursts: int = 3
    """``sorted``: bursts inside whose tasks the order may change."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """All that the core needs to know of a job. Raises ``ConfigError`` for numbers that cannot work together."""

    MAX_UPDATE_ATTEMPTS: ClassVar[int] = 3
    """Weight updates that a cell may fail in a row, switches that it may fail in all."""

    job_id: JobId
    num_cells: int
    """Cells that are expected; the first weights are published when all of them joined or were lost."""
    task_names: tuple[str, ...]
    steps: int
    eval_task_names: tuple[str, ...] = ()
    groups_per_step: int = 4
    """B."""
    group_size: int = 8
    steps_per_burst: int = 1
    """mu."""
    carry_over_steps: float = 1.0
    """phi."""
    max_staleness_steps: int = 8
    at_staleness_bound: AtStalenessBound = AtStalenessBound.WAIT
    on_lost_group: OnLostGroup = OnLostGroup.REPLACE
    policy: Policy = Policy()
    max_lost_groups: int = 200
    max_concurrent_runs: int = 8
    """Runs that may run at once, whatever the slots: the runners' limit."""
    run_start_timeout_s: float = 60.0
    drain_timeout_s: float = 120.0
    checkpoint_every: int = 5
    """Steps between checkpoints."""
    eval_every: int = 0
    """Steps between held-out passes; 0: none during the job."""
    eval_at_start: bool = False
    eval_at_end: bool = True
    """Only where there are held-out tasks."""
    eval_group_size: int = 2
    """Runs of each held-out task."""
    seed: int = 0
    """Seed of the order of tasks."""

    @property
    def window_groups(self) -> int:
        """Groups inside which the order of tasks is rearranged; 0: it is not."""
        is_sorted = self.policy.mode is PolicyMode.ELASTIC and self.policy.rule is ElasticRule.SORTED
        steps = homogeneous_cadence(self.carry_over_steps, self.steps_per_burst)[1]
        return self.policy.window_bursts * steps * self.groups_per_step if is_sorted else 0

    def __post_init__(self) -> None:
        if not self.task_names:
            raise ConfigError("there are no training tasks.", "Point tasks.train at folders in Harbor's format.")
        needed = self.steps_per_burst - 1
        why = "steps_per_burst - 1: the last step of a burst could train nothing"
        if self.at_staleness_bound is AtStalenessBound.WAIT:
            needed = math.ceil(self.carry_over_steps + self.steps_per_burst - 1e-9) - 1
            why = "phi + mu - 1: not all groups that are dispatched could be trained in time"
        if self.max_staleness_steps < needed:
            raise ConfigError(
                f"max_staleness_steps={self.max_staleness_steps} is below {needed} = {why}.",
                "Raise scheduler.max_staleness_steps, or lower scheduler.steps_per_burst or "
                "scheduler.carry_over_steps.",
            )

    @staticmethod
    def from_config(config: SchedulerConfig, **numbers: Any) -> JobOptions:
        """The scheduler's own section, and ``numbers`` for the fields that other sections own."""
        return JobOptions(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            steps_per_burst=config.steps_per_burst,
            carry_over_steps=config.carry_over_steps,
            max_staleness_steps=config.max_staleness_steps,
            at_staleness_bound=AtStalenessBound(config.at_staleness_bound),
            on_lost_group=OnLostGroup(config.on_lost_group),
            policy=policy_of(config),
            max_lost_groups=config.max_lost_groups,
            run_start_timeout_s=config.run_start_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
            **numbers,
        )


def policy_of(config: SchedulerConfig) -> Policy:
    """The plain form of ``scheduler.policy``."""
    chosen = config.policy
    return Policy(
        mode=PolicyMode(chosen.mode),
        streaming=chosen.streaming,
        train_cells=chosen.train_cells if isinstance(chosen, AsyncPolicy) else 1,
        rule=ElasticRule(chosen.rule) if isinstance(chosen, ElasticPolicy) else ElasticRule.PAPER,
        window_bursts=chosen.window_bursts if isinstance(chosen, ElasticPolicy) else 3,
    )
