from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.select import MAIN_ROLE, select
from services.trajectory.tree import TreeCall
from tests.unit.trajectory.trees import NO_LIMIT, make_call, make_tree, tree_calls, unhurried

FORKED = make_tree(
    make_call("c0", None, [1, 2], [3, 4], ordinal=0),
    make_call("c1", "c0", [5], [6] * 6, ordinal=1),
    make_call("c2", "c0", [7], [8] * 2, ordinal=2),
)


def test_all_paths_are_taken_where_the_limit_allows() -> None:
    selection = select(FORKED, max_trajectories=5, seed=0, run_id="g-r0")
    assert selection.num_targets == 10
    assert len(selection.leaves) == 2
    assert selection.report.num_left_out == 0
    assert selection.report.role == MAIN_ROLE


def test_what_the_limit_leaves_out_is_reported() -> None:
    selection = select(FORKED, max_trajectories=1, seed=0, run_id="g-r0")
    assert len(selection.leaves) == 1
    assert selection.report.num_paths == 2
    assert selection.num_targets + selection.report.num_left_out == 10
    assert selection.num_targets in (8, 4)


def test_a_shared_ancestor_is_taken_by_the_first_path_only() -> None:
    selection = select(FORKED, max_trajectories=2, seed=3, run_id="g-r0")
    counts = Counter(FORKED.segments[index].call_id for index in selection.targets)
    assert counts == {"c0": 1, "c1": 1, "c2": 1}


def test_a_leaf_is_drawn_in_proportion_to_its_untrained_tokens() -> None:
    drawn = Counter(
        FORKED.segments[select(FORKED, max_trajectories=1, seed=seed, run_id="g-r0").leaves[0]].call_id
        for seed in range(3000)
    )
    expected = {"c1": 3000 * 8 / 12, "c2": 3000 * 4 / 12}
    chi_square = sum((drawn[call] - count) ** 2 / count for call, count in expected.items())
    assert chi_square < 10.8  # 1 degree of freedom, p = 0.001


def test_greedy_tokens_and_superseded_answers_are_never_targets() -> None:
    tree = make_tree(
        make_call("c0", None, [1], [2, 2], ordinal=0),
        make_call("c1", None, [1], [3, 3, 3], ordinal=1),
        make_call("c2", "c1", [4], [5], ordinal=2, trainable=False),
    )
    selection = select(tree, max_trajectories=5, seed=0, run_id="g-r0")
    assert {tree.segments[index].call_id for index in selection.targets} == {"c1"}
    assert (selection.report.num_superseded, selection.report.num_not_trainable) == (2, 1)


def test_a_tree_without_trainable_tokens_selects_nothing() -> None:
    selection = select(make_tree(make_call("c0", None, [1], [])), max_trajectories=5, seed=0, run_id="g-r0")
    assert (selection.leaves, selection.num_targets, selection.report.num_paths) == ((), 0, 0)


@pytest.mark.parametrize("limit", [1, 2, NO_LIMIT])
@unhurried
@given(calls=tree_calls(), seed=st.integers(0, 5))
def test_any_selection_keeps_its_limits_and_is_reproducible(calls: list[TreeCall], seed: int, limit: int) -> None:
    tree = make_tree(*calls)
    selection = select(tree, max_trajectories=limit, seed=seed, run_id="g-r0")
    assert selection == select(make_tree(*calls), max_trajectories=limit, seed=seed, run_id="g-r0")
    assert len(selection.leaves) <= limit
    assert len(set(selection.leaves)) == len(selection.leaves)
    on_paths = {index for leaf in selection.leaves for index in tree.path(leaf)}
    superseded = tree.superseded()
    trainable = {i for i, s in enumerate(tree.segments) if s.is_sampled and s.trainable and i not in superseded}
    assert selection.targets == on_paths & trainable
    report = selection.report
    num_sampled = sum(len(call.output_ids) for call in calls)
    assert report.num_targets + report.num_left_out + report.num_not_trainable + report.num_superseded == num_sampled
    if limit == NO_LIMIT:
        assert report.num_left_out == 0
