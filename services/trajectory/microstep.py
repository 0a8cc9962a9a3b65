"""From the scored runs of a group to micro-steps: forests of token segments in which runs share their prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.types import VersionSpan
from services.trainer.types import MicroStep, Node, RunWeight
from services.trajectory.select import Selection
from services.trajectory.tree import ROOT, Segment, SegmentForest, TrajectoryTree

SHARED = -1
"""``Node.run`` of a segment that several runs share."""


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """A counted run with what was selected of it."""

    run_id: str
    advantage: float
    tree: TrajectoryTree
    selection: Selection


def cut_group(runs: Sequence[ScoredRun], max_tokens: int) -> list[list[ScoredRun]]:
    """Cut a group between runs, in order, into pieces of at most ``max_tokens`` unique tokens.

    Runs stay together while they fit, for they share their prompt; each further piece repeats it. A single run is
    never cut, however long. Runs without a target are left out: they count in the baseline only.
    """
    pieces: list[list[ScoredRun]] = []
    forest = SegmentForest()
    for run in (run for run in runs if run.selection.num_targets):
        _graft(forest, run)
        if not pieces or forest.num_tokens > max_tokens:
            pieces.append([])
            forest = SegmentForest()
            _graft(forest, run)
        pieces[-1].append(run)
    return pieces


def forest_tokens(runs: Sequence[ScoredRun]) -> int:
    """Unique tokens of a micro-step of these runs: what one pass over it costs."""
    forest = SegmentForest()
    for run in runs:
        _graft(forest, run)
    return forest.num_tokens


def build_micro_steps(group_id: str, runs: Sequence[ScoredRun], max_tokens: int) -> list[MicroStep]:
    """The micro-steps of a group, one for each piece of ``cut_group``."""
    return [
        build_micro_step(f"{group_id}-m{index}", group_id, piece)
        for index, piece in enumerate(cut_group(runs, max_tokens))
    ]


def build_micro_step(micro_step_id: str, group_id: str, runs: Sequence[ScoredRun]) -> MicroStep:
    """One micro-step of whole runs, each with at least one target.

    Parents stand before their children. A prompt segment that several runs begin with is one node with run
    ``SHARED``; every branch ends with a target.
    """
    forest = SegmentForest()
    targets = [_graft(forest, run) for run in runs]
    return MicroStep(
        micro_step_id=micro_step_id,
        group_id=group_id,
        nodes=tuple(_nodes(forest, _owners(forest, targets))),
        runs=tuple(RunWeight(run.run_id, run.advantage, run.selection.num_targets) for run in runs),
    )


def _graft(forest: SegmentForest, run: ScoredRun) -> list[int]:
    """Lay the selected paths of a run into a forest; the segments that hold its targets there.

    In the forest ``Segment.trainable`` says that the tokens are targets.
    """
    kept = _kept(run)
    place = {ROOT: ROOT}
    targets = []
    for index in run.tree.preorder():
        if index not in kept:
            continue
        segment = run.tree.segments[index]
        parent = place[segment.parent]
        if segment.call_id is None:
            place[index] = forest.insert_prompt(parent, segment.token_ids)
            continue
        is_target = index in run.selection.targets
        place[index] = forest.add_sampled(
            parent, segment.call_id, segment.token_ids, segment.logprobs, segment.version_spans, is_target
        )
        if is_target:
            targets.append(place[index])
    return targets


def _kept(run: ScoredRun) -> set[int]:
    """The segments on the selected paths, each path up to its last target: what follows trains nothing."""
    kept: set[int] = set()
    for target in run.selection.targets:
        index = target
        while index != ROOT and index not in kept:
            kept.add(index)
            index = run.tree.segments[index].parent
    return kept


def _owners(forest: SegmentForest, targets: Sequence[Sequence[int]]) -> dict[int, int]:
    """For each segment the position of the run whose targets lie in or below it, ``SHARED`` if several runs' do."""
    owners: dict[int, int] = {}
    for position, own_targets in enumerate(targets):
        seen: set[int] = set()
        for target in own_targets:
            index = target
            while index != ROOT and index not in seen:
                seen.add(index)
                owners[index] = position if owners.get(index, position) == position else SHARED
                index = forest.segments[index].parent
    return owners


def _nodes(forest: SegmentForest, owners: dict[int, int]) -> list[Node]:
    """The forest's segments as nodes; chains of one run without a branch become one node."""
    nodes: list[Node] = []
    stack = [(root, ROOT) for root in reversed(forest.roots)]
    while stack:
        index, parent = stack.pop()
        run = owners[index]
        chain = [forest.segments[index]]
        children = chain[-1].children
        while len(children) == 1 and owners[children[0]] == run:
            chain.append(forest.segments[children[0]])
            children = chain[-1].children
        nodes.append(_node(parent, run, chain))
        stack.extend((child, len(nodes) - 1) for child in reversed(children))
    return nodes


def _node(parent: int, run: int, chain: Sequence[Segment]) -> Node:
    token_ids = np.concatenate([segment.token_ids for segment in chain])
    target_mask = np.zeros(len(token_ids), dtype=np.bool_)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    spans: list[VersionSpan] = []
    start = 0
    for segment in chain:
        stop = start + len(segment.token_ids)
        if segment.trainable:
            target_mask[start:stop] = True
            logprobs[start:stop] = segment.logprobs
            spans.extend(segment.version_spans)
        start = stop
    return Node(parent, run, token_ids, target_mask, logprobs, _joined(spans))


def _joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Version spans with neighbours of one version made one."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            span = VersionSpan(span.version, joined.pop().num_tokens + span.num_tokens)
        joined.append(span)
    return tuple(joined)
