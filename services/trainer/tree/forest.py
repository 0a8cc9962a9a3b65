"""The batch as the tree executor sees it: a forest of token segments, as few and as short as exactness allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.trainer.types import Node

_MIN_COMMON_TOKENS = 16
"""A common beginning shorter than this is evaluated twice, rather than made a segment of its own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that stand one after another on every path that holds one of them."""

    parent: int
    """Index in ``Forest.segments``, -1 for a root; parents stand before their children, in depth-first order."""
    start: int
    """Position of the first token on its path."""
    token_ids: NDArray[np.int32]
    """[n], n >= 1"""
    predecessors: NDArray[np.int32]
    """[m] For each target the offset in the segment of the token that predicts it, ascending; -1 is the last token
    of the parent."""
    first_target: int
    """The segment's targets are ``first_target`` to ``first_target + m`` in the arrays of the forest."""
    is_shared: bool
    """No run's own tokens: a segment that ``prefix_gradient: detached`` detaches. It has no targets."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        return len(self.predecessors)


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments in depth-first order, with the targets of all of them. M targets."""

    segments: tuple[Segment, ...]
    target_ids: NDArray[np.int32]
    """[M]"""
    target_runs: NDArray[np.int32]
    """[M] Index of the target's run in ``Batch.runs``."""
    behaviour: NDArray[np.float32]
    """[M] The engine's log-probabilities."""
    versions: NDArray[np.int64]
    """[M] Version of the weights that sampled the target."""

    @property
    def num_tokens(self) -> int:
        """Unique tokens that have to be evaluated."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_targets(self) -> int:
        return len(self.target_ids)

    @property
    def longest_path(self) -> int:
        """Tokens of the longest path from a root."""
        return max((segment.start + segment.num_tokens for segment in self.segments), default=0)

    def children(self) -> list[list[int]]:
        """The children of each segment, in order."""
        below: list[list[int]] = [[] for _ in self.segments]
        for index, segment in enumerate(self.segments):
            if segment.parent >= 0:
                below[segment.parent].append(index)
        return below


@dataclass(slots=True)
class _Targets:
    """Some targets of one draft, in order."""

    offsets: NDArray[np.int64]  # in the draft's tokens
    ids: NDArray[np.int32]
    runs: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    versions: NDArray[np.int64]

    def shifted(self, num_tokens: int) -> _Targets:
        return _Targets(self.offsets + num_tokens, self.ids, self.runs, self.behaviour, self.versions)

    def joined(self, later: _Targets) -> _Targets:
        return _Targets(
            np.concatenate([self.offsets, later.offsets]),
            np.concatenate([self.ids, later.ids]),
            np.concatenate([self.runs, later.runs]),
            np.concatenate([self.behaviour, later.behaviour]),
            np.concatenate([self.versions, later.versions]),
        )


@dataclass(slots=True)
class _Draft:
    """A segment in the making. The root of all has no tokens."""

    token_ids: NDArray[np.int32]
    targets: _Targets
    run: int  # -1: runs share it
    children: list[_Draft] = field(default_factory=list)

    @property
    def is_shared(self) -> bool:
        return self.run < 0

    @property
    def num_context(self) -> int:
        """Tokens before the first target."""
        return int(self.targets.offsets[0]) if len(self.targets.offsets) else len(self.token_ids)


def make_forest(nodes: Sequence[Node]) -> Forest:
    """The segments that have to be evaluated for the targets of ``nodes``, and no more.

    Left out are nodes that lead to no target, and the tokens at the end of a leaf that predict nothing (the last
    target itself among them, unless its segment would be empty). A node is joined with its only child, and siblings
    or roots that begin with the same tokens, none of them a target, share that beginning (it is shared by runs then,
    unless both are of one run): neither changes a path, so both are exact. Children keep their order.

    Raises:
        ValueError: a parent does not stand before its child, a target has nothing before it, or the version spans
            of a node do not cover its targets.
    """
    top = _Draft(np.zeros(0, dtype=np.int32), _no_targets(), run=-1)
    drafts: list[_Draft] = []  # of each node; that of a node without tokens is its parent's
    for index, node in enumerate(nodes):
        if node.parent >= index:
            raise ValueError(f"node {index} stands before its parent {node.parent}")
        above = drafts[node.parent] if node.parent >= 0 else top
        targets = _targets_of(index, node)
        if above is top and len(targets.offsets) and targets.offsets[0] == 0:
            raise ValueError("the first token of a root is a target, but nothing predicts it")
        if len(node.token_ids) == 0:
            drafts.append(above)
            continue
        draft = _Draft(node.token_ids.astype(np.int32), targets, node.run)
        above.children.append(draft)
        drafts.append(draft)
    _drop_what_leads_nowhere(top)
    _share_beginnings(top)
    _join_only_children(top)
    _trim_leaves(top)
    return _lay_out(top)


def _targets_of(index: int, node: Node) -> _Targets:
    offsets = np.flatnonzero(node.target_mask)
    counts = [span.num_tokens for span in node.version_spans]
    if sum(counts) != len(offsets):
        raise ValueError(f"node {index} has {len(offsets)} targets, but version spans for {sum(counts)}")
    versions = np.repeat(np.array([span.version for span in node.version_spans], dtype=np.int64), counts)
    return _Targets(
        offsets=offsets,
        ids=node.token_ids[offsets].astype(np.int32),
        runs=np.full(len(offsets), node.run, dtype=np.int32),
        behaviour=node.logprobs[offsets].astype(np.float32),
        versions=versions,
    )


def _no_targets() -> _Targets:
    ids = np.zeros(0, dtype=np.int32)
    return _Targets(np.zeros(0, dtype=np.int64), ids, ids, np.zeros(0, np.float32), np.zeros(0, np.int64))


def _walk(top: _Draft) -> Iterator[_Draft]:
    """All drafts, depth first, the given one included; children are read when their parent has been handled."""
    stack = [top]
    while stack:
        draft = stack.pop()
        yield draft
        stack += reversed(draft.children)


def _drop_what_leads_nowhere(top: _Draft) -> None:
    for draft in reversed(list(_walk(top))):  # children before their parents
        draft.children = [child for child in draft.children if child.children or len(child.targets.offsets)]


def _share_beginnings(top: _Draft) -> None:
    """Siblings with a common beginning become children of it."""
    for draft in _walk(top):
        kept: list[_Draft] = []
        for child in draft.children:
            for other in kept:
                common = _num_common(other, child)
                if common:
                    _split(other, common)
                    _split(child, common)
                    other.run = other.run if other.run == child.run else -1
                    other.children += child.children  # which meet their new siblings when ``other`` is handled
                    break
            else:
                kept.append(child)
        draft.children = kept


def _num_common(left: _Draft, right: _Draft) -> int:
    """Tokens at the beginning of both that are worth sharing and that may be: none of them is a target."""
    limit = min(left.num_context, right.num_context)
    common = 0
    for stop in (min(limit, _MIN_COMMON_TOKENS), limit):  # most siblings differ at once
        unequal = np.flatnonzero(left.token_ids[common:stop] != right.token_ids[common:stop])
        if len(unequal):
            common += int(unequal[0])
            break
        common = stop
    is_whole = common in (len(left.token_ids), len(right.token_ids))
    return common if is_whole or common >= _MIN_COMMON_TOKENS else 0


def _split(draft: _Draft, num_tokens: int) -> None:
    """Leave the first tokens, without a target among them; the rest becomes their child."""
    if num_tokens == len(draft.token_ids):
        return
    rest = _Draft(draft.token_ids[num_tokens:], draft.targets.shifted(-num_tokens), draft.run, draft.children)
    draft.token_ids, draft.targets, draft.children = draft.token_ids[:num_tokens], _no_targets(), [rest]


def _join_only_children(top: _Draft) -> None:
    for draft in _walk(top):
        if draft is top:
            continue
        parts, targets = [draft.token_ids], draft.targets
        num_tokens = len(draft.token_ids)
        while len(draft.children) == 1 and draft.children[0].run == draft.run:
            child = draft.children[0]
            parts.append(child.token_ids)
            targets = targets.joined(child.targets.shifted(num_tokens))
            num_tokens += len(child.token_ids)
            draft.children = child.children
        if len(parts) > 1:
            draft.token_ids, draft.targets = np.concatenate(parts), targets


def _trim_leaves(top: _Draft) -> None:
    for draft in _walk(top):
        if draft is not top and not draft.children:
            draft.token_ids = draft.token_ids[: max(1, int(draft.targets.offsets[-1]))]


def _lay_out(top: _Draft) -> Forest:
    segments: list[Segment] = []
    targets: list[_Targets] = []
    num_targets = 0
    stack = [(child, -1, 0) for child in reversed(top.children)]
    while stack:
        draft, parent, start = stack.pop()
        index = len(segments)
        predecessors = (draft.targets.offsets - 1).astype(np.int32)
        segments.append(Segment(parent, start, draft.token_ids, predecessors, num_targets, draft.is_shared))
        targets.append(draft.targets)
        num_targets += len(predecessors)
        stack += [(child, index, start + len(draft.token_ids)) for child in reversed(draft.children)]
    return Forest(
        segments=tuple(segments),
        target_ids=_join([part.ids for part in targets], np.int32),
        target_runs=_join([part.runs for part in targets], np.int32),
        behaviour=_join([part.behaviour for part in targets], np.float32),
        versions=_join([part.versions for part in targets], np.int64),
    )


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype=dtype)
