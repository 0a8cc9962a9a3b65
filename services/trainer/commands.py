"""What the training ranks of a cell are told to do, and how they are told.

A step is taken whole (``TrainStep``), or by several cells together: each ``Accumulate``s micro-steps into a gradient
sum of its own, a satellite's sum is ``Collect``ed and ``Absorb``ed by the core, and the core ``Update``s the weights.
Every such command carries the step's ``epoch``: a rank forgets a sum of another step or epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.trainer.types import StepReport

if TYPE_CHECKING:
    from services.trainer.backends.base import BatchResult


@dataclass(frozen=True, slots=True)
class MicroStepAt:
    """Where a rank finds a micro-step: it asks the shard, which makes it anew if it was restarted meanwhile."""

    shard: str
    """Name of the shard's actor."""
    group_id: str
    index: int


@dataclass(frozen=True, slots=True)
class MicroStepRef:
    """A micro-step as commands carry it. Equal ones have the same key, wherever their data lies."""

    key: str
    """Stays when the micro-steps of a group are asked for again."""
    data: Any = field(compare=False)
    """A ``MicroStep`` or a Ray object ref of one."""


@dataclass(frozen=True, slots=True)
class SumReport:
    """What the gradient sum of a cell holds now."""

    step: int
    epoch: int
    keys: frozenset[str]
    """Of the micro-steps in it."""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """A cell's gradient sum, unnormalised, with everything that a step's report needs of it."""

    step: int
    epoch: int
    keys: frozenset[str]
    """Of the micro-steps in it."""
    num_runs: int
    """Runs with a target."""
    num_batches: int
    result: BatchResult = field(compare=False)
    tensors: Any = field(compare=False)
    """Float32 numpy arrays by parameter name, or a Ray object ref of that dict."""
    peak_rss_bytes: int = field(default=0, compare=False)
    """Of the rank that made it."""


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """The core's trainable parameters in master precision."""

    step: int
    """The step that starts from them."""
    tensors: Any = field(compare=False)
    """Float32 numpy arrays by parameter name, or a Ray object ref of that dict."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Take the ``step``-th optimizer step of the job (they count from 1). Answered by a ``StepReport``."""

    step: int
    version: int
    """Version of the weights that the step starts from, if they were published, else -1: the targets that they
    sampled are compared with the engine."""
    temperature: float
    """Of the sampling: log-probabilities are those of ``logits / temperature``."""
    micro_steps: tuple[Any, ...] = field(compare=False)
    """``MicroStep``s or Ray object refs of them."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradient of micro-steps to the cell's sum. Answered by a ``SumReport``."""

    step: int
    epoch: int
    version: int
    temperature: float
    micro_steps: tuple[MicroStepRef, ...]


@dataclass(frozen=True, slots=True)
class Collect:
    """Hand the cell's sum over and forget it. Answered by a ``GradientSum``."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Absorb:
    """Add another cell's sum to one's own. Answered by a ``SumReport``; what could not be fetched is not in it."""

    step: int
    epoch: int
    gradients: GradientSum


@dataclass(frozen=True, slots=True)
class Update:
    """Step the optimizer. Answered by a ``StepReport``; by a ``SumReport``, and nothing was done, if the cell's sum
    holds other micro-steps than these (ranks that were restarted have lost theirs).
    """

    step: int
    epoch: int
    version: int
    temperature: float
    micro_steps: tuple[MicroStepRef, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Give out the weights from which ``step`` starts. Answered by a ``WeightSnapshot``."""

    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """Take over weights, and forget the sum. Answered by None."""

    weights: WeightSnapshot


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget the cell's sum. Answered by None."""


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


StepCommand = TrainStep | Accumulate | Absorb | Update
"""Commands that make a step: once it is trained, all of them are answered with its report."""
Command = (
    TrainStep
    | Accumulate
    | Collect
    | Absorb
    | Update
    | Snapshot
    | Load
    | Discard
    | Publish
    | SaveCheckpoint
    | MarkBest
    | Stop
)


@dataclass(frozen=True, slots=True)
class Order:
    """A command as one rank gets it."""

    order_id: int
    command: Command
    claims: tuple[int, ...] = ()
    """Indices into the command's micro-steps that this rank takes."""
    num_claims: int = 0
    """Micro-steps of the command, over all ranks."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """What a mailbox remembers of a step, for whoever divides its work."""

    group_ids: tuple[str, ...]
    """Groups that were told so far, in order."""
    report: StepReport | None
    """If the step is trained."""


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
