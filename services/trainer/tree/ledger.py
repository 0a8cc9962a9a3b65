"""What a walk over chunks will hold at each visit, and the work that it will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trainer.tree.costs import ChunkBytes, ModelCosts
from services.trainer.tree.forest import Forest
from services.trainer.tree.visits import Chunk, PrefixGradient, Visit, VisitKind, detached_segments

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Way:
    """How the chunks of a walk are evaluated."""

    recompute_layers: bool = False
    keep_attended: bool = False
    head_rows: int = 1024


@dataclass(frozen=True, slots=True)
class Work:
    """Floating point operations of a step, and tokens that go through the model forward."""

    forward_flops: float = 0.0
    """Each token once, and the head."""
    recompute_flops: float = 0.0
    """Forward again, of chunks and of layers."""
    backward_flops: float = 0.0
    evaluated_tokens: int = 0
    """In forwards of chunks: a token that is evaluated again counts again."""

    @property
    def flops(self) -> float:
        return self.forward_flops + self.recompute_flops + self.backward_flops


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """What the ledger needs to know of each chunk. All arrays are ``[chunks]``."""

    num_tokens: NDArray[np.int64]
    page_tokens: NDArray[np.int64]
    """Of the longest chunk on the path, itself included."""
    num_targets: NDArray[np.int64]
    is_inner: NDArray[np.bool_]
    """Later chunks read its states."""
    has_gradient: NDArray[np.bool_]
    state_bytes: Floats
    accumulation_bytes: Floats
    """Of the gradients of its token states, which all that comes below adds to."""
    boundary_accumulation_bytes: Floats
    """Of those of its boundary states, which only the chunks right behind it add to."""
    parents: NDArray[np.int64]
    path_bytes: Floats
    """States of the chunks before it that it reads."""
    path_accumulation_bytes: Floats
    """Gradients of those, token states only."""
    forward_flops: Floats
    again_flops: Floats
    """Of a recomputation, which may be spared attention."""
    backward_flops: Floats

    def bytes_of(self, cost: ChunkBytes) -> list[float]:
        """What each chunk costs."""
        shapes = list(zip(self.num_tokens.tolist(), self.page_tokens.tolist(), strict=True))
        known = {shape: cost.at(*shape) for shape in set(shapes)}
        return [known[shape] for shape in shapes]


@dataclass(frozen=True, slots=True)
class Ledger:
    """A walk, visit by visit. All arrays are ``[visits]``."""

    visits: tuple[Visit, ...]
    transient_bytes: Floats
    """Most that a visit holds beside states, kept graphs and constants."""
    graph_bytes: Floats
    """Graphs kept for later visits."""
    stored_bytes: Floats
    """States, their gradients and layer inputs, at their most during a visit."""
    flops: Floats
    passed_bytes: Floats
    """States and gradients of the path that a visit reads and writes."""
    num_passes: NDArray[np.int64]
    """Times that a visit reads the model's weights."""
    work: Work

    @property
    def live_bytes(self) -> Floats:
        """All but constants, wherever it lies."""
        return self.transient_bytes + self.graph_bytes + self.stored_bytes


