"""Actions: what to do, in the imperative. Plain data; a performer carries them out and answers with events."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.types import CellRole
from services.scheduler.types import JobStatus, ResumeState, TaskRewards
from services.trajectory.types import GroupSpec


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
    """Move a cell. To training: drain its rollout side, answered by ``CellDrained``; to rollout: ``CellAdmitted``.

    A satellite that left rollout trains with the core: from ``CellDrained`` on it claims work of the step in flight,
    and a switch back takes it out, its unfinished claims being given to others.
    """

    cell_id: str
    role: CellRole
    """``TRAIN`` or ``ROLLOUT``."""
    timeout_s: float
    """To training: calls that are in flight after this long are aborted and go on elsewhere."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Train these groups as part of optimizer step ``step``, the ``step``-th of the job.

    A streaming step is told group by group. The cells that are in training claim the work; the optimizer steps when
    all groups are told and counted. The action that completes the step is answered by ``StepTrained``, and the claims
    on the way by ``TrainingProgressed``.
    """

    step: int
    group_ids: tuple[str, ...]
    """Groups that come to the step with this action."""
    version: int
    """Version of the weights that were published last."""
    num_missing: int = 0
    """Groups that will still come to this step; 0 completes it."""


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
