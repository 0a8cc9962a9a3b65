"""The clipped policy loss. Pure: tensors in, tensors out.

A run contributes ``(1 / n_run) * sum over its targets``; contributions are only ever summed here. Whoever steps the
optimizer divides once by the number of counted runs, so cutting the runs apart in any way changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.config import ClippedLossConfig


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over targets; those of several batches or ranks add up."""

    loss: float = 0.0
    num_targets: int = 0
    num_clipped: int = 0
    ratio: float = 0.0
    kl_behaviour: float = 0.0
    """Behaviour minus current log-probability, nats."""
    entropy: float = 0.0
    """Nats."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss,
            self.num_targets + other.num_targets,
            self.num_clipped + other.num_clipped,
            self.ratio + other.ratio,
            self.kl_behaviour + other.kl_behaviour,
            self.entropy + other.entropy,
        )


def clipped_policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    entropy: Tensor,
    config: ClippedLossConfig,
    old: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """PPO's surrogate, to be minimised, summed over targets (Schulman et al. 2017, equation 7, with two bounds).

    All tensors are ``[targets]``: ``logprobs`` of the weights being trained (with gradient), ``behaviour`` of the
    engine that sampled (at the same temperature), ``advantages`` of the targets' runs, ``weights`` ``1 / n_run``,
    ``entropy`` for the statistics. A target adds ``-weight * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with
    ``r = min(exp(logprob - behaviour), ratio_max)``: a positive advantage raises the log-probability, and beyond a
    bound no gradient is left.

    With ``old``, the log-probabilities of the weights that the step starts from, ratios are taken against them, and a
    target is weighted by ``min(exp(old - behaviour), ratio_max)`` for the engine's staleness (the decoupled loss of
    AReaL, arXiv 2505.24298, with the weight cut).
    """
    log_ratio = logprobs - (behaviour if old is None else old)
    ratio = log_ratio.clamp(max=math.log(config.ratio_max)).exp()  # cut before exp, which would overflow
    if old is not None:
        weights = weights * (old - behaviour).clamp(max=math.log(config.ratio_max)).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate).sum()
    with torch.no_grad():
        is_clipped = (
            ((advantages > 0) & (ratio > 1 + config.clip_high))
            | ((advantages < 0) & (ratio < 1 - config.clip_low))
            | (log_ratio > math.log(config.ratio_max))
        )
        sums = LossSums(
            loss=float(loss),
            num_targets=logprobs.numel(),
            num_clipped=int(is_clipped.sum()),
            ratio=float(ratio.sum()),
            kl_behaviour=float((behaviour - logprobs).sum()),
            entropy=float(entropy.sum()),
        )
    return loss, sums
