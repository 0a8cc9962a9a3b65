"""The objective of a forest's targets, asked for in parts, is the loss of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.config import ClippedLossConfig
from services.trainer.loss import clipped_policy_loss
from services.trainer.objective import PolicyObjective
from services.trainer.tree.forest import make_forest
from tests.unit.trainer.forests import make_micro_step


def test_parts_in_any_order_give_the_slopes_and_sums_of_the_whole() -> None:
    micro_step = make_micro_step(3)
    forest = make_forest(micro_step.nodes)
    config = ClippedLossConfig()
    logprobs = torch.from_numpy(forest.behaviour).double() + torch.linspace(-0.6, 0.6, forest.num_targets).double()
    entropy = torch.linspace(1, 2, forest.num_targets).double()
    leaf = logprobs.clone().requires_grad_()
    runs = [micro_step.runs[run] for run in forest.target_runs]
    loss, sums = clipped_policy_loss(
        leaf,
        torch.from_numpy(forest.behaviour).double(),
        torch.tensor([run.advantage for run in runs]).double(),
        torch.tensor([1 / run.num_targets for run in runs]).double(),
        entropy,
        config,
    )
    loss.backward()
    objective = PolicyObjective(forest, micro_step.runs, config, torch.device("cpu"), version=0)
    slopes = torch.zeros_like(logprobs)
    for part in np.array_split(np.random.default_rng(0).permutation(forest.num_targets), 4):
        index = torch.from_numpy(part)
        slopes[index] = objective(index, logprobs[index], entropy[index])
    torch.testing.assert_close(slopes, leaf.grad, rtol=1e-6, atol=1e-9)
    assert objective.sums.loss == pytest.approx(sums.loss)
    assert objective.sums.num_clipped == sums.num_clipped
    assert objective.logprob_abs_diff_max == pytest.approx(0.6, abs=1e-6)


def test_only_targets_of_the_version_are_compared_with_the_engine() -> None:
    micro_step = make_micro_step(3)
    forest = make_forest(micro_step.nodes)
    objective = PolicyObjective(forest, micro_step.runs, ClippedLossConfig(), torch.device("cpu"), version=7)
    everything = torch.arange(forest.num_targets)
    objective(everything, torch.zeros(forest.num_targets), torch.zeros(forest.num_targets))
    assert objective.logprob_abs_diff_max == -1
