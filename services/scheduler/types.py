"""What goes into the scheduler's state machine (events), what comes out (decisions), and what it is told at the start.

Events say what happened (past tense), actions what to do (imperative). Both are plain data: the live actor and the
simulator feed the same events to the same core and perform the same actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from services.common.errors import ConfigError
from services.common.ids import JobId
from services.common.types import CellRole, CellState
from services.scheduler.config import SchedulerConfig
from services.trajectory.outcome import Outcome
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


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellJoined:
    """A cell's rollout side is up, without weights yet. Also sent when a lost cell comes back."""

    cell_id: str
    slots: int
    is_core: bool


@dataclass(frozen=True, slots=True)
class CellUpdating:
    """A cell began to take in new weights; its calls are paused and it takes no new ones. Sending it is optional."""

    cell_id: str
    version: int


@dataclass(frozen=True, slots=True)
class CellServing:
    """A cell holds the weights of ``version``, verified."""

    cell_id: str
    version: int


@dataclass(frozen=True, slots=True)
class CellStale:
    """A cell's weights cannot be trusted (failed verification, recovered engine); it gets no traffic."""

    cell_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CellLost:
    """A cell's rollout side is gone. It may come back with ``CellJoined``."""

    cell_id: str
    reason: str
    may_return: bool = False
    """It is being restarted: a job that has no other cell waits for it. Sent again, False, when nothing came of it."""


@dataclass(frozen=True, slots=True)
class CellDrained:
    """The rollout side of a cell is quiet: its switch to training is complete."""

    cell_id: str
    num_aborted: int = 0
    """Calls that were aborted at the deadline; they go on at other cells."""


@dataclass(frozen=True, slots=True)
class CellAdmitted:
    """A cell takes calls again: its switch to rollout is complete."""

    cell_id: str


@dataclass(frozen=True, slots=True)
class RunStarted:
    """An attempt is under way: its key is open, and it is on its way to a runner."""

    run_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """An attempt ended. Sent once for every attempt that was started, also for aborted ones."""

    run_id: str
    attempt: int
    outcome: Outcome
    reward: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupScored:
    """The answer to ``ScoreGroup``, for training and held-out groups alike."""

    result: GroupResult


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The answer to ``TrainStep``: ``step`` optimizer steps are complete."""

    step: int
    num_tokens: int = 0
    num_targets: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PublicationEnded:
    """The answer to ``PublishWeights``, after a ``CellServing`` or ``CellStale`` of each of its cells."""

    version: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The answer to ``SaveCheckpoint``: it is complete on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class BestMarked:
    """The answer to ``MarkBest``: the checkpoint of ``step`` is the best one."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainingFailed:
    """The training ranks failed beyond their restarts; the job cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """An action could not be performed."""

    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user wants the job to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    CellJoined
    | CellUpdating
    | CellServing
    | CellStale
    | CellLost
    | CellDrained
    | CellAdmitted
    | RunStarted
    | RunEnded
    | GroupScored
    | StepTrained
    | PublicationEnded
    | CheckpointSaved
    | BestMarked
    | TrainingFailed
    | ActionFailed
    | CancelRequested
    | Tick
)


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Tell the group's shard that it exists. Ended before any other action on the group begins."""

    spec: GroupSpec
    task_index: int
    """Index into the job's training tasks; into its held-out tasks if ``spec.is_eval``."""


