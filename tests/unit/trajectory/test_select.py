from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trajectory.select import Selection
from services.trajectory.select import select as select_by_role
from services.trajectory.tree import TrajectoryTree, TreeCall
from services.trajectory.types import CallRole
from tests.unit.trajectory.trees import make_call, make_tree, tree_calls, unhurried


def select(tree: TrajectoryTree, **how: Any) -> Selection:
    return select_by_role(tree, how.pop("roles", {}), **how)


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
    assert selection.report.leaf_roles == (CallRole.MAIN, CallRole.MAIN)


def test_what_the_limit_leaves_out_is_reported() -> None:
    selection = select(FORKED, max_trajectories=1, seed=0, run_id="g-r0")
    assert len(selection.leaves) == 1
    assert selection.report.left_out == {CallRole.MAIN: selection.report.num_left_out}
    assert selection.num_targets + selection.report.num_left_out == 10
    assert selection.num_targets in (8, 4)


def test_a_shared_ancestor_is_taken_by_the_first_path_only() -> None:
    selection = select(FORKED, max_trajectories=2, seed=3, run_id="g-r0")
    counts = Counter(FORKED.segments[index].call_id for index in selection.targets)
    assert counts == {"c0": 1, "c1": 1, "c2": 1}


@pytest.mark.parametrize("sizes", [(6, 2), (1, 2, 3, 4, 10), (50, 1, 1)])
def test_a_leaf_is_drawn_in_proportion_to_its_untrained_tokens(sizes: tuple[int, ...]) -> None:
    """Pearson's test at p = 0.001, over the first draw; the shared answer of 2 tokens counts for every leaf."""
    leaves = [make_call(f"c{at}", "root", [at], [9] * size, ordinal=at) for at, size in enumerate(sizes, 1)]
    tree = make_tree(make_call("root", None, [0], [9, 9]), *leaves)
    num_draws = 4000
    drawn = Counter(
        select(tree, max_trajectories=1, seed=seed, run_id="g-r0").report.leaf_call_ids[0] for seed in range(num_draws)
    )
    total = sum(size + 2 for size in sizes)
    expected = {f"c{at}": num_draws * (size + 2) / total for at, size in enumerate(sizes, 1)}
    chi_square = sum((drawn[call] - count) ** 2 / count for call, count in expected.items())
    assert chi_square < {1: 10.83, 2: 13.82, 4: 18.47}[len(sizes) - 1]


def test_what_an_earlier_path_took_weighs_nothing_in_the_next_draw() -> None:
    """Behind the path of c2 (20 tokens below a shared answer of 30), c0 has 1 untrained token and c1 3."""
    tree = make_tree(
        make_call("root", None, [0], [9] * 30),
        *(make_call(f"c{at}", "root", [at + 1], [9] * size) for at, size in enumerate((1, 3, 20))),
    )
    second: Counter[str] = Counter()
    for seed in range(6000):
        first, next_one = select(tree, max_trajectories=2, seed=seed, run_id="g-r0").report.leaf_call_ids
        if first == "c2":
            second[next_one] += 1
    total = second.total()
    expected = {"c0": total / 4, "c1": total * 3 / 4}
    assert sum((second[call] - count) ** 2 / count for call, count in expected.items()) < 10.83


ROLES = {
    "main": CallRole.MAIN,
    "summary": CallRole.MAIN_SUMMARY,
    "sub": CallRole.SUBAGENT,
    "sub_summary": CallRole.SUBAGENT_SUMMARY,
}
DELEGATING = make_tree(
    *(
        make_call(name, None, [at], [9] * size)
        for at, (name, size) in enumerate(zip(ROLES, (1, 5, 50, 90), strict=True))
    )
)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, None])
def test_roles_are_taken_in_their_order_whatever_their_sizes(limit: int | None) -> None:
    for seed in range(20):
        selection = select(DELEGATING, roles=ROLES, max_trajectories=limit, seed=seed, run_id="g-r0")
        assert selection.report.leaf_call_ids == tuple(ROLES)[:limit]
        assert selection.report.leaf_roles == tuple(ROLES.values())[:limit]


def test_a_lower_role_waits_until_the_higher_has_no_untrained_token() -> None:
    roles = {"c1": CallRole.MAIN_SUMMARY}
    assert select(FORKED, roles=roles, max_trajectories=1, seed=0, run_id="g-r0").report.leaf_call_ids == ("c2",)
    both = select(FORKED, roles=roles, max_trajectories=2, seed=0, run_id="g-r0").report
    assert (both.leaf_call_ids, both.leaf_roles) == (("c2", "c1"), (CallRole.MAIN, CallRole.MAIN_SUMMARY))


