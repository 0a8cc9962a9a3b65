"""What a simulation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from services.scheduler.sim.bounds import LowerBound
from services.scheduler.sim.pool import CellMode


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that was trained."""

    group_id: str
    task_index: int
    step: int
    staleness_steps: int
    """Steps between the version it was dispatched under and the one that it was trained on."""
    durations_s: tuple[float, ...]
    """Of its valid runs, as they take at full speed."""

    @property
    def slowest_s(self) -> float:
        return max(self.durations_s, default=0.0)


@dataclass(frozen=True, slots=True)
class Staleness:
    """Steps, over trained groups."""

    mean: float
    maximum: int
    mean_after_first_burst: float
    mean_by_slowest_run_quartile: tuple[float, ...]
    """Groups with the shortest slowest runs first. Equal numbers: no bias against long runs."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Runs and groups."""

    dispatched_runs: int
    ended_runs: int
    """Of groups that were scored; the others were cancelled at the job's end or dropped."""
    trained_runs: int
    lost_attempts: int
    moved_runs: int
    """Times that a run went on at another cell."""
    dispatched_groups: int
    trained_groups: int
    lost_groups: int


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the time of all cells, between the first publication and the end of the last step."""

    serving: float
    training: float
    switching: float
    waiting: float
    """In training, without work."""
    down: float
    slot_occupancy: float
    """Busy slots of those of cells in rollout."""


@dataclass(frozen=True, slots=True)
class CellIntervals:
    """What a cell did when: (mode, start, end), seconds."""

    cell_id: str
    intervals: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything over time, seconds."""

    cells: tuple[CellIntervals, ...]
    water_level: tuple[tuple[float, int], ...]
    ready_groups: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a simulation found. The same configuration gives the same result."""

    name: str
    status: str
    """``finished``, or how else the job ended."""
    reason: str
    start_s: float
    """When the first weights were published: all figures count from here."""
    step_end_s: tuple[float, ...]
    """Of the measured steps."""
    staleness: Staleness
    counts: RunCounts
    utilisation: Utilisation
    exposed_training_s: float
    """Time in which a step was in flight and no run went on."""
    run_mean_s: float
    """Mean duration of the trained runs, at full speed."""
    slowest_of_group_mean_s: float
    num_switches: int
    num_events: int
    """That the core handled."""
    lower_bound: LowerBound
    groups: tuple[TrainedGroup, ...]
    timeline: Timeline | None

    @property
    def hours(self) -> float:
        """From the first publication to the end of the last step."""
        return (self.step_end_s[-1] - self.start_s) / 3600 if self.step_end_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON-ready. Groups and the timeline stay out."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": self.reason,
            "hours": self.hours,
            "steps": len(self.step_end_s),
            "step_end_hours": [(end_s - self.start_s) / 3600 for end_s in self.step_end_s],
            "staleness": asdict(self.staleness),
            "counts": asdict(self.counts),
            "utilisation": asdict(self.utilisation),
            "exposed_training_hours": self.exposed_training_s / 3600,
            "run_mean_s": self.run_mean_s,
            "slowest_of_group_mean_s": self.slowest_of_group_mean_s,
            "num_switches": self.num_switches,
            "num_events": self.num_events,
            "lower_bound": {"hours": self.lower_bound.hours, "binding": self.lower_bound.binding}
            | {f"{name}_hours": seconds / 3600 for name, seconds in self.lower_bound.seconds_by_name.items()},
        }


def staleness_of(groups: Sequence[TrainedGroup], steps_per_burst: int) -> Staleness:
    """The staleness of trained groups."""
    if not groups:
        return Staleness(0.0, 0, 0.0, ())
    later = [group for group in groups if group.step > steps_per_burst] or list(groups)
    by_slowest = sorted(later, key=lambda group: group.slowest_s)
    cuts = [len(by_slowest) * quarter // 4 for quarter in range(5)]
    quartiles = [by_slowest[start:end] for start, end in pairwise(cuts)]
    return Staleness(
        mean=fmean(group.staleness_steps for group in groups),
        maximum=max(group.staleness_steps for group in groups),
        mean_after_first_burst=fmean(group.staleness_steps for group in later),
        mean_by_slowest_run_quartile=tuple(
            fmean(group.staleness_steps for group in quartile) for quartile in quartiles if quartile
        ),
    )


def utilisation_of(accounts: Sequence[dict[str, Any]], slots: Sequence[int]) -> Utilisation:
    """From the accounts of each cell (``SimCell.accounts``)."""
    seconds = {mode: sum(account["seconds_in"][mode] for account in accounts) for mode in CellMode}
    total_s = sum(seconds.values()) or 1.0
    slot_s = sum(
        number * account["seconds_in"][CellMode.SERVING] for account, number in zip(accounts, slots, strict=True)
    )
    busy_s = sum(account["busy_slot_s"] for account in accounts)
    shares = {mode.value: seconds[mode] / total_s for mode in CellMode}
    return Utilisation(**shares, slot_occupancy=busy_s / slot_s if slot_s else 0.0)
