"""Lower bounds on the time of a job: what no policy with the same dispatch and staleness can beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Each bound in seconds; the largest binds."""

    seconds_by_name: dict[str, float]

    @property
    def binding(self) -> str:
        return max(self.seconds_by_name, key=lambda name: self.seconds_by_name[name])

    @property
    def hours(self) -> float:
        return self.seconds_by_name[self.binding] / 3600


def work_bound_s(run_s: float, train_cell_s: float, slots: Sequence[int], num_standalone: int) -> float:
    """The pool busy without a pause: ``run_s`` slot-seconds of runs and ``train_cell_s`` cell-seconds of training.

    ``slots``: of each cell, the standalone ones last. Training takes the cells with the fewest slots.
    """
    trainable = sorted(slots[: len(slots) - num_standalone])

    def holds(hours_s: float) -> bool:
        left_s, capacity = train_cell_s, hours_s * sum(slots)
        for number in trainable:
            taken_s = min(left_s, hours_s)
            left_s -= taken_s
            capacity -= taken_s * number
        return left_s <= 0 and capacity >= run_s

    low, high = 0.0, (run_s / max(1, min(slots)) + train_cell_s) + 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


def lower_bound(
    slowest_s: Sequence[float],
    burst_of_group: Sequence[int],
    run_s: float,
    train_cell_s: float,
    *,
    slots: Sequence[int],
    num_standalone: int,
    max_outstanding: int,
    has_carry_over: bool,
    max_concurrent_runs: int | None = None,
) -> LowerBound:
    """All bounds of a job that trained these groups.

    - ``work``: all runs and all training, with no cell ever idle.
    - ``staleness``: a group is outstanding for at least its slowest run, and at most ``max_outstanding`` (Q) are.
    - ``slowest_group``: one group cannot be faster than its slowest run.
    - ``runners``: no more runs at once than ``max_concurrent_runs``, where that is limited.
    - ``bursts``: without carry-over (phi = 0) a burst's groups start when the one before has ended.
    """
    bounds = {
        "work": work_bound_s(run_s, train_cell_s, slots, num_standalone),
        "staleness": sum(slowest_s) / max(1, max_outstanding),
        "slowest_group": max(slowest_s, default=0.0),
    }
    if max_concurrent_runs is not None:
        bounds["runners"] = run_s / max_concurrent_runs
    if not has_carry_over:
        slowest_in_burst: dict[int, float] = {}
        for burst, seconds in zip(burst_of_group, slowest_s, strict=True):
            slowest_in_burst[burst] = max(seconds, slowest_in_burst.get(burst, 0.0))
        bounds["bursts"] = sum(slowest_in_burst.values())
    return LowerBound(bounds)
