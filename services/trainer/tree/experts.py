"""Expert parallelism: the ranks that share chunks also share the experts of each layer.

A rank holds a run of consecutive experts and evaluates them for the tokens of all ranks: hidden states and routing are
gathered, and each rank's contributions go back to where the tokens are. So the gradients of experts are complete on the
rank that holds them, while those of all other parameters are to be summed over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.errors import ConfigError, TrainingError
from services.trainer.tree.parallel import ParallelContext
from services.trainer.tree.ranks import Ranks, split_tokens
from services.trainer.tree.states import current

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def shard_experts(model: Any, group: dist.ProcessGroup | None) -> ExpertShards:
    """Leave each rank only its slice of the experts of a model. ``group``: that of the model's executor, which must
    have been made before; optimizers are to be made after. On its own the model cannot be run any more.

    Raises:
        ConfigError: the model's experts cannot be shared by so many ranks.
    """
    ranks = Ranks(group)
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in list(model.named_modules()):
        if not _has_experts(module):
            continue
        _check(name, module.num_experts, ranks.size)
        counts = split_tokens(module.num_experts, ranks.size)
        share = _Share(sum(counts[: ranks.rank]), counts[ranks.rank], module.num_experts)
        for key, parameter in list(module.named_parameters(recurse=False)):
            own = parameter.detach()[share.first : share.first + share.num_own].clone()
            setattr(module, key, torch.nn.Parameter(own, requires_grad=parameter.requires_grad))
            sizes[f"{name}.{key}"] = counts
        module.num_experts = share.num_own
        module.forward = partial(_evaluate, module, share, module.forward)
    if not sizes:
        raise ConfigError(f"{model.config.model_type} has no experts to share.", "Share its chunks only.")
    return ExpertShards(ranks, sizes)


class ExpertShards:
    """Which parameters are slices, and how they are put together. Tensors of the shape of a parameter (its gradient, an
    optimizer's moments) are sliced as it is. What is not said to be local is to be called on all ranks, in one order.
    """

    def __init__(self, ranks: Ranks, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """``sizes``: by name of the parameter, how many experts each rank holds."""
        self._ranks = ranks
        self._sizes = dict(sizes)

    @property
    def names(self) -> frozenset[str]:
        """Parameters of which this rank holds a slice: their gradients must not be summed over ranks. Local."""
        return frozenset(self._sizes)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """From a rank's tensor to that of all experts, on every rank; a parameter that is no slice is returned."""
        return self._ranks.collect(tensor, self._sizes[name]) if name in self._sizes else tensor

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """The reverse of ``whole``. Local."""
        if name not in self._sizes:
            return tensor
        return tensor.split(self._sizes[name])[self._ranks.rank]

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients over ranks, in place, where they are sums over each rank's own tokens."""
        for name, gradient in gradients.items():
            if name not in self._sizes:
                self._ranks.sum(gradient)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of the whole gradient, after ``reduce``. Every rank has to name the same parameters."""
        local = [gradient for name, gradient in gradients.items() if name in self._sizes]
        others = [gradient for name, gradient in gradients.items() if name not in self._sizes]
        return (self._ranks.sum(_square(local)) + _square(others)).sqrt()


def _square(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.linalg.vector_norm(tensor).double().square().cpu() for tensor in tensors]).sum()


@dataclass(frozen=True, slots=True)
class _Share:
    first: int
    num_own: int
    num_all: int


def _has_experts(module: Any) -> bool:
    """Holds the weights of all experts of a layer, stacked."""
    parameters = list(module.parameters(recurse=False))
    num_experts = getattr(module, "num_experts", None)
    return any(parameter.dim() == 3 for parameter in parameters) and all(
        parameter.shape[0] == num_experts for parameter in parameters
    )


def _check(name: str, num_experts: int, num_ranks: int) -> None:
    if name.endswith("base_layer"):
        raise ConfigError(
            f"the experts in {name} have adapters: ranks cannot share them.",
            "Leave the experts without adapters, or on every rank.",
        )
    if num_experts < num_ranks:
        raise ConfigError(
            f"{num_experts} experts cannot be shared by {num_ranks} ranks.",
            "Use fewer ranks, or leave the experts on every rank.",
        )


# -- evaluation --------------------------------------------------------------------------------------------------------


def _evaluate(
    experts: Any, share: _Share, forward: Forward, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Tensor:
    """In place of an experts module's forward. ``hidden`` ``[T, hidden]``, ``indices`` and ``weights`` ``[T, k]`` of
    the tokens that are here; ``forward`` is that for the experts that are here."""
    context = current()
    if not isinstance(context, ParallelContext):
        if len(next(experts.parameters())) != share.num_all:
            raise TrainingError(
                "a rank that holds only some of the experts cannot run the model on its own.",
                "Give the model all of its weights for the call (torch.func.functional_call).",
            )
        with _all_experts(experts, share):
            return forward(hidden, indices, weights)
    all_indices = context.gather(indices)
    all_hidden = _OfAll.apply(context, context.anchor, hidden)
    all_weights = _OfAll.apply(context, context.anchor, weights)
    result = _contributions(share, forward, all_hidden, all_indices, all_weights)
    # a rank whose experts nobody chose still takes part in the exchanges of the backward
    return _ToOwners.apply(context, context.anchor, result, all_hidden, all_weights)


def _contributions(share: _Share, forward: Forward, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """``[T, hidden]``: what the experts that are here give. Each choice of a token goes as a token of its own."""
    num_tokens, num_chosen = indices.shape
    local = indices.reshape(-1) - share.first
    rows = ((local >= 0) & (local < share.num_own)).nonzero()[:, 0]
    if not len(rows):
        return torch.zeros_like(hidden)
    results = forward(hidden[rows // num_chosen], local[rows, None], weights.reshape(-1)[rows, None])
    spread = results.new_zeros(num_tokens * num_chosen, results.shape[-1]).index_copy(0, rows, results)
    return spread.view(num_tokens, num_chosen, -1).sum(1)


@contextlib.contextmanager
def _all_experts(experts: Any, share: _Share) -> Iterator[None]:
    experts.num_experts = share.num_all
    try:
        yield
    finally:
        experts.num_experts = share.num_own


class _OfAll(torch.autograd.Function):
    """Rows of the tokens of all ranks; their gradients come back to where the rows are."""

    @staticmethod
    def forward(ctx: Any, context: ParallelContext, anchor: Tensor, rows: Tensor) -> Tensor:
        ctx.context = context
        return context.gather(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.context.exchange_sum(gradients[0])


class _ToOwners(torch.autograd.Function):
    """Sums of what all ranks have for the tokens that are here."""

    @staticmethod
    def forward(ctx: Any, context: ParallelContext, anchor: Tensor, rows: Tensor, *links: Tensor) -> Tensor:
        ctx.context, ctx.num_links = context, len(links)
        return context.exchange_sum(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.context.gather(gradients[0]), *(None for _ in range(ctx.num_links))
