"""What a step over long contexts takes, asked before it is run: forests, always-held bytes, memory by purpose, and the
longest prompt that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.common.errors import ConfigError
from services.common.types import VersionSpan
from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.ledger import chunk_facts
from services.trainer.tree.plan import Mode, ModeChoice, Plan, PlanOptions, PrefixGradient, VisitKind, make_plan
from services.trainer.types import Node

_MAX_CHUNKS = 4096
"""Chunks of the longest path in the plans that are looked at first: making a plan takes time for each chunk."""
_MAX_PROMPT_TOKENS = 1 << 31
_NUM_REFINEMENTS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A group of runs that answer one prompt, all tokens of the answers targets."""

    prompt_tokens: int
    response_tokens: int
    group_size: int

    def nodes(self, vocab_size: int = 1, seed: int = 0) -> tuple[Node, ...]:
        """Random tokens. The engine's log-probabilities are those of a uniform choice."""
        rng = np.random.default_rng(seed)
        prompt = self._node(-1, -1, rng.integers(0, vocab_size, self.prompt_tokens), 0.0)
        answers = (
            self._node(0, run, rng.integers(0, vocab_size, self.response_tokens), -float(np.log(vocab_size)))
            for run in range(self.group_size)
        )
        return prompt, *answers

    def _node(self, parent: int, run: int, ids: np.ndarray[tuple[int], np.dtype[np.int64]], logprob: float) -> Node:
        is_target = run >= 0
        return Node(
            parent=parent,
            run=run,
            token_ids=ids.astype(np.int32),
            target_mask=np.full(len(ids), is_target),
            logprobs=np.full(len(ids), logprob, dtype=np.float32),
            version_spans=(VersionSpan(0, len(ids)),) if is_target else (),
        )


@dataclass(frozen=True, slots=True)
class AlwaysHeld:
    """Bytes on one rank whatever the context."""

    weights: float
    gradients: float
    """Of what is trained."""
    optimizer: float
    """Its moments, and master weights that are kept beside the weights."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """The most bytes that each purpose takes during a step; not all at once."""

    states: float
    """Of the chunks on one path, and what attention gave where it is kept."""
    gradients: float
    """Collected for these states."""
    graph: float
    """Of the largest chunk that is pushed back."""
    backward: float
    """Beside its graph meanwhile; or the head's, where that is more."""
    head: float
    """Logits of one piece, and the hidden states of a chunk's targets."""


