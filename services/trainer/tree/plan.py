"""The plan of a step: chunks, the order in which they are visited, and what that needs. Pure and deterministic, so
all ranks that hold the same forest and the same costs execute the same plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from services.common.errors import ConfigError
from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.forest import Forest
from services.trainer.tree.ledger import ChunkFacts, Ledger, Way, Work, chunk_facts, make_ledger
from services.trainer.tree.predict import Prediction, place, with_ratios
from services.trainer.tree.visits import Chunk, PrefixGradient, Visit, VisitKind, cut_chunks, list_visits

__all__ = [
    "Chunk",
    "Mode",
    "ModeChoice",
    "Plan",
    "PlanOptions",
    "Prediction",
    "PrefixGradient",
    "Recompute",
    "Visit",
    "VisitKind",
    "cut_chunks",
    "list_visits",
    "make_plan",
]

_HEAD_BYTES = 64 << 20
"""A chunk of logits may take this much even where nothing else does."""


class Mode(StrEnum):
    """How a batch is evaluated."""

    PACK = "pack"
    """The whole forest in one forward and backward, its branches kept apart."""
    WALK = "walk"
    """Chunk by chunk."""


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
    """Chunks but one of a segment are multiples of it."""
    max_pack_tokens: int = 65536
    """``auto`` packs no larger forest."""
    head_rows: int = 1024
    """Most targets whose logits are held at once; fewer where memory is short."""
    spare_share: float = 0.02
    """Part of the device's budget that plans leave free, since predictions err."""


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
    """Choose how to execute a step over ``forest`` within ``budget``: the fastest way that fits, by prediction.

    Packing comes first. A walk takes chunks as large as they fit, keeps graphs and what attention gave while there is
    room, and evaluates layers one at a time where whole chunks would be too small.

    Raises:
        ConfigError: nothing fits, or the model cannot do what is asked.
    """
    given = budget
    if budget.live_bytes is not None:
        budget = replace(budget, live_bytes=int(budget.live_bytes * (1 - options.spare_share)))
    packed = _pack(forest, costs, budget, options) if options.mode is not ModeChoice.WALK else None
    if packed is not None and (options.mode is ModeChoice.PACK or _fits(packed, budget)):
        return packed
    best: Plan | None = None
    least: Plan | None = None  # the one that needs the least of the device, to be named if none fits
    for candidate in _walks(forest, costs, budget, options):
        if _fits(candidate, budget):
            if best is None or candidate.predicted.seconds < best.predicted.seconds:
                best = candidate
        elif least is None or _need(candidate) < _need(least):
            least = candidate
    if best is None:
        assert least is not None
        raise _nothing_fits(least, costs, given, options)
    return best


# Mode pack