def test_side_calls_are_never_drawn_and_what_they_sampled_is_left_out() -> None:
    tree = make_tree(
        make_call("title", None, [0], [9] * 50, ordinal=0),
        make_call("c0", None, [1], [2, 2], ordinal=1),
        make_call("memory", "c0", [3], [4] * 7, ordinal=2),
        make_call("memory2", "memory", [5], [6] * 8, ordinal=3),
        make_call("c1", "c0", [7], [8] * 3, ordinal=4),
    )
    roles = dict.fromkeys(("title", "memory", "memory2"), CallRole.SIDE)
    report = select(tree, roles=roles, max_trajectories=None, seed=0, run_id="g-r0").report
    assert (report.leaf_call_ids, report.leaf_roles) == (("c1",), (CallRole.MAIN,))
    assert (set(report.target_call_ids), report.num_targets) == ({"c0", "c1"}, 5)
    assert (report.left_out, report.num_left_out) == ({CallRole.SIDE: 65}, 65)


def test_a_path_ends_before_the_side_calls_that_nothing_else_follows() -> None:
    tree = make_tree(
        make_call("c0", None, [1], [2, 2], ordinal=0),
        make_call("c1", "c0", [3], [4, 4], ordinal=1),
        make_call("memory", "c1", [5], [6] * 7, ordinal=2),
    )
    selection = select(tree, roles={"memory": CallRole.SIDE}, max_trajectories=2, seed=0, run_id="g-r0")
    assert [tree.segments[leaf].call_id for leaf in selection.leaves] == ["c1"]
    assert selection.report.leaf_call_ids == ("c1",)
    assert selection.num_targets == 4


def test_a_side_call_that_a_conversation_goes_on_from_is_context_only() -> None:
    tree = make_tree(
        make_call("c0", None, [1], [2, 2], ordinal=0),
        make_call("side", "c0", [3], [4] * 7, ordinal=1),
        make_call("c1", "side", [5], [6] * 3, ordinal=2),
    )
    selection = select(tree, roles={"side": CallRole.SIDE}, max_trajectories=2, seed=0, run_id="g-r0")
    assert selection.report.leaf_call_ids == ("c1",)
    assert set(selection.report.target_call_ids) == {"c0", "c1"}
    assert selection.report.left_out == {CallRole.SIDE: 7}


def test_a_run_of_side_calls_only_selects_nothing() -> None:
    tree = make_tree(make_call("title", None, [0], [9] * 5))
    selection = select(tree, roles={"title": CallRole.SIDE}, max_trajectories=2, seed=0, run_id="g-r0")
    assert (selection.leaves, selection.num_targets, selection.report.num_left_out) == ((), 0, 5)


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
    assert (selection.leaves, selection.num_targets, selection.report.leaf_call_ids) == ((), 0, ())


@pytest.mark.parametrize("limit", [1, 2, None])
@unhurried
@given(calls=tree_calls(), seed=st.integers(0, 5), drawn=st.lists(st.sampled_from(CallRole), min_size=12, max_size=12))
def test_any_selection_keeps_its_limits_and_is_reproducible(
    calls: list[TreeCall], seed: int, drawn: list[CallRole], limit: int | None
) -> None:
    tree = make_tree(*calls)
    roles = {call.call_id: role for call, role in zip(calls, drawn, strict=False)}
    selection = select(tree, roles=roles, max_trajectories=limit, seed=seed, run_id="g-r0")
    assert selection == select(make_tree(*calls), roles=roles, max_trajectories=limit, seed=seed, run_id="g-r0")
    assert limit is None or len(selection.leaves) <= limit
    assert len(set(selection.leaves)) == len(selection.leaves)
    on_paths = {index for leaf in selection.leaves for index in tree.path(leaf)}
    superseded = tree.superseded()
    trainable = {i for i, s in enumerate(tree.segments) if s.is_sampled and s.trainable and i not in superseded}
    side = {i for i in trainable if roles.get(tree.segments[i].call_id or "") is CallRole.SIDE}
    assert selection.targets == on_paths & (trainable - side)
    report = selection.report
    assert CallRole.SIDE not in report.leaf_roles
    assert set(report.leaf_call_ids) <= {call.call_id for call in calls}
    num_sampled = sum(len(call.output_ids) for call in calls)
    assert report.num_targets + report.num_left_out + report.num_not_trainable + report.num_superseded == num_sampled
    assert report.left_out.get(CallRole.SIDE, 0) == sum(len(tree.segments[i].token_ids) for i in side)
    if limit is None:
        assert report.num_left_out == report.left_out.get(CallRole.SIDE, 0)
