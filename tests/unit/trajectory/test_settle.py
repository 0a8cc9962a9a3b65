from __future__ import annotations

import math

import pytest

from services.trajectory.config import TrajectoryConfig
from services.trajectory.microstep import build_micro_steps
from services.trajectory.outcome import OUTCOME_TABLE, CallTrouble, Outcome
from services.trajectory.settle import FinalRun, Settlement, settle_group, settle_outcome
from services.trajectory.types import LossReason
from tests.unit.trajectory.trees import make_call, make_tree
from tests.unit.trajectory.world import make_result, make_spec

CONFIG = TrajectoryConfig()


def final(run: int, reward: float | None, outcome: Outcome = Outcome.FINISHED, *, trainable: bool = True) -> FinalRun:
    tree = make_tree(
        make_call(f"r{run}-c0", None, [1, 2], [3, 4], ordinal=0, version=run + 1, trainable=trainable),
        make_call(f"r{run}-c1", f"r{run}-c0", [5], [6], ordinal=1, version=run + 2, trainable=trainable),
    )
    return FinalRun(make_result(f"g000000-r{run}", reward, outcome), tree)


def settle(*runs: FinalRun, config: TrajectoryConfig | None = None, drop_equal_rewards: bool = True) -> Settlement:
    spec = make_spec(num_runs=len(runs))
    return settle_group(spec, runs, config or TrajectoryConfig(), drop_equal_rewards=drop_equal_rewards)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_is_counted_and_trained_as_its_row_says(outcome: Outcome) -> None:
    rule = OUTCOME_TABLE[outcome]
    settlement = settle(final(0, 0.0), final(1, 1.0), final(2, 5.0, outcome))
    assert settlement.result.num_counted == (3 if rule.counted else 2)
    assert settlement.result.num_targets == (9 if rule.trained else 6)
    assert ("g000000-r2" in settlement.advantages) == rule.counted


@pytest.mark.parametrize("reward", [None, math.nan])
def test_a_run_without_a_valid_reward_is_no_zero(reward: float | None) -> None:
    settlement = settle(final(0, 0.0), final(1, 1.0), final(2, reward))
    assert settlement.result.rewards == (0.0, 1.0)
    assert settlement.result.reward_mean == 0.5


def test_a_group_without_targets_is_lost() -> None:
    settlement = settle(final(0, 0.0, trainable=False), final(1, 1.0, trainable=False))
    assert not settlement.result.ready
    assert settlement.result.reason == "no run has a token to train"


def test_a_counted_run_without_targets_moves_the_baseline_only() -> None:
    settlement = settle(final(0, 0.0), final(1, 1.0), final(2, 1.0, trainable=False))
    assert settlement.result.ready
    assert settlement.result.num_counted == 3
    assert settlement.advantages["g000000-r0"] < -1
    (micro_step,) = build_micro_steps("g000000", settlement.runs, 1000)
    assert [run.run_id for run in micro_step.runs] == ["g000000-r0", "g000000-r1"]


def test_the_result_tells_what_one_pass_costs_and_how_old_the_tokens_are() -> None:
    runs = [final(0, 0.0), final(1, 1.0)]
    whole = settle(*runs).result
    assert (whole.num_targets, whole.num_tokens, whole.version_min) == (6, 2 + 2 * 4, 1)
    cut = settle(*runs, config=TrajectoryConfig(micro_step_tokens=16)).result
    assert cut.num_tokens == 10


def test_equal_rewards_are_lost_or_kept_as_the_job_says() -> None:
    assert settle(final(0, 1.0), final(1, 1.0)).result.reason == "all 2 counted rewards are equal"
    kept = settle(final(0, 1.0), final(1, 1.0), drop_equal_rewards=False)
    assert kept.result.ready
    assert set(kept.advantages.values()) == {0.0}


def test_a_run_that_could_not_be_set_up_counts_as_the_job_says() -> None:
    """Rewards 0, 1 and a placeholder's 0: mean 1/3, sample deviation sqrt(1/3)."""
    runs = [final(0, 0.0), final(1, 1.0), final(2, None, Outcome.SETUP_FAILURE)]
    dropped = settle(*runs)
    assert dropped.result.rewards == (0.0, 1.0)
    placed = settle(*runs, config=TrajectoryConfig(setup_failure="placeholder"))
    assert placed.result.rewards == (0.0, 1.0, 0.0)
    assert placed.result.num_targets == dropped.result.num_targets == 6
    assert placed.advantages["g000000-r1"] == pytest.approx((2 / 3) / math.sqrt(1 / 3), rel=1e-4)
    assert placed.advantages["g000000-r2"] == placed.advantages["g000000-r0"] < 0
    (micro_step,) = build_micro_steps("g000000", placed.runs, 1000)
    assert [run.run_id for run in micro_step.runs] == ["g000000-r0", "g000000-r1"]


def test_a_run_that_could_not_be_set_up_is_no_zero_of_a_held_out_group() -> None:
    runs = [final(0, 1.0), final(1, None, Outcome.SETUP_FAILURE)]
    config = TrajectoryConfig(setup_failure="placeholder")
    assert settle_group(make_spec(is_eval=True), runs, config, drop_equal_rewards=True).result.rewards == (1.0,)


def test_each_lost_group_has_a_reason_to_count_by() -> None:
    assert settle(final(0, 0.0), final(1, None)).result.loss_reason is LossReason.TOO_FEW_COUNTED
    assert settle(final(0, 1.0), final(1, 1.0)).result.loss_reason is LossReason.EQUAL_REWARDS
    untrained = settle(final(0, 0.0, trainable=False), final(1, 1.0, trainable=False))
    assert untrained.result.loss_reason is LossReason.NOTHING_TO_TRAIN
    held_out = settle_group(make_spec(is_eval=True), [final(0, 0.0), final(1, 1.0)], CONFIG, drop_equal_rewards=True)
    assert held_out.result.loss_reason is LossReason.HELD_OUT
    assert settle(final(0, 0.0), final(1, 1.0)).result.loss_reason is None


def test_what_was_selected_of_each_counted_run_is_told() -> None:
    settlement = settle(final(0, 0.0), final(1, 1.0), final(2, None))
    advantage, selection = settlement.settled["g000000-r0"]
    assert advantage == settlement.advantages["g000000-r0"]
    assert selection is not None
    assert (selection.leaf_call_ids, selection.target_call_ids) == (("r0-c1",), ("r0-c0", "r0-c1"))
    assert settlement.settled.keys() == {"g000000-r0", "g000000-r1"}


ENDED = {Outcome.FINISHED, Outcome.HARNESS_CRASH}
UNSCORED = {Outcome.VERIFIER_FAILURE, Outcome.VERIFIER_TIMEOUT}
WAITED = {Outcome.HARNESS_TIMEOUT, Outcome.WALL_TIMEOUT}


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize(
    ("trouble", "explained", "by"),
    [
        (None, set(), None),
        (CallTrouble.CONTEXT_OVERFLOWED, ENDED, Outcome.CONTEXT_LIMIT),
        (CallTrouble.TURN_LIMITED, ENDED | WAITED, Outcome.TURN_LIMIT),
        (CallTrouble.ENGINE_LOST, ENDED | WAITED | UNSCORED, Outcome.ENGINE_LOSS),
    ],
)
def test_what_befell_the_last_call_explains_only_the_ends_that_it_causes(
    outcome: Outcome, trouble: CallTrouble | None, explained: set[Outcome], by: Outcome | None
) -> None:
    assert settle_outcome(outcome, trouble) == (by if outcome in explained else outcome)
