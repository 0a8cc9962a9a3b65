"""Selection: which root-to-leaf paths of a run are trained, at most ``max_trajectories`` (J_max) of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trajectory.tree import ROOT, TrajectoryTree
from services.trajectory.types import CallRole, RunSelection


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a tree that is trained."""

    leaves: tuple[int, ...]
    """The selected leaves, in the order of the draw."""
    targets: frozenset[int]
    """The sampled segments whose tokens are targets; each once, on however many selected paths it lies."""
    report: RunSelection

    @property
    def num_targets(self) -> int:
        """``n_run``: the run's targets, fixed here however the run is split later."""
        return self.report.num_targets


@dataclass(slots=True)
class _Leaves:
    """The leaves of a tree without its side calls, in preorder; those below a segment are neighbours."""

    indices: list[int]
    below: dict[int, slice]
    """Segment -> its leaves."""
    calls: list[str]
    """The last sampled call on each leaf's path; empty if there is none."""


def select(
    tree: TrajectoryTree, roles: Mapping[str, CallRole], *, max_trajectories: int | None, seed: int, run_id: str
) -> Selection:
    """In the highest role (the order of ``CallRole``) that has untrained tokens, draw a leaf with probability
    proportional to those on its path, take the path, mark it taken; repeat until nothing is left or
    ``max_trajectories`` paths are taken (None: no limit).

    A path has the role of its last sampled call; calls that ``roles`` does not name are main ones. Side calls are no
    targets, and a path ends before the side calls that nothing else follows. The same tree, roles, seed and run id
    select the same. Time: the segments, plus for each path drawn its segments and the leaves.
    """
    superseded = tree.superseded()
    sampled = {index: segment for index, segment in enumerate(tree.segments) if segment.is_sampled}
    trainable = {index for index, segment in sampled.items() if segment.trainable}
    side = {index for index, segment in sampled.items() if roles.get(segment.call_id or "") is CallRole.SIDE}
    untrained = trainable - superseded - side
    leaves = _leaves(tree, side)
    weights = _weights(tree, leaves, untrained)
    leaf_roles = [roles.get(call_id, CallRole.MAIN) for call_id in leaves.calls]
    generator = random.Random(f"{seed}/{run_id}")
    drawn: list[int] = []
    targets: set[int] = set()
    for role in CallRole:
        positions = np.asarray([at for at, one in enumerate(leaf_roles) if one is role], dtype=np.int64)
        while len(positions) and (max_trajectories is None or len(drawn) < max_trajectories):
            cumulated = weights[positions].cumsum()
            if not cumulated[-1]:
                break
            draw = generator.randrange(int(cumulated[-1]))
            position = int(positions[np.searchsorted(cumulated, draw, side="right")])
            drawn.append(position)
            for index in _untaken(tree, leaves.indices[position], untrained):
                untrained.discard(index)
                targets.add(index)
                weights[leaves.below[index]] -= len(tree.segments[index].token_ids)

    def count(indices: set[int] | frozenset[int]) -> int:
        return sum(len(sampled[index].token_ids) for index in indices)

    left_out: Counter[CallRole] = Counter()
    untrained |= (trainable & side) - superseded
    for index in untrained:
        left_out[roles.get(sampled[index].call_id or "", CallRole.MAIN)] += len(sampled[index].token_ids)
    report = RunSelection(
        max_trajectories=max_trajectories,
        seed=seed,
        leaf_call_ids=tuple(leaves.calls[position] for position in drawn),
        leaf_roles=tuple(leaf_roles[position] for position in drawn),
        target_call_ids=tuple(sampled[index].call_id or "" for index in sorted(targets)),
        num_targets=count(targets),
        num_left_out=count(untrained),
        num_not_trainable=count(sampled.keys() - trainable),
        num_superseded=count(trainable & superseded),
        left_out=dict(left_out),
    )
    return Selection(tuple(leaves.indices[position] for position in drawn), frozenset(targets), report)


def _leaves(tree: TrajectoryTree, side: Set[int]) -> _Leaves:
    last_call: dict[int, str] = {ROOT: ""}
    indices: list[int] = []
    calls: list[str] = []
    first_below: dict[int, int] = {}
    order = list(tree.preorder())
    ends = _ends(tree, order, side)
    for index in order:
        segment = tree.segments[index]
        call_id = "" if index in side else segment.call_id
        last_call[index] = call_id or last_call[segment.parent]
        first_below[index] = len(indices)
        if index in ends:
            indices.append(index)
            calls.append(last_call[index])
    end_below: dict[int, int] = {}
    for index in reversed(order):
        end_below.setdefault(index, first_below[index] + (index in ends))  # the last child has set that of any other
        end_below.setdefault(tree.segments[index].parent, end_below[index])
    below = {index: slice(first_below[index], end_below[index]) for index in order}
    return _Leaves(indices, below, calls)


def _ends(tree: TrajectoryTree, order: Sequence[int], side: Set[int]) -> set[int]:
    """The segments of a preorder where paths end: leaves, once all is cut off behind which are side calls only."""
    ends: set[int] = set()
    inner: set[int] = set()
    for index in reversed(order):
        segment = tree.segments[index]
        is_kept = index not in side and (segment.is_sampled or segment.is_leaf)
        if is_kept and index not in inner:
            ends.add(index)
        if is_kept or index in inner:
            inner.add(segment.parent)
    return ends


def _weights(tree: TrajectoryTree, leaves: _Leaves, untrained: set[int]) -> NDArray[np.int64]:
    """For each leaf the number of untrained tokens on its path: int64 ``[leaves]``."""
    weights = np.zeros(len(leaves.indices), dtype=np.int64)
    for index in untrained:
        weights[leaves.below[index]] += len(tree.segments[index].token_ids)
    return weights


def _untaken(tree: TrajectoryTree, index: int, untrained: set[int]) -> list[int]:
    """The untrained segments on the path to ``index``."""
    found = []
    while index != ROOT:
        if index in untrained:
            found.append(index)
        index = tree.segments[index].parent
    return found
