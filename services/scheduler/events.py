"""Events: what happened, in the past tense. Plain data; the live actor and the simulator feed the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.types import CellKind, CellRole
from services.scheduler.actions import Action
from services.scheduler.options import PolicyMode
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult


@dataclass(frozen=True, slots=True)
class CellJoined:
    """A cell's rollout side is up, without weights yet. Also sent when a lost cell comes back."""

    cell_id: str
    slots: int
    kind: CellKind = CellKind.SATELLITE


@dataclass(frozen=True, slots=True)
class CellReported:
    """What a live cell says of itself: sent when its slots changed, and by a restarted scheduler's shell."""

    cell_id: str
    slots: int
    version: int
    """Version of the verified weights that it serves; -1: it serves none."""


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
class HarnessEnded:
    """The harness of an attempt has ended, and what it left is being scored: it makes no further call."""

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
class TrainingProgressed:
    """Cells claimed work of the step in flight, or gave some back."""

    step: int
    num_unclaimed: int
    """Micro-steps that nobody has claimed."""


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The answer to the ``TrainStep`` that completed the step: ``step`` optimizer steps are done."""

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
class DrainRequested:
    """A user wants a cell to be quiet: no runs, no training, until it is undrained."""

    cell_id: str


@dataclass(frozen=True, slots=True)
class UndrainRequested:
    """A user gives a drained cell back."""

    cell_id: str


@dataclass(frozen=True, slots=True)
class SwitchRequested:
    """A user wants a cell to move now. One that moved to rollout stays there until the burst ends."""

    cell_id: str
    role: CellRole
    """``TRAIN`` or ``ROLLOUT``."""


@dataclass(frozen=True, slots=True)
class PolicyRequested:
    """A user wants other numbers from the next burst boundary on. None: as it is."""

    carry_over_steps: float | None = None
    steps_per_burst: int | None = None
    mode: PolicyMode | None = None


Request = DrainRequested | UndrainRequested | SwitchRequested | PolicyRequested
"""What a user asks for: ``JobState.refusal`` says beforehand why it cannot be."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    CellJoined
    | CellReported
    | CellUpdating
    | CellServing
    | CellStale
    | CellLost
    | CellDrained
    | CellAdmitted
    | RunStarted
    | HarnessEnded
    | RunEnded
    | GroupScored
    | TrainingProgressed
    | StepTrained
    | PublicationEnded
    | CheckpointSaved
    | BestMarked
    | TrainingFailed
    | ActionFailed
    | CancelRequested
    | DrainRequested
    | UndrainRequested
    | SwitchRequested
    | PolicyRequested
    | Tick
)
