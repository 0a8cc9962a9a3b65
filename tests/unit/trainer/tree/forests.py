"""Random forests of every shape that the tree executor has to take."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from services.common.types import VersionSpan
from services.trainer.packing import Batch
from services.trainer.types import Node, RunWeight
from tests.unit.trainer.forests import VOCAB_SIZE, make_node


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a random forest."""

    num_roots: int = 1
    num_runs: int = 3
    max_depth: int = 5
    """Nodes on the longest path."""
    max_own_nodes: int = 4
    """Nodes of a run."""
    prompt_tokens: int = 9
    long_tokens: int = 14
    """A long node has up to this many tokens: choose it to be several chunks."""


def make_batch(seed: int, shape: Shape | None = None) -> Batch:
    """Groups of runs with shared prompts, often in pieces, that branch below them.

    Nodes are of one token, of a few or long; some are empty, some have no targets or end in tokens that are none,
    some start with one, some begin as a sibling does. Nodes do not stand in depth-first order. Each run has a target.
    A run that has a root alone may own all of it.
    """
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []
    runs: list[RunWeight] = []
    for root in range(shape.num_roots):
        num_runs = max(1, shape.num_runs // shape.num_roots)
        is_shared = num_runs > 1 or rng.random() < 0.6
        shared, depths = _add_prompt(rng, nodes, shape, -1 if is_shared else len(runs))
        own: list[list[int]] = [[] for _ in range(num_runs)] if is_shared else [list(shared)]
        for _ in range(shape.max_own_nodes):
            for run in range(num_runs):
                if own[run] and rng.random() < 0.3:
                    continue
                parents = [n for n in (*shared, *own[run]) if depths[n] < shape.max_depth]
                # a run mostly goes on below itself; often it branches
                parent = own[run][-1] if own[run] and own[run][-1] in parents and rng.random() < 0.5 else None
                parent = int(rng.choice(parents)) if parent is None else parent
                depths[len(nodes)] = depths[parent] + 1
                own[run].append(len(nodes))
                node = make_own_node(rng, parent, len(runs) + run, _draw_size(rng, shape))
                nodes.append(_begin_alike(rng, node, nodes) if rng.random() < 0.2 else node)
        for run in range(num_runs):
            runs.append(_close_run(rng, nodes, own[run], f"g{root}-r{run}"))
    return Batch(tuple(nodes), tuple(runs))


def make_own_node(rng: np.random.Generator, parent: int, run: int, num_tokens: int) -> Node:
    """A node of a run: targets all over it, or none, with or without its first and last tokens."""
    share = float(rng.choice([0.0, 0.3, 0.8, 1.0], p=[0.15, 0.3, 0.3, 0.25]))
    node = make_node(rng, parent, run, num_tokens, target_share=share)
    return with_targets(rng, node, node.target_mask)


def with_targets(rng: np.random.Generator, node: Node, mask: np.ndarray) -> Node:
    """The node with these targets, and behaviour log-probabilities and versions for them."""
    logprobs = np.where(mask, rng.normal(-5.0, 0.7, len(mask)), 0.0).astype(np.float32)
    count = int(mask.sum())
    first = int(rng.integers(0, count + 1))
    spans = tuple(VersionSpan(version, n) for version, n in ((3, first), (4, count - first)) if n)
    return replace(node, target_mask=mask, logprobs=logprobs, version_spans=spans)


def chain(num_tokens: int, cuts: tuple[int, ...], seed: int = 0) -> Batch:
    """One path of a single run, cut into nodes; every token but the first is a target."""
    rng = np.random.default_rng(seed)
    nodes = []
    bounds = (0, *cuts, num_tokens)
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        node = Node(
            index - 1,
            0,
            rng.integers(0, VOCAB_SIZE, stop - start).astype(np.int32),
            np.zeros(stop - start, dtype=np.bool_),
            np.zeros(stop - start, dtype=np.float32),
        )
        nodes.append(with_targets(rng, node, np.arange(start, stop) > 0))
    return Batch(tuple(nodes), (RunWeight("r0", 1.0, num_tokens - 1),))


def _add_prompt(
    rng: np.random.Generator, nodes: list[Node], shape: Shape, run: int
) -> tuple[list[int], dict[int, int]]:
    """Segments that runs share, or of one run: a root, sometimes with pieces below it. Returns them, and the depth of
    each."""
    first = [len(nodes)]
    depths = {len(nodes): 1}
    nodes.append(make_node(rng, -1, run, shape.prompt_tokens, target_share=0.3, version=3))
    for _ in range(int(rng.integers(0, 3))):
        parent = int(rng.choice(first))
        depths[len(nodes)] = depths[parent] + 1
        first.append(len(nodes))
        nodes.append(make_node(rng, parent, run, _draw_size(rng, shape), target_share=0.3, version=3))
    return first, depths


def _begin_alike(rng: np.random.Generator, node: Node, nodes: list[Node]) -> Node:
    """The node with the first tokens of a sibling."""
    siblings = [other for other in nodes if other.parent == node.parent]
    if not siblings:
        return node
    other = siblings[int(rng.integers(len(siblings)))]
    count = min(len(node.token_ids), len(other.token_ids))
    return replace(node, token_ids=np.concatenate([other.token_ids[:count], node.token_ids[count:]]))


def _draw_size(rng: np.random.Generator, shape: Shape) -> int:
    kind = rng.random()
    if kind < 0.05:
        return 0
    if kind < 0.25:
        return 1
    return int(rng.integers(2, 6)) if kind < 0.7 else int(rng.integers(6, max(shape.long_tokens, 7) + 1))


def _close_run(rng: np.random.Generator, nodes: list[Node], own: list[int], run_id: str) -> RunWeight:
    """Its weight; if it has no target, its first node with tokens gets some."""
    if not any(nodes[index].target_mask.any() for index in own):
        index = next((n for n in own if len(nodes[n].token_ids)), own[0])
        node = nodes[index]
        if not len(node.token_ids):
            node = make_node(rng, node.parent, node.run, 1)
        nodes[index] = with_targets(rng, node, np.arange(len(node.token_ids)) > (-1 if node.parent >= 0 else 0))
    num_targets = sum(int(nodes[index].target_mask.sum()) for index in own)
    return RunWeight(run_id, float(rng.choice([-1.0, 1.0]) * rng.uniform(0.3, 1.5)), num_targets)
