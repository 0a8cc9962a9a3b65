"""The plan of a step: chunks, the order in which they are visited, and what that needs. Pure and deterministic, so
all ranks that hold the same forest execute the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.forest import Forest


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


class Mode(StrEnum):
    """How a batch is evaluated."""

    PACK = "pack"
    """The whole forest in one forward and backward, its branches kept apart by a mask."""
    WALK = "walk"
    """Chunk by chunk."""


class PrefixGradient(StrEnum):
    """What happens to the gradient of segments that runs share."""

    EXACT = "exact"
    DETACHED = "detached"
    """It is dropped, as in LongStraw (arXiv 2607.14952)."""


class Recompute(StrEnum):
    """How the activations of an inner chunk come back for its backward."""

    AUTO = "auto"
    """Kept where they fit."""
    CHUNK = "chunk"
    """Evaluated again: four forwards' work a token."""
    KEEP = "keep"
    """Kept since the capture: three forwards' work a token."""


class ModeChoice(StrEnum):
    """Which mode to use."""

    AUTO = "auto"
    PACK = "pack"
    WALK = "walk"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user decides."""

    prefix_gradient: PrefixGradient = PrefixGradient.EXACT
    recompute: Recompute = Recompute.AUTO
    mode: ModeChoice = ModeChoice.AUTO
    min_chunk_tokens: int = 64
    """Chunks are made no smaller to fit (a segment may be)."""
    max_chunk_tokens: int = 8192
    alignment_tokens: int = 1
    """Chunks but the last of a segment are multiples of it."""
    head_rows: int = 1024
    """Most targets whose logits are held at once."""


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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan will need."""

    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How to execute a step."""

    mode: Mode
    chunks: tuple[Chunk, ...]
    """In depth-first order, those of a segment one after another. In mode ``pack`` the segments."""
    visits: tuple[Visit, ...]
    """None in mode ``pack``."""
    recompute_layers: bool
    """In graphs of whole chunks only each layer's input is kept (offloaded), and the layer is evaluated again in
    backward."""
    head_rows: int
    """Most targets whose logits are held at once."""
    predicted: Prediction
    reason: str
    """One sentence for people."""
    keep_attended: bool = False
    """What attention over the path gave is kept from a chunk's capture: a recomputation walks over the path once less
    (only backward). It costs queries' width a token and layer."""


def make_plan(forest: Forest, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Plan:
    """Choose how to execute a step over ``forest`` within ``budget``.

    Raises:
        ConfigError: nothing fits.
    """
    chunks = cut_chunks(forest, options.max_chunk_tokens, options.alignment_tokens)
    keep = options.recompute is Recompute.KEEP
    kept = frozenset(range(len(chunks))) if keep else frozenset()
    visits = list_visits(forest, chunks, options.prefix_gradient, kept)
    reason = f"chunks of at most {options.max_chunk_tokens} tokens"
    return Plan(Mode.WALK, chunks, visits, False, options.head_rows, Prediction(), reason)


def cut_chunks(forest: Forest, chunk_tokens: int, alignment_tokens: int) -> tuple[Chunk, ...]:
    """Cut each segment into chunks of at most ``chunk_tokens``, rounded down to the alignment."""
    size = max(alignment_tokens, chunk_tokens // alignment_tokens * alignment_tokens)
    chunks: list[Chunk] = []
    last: list[int] = []  # last chunk of each segment
    for index, segment in enumerate(forest.segments):
        parent = last[segment.parent] if segment.parent >= 0 else -1
        for first in range(0, segment.num_tokens, size):
            num_tokens = min(size, segment.num_tokens - first)
            chunks.append(Chunk(index, first, num_tokens, segment.start + first, parent))
            parent = len(chunks) - 1
        last.append(parent)
    return tuple(chunks)


def list_visits(
    forest: Forest, chunks: tuple[Chunk, ...], prefix_gradient: PrefixGradient, kept: frozenset[int]
) -> tuple[Visit, ...]:
    """The walk, depth first. ``kept``: chunks whose graph stays from their capture to their backward."""
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