def _pack(forest: Forest, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Plan | None:
    """The plan of one pass over the packed forest; None if ``auto`` has to do without."""
    is_detached = options.prefix_gradient is PrefixGradient.DETACHED
    can = costs.can_pack and not is_detached
    if options.mode is ModeChoice.AUTO and (not can or forest.num_tokens > options.max_pack_tokens):
        return None
    if not can:
        what = "detaching the shared segments" if is_detached else "a model whose layers are not all attention"
        raise ConfigError(f"mode pack does not serve {what}.", "Set the mode to walk or auto.")
    longest = max((segment.num_tokens for segment in forest.segments), default=1)
    chunks = cut_chunks(forest, longest)
    packed = costs.pack.at((segment.start, segment.num_tokens) for segment in forest.segments)
    rows = _head_rows(costs, budget, options, packed)
    peak = costs.constant_bytes + packed
    peak += costs.head_bytes(min(rows, forest.num_targets)) + forest.num_targets * costs.row_bytes
    forward = sum(costs.forward_flops(chunk.start, chunk.num_tokens) for chunk in chunks)
    backward = sum(costs.backward_flops(chunk.start, chunk.num_tokens) for chunk in chunks)
    head = forest.num_targets * costs.head_flops_per_target
    work = Work(forward + head, 0.0, backward + costs.backward_over_forward * head, forest.num_tokens)
    speeds = costs.speeds
    predicted = with_ratios(
        Prediction(
            live_bytes=int(peak),
            work=work,
            seconds=work.flops / speeds.flops_per_s + 3 * costs.weight_bytes / speeds.memory_bytes_per_s,
        ),
        forest,
        costs,
    )
    plan = Plan(Mode.PACK, chunks, (), False, rows, predicted, f"one pass over {forest.num_tokens:,} packed tokens")
    if options.mode is ModeChoice.PACK and not _fits(plan, budget):
        raise ConfigError(
            f"the packed forest of {forest.num_tokens:,} tokens needs {_size(peak)}; the budget is "
            f"{_size(budget.live_bytes or 0)}.",
            "Set the mode to walk or auto, raise the memory budget, or train fewer runs at once.",
        )
    return plan


# Mode walk


def _walks(forest: Forest, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Iterator[Plan]:
    """Plans worth comparing, whether they fit or not."""
    sizes = _chunk_sizes(forest, options)
    keeps_attended = (False, True) if costs.attended_bytes_per_token else (False,)
    for recompute_layers in (False, True):
        is_resident = False
        for keep_attended in keeps_attended:
            least_s = math.inf
            for size in sizes:
                backward = costs.layer_backward if recompute_layers else costs.backward
                rows = _head_rows(costs, budget, options, backward.at(size, size))
                way = Way(recompute_layers, keep_attended, rows)
                plan = _walk(forest, costs, budget, options, size, way)
                yield plan
                if _fits(plan, budget):
                    is_resident |= plan.predicted.store_limit_bytes is None
                    if is_resident or plan.predicted.seconds > least_s:
                        break  # smaller chunks would only pass over the path more often
                    least_s = plan.predicted.seconds
        if is_resident:
            return  # layers one at a time would only add work


def _chunk_sizes(forest: Forest, options: PlanOptions) -> list[int]:
    """From the largest to the smallest, each about half of the one before."""
    step = options.alignment_tokens
    longest = max((segment.num_tokens for segment in forest.segments), default=1)
    largest = max(step, options.max_chunk_tokens // step * step)
    size = min(largest, -(-longest // step) * step)
    smallest = min(size, -(-options.min_chunk_tokens // step) * step)
    sizes = [size]
    while size > smallest:
        size = max(smallest, -(-size // 2 // step) * step)
        sizes.append(size)
    return sizes


def _walk(forest: Forest, costs: ModelCosts, budget: Budget, options: PlanOptions, size: int, way: Way) -> Plan:
    chunks = cut_chunks(forest, size, options.alignment_tokens)
    facts = chunk_facts(forest, costs, chunks, options.prefix_gradient, keep_attended=way.keep_attended)
    visits = list_visits(forest, chunks, options.prefix_gradient)
    ledger = make_ledger(facts, costs, visits, way)
    kept = _kept_chunks(facts, costs, budget, options, ledger, way)
    if kept:
        visits = list_visits(forest, chunks, options.prefix_gradient, kept)
        ledger = make_ledger(facts, costs, visits, way)
    placed = place(ledger, facts, costs, budget, way)
    predicted = with_ratios(replace(placed, work=ledger.work), forest, costs)
    num_pushed = sum(visit.kind is VisitKind.BACKWARD for visit in visits)
    reason = _reason(chunks, way, len(kept), num_pushed, predicted)
    return Plan(
        Mode.WALK,
        chunks,
        visits,
        way.recompute_layers,
        way.head_rows,
        predicted,
        reason,
        keep_attended=way.keep_attended,
    )


def _kept_chunks(
    facts: ChunkFacts, costs: ModelCosts, budget: Budget, options: PlanOptions, ledger: Ledger, way: Way
) -> frozenset[int]:
    """Chunks whose graphs are kept: those that keep them for the fewest visits first, while there is room."""
    pushed = {visit.chunk: at for at, visit in enumerate(ledger.visits) if visit.kind is VisitKind.BACKWARD}
    if options.recompute is Recompute.CHUNK:
        return frozenset()
    if options.recompute is Recompute.KEEP:
        return frozenset(pushed)
    captured = {visit.chunk: at for at, visit in enumerate(ledger.visits) if visit.kind is VisitKind.CAPTURE}
    room = _room(ledger, costs, budget, way)
    graphs = facts.bytes_of(costs.layer_graph if way.recompute_layers else costs.graph)
    inputs = costs.layer_input_bytes_per_token if way.recompute_layers else 0.0
    if not pushed or float(room.max()) < min(graphs[chunk] for chunk in pushed):
        return frozenset()
    kept: set[int] = set()
    for chunk in sorted(pushed, key=lambda chunk: (pushed[chunk] - captured[chunk], -chunk)):
        graph = graphs[chunk] + inputs * int(facts.num_tokens[chunk])
        during = slice(captured[chunk], pushed[chunk])  # its backward holds it anyway
        if float(room[during].min()) >= graph:
            room[during] -= graph
            kept.add(chunk)
    return frozenset(kept)


def _room(ledger: Ledger, costs: ModelCosts, budget: Budget, way: Way) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bytes that each visit leaves for kept graphs. Layer inputs may go wherever states may."""
    if budget.live_bytes is None:
        return np.full(len(ledger.visits), np.inf)
    total = float(budget.live_bytes)
    if way.recompute_layers:
        beside = [budget.host_bytes, budget.disk_bytes]
        total += sum(np.inf if tier is None else tier for tier in beside)
    return total - costs.constant_bytes - ledger.live_bytes


# Common


def _head_rows(costs: ModelCosts, budget: Budget, options: PlanOptions, beside_bytes: float) -> int:
    """As many rows as take no more than what the model's own backward takes, or a small share of the budget."""
    share = _HEAD_BYTES if budget.live_bytes is None else min(_HEAD_BYTES, budget.live_bytes // 16)
    if not costs.head_bytes_per_row:
        return options.head_rows
    rows = int((max(beside_bytes, share) - costs.head_base_bytes) / costs.head_bytes_per_row)
    return max(1, min(options.head_rows, rows))


def _fits(plan: Plan, budget: Budget) -> bool:
    predicted = plan.predicted
    used = (predicted.live_bytes, predicted.host_bytes, predicted.disk_bytes)
    limits = (budget.live_bytes, budget.host_bytes, budget.disk_bytes)
    return all(limit is None or used_bytes <= limit for used_bytes, limit in zip(used, limits, strict=True))


def _need(plan: Plan) -> tuple[int, int]:
    """What it needs of the device without the states, and of all tiers."""
    predicted = plan.predicted
    kept_there = min(predicted.stored_bytes, predicted.store_limit_bytes or 0)
    return predicted.live_bytes - kept_there, predicted.stored_bytes


def _nothing_fits(plan: Plan, costs: ModelCosts, budget: Budget, options: PlanOptions) -> ConfigError:
    needed, _ = _need(plan)
    size = max((chunk.num_tokens for chunk in plan.chunks), default=0)
    message = (
        f"no plan fits the memory: with chunks of {size:,} tokens a step needs {_size(needed)} on the device "
        f"({_size(costs.constant_bytes)} of it always) and {_size(plan.predicted.stored_bytes)} for states, "
        f"but there are {_limit(budget.live_bytes)} on the device, {_limit(budget.host_bytes)} of host memory and "
        f"{_limit(budget.disk_bytes)} on disk."
    )
    if budget.live_bytes is not None and needed > budget.live_bytes:
        hint = f"Raise the device's budget, lower min_chunk_tokens ({options.min_chunk_tokens}), "
        hint += "spread the model over more ranks, or train adapters (LoRA)."
    else:
        hint = "Raise the budget of host memory or give a folder for pages with more room, or shorten the context."
    if options.recompute is Recompute.KEEP:
        hint = "Set recompute to auto or chunk. " + hint
    return ConfigError(message, hint)


def _reason(chunks: tuple[Chunk, ...], way: Way, num_kept: int, num_pushed: int, predicted: Prediction) -> str:
    size = max((chunk.num_tokens for chunk in chunks), default=0)
    parts = [f"{len(chunks):,} chunks of at most {size:,} tokens"]
    if num_pushed:
        parts.append(f"the graphs of {num_kept:,} of {num_pushed:,} inner chunks kept")
    if way.recompute_layers:
        parts.append("layers evaluated one at a time, as whole chunks leave no room")
    if way.keep_attended:
        parts.append("the output of attention kept")
    moved = [(predicted.host_bytes, "in host memory"), (predicted.disk_bytes, "on disk")]
    where = [f"{_size(size_bytes)} {place}" for size_bytes, place in moved if size_bytes]
    if where:
        parts.append(f"{' and '.join(where)} of {_size(predicted.stored_bytes)} of states")
    return "; ".join(parts)


def _limit(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else _size(size_bytes)


def _size(size_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{int(size_bytes)} bytes"
