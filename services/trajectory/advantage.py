"""Group-relative advantages: one number a run, so that no way of splitting a run changes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Estimator = Literal["grpo", "grpo_no_std", "rloo"]

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards give no huge advantages."""
EQUAL_REWARD_TOLERANCE = 1e-9
"""Rewards that differ by no more than this are equal: they say nothing about the runs."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of a group's counted runs."""

    by_run: dict[str, float]
    equal_rewards: bool
    """All counted rewards are equal (or there is at most one): every advantage is exactly 0."""


def group_advantages(rewards: Mapping[str, float], estimator: Estimator) -> Advantages:
    """Advantages from the rewards of the counted runs (run id -> reward).

    Runs that are missing from ``rewards`` (lost, unscored) neither get an advantage nor move the baseline.

    - ``grpo`` (arXiv 2402.03300, eq. 10): ``(reward - mean) / (std + STD_EPSILON)``; std is the sample standard
      deviation (n - 1), as TRL and verl compute it.
    - ``grpo_no_std`` (Dr. GRPO, arXiv 2503.20783): ``reward - mean``.
    - ``rloo`` (arXiv 2402.14740): the reward minus the mean of the other runs' rewards.

    Raises ``ValueError`` for a reward that is not finite.
    """
    bad = [run_id for run_id, reward in rewards.items() if not math.isfinite(reward)]
    if bad:
        raise ValueError(f"rewards must be finite numbers; not so for {', '.join(bad)}")
    values = list(rewards.values())
    if len(values) < 2 or max(values) - min(values) <= EQUAL_REWARD_TOLERANCE:
        return Advantages(dict.fromkeys(rewards, 0.0), equal_rewards=True)
    mean = math.fsum(values) / len(values)
    if estimator == "rloo":
        scale = len(values) / (len(values) - 1)  # reward - mean of the others = scale * (reward - mean)
    elif estimator == "grpo":
        scale = 1.0 / (statistics.stdev(values) + STD_EPSILON)
    else:
        scale = 1.0
    return Advantages({run_id: (reward - mean) * scale for run_id, reward in rewards.items()}, equal_rewards=False)
