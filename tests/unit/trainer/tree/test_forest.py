"""A forest holds every target behind the path that it had, and no token that no target needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.types import VersionSpan
from services.trainer.packing import plan_batches
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.types import Node
from tests.unit.trainer.forests import make_micro_step, make_node, path_to

SEEDS = st.integers(0, 2000)


def node(parent: int, run: int, ids: Sequence[int], targets: Sequence[int] = (), version: int = 0) -> Node:
    """A node with the given ids; ``targets`` are offsets."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[list(targets)] = True
    logprobs = np.where(mask, -0.5 - 0.25 * np.arange(len(ids)), 0.0).astype(np.float32)
    spans = (VersionSpan(version, len(targets)),) if targets else ()
    return Node(parent, run, np.array(ids, dtype=np.int32), mask, logprobs, spans)


def rows_of_nodes(nodes: Sequence[Node]) -> Counter[tuple[object, ...]]:
    """Every target as (tokens before it, its own, run, behaviour log-probability, version)."""
    rows: Counter[tuple[object, ...]] = Counter()
    for index, own in enumerate(nodes):
        path = np.concatenate([nodes[above].token_ids for above in path_to(nodes, index)])
        versions = [span.version for span in own.version_spans for _ in range(span.num_tokens)]
        for offset, version in zip(np.flatnonzero(own.target_mask), versions, strict=True):
            end = len(path) - len(own.token_ids) + offset
            rows[(path[:end].tobytes(), int(path[end]), own.run, float(own.logprobs[offset]), version)] += 1
    return rows


def rows_of_forest(forest: Forest) -> Counter[tuple[object, ...]]:
    rows: Counter[tuple[object, ...]] = Counter()
    for index, segment in enumerate(forest.segments):
        path = np.concatenate([forest.segments[above].token_ids for above in segment_path(forest, index)])
        for place, predecessor in enumerate(segment.predecessors):
            target = segment.first_target + place
            end = segment.start + int(predecessor) + 1
            rows[
                (
                    path[:end].tobytes(),
                    int(forest.target_ids[target]),
                    int(forest.target_runs[target]),
                    float(forest.behaviour[target]),
                    int(forest.versions[target]),
                )
            ] += 1
    return rows


def segment_path(forest: Forest, index: int) -> list[int]:
    path: list[int] = []
    while index >= 0:
        path.insert(0, index)
        index = forest.segments[index].parent
    return path


def batch_nodes(*seeds: int) -> tuple[Node, ...]:
    (batch,) = plan_batches([make_micro_step(seed, num_runs=1 + seed % 4) for seed in seeds], 100_000)
    return batch.nodes


@given(st.lists(SEEDS, min_size=1, max_size=3))
def test_every_target_keeps_its_path_its_run_and_its_record(seeds: list[int]) -> None:
    nodes = batch_nodes(*seeds)
    assert rows_of_forest(make_forest(nodes)) == rows_of_nodes(nodes)


@given(SEEDS)
def test_segments_are_in_depth_first_order_and_stand_behind_their_parents(seed: int) -> None:
    forest = make_forest(batch_nodes(seed))
    targets = 0
    open_path: list[int] = []
    for index, segment in enumerate(forest.segments):
        while open_path and open_path[-1] != segment.parent:
            open_path.pop()
        assert (open_path[-1] if open_path else -1) == segment.parent
        open_path.append(index)
        parent = forest.segments[segment.parent] if segment.parent >= 0 else None
        assert segment.start == (parent.start + parent.num_tokens if parent else 0)
        assert segment.first_target == targets
        targets += segment.num_targets
        assert all(low < high for low, high in pairwise(segment.predecessors))
        assert segment.num_tokens >= 1
    assert targets == forest.num_targets


@given(SEEDS)
def test_no_token_is_left_that_no_target_needs(seed: int) -> None:
    nodes = batch_nodes(seed)
    forest = make_forest(nodes)
    children = forest.children()
    for index, segment in enumerate(forest.segments):
        if not children[index]:
            assert segment.num_targets
            assert segment.num_tokens == max(1, int(segment.predecessors[-1]) + 1)
        assert not (segment.is_shared and segment.num_targets)
        assert not (len(children[index]) == 1 and forest.segments[children[index][0]].is_shared == segment.is_shared)
    assert forest.num_tokens <= sum(len(node.token_ids) for node in nodes)


def test_target_at_a_boundary_is_predicted_by_the_last_token_of_the_parent() -> None:
    forest = make_forest([node(-1, -1, [1, 2]), node(0, 0, [3, 4], [0, 1]), node(0, 1, [5, 6, 7], [2])])
    assert [segment.predecessors.tolist() for segment in forest.segments] == [[], [-1, 0], [1]]
    assert [segment.token_ids.tolist() for segment in forest.segments] == [[1, 2], [3], [5, 6]]
    assert forest.target_ids.tolist() == [3, 4, 7]