def chunk_facts(
    forest: Forest, costs: ModelCosts, chunks: Sequence[Chunk], prefix_gradient: PrefixGradient, *, keep_attended: bool
) -> ChunkFacts:
    """The facts of each chunk."""
    num_chunks = len(chunks)
    is_detached = detached_segments(forest, prefix_gradient)
    num_tokens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    has_gradient = np.array([not is_detached[chunk.segment] for chunk in chunks], dtype=np.bool_)
    parents = np.array([chunk.parent for chunk in chunks], dtype=np.int64)
    is_inner = np.zeros(num_chunks, dtype=np.bool_)
    is_inner[parents[parents >= 0]] = True
    read = is_inner.astype(np.float64) * (num_tokens * costs.state_bytes_per_token + costs.boundary_bytes)
    attended = (is_inner & has_gradient & keep_attended) * (num_tokens * costs.attended_bytes_per_token)
    collects = (is_inner & has_gradient).astype(np.float64)
    gradients = collects * (num_tokens * costs.accumulation_bytes_per_token)
    page = num_tokens.copy()
    path, path_gradients = np.zeros(num_chunks), np.zeros(num_chunks)
    for index, parent in enumerate(parents.tolist()):  # parents stand before their children
        if parent >= 0:
            page[index] = max(page[index], page[parent])
            path[index] = path[parent] + read[parent]
            path_gradients[index] = path_gradients[parent] + gradients[parent]
    forward = np.array([costs.forward_flops(chunk.start, chunk.num_tokens) for chunk in chunks])
    spared = np.zeros(num_chunks)
    if keep_attended:
        spared = np.array([costs.attended_flops(chunk.start, chunk.num_tokens) for chunk in chunks]) * is_inner
    return ChunkFacts(
        num_tokens=num_tokens,
        page_tokens=page,
        num_targets=_targets_by_chunk(forest, chunks),
        is_inner=is_inner,
        has_gradient=has_gradient,
        state_bytes=read + attended,
        accumulation_bytes=gradients,
        boundary_accumulation_bytes=collects * costs.boundary_accumulation_bytes,
        parents=parents,
        path_bytes=path,
        path_accumulation_bytes=path_gradients,
        forward_flops=forward,
        again_flops=forward - spared,
        backward_flops=np.array([costs.backward_flops(chunk.start, chunk.num_tokens) for chunk in chunks]),
    )


