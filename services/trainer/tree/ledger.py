"""What a walk over chunks will hold at each visit, and the work that it will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.trainer.tree.costs import ModelCosts
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
    path_bytes: Floats
    """States of the chunks before it that it reads."""
    path_accumulation_bytes: Floats
    """Gradients of those."""
    forward_flops: Floats
    again_flops: Floats
    """Of a recomputation, which may be spared attention."""
    backward_flops: Floats


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
    per_token, per_boundary = costs.accumulation_bytes_per_token, costs.boundary_accumulation_bytes
    gradients = (is_inner & has_gradient).astype(np.float64) * (num_tokens * per_token + per_boundary)
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
        self._facts = facts
        self._costs = costs
        self._way = way
        self._graph = costs.layer_graph if way.recompute_layers else costs.graph
        self._backward = costs.layer_backward if way.recompute_layers else costs.backward
        self._input_bytes = costs.layer_input_bytes_per_token if way.recompute_layers else 0.0
        self._collected_bytes = 0.0
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
            self.stored_bytes -= float(self._facts.state_bytes[chunk])
        if visit.kind in (VisitKind.REPLAY, VisitKind.BACKWARD):
            self.stored_bytes -= self._input_bytes * int(self._facts.num_tokens[chunk])
            self.stored_bytes -= float(self._facts.accumulation_bytes[chunk])
            self._collected_bytes -= float(self._facts.accumulation_bytes[chunk])

    def _capture(self, visit: Visit) -> _Entry:
        facts, chunk = self._facts, visit.chunk
        size, page = int(facts.num_tokens[chunk]), int(facts.page_tokens[chunk])
        transient = self._costs.capture.at(size, page)
        self.stored_bytes += float(facts.state_bytes[chunk])
        if visit.keep_graph:
            graph = self._graph.at(size, page)
            self._kept.add(chunk)
            self.graph_bytes += graph
            self.stored_bytes += self._input_bytes * size
            transient = max(0.0, transient - graph)
        forward = float(facts.forward_flops[chunk])
        return _Entry(
            transient, forward, evaluated_tokens=size, passed_bytes=float(facts.path_bytes[chunk]), num_passes=1
        )

    def _push(self, visit: Visit) -> _Entry:
        facts, costs, chunk = self._facts, self._costs, visit.chunk
        size, page, num_targets = (int(a[chunk]) for a in (facts.num_tokens, facts.page_tokens, facts.num_targets))
        graph = self._graph.at(size, page)
        is_first, was_kept = visit.kind is VisitKind.REPLAY, chunk in self._kept
        if was_kept:
            self._kept.remove(chunk)
            self.graph_bytes -= graph
        else:
            self.stored_bytes += self._input_bytes * size
        path_gradients = float(facts.path_accumulation_bytes[chunk])
        grown = max(0.0, path_gradients + float(facts.accumulation_bytes[chunk]) - self._collected_bytes)
        self._collected_bytes += grown
        self.stored_bytes += grown
        head = costs.head_bytes(min(num_targets, self._way.head_rows))
        extra = num_targets * costs.row_bytes + max(self._backward.at(size, page), head)
        forward, again = float(facts.forward_flops[chunk]), float(facts.again_flops[chunk])
        head_flops = num_targets * costs.head_flops_per_target
        num_again = self._way.recompute_layers + (not is_first and not was_kept)
        num_walks = is_first + 1 + (0 if self._way.keep_attended and not is_first else num_again)
        return _Entry(
            transient_bytes=max(graph + extra - grown, extra),  # the graph shrinks while the path's gradients are made
            first_flops=head_flops + (forward if is_first else 0.0),
            again_flops=num_again * (forward if is_first else again),
            backward_flops=float(facts.backward_flops[chunk]) + costs.backward_over_forward * head_flops,
            evaluated_tokens=0 if was_kept else size,
            passed_bytes=num_walks * float(facts.path_bytes[chunk]) + 2 * path_gradients,
            num_passes=is_first + num_again + 2,
        )


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
