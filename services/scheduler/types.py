"""Types of the scheduler that are neither events nor actions: status, counters, what is resumed, what clients see."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common.types import CellKind, CellRole, CellState
from services.trajectory.types import GroupResult, GroupSpec


class JobStatus(StrEnum):
    """Where a job stands."""

    STARTING = "starting"
    """Cells join and get their first weights."""
    RUNNING = "running"
    ENDING = "ending"
    """Cancelled or failed: the step in flight ends and a checkpoint is saved."""
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (JobStatus.FINISHED, JobStatus.CANCELLED, JobStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative counters of runs. Further attempts of a run change none of them."""

    dispatched: int = 0
    """d: runs of all groups that were opened."""
    started: int = 0
    """p: runs that left the queue."""
    ended: int = 0
    """f: runs that finally ended."""

    @property
    def water_level(self) -> int:
        """w = d - f: unfinished runs."""
        return self.dispatched - self.ended


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A scored group that waits to be trained."""

    spec: GroupSpec
    task_index: int
    result: GroupResult


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What a checkpoint's commit record holds of the scheduler, and what a resumed job starts from."""

    step: int = 0
    version: int = 0
    next_group_index: int = 0
    next_eval_group_index: int = 0
    data_position: int = 0
    """Groups taken from the endless order of tasks so far."""
    unfinished_task_indices: tuple[int, ...] = ()
    """Tasks of the groups that were unfinished: they are dispatched first, as new groups."""
    ready: tuple[ReadyGroup, ...] = ()
    training: Counters = Counters()
    evaluation: Counters = Counters()
    num_lost_groups: int = 0
    last_eval_step: int = -1
    """Step of the last held-out pass, -1 before the first."""
    best_eval_step: int = -1
    """Step of the weights with the highest mean held-out reward, -1: none. 0: the model as it came, not saved."""
    best_eval_reward: float | None = None
    """Theirs: the reward to beat."""
    exported_step: int = -1
    """Step of the newest checkpoint that has an export."""
    reward_mean_by_step: tuple[float | None, ...] = ()
    train_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TaskRewards:
    """The held-out rewards of one task."""

    task_name: str
    rewards: tuple[float, ...]
    """One for each run with a valid reward."""
    num_runs: int
    """Runs that were started for it."""


# -- what clients see -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell as clients see it."""

    cell_id: str
    role: CellRole
    state: CellState
    version: int
    """-1 before its first weights."""
    slots: int
    num_runs: int
    kind: CellKind
    is_draining: bool = False
    reason: str = ""
    """Why it is stale or down."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as clients see it."""

    run_id: str
    group_id: str
    task_name: str
    attempt: int
    status: str
    """'queued', 'running', or its outcome."""
    reward: float | None
    cell_id: str
    version: int
    """Version stamped on its group at dispatch."""
    is_eval: bool


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The policy as clients see it."""

    mode: str
    streaming: bool
    rule: str
    """``elastic``."""
    train_cells: int
    """``async``."""
    carry_over_steps: float
    """phi."""
    steps_per_burst: int
    """mu."""
    pending: dict[str, Any] = field(default_factory=dict)
    """The fields above that change, with their new values."""
    pending_from_step: int | None = None
    """The burst boundary (as a step) from which ``pending`` holds."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A job's state as gRPC clients see it."""

    job_id: str
    status: str
    step: int
    steps_target: int
    version: int
    dispatched: int
    """Runs, held-out ones included; as are ``started`` and ``ended``."""
    started: int
    ended: int
    water_level: int
    ready_groups: int
    outstanding_groups: int
    lost_groups: int
    queued_runs: int
    """Runs that wait for a slot, those that wait for a further attempt included."""
    running_runs: int
    """Attempts that hold a slot."""
    policy: PolicyView
    reason: str = ""
    """Why the job ends or ended."""
    cells: tuple[CellView, ...] = ()


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A decision as it stands in the event log."""

    sequence: int
    """Sequence of the event that made it."""
    at_s: float
    action: str
    payload: dict[str, Any]
    reason: str


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event with what was decided about it."""

    sequence: int
    at_s: float
    """Unix time, seconds."""
    kind: str
    payload: dict[str, Any] = field(default_factory=dict)
    decisions: tuple[LoggedDecision, ...] = ()
