"""What a model costs: bytes and floating point operations, measured by ``probe`` or computed from a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knot:
    """Bytes of a chunk of one size."""

    num_tokens: int
    base: float
    per_page_token: float = 0.0
    """For each token of the longest page on the chunk's path, itself included."""


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes as a function of a chunk of ``n`` tokens on whose path the longest page has ``p >= n`` tokens: linear in
    ``p``, and in ``n`` between knots and beyond them. No knots: none."""

    knots: tuple[Knot, ...] = ()
    """By ascending size."""

    @classmethod
    def linear(
        cls, base: float = 0.0, per_token: float = 0.0, per_page_token: float = 0.0, per_pair: float = 0.0
    ) -> ChunkBytes:
        """``base + n * per_token + p * (per_page_token + n * per_pair)``"""
        return cls((Knot(0, base, per_page_token), Knot(1, base + per_token, per_page_token + per_pair)))

    def at(self, num_tokens: int, page_tokens: int) -> float:
        """Never negative, whatever lies below the lowest knot."""
        if not self.knots:
            return 0.0
        above = next((i for i, knot in enumerate(self.knots) if knot.num_tokens >= num_tokens), len(self.knots) - 1)
        low, high = self.knots[max(0, above - 1)], self.knots[max(above, min(1, len(self.knots) - 1))]
        between = high.num_tokens - low.num_tokens
        share = (num_tokens - low.num_tokens) / between if between else 0.0
        base = low.base + share * (high.base - low.base)
        per_page_token = low.per_page_token + share * (high.per_page_token - low.per_page_token)
        return max(0.0, base + page_tokens * per_page_token)


@dataclass(frozen=True, slots=True)
class PackBytes:
    """Bytes of one forward and backward over a packed row, without the head."""

    base: float = 0.0
    per_token: float = 0.0
    per_path_token: float = 0.0
    """For each token of each segment's path, itself included, roots left out: what is gathered for its queries."""
    per_pair: float = 0.0
    """For each pair of a segment's token and a token of its path, roots left out: masks."""
    per_root_pair: float = 0.0
    """For each pair of tokens of a root: scores, where no fused kernel takes the model's heads."""

    def at(self, segments: Iterable[tuple[int, int]]) -> float:
        """Of a row of segments, each its first token's position on its path and its number of tokens."""
        total = self.base
        for start, num_tokens in segments:
            path = start + num_tokens
            total += num_tokens * self.per_token
            if start:
                total += path * (self.per_path_token + num_tokens * self.per_pair)
            else:
                total += num_tokens * num_tokens * self.per_root_pair
        return total


