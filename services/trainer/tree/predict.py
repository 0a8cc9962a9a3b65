"""What a plan will need: the peak of each memory tier, the work, and roughly the time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.forest import Forest
from services.trainer.tree.ledger import ChunkFacts, Ledger, Way, Work

_PASSING_PAGES = 4
"""Pages of one layer for which the store leaves room when it moves pages: read ahead, in use, on their way down."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan will need on one rank."""

    live_bytes: int = 0
    """Peak on the device (on a CPU: of live tensors): constants, activations, kept graphs, and the states there."""
    host_bytes: int = 0
    """Peak of states in host memory beside an accelerator."""
    disk_bytes: int = 0
    """Peak of states in files."""
    stored_bytes: int = 0
    """Peak of states, their gradients and layer inputs, wherever they lie."""
    store_limit_bytes: int | None = None
    """What of that may lie on the device (on a CPU: in memory); the rest is moved. None: all."""
    unique_tokens: int = 0
    flat_tokens: int = 0
    """Tokens of all root-to-leaf paths as rows of their own."""
    work: Work = field(default_factory=Work)
    forwards: float = 0.0
    """The work in units of one forward of all unique tokens."""
    speedup: float = 1.0
    """Work of flattened rows with recomputed activations and the same head, over this plan's."""
    seconds: float = 0.0
    """Rough, from the speeds in the costs."""


def place(ledger: Ledger, facts: ChunkFacts, costs: ModelCosts, budget: Budget, way: Way) -> Prediction:
    """Spread the states over device, host memory and disk, in this order."""
    on_device = costs.constant_bytes + ledger.transient_bytes + ledger.graph_bytes
    stored = float(ledger.stored_bytes.max(initial=0.0))
    peak = costs.constant_bytes + float(ledger.live_bytes.max(initial=0.0))
    limit: int | None = None
    moved = 0.0
    if budget.live_bytes is not None and peak > budget.live_bytes:
        widest = costs.layer_state_bytes_per_token
        if way.recompute_layers:
            widest = max(widest, costs.layer_input_bytes_per_token / costs.num_layers)
        passing = _PASSING_PAGES * widest * int(facts.num_tokens.max(initial=0))
        needed = float(on_device.max(initial=0.0))
        limit = max(0, int(budget.live_bytes - needed))
        moved = max(0.0, stored - max(0.0, limit - passing))
        peak = needed + max(passing, min(stored, limit))
    on_host = moved if budget.host_bytes is None else min(moved, budget.host_bytes)
    on_disk = moved - on_host
    return Prediction(
        live_bytes=int(peak),
        host_bytes=int(on_host),
        disk_bytes=int(on_disk),
        stored_bytes=int(stored),
        store_limit_bytes=limit,
        seconds=_seconds(ledger, costs, stored, on_host, on_disk),
    )


def _seconds(ledger: Ledger, costs: ModelCosts, stored: float, on_host: float, on_disk: float) -> float:
    """Work, weights and the path's states, as if a path lay in the tiers as all states do at their most."""
    speeds = costs.speeds
    passed = float(ledger.passed_bytes.sum())
    weights = float(ledger.num_passes.sum()) * costs.weight_bytes
    share_host, share_disk = (on_host / stored, on_disk / stored) if stored else (0.0, 0.0)
    return (
        float(ledger.flops.sum()) / speeds.flops_per_s
        + (weights + passed) / speeds.memory_bytes_per_s
        + passed * share_host / speeds.host_bytes_per_s
        + passed * share_disk / speeds.disk_bytes_per_s
    )


def with_ratios(predicted: Prediction, forest: Forest, costs: ModelCosts) -> Prediction:
    """Set against one forward of the unique tokens, and against rows that repeat what they share."""
    unique = sum(costs.forward_flops(segment.start, segment.num_tokens) for segment in forest.segments)
    children = forest.children()
    leaves = [segment.start + segment.num_tokens for i, segment in enumerate(forest.segments) if not children[i]]
    head = forest.num_targets * costs.head_flops_per_target
    flat = sum(2 * costs.forward_flops(0, length) + costs.backward_flops(0, length) for length in leaves)
    flat += (1 + costs.backward_over_forward) * head
    flops = predicted.work.flops
    return replace(
        predicted,
        unique_tokens=forest.num_tokens,
        flat_tokens=sum(leaves),
        forwards=flops / (unique + head) if unique + head else 0.0,
        speedup=flat / flops if flops else 1.0,
    )
