"""The policy by tables."""

from __future__ import annotations

import pytest

from services.scheduler import policy


@pytest.mark.parametrize(
    ("groups_per_step", "mu", "phi", "steps_left", "target"),
    [
        (4, 1, 1.0, 100, 8),
        (4, 1, 0.0, 100, 4),
        (4, 3, 0.0, 100, 12),
        (4, 2, 1.0, 100, 12),
        (4, 1, 0.5, 100, 6),
        (3, 1, 0.5, 100, 5),  # 4.5 is rounded up: a step needs whole groups
        (10, 1, 0.1, 100, 11),  # 1.1 * 10 in floating point is a little more than 11
        (4, 1, 1.0, 1, 4),  # one step is left: more groups could not be trained
        (4, 1, 1.0, 0, 0),
    ],
)
def test_outstanding_target_is_phi_plus_mu_steps(groups_per_step, mu, phi, steps_left, target) -> None:
    assert policy.outstanding_target(groups_per_step, mu, phi, steps_left)[0] == target


@pytest.mark.parametrize(("target", "outstanding", "missing"), [(8, 0, 8), (8, 4, 4), (8, 8, 0), (4, 8, 0)])
def test_dispatch_tops_up_and_never_takes_back(target, outstanding, missing) -> None:
    assert policy.groups_to_dispatch(target, outstanding)[0] == missing


@pytest.mark.parametrize(
    ("water_level", "rollout_slots", "cell_slots", "may_leave"),
    [
        (16, 32, 16, True),
        (17, 32, 16, False),
        (0, 16, 16, True),  # one cell in all leaves when nothing is unfinished
        (1, 16, 16, False),
        (8, 24, 16, True),  # slots may differ
        (9, 24, 16, False),
    ],
)
def test_a_cell_leaves_rollout_when_the_others_hold_all_unfinished_runs(
    water_level, rollout_slots, cell_slots, may_leave
) -> None:
    assert policy.may_leave_rollout(water_level, rollout_slots, cell_slots)[0] is may_leave


@pytest.mark.parametrize(
    ("water_level", "num_ready", "may_leave"), [(9, 4, True), (9, 3, False), (17, 4, False), (17, 3, False)]
)
def test_the_core_also_needs_the_groups_of_a_step(water_level, num_ready, may_leave) -> None:
    assert policy.core_may_leave_rollout(water_level, 32, 16, num_ready, 4)[0] is may_leave


def test_the_reason_tells_the_numbers() -> None:
    _, reason = policy.core_may_leave_rollout(9, 32, 16, 4, 4)
    assert reason == "w=9 <= C_R - C_core = 16 and 4 groups are ready of the 4 that it needs"


@pytest.mark.parametrize(
    ("water_level", "num_ready", "num_missing_runs", "other_slots", "stays"),
    [
        (0, 4, 16, 16, True),
        (1, 4, 16, 16, False),
        (0, 3, 16, 16, False),
        (0, 8, 0, 0, True),
        (8, 9, 8, 16, True),
    ],
)
def test_the_core_stays_in_training_only_if_the_others_can_take_all_runs(
    water_level, num_ready, num_missing_runs, other_slots, stays
) -> None:
    assert policy.core_stays_in_training(water_level, num_ready, num_missing_runs, other_slots, 4)[0] is stays


@pytest.mark.parametrize(
    ("step", "version", "bound", "stale"), [(8, 0, 8, False), (9, 0, 8, True), (5, 5, 0, False), (6, 5, 0, True)]
)
def test_staleness_counts_steps_since_dispatch(step, version, bound, stale) -> None:
    assert policy.too_stale(step, version, bound)[0] is stale


@pytest.mark.parametrize(
    ("step", "seats", "bound", "num_by_version", "newest"),
    [
        (5, 2, 8, {4: 3, 5: 1}, None),  # far from the bound
        (5, 2, 1, {4: 2, 5: 2}, 4),  # both seats are needed by those that are due now
        (5, 2, 1, {4: 1, 5: 3}, 5),  # one is due now, four within the two next steps: they fill both
        (5, 2, 1, {4: 1, 5: 2}, None),
        (5, 1, 1, {4: 1, 5: 2}, 4),  # one seat is taken already
        (5, 2, 2, {3: 3}, 3),  # more than can be trained in time (a resumed job with a lower bound)
        (5, 2, 0, {5: 2}, 5),
        (5, 2, 0, {}, None),
    ],
)
def test_a_seat_is_kept_for_groups_that_would_grow_too_old(step, seats, bound, num_by_version, newest) -> None:
    assert policy.newest_admissible_version(step, seats, 2, bound, num_by_version)[0] == newest


@pytest.mark.parametrize(
    ("free_and_index", "best"),
    [
        ([(2, 0), (3, 1)], 1),
        ([(2, -1), (2, 0)], 1),  # the core leaves first, so it is filled last
        ([(4, 0), (3, 1)], 0),
        ([(0, 0), (-1, 1)], 0),
    ],
)
def test_a_run_goes_to_the_cell_with_most_free_slots(free_and_index, best) -> None:
    keys = [policy.preference_of_cell(*cell) for cell in free_and_index]
    assert keys.index(min(keys)) == best


def test_tasks_come_in_a_fresh_permutation_each_epoch() -> None:
    epochs = [[policy.task_at(epoch * 24 + offset, 24, seed=7) for offset in range(24)] for epoch in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(24))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == [policy.task_at(offset, 24, seed=7) for offset in range(24)]
    assert epochs[0] != [policy.task_at(offset, 24, seed=8) for offset in range(24)]


@pytest.mark.parametrize(
    ("step", "last", "every", "at_start", "at_end", "due"),
    [
        (0, -1, 5, True, True, True),
        (0, -1, 5, False, True, False),
        (4, 0, 5, True, True, False),
        (5, 0, 5, True, True, True),
        (6, 4, 5, True, True, True),  # bursts of two steps: the first boundary behind 5
        (5, 5, 5, True, True, False),
        (5, -1, 0, True, True, False),
        (10, 5, 0, True, True, True),
        (10, 5, 5, True, False, False),
        (10, 10, 5, True, True, False),
    ],
)
def test_held_out_passes_come_every_so_many_steps_at_the_start_and_the_end(
    step, last, every, at_start, at_end, due
) -> None:
    assert policy.evaluation_is_due(step, last, 10, every, at_start=at_start, at_end=at_end) is due


@pytest.mark.parametrize(
    ("reward", "best", "is_best", "why"),
    [
        (0.0, None, True, "held-out mean reward 0 at step 13 is the first"),
        (0.61, 0.54, True, "held-out mean reward 0.61 at step 13 beats 0.54 at step 5"),
        (0.54, 0.54, False, "held-out mean reward 0.54 at step 13 does not beat 0.54 at step 5"),
        (0.5, 0.54, False, "held-out mean reward 0.5 at step 13 does not beat 0.54 at step 5"),
    ],
)
def test_only_a_higher_held_out_reward_is_a_new_best(reward, best, is_best, why) -> None:
    assert policy.is_new_best(reward, 13, best, 5) == (is_best, why)