@dataclass(frozen=True, slots=True)
class PairCost:
    """Work of token mixing that grows with the number of positions that a token sees."""

    flops_per_pair: float
    """Forward, summed over the layers that see this far."""
    visible: int | None = None
    """Most positions that a token sees, itself included (a window, a top-k); None: all before it."""
    is_attended: bool = True
    """Keeping what attention gave (``Plan.keep_attended``) spares its recomputation; not so an indexer's."""
    backward_over_forward: float = 2.5
    """Attention's backward makes five products of its forward's two (FlashAttention, Dao et al. 2022)."""

    def flops(self, start: int, num_tokens: int) -> float:
        """Forward of the tokens at positions ``start`` to ``start + num_tokens``, each seeing itself and back."""
        end = start + num_tokens
        limit = end if self.visible is None else self.visible
        growing = max(0, min(end, limit) - start)  # tokens that still see everything before them
        pairs = growing * (start + 1) + growing * (growing - 1) // 2 + (num_tokens - growing) * limit
        return self.flops_per_pair * pairs


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast one rank is, for choosing among plans and for a rough forecast of time."""

    flops_per_s: float = 1e14
    memory_bytes_per_s: float = 2e12
    """The device reading its own memory."""
    host_bytes_per_s: float = 2e10
    """Between the device and host memory."""
    disk_bytes_per_s: float = 2e9


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Bytes and work of one model on one rank. Zeros stand for what costs nothing."""

    constant_bytes: float = 0.0
    """What lives on the device all the time and counts in its budget: weights, their gradients, optimizer state."""
    weight_bytes: float = 0.0
    """What a pass over a chunk reads of the weights."""
    state_bytes_per_token: float = 0.0
    """States that later tokens read: keys and values, latents, index keys, recorded choices."""
    layer_state_bytes_per_token: float = 0.0
    """The largest layer's share of it: pages come back from host memory or disk layer by layer."""
    accumulation_bytes_per_token: float = 0.0
    """Collected gradients of the states that have one."""
    boundary_bytes: float = 0.0
    """States at the end of a chunk: recurrent, convolution, last hidden state."""
    boundary_accumulation_bytes: float = 0.0
    attended_bytes_per_token: float = 0.0
    """What attention gave, where a plan keeps it (``Plan.keep_attended``)."""
    capture: ChunkBytes = ChunkBytes()
    """Most that a forward without autograd holds beside the states."""
    graph: ChunkBytes = ChunkBytes()
    """What a forward with autograd leaves behind for its backward, beside the states."""
    backward: ChunkBytes = ChunkBytes()
    """Most that a forward with autograd and its backward hold beyond ``graph``."""
    layer_input_bytes_per_token: float = 0.0
    """Inputs of all layers, which go to where the states are (``recompute_layers``)."""
    num_layers: int = 1
    layer_graph: ChunkBytes = ChunkBytes()
    """As ``graph``, with ``recompute_layers``: what stays on the device."""
    layer_backward: ChunkBytes = ChunkBytes()
    """As ``backward``, with ``recompute_layers``: one layer's graph is in it."""
    pack: PackBytes = PackBytes()
    """Most that one forward and backward over a packed row holds, without the head."""
    can_pack: bool = False
    """All token mixers are attention, so that the branches of one row can be kept apart."""
    row_bytes: float = 0.0
    """For each target of a chunk: its hidden state, and the gradient of that."""
    head_base_bytes: float = 0.0
    """Most that the head holds whatever the number of rows: the gradient of its weight."""
    head_bytes_per_row: float = 0.0
    """Most that the head holds for one row of logits."""
    flops_per_token: float = 0.0
    """Forward of one token, without the head and without what ``pairs`` counts."""
    head_flops_per_target: float = 0.0
    """Forward."""
    pairs: tuple[PairCost, ...] = ()
    backward_over_forward: float = 2.0
    """Work of a backward in units of its forward, but for ``pairs``: about 1 where the weights are frozen (LoRA)."""
    speeds: Speeds = Speeds()

    def forward_flops(self, start: int, num_tokens: int) -> float:
        """Forward of the tokens at ``start`` to ``start + num_tokens`` of a path, without the head."""
        return num_tokens * self.flops_per_token + sum(pair.flops(start, num_tokens) for pair in self.pairs)

    def backward_flops(self, start: int, num_tokens: int) -> float:
        """Backward of the same, without recomputation."""
        own = num_tokens * self.flops_per_token * self.backward_over_forward
        return own + sum(pair.flops(start, num_tokens) * pair.backward_over_forward for pair in self.pairs)

    def attended_flops(self, start: int, num_tokens: int) -> float:
        """The part of the forward that ``Plan.keep_attended`` spares a recomputation."""
        return sum(pair.flops(start, num_tokens) for pair in self.pairs if pair.is_attended)

    def head_bytes(self, num_rows: int) -> float:
        """Most that the head holds for a chunk of ``num_rows`` targets."""
        return self.head_base_bytes + num_rows * self.head_bytes_per_row if num_rows else 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may use on one rank. None: as much as it wants; 0: nothing."""

    live_bytes: int | None = None
    """On the device: weights, activations, and the states that lie there. On a CPU the memory as a whole."""
    host_bytes: int | None = 0
    """States and layer inputs in host memory, beside an accelerator."""
    disk_bytes: int | None = 0
    """States in files."""
