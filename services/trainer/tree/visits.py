"""Chunks of segments, and the depth-first order in which they are visited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from services.trainer.tree.forest import Forest, Segment


class VisitKind(StrEnum):
    """What a visit does with its chunk."""

    CAPTURE = "capture"
    """Evaluate it and keep its states."""
    REPLAY = "replay"
    """The last chunk of a leaf: forward and backward at once; no states are kept."""
    BACKWARD = "backward"
    """Push the gradients collected for its states, and that of its targets, through it; its states are freed."""
    RELEASE = "release"
    """A detached chunk: its states are freed."""


class PrefixGradient(StrEnum):
    """What happens to the gradient of segments that runs share."""

    EXACT = "exact"
    DETACHED = "detached"
    """It is dropped, as in LongStraw (arXiv 2607.14952)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that go through the model together."""

    segment: int
    first: int
    """Offset of the first token in the segment."""
    num_tokens: int
    start: int
    """Position of the first token on its path."""
    parent: int
    """The chunk before it on its path, -1 at a root."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One step of the walk."""

    kind: VisitKind
    chunk: int
    keep_graph: bool = False
    """A capture with autograd; the graph lives until the chunk's BACKWARD."""


def cut_chunks(forest: Forest, chunk_tokens: int, alignment_tokens: int = 1) -> tuple[Chunk, ...]:
    """Cut each segment into as few chunks of at most ``chunk_tokens`` as possible, in depth-first order.

    All chunks of a segment but one are multiples of ``alignment_tokens``; so is the limit, rounded down. Those of an
    inner segment are of about one size; a leaf's last one, which is never evaluated twice, is as long as it may be.
    """
    limit = max(alignment_tokens, chunk_tokens // alignment_tokens * alignment_tokens)
    is_inner = [bool(children) for children in forest.children()]
    chunks: list[Chunk] = []
    last: list[int] = []  # last chunk of each segment
    for index, segment in enumerate(forest.segments):
        parent = last[segment.parent] if segment.parent >= 0 else -1
        first = 0
        for num_tokens in _sizes(segment, limit, alignment_tokens, is_inner=is_inner[index]):
            chunks.append(Chunk(index, first, num_tokens, segment.start + first, parent))
            parent = len(chunks) - 1
            first += num_tokens
        last.append(parent)
    return tuple(chunks)


def _sizes(segment: Segment, limit: int, alignment: int, *, is_inner: bool) -> Iterator[int]:
    left = segment.num_tokens
    num_chunks = -(-left // limit)
    size = limit
    if is_inner:
        size = -(-left // num_chunks // alignment) * alignment
    elif num_chunks > 1:
        yield left - (num_chunks - 1) * limit
        left = (num_chunks - 1) * limit
    while left > 0:
        yield min(size, left)
        left -= size


def list_visits(
    forest: Forest, chunks: tuple[Chunk, ...], prefix_gradient: PrefixGradient, kept: frozenset[int] = frozenset()
) -> tuple[Visit, ...]:
    """The walk, depth first. ``kept``: chunks whose graph stays from their capture to their backward.

    An inner segment's chunks are captured, its children visited, then its chunks pushed back from the last to the
    first. A leaf's last chunk is replayed. Detached segments are captured and released.
    """
    children = forest.children()
    by_segment: list[list[int]] = [[] for _ in forest.segments]
    for index, chunk in enumerate(chunks):
        by_segment[chunk.segment].append(index)
    is_detached = detached_segments(forest, prefix_gradient)
    visits: list[Visit] = []
    roots = [index for index, segment in enumerate(forest.segments) if segment.parent < 0]
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        segment, is_done = stack.pop()
        own = by_segment[segment]
        captured = own if children[segment] else own[:-1]
        if is_done:
            kind = VisitKind.RELEASE if is_detached[segment] else VisitKind.BACKWARD
            visits += [Visit(kind, chunk) for chunk in reversed(captured)]
            continue
        has_graph = not is_detached[segment]
        visits += [Visit(VisitKind.CAPTURE, chunk, has_graph and chunk in kept) for chunk in captured]
        if not children[segment]:
            visits.append(Visit(VisitKind.REPLAY, own[-1]))
        stack.append((segment, True))
        stack += [(child, False) for child in reversed(children[segment])]
    return tuple(visits)


def detached_segments(forest: Forest, prefix_gradient: PrefixGradient) -> list[bool]:
    """Whether each segment is without gradient: shared, as are all its ancestors."""
    result: list[bool] = []
    for segment in forest.segments:
        above = segment.parent < 0 or result[segment.parent]
        result.append(prefix_gradient is PrefixGradient.DETACHED and segment.is_shared and above)
    return result
