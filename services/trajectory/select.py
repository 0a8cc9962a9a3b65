"""Selection: which root-to-leaf paths of a run are trained, at most ``max_trajectories`` of them.

Every path has the role 'main' so far: nothing tells a subagent's or a summary's branch apart yet, so the draw is
over all leaves of the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.trajectory.tree import ROOT, TrajectoryTree

MAIN_ROLE = "main"
"""The one role that paths have."""


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """What was selected and what was left out. Tokens are sampled ones."""

    role: str
    num_paths: int
    """Paths that ended with something to train."""
    num_selected_paths: int
    num_targets: int
    num_left_out: int
    """Trainable tokens on paths that were not selected."""
    num_not_trainable: int
    """Tokens made greedily, or of answers that were cut."""
    num_superseded: int
    """Trainable tokens of answers that a retry left behind."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a tree that is trained."""

    leaves: tuple[int, ...]
    """The selected leaves, in the order of the draw."""
    targets: frozenset[int]
    """The sampled segments whose tokens are targets; each once, on however many selected paths it lies."""
    num_targets: int
    """``n_run``: the run's targets, fixed here however the run is split later."""
    report: SelectionReport


def select(tree: TrajectoryTree, *, max_trajectories: int, seed: int, run_id: str) -> Selection:
    """Draw a leaf with probability proportional to its path's untrained tokens, take its path, mark it taken,
    repeat until nothing is left or ``max_trajectories`` paths are taken.

    The same tree, seed and run id select the same.
    """
    superseded = tree.superseded()
    sampled = {index: segment for index, segment in enumerate(tree.segments) if segment.is_sampled}
    trainable = {index for index, segment in sampled.items() if segment.trainable}
    untrained = trainable - superseded
    generator = random.Random(f"{seed}/{run_id}")
    leaves: list[int] = []
    targets: set[int] = set()
    num_paths = sum(1 for weight in _untrained_by_leaf(tree, untrained).values() if weight)
    while len(leaves) < max_trajectories and untrained:
        weights = _untrained_by_leaf(tree, untrained)
        leaf = generator.choices(list(weights), weights=list(weights.values()))[0]
        leaves.append(leaf)
        taken = untrained.intersection(tree.path(leaf))
        targets |= taken
        untrained -= taken

    def count(indices: set[int] | frozenset[int]) -> int:
        return sum(len(sampled[index].token_ids) for index in indices)

    report = SelectionReport(
        role=MAIN_ROLE,
        num_paths=num_paths,
        num_selected_paths=len(leaves),
        num_targets=count(targets),
        num_left_out=count(untrained),
        num_not_trainable=count(sampled.keys() - trainable),
        num_superseded=count(trainable & superseded),
    )
    return Selection(tuple(leaves), frozenset(targets), report.num_targets, report)


def _untrained_by_leaf(tree: TrajectoryTree, untrained: set[int]) -> dict[int, int]:
    """For each leaf the number of untrained tokens on its path: one walk over the tree."""
    above = {ROOT: 0}
    weights: dict[int, int] = {}
    for index in tree.preorder():
        segment = tree.segments[index]
        above[index] = above[segment.parent] + (len(segment.token_ids) if index in untrained else 0)
        if not segment.children:
            weights[index] = above[index]
    return weights
