"""What a training backend can do for a rank. The rank decides when; the backend knows the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from services.trainer.loss import LossSums
from services.trainer.packing import Batch


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one forward and backward saw; results of several batches add up."""

    sums: LossSums = field(default_factory=LossSums)
    num_tokens: int = 0
    """Unique tokens that went through the model."""
    logprob_abs_diff_max: float = -1.0
    """Largest |engine - trainer| over the targets that the weights being trained have sampled; -1 if none."""

    def __add__(self, other: BatchResult) -> BatchResult:
        return BatchResult(
            self.sums + other.sums,
            self.num_tokens + other.num_tokens,
            max(self.logprob_abs_diff_max, other.logprob_abs_diff_max),
        )


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimizer step did."""

    grad_norm: float
    """Global norm after the division by the number of runs, before clipping."""
    learning_rate: float
    skipped: bool
    """The gradient was not finite: the weights and the optimizer are as before."""


class TrainingBackend(Protocol):
    """One rank's model and optimizer."""

    def accumulate(self, batch: Batch, temperature: float, version: int) -> BatchResult:
        """Forward and backward; the gradient of the batch's unnormalised loss is added to what is there.

        ``temperature`` is that of the sampling. Targets sampled by ``version`` are compared with the engine.

        Raises:
            ConfigError: the model cannot run this batch exactly.
            ValueError: the batch's forest is malformed.
        """

    def reduce(self) -> None:
        """Sum the accumulated gradients over the ranks."""

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradient by parameter; a parameter that has none is left out."""

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add another cell's ``gradients()`` to what is there.

        Raises:
            ValueError: they belong to other parameters; nothing was added.
        """

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take over another cell's ``state()``.

        Raises:
            ConfigError: it belongs to another model or another way of tuning.
        """

    def update(self, num_runs: int, step: int) -> Update:
        """Divide the gradient by ``num_runs``, clip it, step the optimizer, and forget the gradient."""

    def discard(self) -> None:
        """Forget the gradient."""

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights under their Hugging Face names, adapters merged in, tied tensors once, float32."""

    def score(self, token_ids: Sequence[int], weights: Mapping[str, Tensor]) -> list[float]:
        """Log-probabilities (temperature 1) of ``token_ids[1:]`` under ``weights`` (names of ``merged_weights``)."""

    def state(self) -> dict[str, Tensor]:
        """The trainable tensors."""

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state."""

    def load(self, state: Mapping[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        """Go back to what ``state`` and ``optimizer_state`` gave.

        Raises:
            ConfigError: they belong to another model or another way of tuning.
        """