def plan_longctx(forest: Forest, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Plan:
    """``make_plan``, with very many small chunks only where nothing else fits.

    Raises:
        ConfigError: nothing fits, or the model cannot do what is asked.
    """
    smallest = min(options.max_chunk_tokens, max(options.min_chunk_tokens, forest.longest_path // _MAX_CHUNKS))
    try:
        return make_plan(forest, costs, budget, replace(options, min_chunk_tokens=smallest))
    except ConfigError:
        if smallest == options.min_chunk_tokens:
            raise
        return make_plan(forest, costs, budget, options)


def memory_parts(forest: Forest, plan: Plan, costs: ModelCosts, prefix_gradient: PrefixGradient) -> MemoryParts:
    """By purpose, for one rank."""
    chunks = plan.chunks
    if plan.mode is Mode.PACK:
        rows = min(plan.head_rows, forest.num_targets)
        head = costs.head_bytes(rows) + forest.num_targets * costs.row_bytes
        return MemoryParts(0.0, 0.0, plan.predicted.live_bytes - costs.constant_bytes - head, 0.0, head)
    facts = chunk_facts(forest, costs, chunks, prefix_gradient, keep_attended=plan.keep_attended)
    states, gradients = np.zeros(len(chunks)), np.zeros(len(chunks))
    for index, parent in enumerate(facts.parents.tolist()):
        states[index] = facts.state_bytes[index] + (states[parent] if parent >= 0 else 0.0)
        gradients[index] = facts.accumulation_bytes[index] + (gradients[parent] if parent >= 0 else 0.0)
    pushed = [v.chunk for v in plan.visits if v.kind in (VisitKind.REPLAY, VisitKind.BACKWARD)]
    sizes = [(int(facts.num_tokens[chunk]), int(facts.page_tokens[chunk])) for chunk in pushed]
    num_targets = int(facts.num_targets.max(initial=0))
    of_graph = costs.layer_graph if plan.recompute_layers else costs.graph
    of_backward = costs.layer_backward if plan.recompute_layers else costs.backward
    graph = max((of_graph.at(*size) for size in sizes), default=0.0)
    backward = max((of_backward.at(*size) for size in sizes), default=0.0)
    head = costs.head_bytes(min(num_targets, plan.head_rows)) + num_targets * costs.row_bytes
    return MemoryParts(
        states=float(states.max(initial=0.0)),
        gradients=float(gradients.max(initial=0.0) + facts.boundary_accumulation_bytes.max(initial=0.0)),
        graph=graph,
        backward=backward,
        head=head,
    )


# The longest prompt


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest prompt that was found to fit."""

    prompt_tokens: int
    plan: Plan


def longest_prompt(shape: Shape, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Longest | None:
    """The longest prompt for which a plan fits, by prediction, to about 2%; None: not even one token.

    ``shape.prompt_tokens`` does not matter.

    Raises:
        ConfigError: the device's memory has no limit.
    """
    if budget.live_bytes is None or (costs.state_bytes_per_token and None in (budget.host_bytes, budget.disk_bytes)):
        raise ConfigError(
            "without a limit on memory every prompt fits.", "Give --memory (and sizes for the other places of states)."
        )
    best = None if options.mode is ModeChoice.PACK else _longest_walk(shape, costs, budget, options)
    if options.mode is not ModeChoice.WALK and costs.can_pack and options.prefix_gradient is PrefixGradient.EXACT:
        limit = options.max_pack_tokens if options.mode is ModeChoice.AUTO else _MAX_PROMPT_TOKENS
        packing = replace(options, mode=ModeChoice.PACK)
        packed = _search(shape, costs, budget, packing, guess=min(limit, 1 << 16))
        if packed is not None and (best is None or packed.prompt_tokens > best.prompt_tokens):
            best = packed
    return best


def _longest_walk(shape: Shape, costs: ModelCosts, budget: Budget, options: PlanOptions) -> Longest | None:
    """By chunks of the size that promises most: the plans of all sizes would take minutes for millions of tokens."""
    options = replace(options, mode=ModeChoice.WALK)
    sizes = [options.max_chunk_tokens]
    while sizes[-1] > options.min_chunk_tokens:
        sizes.append(max(options.min_chunk_tokens, sizes[-1] // 2))
    promised = [_promised_tokens(size, shape, costs, budget, options) for size in sizes]
    most = max(promised)
    size, guess = next((s, p) for s, p in zip(sizes, promised, strict=True) if p >= 0.99 * most)
    found = _search(
        shape, costs, budget, replace(options, min_chunk_tokens=min(size, options.max_chunk_tokens)), int(guess)
    )
    return found if found is not None else _search(shape, costs, budget, options, 1)


def _promised_tokens(size: int, shape: Shape, costs: ModelCosts, budget: Budget, options: PlanOptions) -> float:
    """Roughly how many tokens of a path find room with chunks of one size."""
    most = 0.0
    gradient = costs.accumulation_bytes_per_token if options.prefix_gradient is PrefixGradient.EXACT else 0.0
    per_token = costs.state_bytes_per_token + gradient + costs.boundary_bytes / size
    rows = min(options.head_rows, size, shape.response_tokens)
    for graph, backward, inputs in (
        (costs.graph, costs.backward, 0.0),
        (costs.layer_graph, costs.layer_backward, costs.layer_input_bytes_per_token * size),
    ):
        needed = costs.constant_bytes + graph.at(size, size) + max(backward.at(size, size), costs.head_bytes(rows))
        room = (budget.live_bytes or 0) - needed
        if room > 0:
            room += (budget.host_bytes or 0) + (budget.disk_bytes or 0) - inputs
            most = max(most, room / per_token if per_token else float(_MAX_PROMPT_TOKENS))
    return min(most, float(_MAX_PROMPT_TOKENS))


def _search(shape: Shape, costs: ModelCosts, budget: Budget, options: PlanOptions, guess: int) -> Longest | None:
    """From a guess to the longest prompt that fits."""

    def fitting(num_tokens: int) -> Longest | None:
        forest = make_forest(replace(shape, prompt_tokens=num_tokens).nodes())
        try:
            return Longest(num_tokens, make_plan(forest, costs, budget, options))
        except ConfigError:
            return None

    low, high = None, None  # the longest that fits, the shortest that does not
    at = max(1, guess)
    for _ in range(64):
        found = fitting(at)
        if found is not None:
            low = found
        else:
            high = at
        if (found is None and at == 1) or at >= _MAX_PROMPT_TOKENS:
            break
        if low is not None and high is not None:
            break
        at = max(1, int(at * 0.9)) if found is None else min(_MAX_PROMPT_TOKENS, max(at + 1, int(at * 1.1)))
    if low is None or high is None:
        return low
    for _ in range(_NUM_REFINEMENTS):
        if high - low.prompt_tokens <= max(1, low.prompt_tokens // 64):
            break
        found = fitting((low.prompt_tokens + high) // 2)
        if found is not None:
            low = found
        else:
            high = (low.prompt_tokens + high) // 2
    return low
