"""Types of the trajectory store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.rollout.types import RunResult
from services.trajectory.outcome import CallTrouble, Outcome
from services.trajectory.types import GroupResult, GroupSpec


class GroupState(StrEnum):
    """Where a group stands."""

    OPEN = "open"
    READY = "ready"
    LOST = "lost"
    """Settled, and not to be trained (held-out groups too)."""
    DROPPED = "dropped"
    """The scheduler gave it up."""
    CANCELLED = "cancelled"
    """The job ended before it was complete."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose rows: those of one shard of a job, of the whole job, or all."""

    job_id: str | None = None
    shard_index: int | None = None


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """The newest attempt of a run, without its calls."""

    attempt: int
    key_hash: bytes | None
    """None: closed."""
    trouble: CallTrouble | None
    """Why its last call was not completed."""
    result: RunResult | None


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group and the newest attempt of each of its runs (None: not started)."""

    spec: GroupSpec
    state: GroupState
    result: GroupResult | None
    attempts: dict[str, StoredAttempt | None]
    reason: str = ""
    opened_at_s: float = 0.0
    trained_step: int | None = None
    """The step that trained it."""
    pruned_at_s: float | None = None
    """Unix time at which retention deleted its calls."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to list. Fields that are None do not filter."""

    group_id: str | None = None
    task_name: str | None = None
    outcome: Outcome | None = None
    is_eval: bool | None = None
    unfinished: bool | None = None
    """True: only runs without an outcome; False: only those with one."""
    limit: int | None = None
    """The last so many runs, in order of dispatch."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What retention deleted, or would delete."""

    group_ids: tuple[str, ...]
    """Oldest first."""
    num_calls: int
    num_objects: int
    freed_bytes: int
    kept_bytes: int
    """Stored calls that are left. More than the limit where groups that are still needed make it so."""
    is_dry: bool
