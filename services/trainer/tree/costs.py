"""What a model costs: bytes and floating point operations, measured by ``probe`` or computed from a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes as a function of a chunk of ``n`` tokens whose path has pages of at most ``p`` tokens."""

    base: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    """For each pair of a token of the chunk and a token of the longest page."""

    def at(self, num_tokens: int, page_tokens: int) -> float:
        return self.base + num_tokens * (self.per_token + page_tokens * self.per_pair)


@dataclass(frozen=True, slots=True)
class PairCost:
    """Work of token mixing that grows with the number of positions that a token sees."""

    flops_per_pair: float
    """Forward, summed over the layers that see this far."""
    visible: int | None = None
    """Most positions that a token sees, itself included (a window, a top-k); None: all before it."""

    def flops(self, start: int, num_tokens: int) -> float:
        """Forward of the tokens at positions ``start`` to ``start + num_tokens``, each seeing itself and back."""
        end = start + num_tokens
        limit = end if self.visible is None else min(end, self.visible)
        growing = max(0, min(end, limit) - start)  # tokens that still see everything before them
        pairs = growing * (start + 1) + growing * (growing - 1) // 2 + (num_tokens - growing) * limit
        return self.flops_per_pair * pairs


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Bytes and work of one model on one rank. Zeros stand for what costs nothing."""

    constant_bytes: float = 0.0
    """Weights, their gradients, and whatever else lives on the device all the time."""
    state_bytes_per_token: float = 0.0
    """States that later tokens read: keys and values, latents, index keys, recorded choices."""
    accumulation_bytes_per_token: float = 0.0
    """Collected gradients of those that have one."""
    boundary_bytes: float = 0.0
    """States at the end of a chunk: recurrent, convolution, last hidden state."""
    boundary_accumulation_bytes: float = 0.0
    capture: ChunkBytes = ChunkBytes()
    """Most that a forward without autograd holds beside the states."""
    graph: ChunkBytes = ChunkBytes()
    """What a forward with autograd leaves behind for its backward, beside the states."""
    backward: ChunkBytes = ChunkBytes()
    """Most that a forward with autograd and its backward hold beyond ``graph``."""
    layer_inputs: ChunkBytes = ChunkBytes()
    """As ``graph``, where only each layer's input is kept (``recompute_layers``)."""
    layer_backward: ChunkBytes = ChunkBytes()
    """As ``backward``, with ``recompute_layers``: one layer's graph is in it."""
    pack: ChunkBytes = ChunkBytes()
    """Most that one forward and backward over a packed row holds, without the head; its one page is the row."""
    can_pack: bool = False
    """All token mixers are attention, so a tree mask separates the branches of one row."""
    head_base_bytes: float = 0.0
    head_bytes_per_row: float = 0.0
    """Most that the head holds for one row of logits."""
    flops_per_token: float = 0.0
    """Forward of one token without the head and without what ``pairs`` counts."""
    head_flops_per_target: float = 0.0
    pairs: tuple[PairCost, ...] = ()

    def forward_flops(self, start: int, num_tokens: int) -> float:
        """Forward of the tokens at ``start`` to ``start + num_tokens`` of a path, without the head."""
        return num_tokens * self.flops_per_token + sum(pair.flops(start, num_tokens) for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may use on one rank. None: as much as it wants."""

    live_bytes: int | None = None
    """On the device: weights, activations, and the states that lie there. On a CPU the memory as a whole."""
    host_bytes: int | None = 0
    """States and layer inputs in host memory, beside an accelerator."""
    disk_bytes: int | None = 0
    """States in files."""