def test_leaf_of_one_target_keeps_a_token() -> None:
    forest = make_forest([node(-1, -1, [1, 2]), node(0, 0, [3], [0]), node(0, 1, [4], [0])])
    assert [segment.num_tokens for segment in forest.segments] == [2, 1, 1]


def test_chain_becomes_one_segment_but_a_shared_prompt_stays_apart() -> None:
    chain = [node(-1, -1, [1]), node(0, -1, [2, 3]), node(1, 0, [4], [0]), node(2, 0, []), node(3, 0, [5, 6], [0, 1])]
    forest = make_forest(chain)
    assert [segment.token_ids.tolist() for segment in forest.segments] == [[1, 2, 3], [4, 5]]
    assert forest.segments[1].predecessors.tolist() == [-1, 0, 1]
    assert [segment.is_shared for segment in forest.segments] == [True, False]


def test_branch_without_target_is_left_out() -> None:
    nodes = [node(-1, 0, [1, 2, 3], [1]), node(0, 0, [4, 5]), node(1, 0, [6])]
    assert [segment.token_ids.tolist() for segment in make_forest(nodes).segments] == [[1]]


def test_groups_share_a_prompt_across_micro_steps() -> None:
    prompt = list(range(30))
    first = [node(-1, -1, prompt), node(0, 0, [40, 41], [0, 1]), node(0, 1, [42, 43], [0, 1])]
    second = [node(-1, 2, [*prompt, 44, 45], [30, 31])]  # a run alone: its prompt is its own
    third = [node(-1, -1, [*prompt[:20], 50]), node(4, 3, [51], [0]), node(4, 4, [52, 53], [1])]
    nodes = [*first, *second, *third]
    forest = make_forest(nodes)
    assert rows_of_forest(forest) == rows_of_nodes(nodes)
    assert [(segment.parent, segment.num_tokens, segment.is_shared) for segment in forest.segments] == [
        (-1, 20, True),
        (0, 10, True),
        (1, 1, False),
        (1, 1, False),
        (1, 1, False),
        (0, 1, True),
        (5, 1, False),
        (5, 1, False),
    ]


def test_branches_of_one_run_share_what_they_repeat_as_its_own() -> None:
    context = list(range(100, 120))
    nodes = [node(-1, 0, [1, 2], [1]), node(0, 0, [*context, 3], [20]), node(0, 0, [*context, 4, 5], [20, 21])]
    forest = make_forest(nodes)
    assert rows_of_forest(forest) == rows_of_nodes(nodes)
    assert [(s.parent, s.num_tokens, s.is_shared) for s in forest.segments] == [
        (-1, 22, False),
        (0, 1, False),
        (0, 1, False),
    ]


def test_targets_are_never_merged() -> None:
    nodes = [node(-1, -1, [1]), node(0, 0, [2, 3, 4], [0, 1, 2]), node(0, 0, [2, 3, 4], [0, 1, 2])]
    forest = make_forest(nodes)
    assert forest.num_targets == 6
    assert len(forest.segments) == 3


def test_short_common_beginning_is_not_worth_a_segment() -> None:
    nodes = [node(-1, -1, [1]), node(0, 0, [2, 3, 4, 5], [3]), node(0, 1, [2, 3, 6, 7], [3])]
    assert [segment.parent for segment in make_forest(nodes).segments] == [-1, 0, 0]


def test_deep_chains_of_branches_need_no_recursion() -> None:
    rng = np.random.default_rng(0)
    nodes = [make_node(rng, -1, -1, 3)]
    for depth in range(1500):
        nodes.append(make_node(rng, 2 * depth, 0, 2, target_share=1.0))
        nodes.append(make_node(rng, 2 * depth, 0, 2, target_share=1.0))
    forest = make_forest(nodes)
    assert forest.num_targets == 6000


def test_malformed_forests_are_refused() -> None:
    root = node(-1, -1, [1, 2])
    with pytest.raises(ValueError, match="before its parent"):
        make_forest([root, node(1, 0, [3], [0])])
    with pytest.raises(ValueError, match="nothing predicts it"):
        make_forest([node(-1, 0, [3, 4], [0])])
    with pytest.raises(ValueError, match="nothing predicts it"):
        make_forest([node(-1, -1, []), node(0, 0, [3, 4], [0])])
    with pytest.raises(ValueError, match="version spans"):
        make_forest([root, replace(node(0, 0, [3, 4], [0, 1]), version_spans=(VersionSpan(0, 1),))])