def _targets_by_chunk(forest: Forest, chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    """A target counts where the token stands that predicts it; one at a boundary, in its segment's first chunk."""
    counts = np.zeros(len(chunks), dtype=np.int64)
    for index, chunk in enumerate(chunks):
        predecessors = forest.segments[chunk.segment].predecessors
        first = chunk.first if chunk.first else -1
        low, high = np.searchsorted(predecessors, [first, chunk.first + chunk.num_tokens])
        counts[index] = high - low
    return counts


@dataclass(frozen=True, slots=True)
class _Entry:
    """One visit's line in the ledger."""

    transient_bytes: float = 0.0
    first_flops: float = 0.0
    again_flops: float = 0.0
    backward_flops: float = 0.0
    evaluated_tokens: int = 0
    passed_bytes: float = 0.0
    num_passes: int = 0


class _Walk:
    """What is held, as the walk goes on."""

    def __init__(self, facts: ChunkFacts, costs: ModelCosts, way: Way) -> None:
        self._costs = costs
        self._way = way
        self._sizes: list[int] = facts.num_tokens.tolist()
        self._targets: list[int] = facts.num_targets.tolist()
        self._parents: list[int] = facts.parents.tolist()
        self._states: list[float] = facts.state_bytes.tolist()
        self._gradients: list[float] = facts.accumulation_bytes.tolist()
        self._boundary_gradients: list[float] = facts.boundary_accumulation_bytes.tolist()
        self._paths: list[float] = facts.path_bytes.tolist()
        self._path_gradients: list[float] = facts.path_accumulation_bytes.tolist()
        self._forward: list[float] = facts.forward_flops.tolist()
        self._again: list[float] = facts.again_flops.tolist()
        self._pushed: list[float] = facts.backward_flops.tolist()
        self._capture_bytes = facts.bytes_of(costs.capture)
        self._graph_bytes = facts.bytes_of(costs.layer_graph if way.recompute_layers else costs.graph)
        self._backward_bytes = facts.bytes_of(costs.layer_backward if way.recompute_layers else costs.backward)
        self._input_bytes = costs.layer_input_bytes_per_token if way.recompute_layers else 0.0
        self._collected_bytes = 0.0
        self._boundaries: dict[int, float] = {}  # collected gradients of boundary states, by chunk
        self._kept: set[int] = set()
        self.stored_bytes = 0.0
        self.graph_bytes = 0.0

    def begin(self, visit: Visit) -> _Entry:
        """Take what a visit allocates that stays, for the visit at least."""
        match visit.kind:
            case VisitKind.CAPTURE:
                return self._capture(visit)
            case VisitKind.REPLAY | VisitKind.BACKWARD:
                return self._push(visit)
            case VisitKind.RELEASE:
                return _Entry()

    def end(self, visit: Visit) -> None:
        """Free what a visit frees."""
        chunk = visit.chunk
        if visit.kind is not VisitKind.CAPTURE:
            self.stored_bytes -= self._states[chunk]
        if visit.kind in (VisitKind.REPLAY, VisitKind.BACKWARD):
            self.stored_bytes -= self._input_bytes * self._sizes[chunk]
            self.stored_bytes -= self._gradients[chunk]
            self._collected_bytes -= self._gradients[chunk]
            self.stored_bytes -= self._boundaries.pop(chunk, 0.0)

    def _capture(self, visit: Visit) -> _Entry:
        chunk = visit.chunk
        transient = self._capture_bytes[chunk]
        self.stored_bytes += self._states[chunk]
        if visit.keep_graph:
            self._kept.add(chunk)
            self.graph_bytes += self._graph_bytes[chunk]
            self.stored_bytes += self._input_bytes * self._sizes[chunk]
            transient = max(0.0, transient - self._graph_bytes[chunk])
        return _Entry(
            transient_bytes=transient,
            first_flops=self._forward[chunk],
            evaluated_tokens=self._sizes[chunk],
            passed_bytes=self._paths[chunk],
            num_passes=1,
        )

    def _push(self, visit: Visit) -> _Entry:
        costs, chunk = self._costs, visit.chunk
        graph, num_targets, size = self._graph_bytes[chunk], self._targets[chunk], self._sizes[chunk]
        is_first, was_kept = visit.kind is VisitKind.REPLAY, chunk in self._kept
        if was_kept:
            self._kept.remove(chunk)
            self.graph_bytes -= graph
        else:
            self.stored_bytes += self._input_bytes * size
        grown = self._collect(chunk)
        head = costs.head_bytes(min(num_targets, self._way.head_rows))
        extra = num_targets * costs.row_bytes + max(self._backward_bytes[chunk], head)
        forward, again = self._forward[chunk], self._again[chunk]
        head_flops = num_targets * costs.head_flops_per_target
        num_again = self._way.recompute_layers + (not is_first and not was_kept)
        num_walks = is_first + 1 + (0 if self._way.keep_attended and not is_first else num_again)
        return _Entry(
            transient_bytes=max(graph + extra - grown, extra),  # the graph shrinks while the path's gradients are made
            first_flops=head_flops + (forward if is_first else 0.0),
            again_flops=num_again * (forward if is_first else again),
            backward_flops=self._pushed[chunk] + costs.backward_over_forward * head_flops,
            evaluated_tokens=0 if was_kept else size,
            passed_bytes=num_walks * self._paths[chunk] + 2 * self._path_gradients[chunk],
            num_passes=is_first + num_again + 2,
        )

    def _collect(self, chunk: int) -> float:
        """Bytes of gradients that a chunk's backward makes room for, on its path."""
        parent = self._parents[chunk]
        grown = max(0.0, self._path_gradients[chunk] + self._gradients[chunk] - self._collected_bytes)
        self._collected_bytes += grown
        if parent >= 0 and parent not in self._boundaries:
            self._boundaries[parent] = self._boundary_gradients[parent]
            grown += self._boundaries[parent]
        self.stored_bytes += grown
        return grown


def make_ledger(facts: ChunkFacts, costs: ModelCosts, visits: Sequence[Visit], way: Way) -> Ledger:
    """Walk the visits and write down what each holds and does."""
    walk = _Walk(facts, costs, way)
    entries: list[_Entry] = []
    graphs, stored = np.zeros(len(visits)), np.zeros(len(visits))
    for at, visit in enumerate(visits):
        entries.append(walk.begin(visit))
        graphs[at], stored[at] = walk.graph_bytes, walk.stored_bytes
        walk.end(visit)
    work = Work(
        forward_flops=sum(entry.first_flops for entry in entries),
        recompute_flops=sum(entry.again_flops for entry in entries),
        backward_flops=sum(entry.backward_flops for entry in entries),
        evaluated_tokens=sum(entry.evaluated_tokens for entry in entries),
    )
    return Ledger(
        visits=tuple(visits),
        transient_bytes=np.array([entry.transient_bytes for entry in entries]),
        graph_bytes=graphs,
        stored_bytes=stored,
        flops=np.array([entry.first_flops + entry.again_flops + entry.backward_flops for entry in entries]),
        passed_bytes=np.array([entry.passed_bytes for entry in entries]),
        num_passes=np.array([entry.num_passes for entry in entries]),
        work=work,
    )
