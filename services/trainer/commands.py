"""What the training ranks of a cell are told to do, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Take the ``step``-th optimizer step of the job (they count from 1). Answered by a ``StepReport``."""

    step: int
    version: int
    """Version of the weights that the step starts from, if they were published, else -1: the targets that they
    sampled are compared with the engine."""
    temperature: float
    """Of the sampling: log-probabilities are those of ``logits / temperature``."""
    micro_steps: tuple[Any, ...]
    """``MicroStep``s or Ray object refs of them."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Expose the current weights as ``version``, the step at which they stand. Answered by a ``WeightManifest``.

    The version published last is answered again as it was, also when steps were taken since. The buffer is the same
    for every version: publish the next one only after all pulls of this one have ended.
    """

    version: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Save weights, optimizer and random states. Answered by the checkpoint's folder."""

    step: int
    version: int
    export: bool = False
    """Also write the weights as a Hugging Face folder inside the checkpoint."""
    kept_steps: tuple[int, ...] = ()
    """Older checkpoints that stay with their exports, beside the newest and the best."""


@dataclass(frozen=True, slots=True)
class MarkBest:
    """Make a checkpoint that was saved with its export the best one. Answered by None."""

    step: int
    reward_mean: float
    """Its mean held-out reward."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the training ranks in good order. Answered by None."""


Command = TrainStep | Publish | SaveCheckpoint | MarkBest | Stop


@dataclass(frozen=True, slots=True)
class Order:
    """A command as one rank gets it."""

    order_id: int
    command: Command
    claims: tuple[int, ...] = ()
    """Indices into ``TrainStep.micro_steps`` that this rank takes."""
    num_claims: int = 0
    """Micro-steps of the step, over all ranks."""


@dataclass(frozen=True, slots=True)
class MailboxStatus:
    """What a mailbox says of itself."""

    num_ranks: int
    """Ranks of the present group that are ready."""
    command: str
    """Name of the command in flight; empty if there is none."""
    num_taken: int
    """Ranks that have taken it."""
    num_waiting: int
    """Commands behind it."""
    closed: str
    """Why no command is taken any more, if so."""
