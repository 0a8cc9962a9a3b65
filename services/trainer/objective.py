"""What is asked of a batch's targets: the slope of the policy loss at each, and the sums that are reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.config import ClippedLossConfig
from services.trainer.loss import LossSums, clipped_policy_loss
from services.trainer.tree.forest import Forest
from services.trainer.types import RunWeight


class PolicyObjective:
    """The clipped policy loss over the targets of a forest, asked for in parts, in any order, each target once."""

    def __init__(
        self,
        forest: Forest,
        runs: Sequence[RunWeight],
        config: ClippedLossConfig,
        device: torch.device,
        *,
        version: int,
        old: Tensor | None = None,
    ) -> None:
        """``version``: targets that it has sampled are compared with the engine. ``old`` ``[M]``: see
        ``clipped_policy_loss``."""
        weights = torch.tensor([[run.advantage, 1.0 / max(run.num_targets, 1)] for run in runs], dtype=torch.float64)
        self._per_target = weights[torch.from_numpy(forest.target_runs).long()].to(device)
        self._behaviour = torch.from_numpy(forest.behaviour).to(device)
        self._is_current = torch.from_numpy(forest.versions == version).to(device)
        self._config = config
        self._old = old
        self.sums = LossSums()
        self.logprob_abs_diff_max = -1.0
        """Largest |engine - trainer| over the targets that ``version`` has sampled; -1 if there was none."""

    def __call__(self, index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """``index`` ``[m]`` of targets, with their log-probabilities and entropies ``[m]``: the loss's slope at the
        log-probabilities ``[m]``."""
        index = index.to(logprobs.device)
        leaf = logprobs.detach().requires_grad_()
        behaviour = self._behaviour[index].to(leaf.dtype)
        advantages, weights = self._per_target[index].to(leaf.dtype).unbind(1)
        old = None if self._old is None else self._old[index].to(leaf.dtype)
        with torch.enable_grad():
            loss, sums = clipped_policy_loss(leaf, behaviour, advantages, weights, entropy, self._config, old)
        (slope,) = torch.autograd.grad(loss, leaf)
        self.sums += sums
        compared = (leaf.detach() - behaviour)[self._is_current[index]].abs()
        if len(compared):
            self.logprob_abs_diff_max = max(self.logprob_abs_diff_max, float(compared.max()))
        return slope
