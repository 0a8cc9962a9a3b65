from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.types import VersionSpan
from services.trainer.packing import check_micro_step
from services.trainer.tree.forest import make_forest
from services.trainer.types import MicroStep
from services.trajectory.microstep import SHARED, ScoredRun, build_micro_step, build_micro_steps, cut_group
from services.trajectory.select import select
from services.trajectory.tree import TreeCall
from tests.unit.trajectory.trees import flatten, loss, make_call, make_tree, scored_runs, unhurried


def scored(number: int, *calls: TreeCall, advantage: float = 1.0) -> ScoredRun:
    tree = make_tree(*calls)
    run_id = f"g000000-r{number}"
    return ScoredRun(run_id, advantage, tree, select(tree, {}, max_trajectories=5, seed=0, run_id=run_id))


def two_runs() -> list[ScoredRun]:
    return [
        scored(
            0,
            make_call("r0-c0", None, [1, 2, 3], [10, 11], ordinal=0, version=1),
            make_call("r0-c1", "r0-c0", [4], [12], ordinal=1, version=2),
            make_call("r0-c2", "r0-c0", [5], [13], ordinal=2, version=2),
        ),
        scored(1, make_call("r1-c0", None, [1, 2, 6], [14]), advantage=-1.0),
    ]


def test_runs_of_a_group_share_their_common_prompt_as_one_node() -> None:
    micro_step = build_micro_step("g000000-m0", "g000000", two_runs())
    described = [(node.parent, node.run, node.token_ids.tolist()) for node in micro_step.nodes]
    assert described == [
        (-1, SHARED, [1, 2]),
        (0, 0, [3, 10, 11]),
        (1, 0, [4, 12]),
        (1, 0, [5, 13]),
        (0, 1, [6, 14]),
    ]
    assert [node.target_mask.tolist() for node in micro_step.nodes[:3]] == [
        [False, False],
        [False, True, True],
        [False, True],
    ]
    assert micro_step.nodes[1].version_spans == (VersionSpan(1, 2),)
    assert [run.num_targets for run in micro_step.runs] == [4, 1]
    assert micro_step.num_tokens == 11


def test_tokens_behind_the_last_target_are_left_out() -> None:
    run = scored(
        0,
        make_call("c0", None, [1], [2], ordinal=0),
        make_call("c1", "c0", [3], [4], ordinal=1, trainable=False),
    )
    micro_step = build_micro_step("m", "g000000", [run])
    assert [node.token_ids.tolist() for node in micro_step.nodes] == [[1, 2]]


def test_untrained_answers_on_the_way_to_a_target_are_context() -> None:
    run = scored(
        0,
        make_call("c0", None, [1], [2], ordinal=0, trainable=False),
        make_call("c1", "c0", [3], [4], ordinal=1),
    )
    (node,) = build_micro_step("m", "g000000", [run]).nodes
    assert node.target_mask.tolist() == [False, False, False, True]
    assert node.logprobs[:3].tolist() == [0, 0, 0]


def test_a_group_beyond_the_limit_is_cut_between_runs_and_repeats_the_prompt() -> None:
    runs = two_runs()
    whole, pieces = build_micro_steps("g000000", runs, 11), build_micro_steps("g000000", runs, 10)
    assert [[run.run_id for run in step.runs] for step in whole] == [["g000000-r0", "g000000-r1"]]
    assert [[run.run_id for run in step.runs] for step in pieces] == [["g000000-r0"], ["g000000-r1"]]
    assert [step.num_tokens for step in pieces] == [9, 4]
    assert [step.micro_step_id for step in pieces] == ["g000000-m0", "g000000-m1"]


def test_a_run_longer_than_the_limit_is_not_cut() -> None:
    assert [len(piece) for piece in cut_group(two_runs(), 1)] == [1, 1]


