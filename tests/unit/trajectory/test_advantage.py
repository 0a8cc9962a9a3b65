from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.advantage import STD_EPSILON, Estimator, group_advantages
from tests.unit.trajectory.trees import unhurried

ESTIMATORS: list[Estimator] = ["grpo", "grpo_no_std", "rloo"]
REWARDS = {"r0": 0.0, "r1": 0.0, "r2": 1.0, "r3": 3.0}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo_no_std", [-1.0, -1.0, 0.0, 2.0]),
        ("grpo", [value / (math.sqrt(2.0) + STD_EPSILON) for value in (-1.0, -1.0, 0.0, 2.0)]),
        ("rloo", [-4 / 3, -4 / 3, 0.0, 8 / 3]),
    ],
)
def test_advantages_are_those_of_the_estimator(estimator: Estimator, expected: list[float]) -> None:
    advantages = group_advantages(REWARDS, estimator)
    assert not advantages.equal_rewards
    assert list(advantages.by_run.values()) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [{"r0": 0.7}, {"r0": 0.3, "r1": 0.1 + 0.2}, {f"r{i}": 1.0 for i in range(8)}, {}])
def test_equal_rewards_and_a_single_member_give_zeros_and_a_flag(
    estimator: Estimator, rewards: dict[str, float]
) -> None:
    advantages = group_advantages(rewards, estimator)
    assert advantages.equal_rewards
    assert advantages.by_run == dict.fromkeys(rewards, 0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_missing_member_does_not_move_the_baseline(estimator: Estimator) -> None:
    counted = {"r0": 0.0, "r3": 1.0}
    assert sum(group_advantages(counted, estimator).by_run.values()) == pytest.approx(0.0)
    assert group_advantages(counted, estimator).by_run.keys() == counted.keys()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="r1"):
        group_advantages({"r0": 1.0, "r1": bad}, "grpo")


@unhurried
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16), st.sampled_from(ESTIMATORS))
def test_advantages_of_any_group_sum_to_zero_and_keep_the_order_of_rewards(
    values: list[float], estimator: Estimator
) -> None:
    rewards = {f"r{index}": value for index, value in enumerate(values)}
    advantages = group_advantages(rewards, estimator)
    assert math.fsum(advantages.by_run.values()) == pytest.approx(0.0, abs=1e-6)
    by_reward = sorted(rewards, key=lambda run: rewards[run])
    ordered = [advantages.by_run[run] for run in by_reward]
    assert ordered == sorted(ordered)
