"""The clipped policy loss against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.config import ClippedLossConfig
from services.trainer.loss import LossSums, clipped_policy_loss

CONFIG = ClippedLossConfig(clip_low=0.2, clip_high=0.3, ratio_max=4.0)


def run_loss(
    log_ratios: list[float], advantages: list[float], weights: list[float] | None = None
) -> tuple[float, list[float], LossSums]:
    """Loss, gradient with respect to the log-probabilities, sums."""
    behaviour = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    logprobs = (behaviour + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    loss, sums = clipped_policy_loss(
        logprobs,
        behaviour,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(weights or [1.0] * len(log_ratios), dtype=torch.float64),
        torch.full((len(log_ratios),), 0.5, dtype=torch.float64),
        CONFIG,
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # descending raises the log-probability of what went well
        (1.0, -2.0, 2.0, 2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.3, 0.0),  # beyond the upper bound nothing is gained
        (0.5, 1.0, -0.5, -0.5),  # but a good token that became rarer is still pulled back
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
        (3.9, -1.0, 3.9, 3.9),
        (9.0, -1.0, 4.0, 0.0),  # ratio_max holds whatever the sign
        (9.0, 1.0, -1.3, 0.0),
    ],
)
def test_clipping_follows_the_sign_of_the_advantage(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    value, gradients, _ = run_loss([math.log(ratio)], [advantage])
    assert value == pytest.approx(loss, abs=1e-12)
    assert gradients[0] == pytest.approx(gradient, abs=1e-12)


def test_no_advantage_gives_no_gradient_anywhere() -> None:
    _, gradients, _ = run_loss([-2.0, -0.1, 0.0, 0.1, 3.0], [0.0] * 5)
    assert gradients == [0.0] * 5


def test_ratio_that_would_overflow_stays_finite() -> None:
    value, gradients, sums = run_loss([2000.0, -2000.0], [-1.0, 1.0])
    assert value == pytest.approx(4.0)
    assert gradients == [0.0, 0.0]
    assert math.isfinite(sums.ratio)


def test_weights_scale_each_target() -> None:
    value, gradients, _ = run_loss([0.0, 0.0], [1.0, -1.0], [0.25, 0.5])
    assert value == pytest.approx(-0.25 + 0.5)
    assert gradients == pytest.approx([-0.25, 0.5])


def test_statistics_are_sums_over_targets() -> None:
    _, _, sums = run_loss([math.log(1.5), math.log(0.9), math.log(8.0)], [1.0, 1.0, -1.0])
    assert sums.num_targets == 3
    assert sums.num_clipped == 2
    assert sums.ratio == pytest.approx(1.5 + 0.9 + 4.0)
    assert sums.kl_behaviour == pytest.approx(-math.log(1.5) - math.log(0.9) - math.log(8.0))
    assert sums.entropy == pytest.approx(1.5)
    assert (sums + sums).num_targets == 6


def test_splitting_targets_changes_no_sum() -> None:
    log_ratios = [0.3, -0.4, 0.05, 1.0]
    advantages = [1.0, -1.0, 0.5, -0.5]
    whole, _, _ = run_loss(log_ratios, advantages)
    parts = [run_loss([x], [a])[0] for x, a in zip(log_ratios, advantages, strict=True)]
    assert sum(parts) == pytest.approx(whole, abs=1e-12)


def test_ratios_against_recomputed_scores_are_weighted_by_the_engines_staleness() -> None:
    """AReaL's decoupled loss, written out."""
    old = [-1.5, -0.8, -0.2, -3.0]
    logprobs = torch.tensor([-1.2, -0.9, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    behaviour, advantages = [-1.0, -1.0, -1.9, -3.0], [1.0, -2.0, 0.5, 1.0]
    loss, sums = clipped_policy_loss(
        logprobs,
        torch.tensor(behaviour, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.full((4,), 0.25, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64),
        CONFIG,
        torch.tensor(old, dtype=torch.float64),
    )
    expected = 0.0
    for new, before, engine, advantage in zip(logprobs.tolist(), old, behaviour, advantages, strict=True):
        importance = min(math.exp(before - engine), CONFIG.ratio_max)
        ratio = math.exp(new - before)
        bounded = min(max(ratio, 1 - CONFIG.clip_low), 1 + CONFIG.clip_high)
        expected -= 0.25 * importance * min(ratio * advantage, bounded * advantage)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    assert sums.kl_behaviour == pytest.approx(sum(behaviour) - sum(logprobs.tolist()), abs=1e-12)
