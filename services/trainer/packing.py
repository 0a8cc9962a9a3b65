"""From micro-steps to forward passes: batches by token budget, and a forest of segments packed into one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.trainer.types import MicroStep, Node, RunWeight

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes through one forward and backward: whole runs, with the segments that they share."""

    nodes: tuple[Node, ...]
    runs: tuple[RunWeight, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Pack:
    """A forest as one row of T tokens, node after node, parents before their children.

    A token attends to itself, to the earlier tokens of its node and to all tokens of the node's ancestors.
    """

    token_ids: NDArray[np.int32]
    """[T]"""
    position_ids: NDArray[np.int32]
    """[T] Distance from the start of the root, as if the path to the token stood alone."""
    node_starts: NDArray[np.int32]
    """[nodes + 1] Node ``n`` takes the positions ``node_starts[n]`` to ``node_starts[n + 1]``."""
    parents: tuple[int, ...]
    """Parent of each node, -1 for a root."""
    targets: NDArray[np.int32]
    """[M] Positions of the targets in the row."""
    predecessors: NDArray[np.int32]
    """[M] Position whose hidden state predicts the target: the token before it on its path, which for a node's
    first token is the last one of its parent."""
    target_runs: NDArray[np.int32]
    """[M] Index of the target's run in ``Batch.runs``."""
    behaviour: NDArray[np.float32]
    """[M] The engine's log-probabilities."""
    versions: NDArray[np.int64]
    """[M] Version of the weights that sampled the target."""

    @property
    def target_ids(self) -> NDArray[np.int32]:
        """[M]"""
        return self.token_ids[self.targets]

    @property
    def longest_path(self) -> int:
        """Tokens of the longest path from a root."""
        return int(self.position_ids.max()) + 1 if len(self.position_ids) else 0


def pack_forest(nodes: Sequence[Node]) -> Pack:
    """Lay a forest out as one row.

    Raises:
        ValueError: a parent does not stand before its child, a target has nothing before it, or the version spans
            of a node do not cover its targets.
    """
    starts = np.zeros(len(nodes) + 1, dtype=np.int32)
    np.cumsum([len(node.token_ids) for node in nodes], out=starts[1:])
    position_ids = np.zeros(starts[-1], dtype=np.int32)
    last = np.full(len(nodes), -1, dtype=np.int32)  # last position on the path that ends with the node
    depth = np.zeros(len(nodes), dtype=np.int32)  # tokens on that path
    targets, predecessors, runs, behaviour, versions = [], [], [], [], []
    for index, node in enumerate(nodes):
        if node.parent >= index:
            raise ValueError(f"node {index} stands before its parent {node.parent}")
        num_tokens = len(node.token_ids)
        before = int(depth[node.parent]) if node.parent >= 0 else 0
        previous = int(last[node.parent]) if node.parent >= 0 else -1
        position_ids[starts[index] : starts[index + 1]] = np.arange(before, before + num_tokens)
        depth[index] = before + num_tokens
        last[index] = starts[index + 1] - 1 if num_tokens else previous
        offsets = np.flatnonzero(node.target_mask)
        targets.append(starts[index] + offsets)
        predecessors.append(np.where(offsets == 0, previous, starts[index] + offsets - 1))
        runs.append(np.full(len(offsets), node.run))
        behaviour.append(node.logprobs[offsets])
        versions.append(_target_versions(index, node, len(offsets)))
    joined = np.concatenate(predecessors) if predecessors else np.zeros(0, dtype=np.int32)
    if (joined < 0).any():
        raise ValueError("the first token of a root is a target, but nothing predicts it")
    return Pack(
        token_ids=_join([node.token_ids for node in nodes], np.int32),
        position_ids=position_ids,
        node_starts=starts,
        parents=tuple(node.parent for node in nodes),
        targets=_join(targets, np.int32),
        predecessors=joined.astype(np.int32),
        target_runs=_join(runs, np.int32),
        behaviour=_join(behaviour, np.float32),
        versions=_join(versions, np.int64),
    )


def plan_batches(micro_steps: Sequence[MicroStep], max_tokens: int) -> list[Batch]:
    """Whole micro-steps, joined in order while they have at most ``max_tokens`` together. A larger one goes alone.

    Raises:
        ValueError: a micro-step's forest contradicts its runs (see ``check_micro_step``).
    """
    batches: list[list[MicroStep]] = []
    num_tokens = 0
    for micro_step in micro_steps:
        check_micro_step(micro_step)
        if micro_step.num_targets == 0:
            continue
        if not batches or num_tokens + micro_step.num_tokens > max_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(micro_step)
        num_tokens += micro_step.num_tokens
    return [_merge(batch) for batch in batches]


def check_micro_step(micro_step: MicroStep) -> None:
    """Raise ``ValueError`` unless each target belongs to one run and ``num_targets`` counts the run's targets."""
    counts = [0] * len(micro_step.runs)
    for index, node in enumerate(micro_step.nodes):
        if not len(node.token_ids) == len(node.target_mask) == len(node.logprobs):
            raise ValueError(f"{micro_step.micro_step_id}: node {index} has ids, mask and logprobs of unequal length")
        num_targets = int(node.target_mask.sum())
        if node.run < 0 and num_targets:
            raise ValueError(f"{micro_step.micro_step_id}: node {index} is shared by runs but has targets")
        if node.run >= 0:
            counts[node.run] += num_targets
        if node.parent >= 0 and micro_step.nodes[node.parent].run not in (-1, node.run):
            raise ValueError(f"{micro_step.micro_step_id}: node {index} hangs below a node of another run")
    for run, count in zip(micro_step.runs, counts, strict=True):
        if run.num_targets != count:
            raise ValueError(
                f"{micro_step.micro_step_id}: run {run.run_id} has {count} targets here, {run.num_targets} at selection"
            )


def count_runs(micro_steps: Sequence[MicroStep]) -> int:
    """Runs that the optimizer step divides by: those with a target."""
    return sum(run.num_targets > 0 for micro_step in micro_steps for run in micro_step.runs)


def _merge(parts: Sequence[MicroStep]) -> Batch:
    nodes: list[Node] = []
    runs: list[RunWeight] = []
    for part in parts:
        first_node, first_run = len(nodes), len(runs)
        nodes += [
            replace(
                node,
                parent=node.parent + first_node if node.parent >= 0 else -1,
                run=node.run + first_run if node.run >= 0 else -1,
            )
            for node in part.nodes
        ]
        runs += part.runs
    return Batch(tuple(nodes), tuple(runs))


def _target_versions(index: int, node: Node, num_targets: int) -> NDArray[np.int64]:
    counts = [span.num_tokens for span in node.version_spans]
    if sum(counts) != num_targets:
        raise ValueError(f"node {index} has {num_targets} targets, but version spans for {sum(counts)}")
    return np.repeat(np.array([span.version for span in node.version_spans], dtype=np.int64), counts)


def _join(arrays: Sequence[NDArray[Any]], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype=dtype)