@dataclass(frozen=True, slots=True)
class StartRun:
    """Start an attempt of a run. Answered by ``RunStarted`` and, some time, ``RunEnded``."""

    run_id: str
    attempt: int
    """Counts from 0; further ones follow losses that are not the policy's fault."""
    group_id: str
    task_index: int
    cell_id: str
    """The cell whose slot it takes: the first to try for its calls."""
    is_eval: bool = False


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """All runs of the group are final. Answered by ``GroupScored``."""

    group_id: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """The group will not be trained; its stored calls may go."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SwitchCell:
    """Move a cell. To training: drain its rollout side, answered by ``CellDrained``; to rollout: ``CellAdmitted``."""

    cell_id: str
    role: CellRole
    """``TRAIN`` or ``ROLLOUT``."""
    timeout_s: float
    """To training: calls that are in flight after this long are aborted and go on elsewhere."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Train one optimizer step, the ``step``-th of the job. Answered by ``StepTrained``."""

    step: int
    group_ids: tuple[str, ...]
    version: int
    """Version of the weights that were published last."""


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Update the cells to ``version``, one after the other in this order.

    ``version`` is the step trained last, or (for cells that joined or failed since) the version published last,
    whose buffer is still exposed. Answered by ``CellServing`` or ``CellStale`` for each cell, then
    ``PublicationEnded``.
    """

    version: int
    cell_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save weights, optimizer and ``resume`` as one commit. Answered by ``CheckpointSaved``.

    A step that was saved before is saved again: a resumed job may need the export.
    """

    step: int
    export: bool
    """These weights get a held-out pass: also write them as a Hugging Face folder, in case they are the best."""
    kept_steps: tuple[int, ...]
    """Checkpoints that stay with their exports, whatever their age: the last commit's, the one in its held-out pass."""
    resume: ResumeState


@dataclass(frozen=True, slots=True)
class MarkBest:
    """Keep the checkpoint of ``step``, which was saved with its export, as the best. Answered by ``BestMarked``."""

    step: int
    reward_mean: float
    """Mean held-out reward of exactly these weights."""


@dataclass(frozen=True, slots=True)
class TaskRewards:
    """The held-out rewards of one task."""

    task_name: str
    rewards: tuple[float, ...]
    """One for each run with a valid reward."""
    num_runs: int
    """Runs that were started for it."""


@dataclass(frozen=True, slots=True)
class RecordEvaluation:
    """A held-out pass over all held-out tasks is complete. Needs no answer."""

    version: int
    tasks: tuple[TaskRewards, ...]
    reward_mean: float | None
    """Over all valid rewards; None if there is none."""


@dataclass(frozen=True, slots=True)
class AbortRuns:
    """End these attempts, whatever they do. Needs no answer; a later ``RunEnded`` of theirs changes nothing."""

    attempts: tuple[tuple[str, int], ...]
    """(run id, attempt)."""
    reason: str


@dataclass(frozen=True, slots=True)
class FinishJob:
    """The job is over; nothing is decided after this."""

    status: JobStatus
    reason: str


Action = (
    OpenGroup
    | StartRun
    | ScoreGroup
    | DropGroup
    | SwitchCell
    | TrainStep
    | PublishWeights
    | SaveCheckpoint
    | MarkBest
    | RecordEvaluation
    | AbortRuns
    | FinishJob
)


@dataclass(frozen=True, slots=True)
class Decision:
    """An action with the numbers that made it."""

    action: Action
    reason: str


class Performer(Protocol):
    """Performs actions: on real cells in a cluster, on modelled ones in tests."""

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        """Perform one action. ``emit`` may be called any number of times, during the call or later, from any thread.

        Actions are performed concurrently, except that those on a group wait for its ``OpenGroup``. An exception
        becomes ``ActionFailed``.
        """

    async def attend(self, emit: Callable[[Event], None]) -> None:
        """Emit what happens without an action: cells that join, die and come back. Cancelled with the scheduler."""


# -- start and resume -------------------------------------------------------------------------------------------------


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

    def __post_init__(self) -> None:
        if not self.task_names:
            raise ConfigError("there are no training tasks.", "Point tasks.train at folders in Harbor's format.")
        if self.max_staleness_steps < self.steps_per_burst - 1:
            raise ConfigError(
                f"max_staleness_steps={self.max_staleness_steps} is below steps_per_burst - 1 = "
                f"{self.steps_per_burst - 1}: the last step of a burst could train nothing.",
                "Raise scheduler.max_staleness_steps or lower scheduler.steps_per_burst.",
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
            max_lost_groups=config.max_lost_groups,
            run_start_timeout_s=config.run_start_timeout_s,
            drain_timeout_s=config.drain_timeout_s,
            **numbers,
        )


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
    is_core: bool
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