def test_a_run_without_targets_is_in_no_micro_step() -> None:
    runs = [*two_runs(), scored(2, make_call("r2-c0", None, [1, 2], [7], trainable=False))]
    (micro_step,) = build_micro_steps("g000000", runs, 1 << 30)
    assert [run.run_id for run in micro_step.runs] == ["g000000-r0", "g000000-r1"]


def assert_well_formed(micro_step: MicroStep) -> None:
    check_micro_step(micro_step)
    assert make_forest(micro_step.nodes).num_targets == micro_step.num_targets
    with_children = {node.parent for node in micro_step.nodes}
    for index, node in enumerate(micro_step.nodes):
        assert node.parent < index
        assert len(node.token_ids) == len(node.target_mask) == len(node.logprobs) > 0
        assert node.token_ids.dtype == np.int32
        assert not node.logprobs[~node.target_mask].any()
        assert sum(span.num_tokens for span in node.version_spans) == node.target_mask.sum()
        if node.run == SHARED:
            assert not node.target_mask.any()
            assert node.parent == -1 or micro_step.nodes[node.parent].run == SHARED
        elif node.parent != -1:
            assert micro_step.nodes[node.parent].run in (SHARED, node.run)
        if index not in with_children:
            assert node.target_mask[-1]


@unhurried
@given(scored_runs(), st.sampled_from([1, 8, 20, 1 << 30]))
def test_each_selected_token_is_a_target_exactly_once_and_nothing_else_is(
    runs: list[ScoredRun], max_tokens: int
) -> None:
    micro_steps = build_micro_steps("g000000", runs, max_tokens)
    expected: Counter[tuple[str, tuple[int, ...], float]] = Counter()
    for run in runs:
        for index in run.selection.targets:
            segment = run.tree.segments[index]
            ids = run.tree.ids(index)
            for offset in range(len(segment.token_ids)):
                stop = len(ids) - len(segment.token_ids) + offset + 1
                expected[run.run_id, tuple(ids[:stop].tolist()), float(segment.logprobs[offset])] += 1
    found: Counter[tuple[str, tuple[int, ...], float]] = Counter()
    for micro_step in micro_steps:
        assert_well_formed(micro_step)
        for row in flatten(micro_step):
            for position, bit in enumerate(row.target_mask):
                if bit:
                    found[row.run_id, row.token_ids[: position + 1], row.logprobs[position]] += 1
    assert found == expected
    assert sum(found.values()) == sum(run.selection.num_targets for run in runs)


@unhurried
@given(scored_runs())
def test_rows_of_a_run_are_its_selected_paths(runs: list[ScoredRun]) -> None:
    for micro_step in build_micro_steps("g000000", runs, 1 << 30):
        rows = Counter((row.run_id, row.token_ids) for row in flatten(micro_step))
        for run in runs:
            own = {ids for run_id, ids in rows if run_id == run.run_id}
            paths = {tuple(run.tree.ids(leaf).tolist()) for leaf in run.selection.leaves}
            assert all(any(path[: len(ids)] == ids for path in paths) for ids in own)
            assert sum(count for (run_id, _), count in rows.items() if run_id == run.run_id) <= len(
                run.selection.leaves
            )


@unhurried
@given(scored_runs(), st.integers(1, 40))
def test_the_loss_does_not_depend_on_where_a_group_is_cut(runs: list[ScoredRun], max_tokens: int) -> None:
    whole = build_micro_steps("g000000", runs, 1 << 30)
    pieces = build_micro_steps("g000000", runs, max_tokens)
    one_by_one = [build_micro_step("m", "g000000", [run]) for run in runs if run.selection.num_targets]
    assert loss(pieces) == pytest.approx(loss(whole), rel=1e-9, abs=1e-9)
    assert loss(one_by_one) == pytest.approx(loss(whole), rel=1e-9, abs=1e-9)
    assert all(len(step.runs) == 1 or step.num_tokens <= max_tokens for step in pieces)
