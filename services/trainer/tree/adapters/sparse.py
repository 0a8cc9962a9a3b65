"""Sparse attention over latents (DeepSeek Sparse Attention): a frozen indexer chooses which positions a query sees.

Its keys are kept page by page. Which positions are chosen is not: that would outweigh the latents (2048 numbers against
576). The choice is made again whenever a chunk is evaluated, from the same keys; only for queries whose last chosen and
first refused scores are almost equal, so that another order of a sum could exchange them, is it recorded and replayed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from services.common.errors import TrainingError
from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.attention import tree_attention
from services.trainer.tree.adapters.mla import keep_latents, latent_elements
from services.trainer.tree.adapters.moe import record_routing
from services.trainer.tree.states import ChunkContext, OwnStates

NAME = "tidegate_tree_sparse"
"""Hugging Face's name for the attention that serves chunks with chosen positions."""

INDEX = "index"
"""Part of the store that holds the index keys of each token ``[T, head]``."""

NEAR_TIE = 1e-5
"""Scores nearer than this, relative to the largest chosen one, may change places when they are computed again."""

SCORES_AT_ONCE = 2**24
"""Most scores of single index heads that are held at a time (64 MiB)."""

_INDEXER_ROPE = {
    "axk2": "apply_rotary_pos_emb",
    "deepseek_v32": "apply_rotary_pos_emb",
    "glm_moe_dsa": "apply_rotary_pos_emb_interleave",
}
"""The function in an architecture's module that rotates its index keys; it need not be the one of its attention."""


class SparseAttention:
    """DeepSeek-V3.2, GLM-5 and those that took over their attention."""

    model_types = frozenset(_INDEXER_ROPE)
    is_attention_only = False  # chosen positions are those of one path

    def install(self, model: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, sparse_attention)
        model.set_attn_implementation(NAME)
        keep_latents(model)
        record_routing(model)
        for module in model.modules():
            if hasattr(module, "expand_kv") and _stand_in_mask not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_stand_in_mask, with_kwargs=True)
            if hasattr(module, "index_topk") and hasattr(module, "wq_b"):
                module.forward = functools.partial(choose_positions, module)
                module.requires_grad_(False)

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        modes = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        return tuple(
            LayerStates(
                token_elements=latent_elements(config),
                frozen_token_elements=config.index_head_dim if mode == "full" else 0,
            )
            for mode in modes[: config.num_hidden_layers]
        )


def _stand_in_mask(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The attention takes its mask apart for the indexer, which needs none here."""
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.empty(1, 1, 0, 0)
    return args, kwargs


def sparse_attention(
    module: Any,
    query: Tensor,
    key: Tensor | OwnStates,
    value: Tensor | OwnStates,
    attention_mask: Tensor | None,
    *,
    indices: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention function. ``indices`` ``[1, T, k]``: the positions that each query sees, -1 where
    fewer. ``query`` ``[1, heads, T, head]``; the result ``[1, T, heads, value head]``.

    Raises:
        ConfigError: the model wants something of its attention that is not computed here.
    """
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None
    if isinstance(key, OwnStates):
        own = replace(key, selected=indices[0].long())
        return tree_attention(module, query, own, own, attention_mask, scaling=scaling, **kwargs)
    assert isinstance(value, Tensor)
    num_keys = key.shape[2]
    visible = torch.zeros(*indices.shape[:2], num_keys + 1, dtype=torch.bool, device=key.device)
    visible.scatter_(2, indices.long().where(indices >= 0, num_keys), True)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None, :, :num_keys], scale=scaling
    )
    return out.transpose(1, 2), None


# -- the choice -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def choose_positions(
    indexer: Any,
    hidden: Tensor,
    query_latent: Tensor,
    rotation: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
) -> Tensor:
    """In place of an indexer's forward: int32 ``[1, T, k]``, the positions that each query sees, ascending, then -1
    where there are fewer. ``hidden`` ``[1, T, hidden]``, ``query_latent`` ``[1, T, q_lora_rank]``. The scores are
    those of Hugging Face's indexers, in float32; among equal ones the lower position is chosen.

    Raises:
        TrainingError: evaluated again, the chunk chooses otherwise.
    """
    query, keys, weights = _index_states(indexer, hidden, query_latent, rotation)
    layer = indexer.layer_idx
    if not isinstance(past_key_values, ChunkContext):
        if past_key_values is not None:
            keys = past_key_values.update_indexer(keys, layer)
        start = keys.shape[1] - hidden.shape[1]
        return _best(indexer, query, weights, [(0, keys[0])], start).positions[None].int()
    context = past_key_values
    context.keep(layer, INDEX, keys[0])
    query, weights = context.gather(query), context.gather(weights)
    best = _best(indexer, query, weights, context.kept(layer, INDEX), context.chunk_start)
    return settle(context, layer, _of_all_ranks(context, best))[None].int()


def _index_states(
    indexer: Any, hidden: Tensor, query_latent: Tensor, rotation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Index queries ``[T, heads, head]``, index keys ``[1, T, head]`` and the weights of the heads ``[T, heads]``."""
    rotate = getattr(sys.modules[type(indexer).__module__], _INDEXER_ROPE[indexer.config.model_type])
    rope = indexer.qk_rope_head_dim
    query = indexer.wq_b(query_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    rotated = rotate(query[..., :rope], key[..., :rope], *rotation, unsqueeze_dim=2)
    query = torch.cat((rotated[0], query[..., rope:]), dim=-1)
    key = torch.cat((rotated[1], key[..., rope:]), dim=-1)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    return query[0], key.squeeze(2), weights[0] * indexer.n_heads**-0.5


def _best(
    indexer: Any, query: Tensor, weights: Tensor, pages: Iterable[tuple[int, Tensor]], first_query: int
) -> Candidates:
    """The best positions on pages (position of the first key, keys) for queries that stand at ``first_query`` and
    after it."""
    best = Candidates(indexer.index_topk, len(query), like=weights)
    for first_key, keys in pages:
        scores = _scores(query, weights, keys, indexer.softmax_scale)
        ahead = first_query - first_key
        if ahead < len(keys) - 1:  # a query sees no key after its own
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(ahead + 1), -torch.inf)
        best.add(scores, first_key)
    return best


def _of_all_ranks(context: ChunkContext, best: Candidates) -> Candidates:
    """From what this rank's keys are for the queries of all ranks to what all keys are for the queries of this one."""
    scores, positions, refused = (context.exchange(part) for part in best.padded())
    if len(scores) == 1:
        return best
    merged = Candidates(best.num_kept, len(scores[0]), like=best.scores)
    for part in zip(scores, positions, refused, strict=True):
        merged.merge(*part)
    return merged


def _scores(query: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """float32 ``[T, P]``: the weighted sum over the heads of the positive parts of query times key."""
    num_queries, num_heads, _ = query.shape
    rows = max(1, SCORES_AT_ONCE // (num_heads * len(keys)))
    transposed = keys.float().T
    scores = query.new_empty(num_queries, len(keys), dtype=torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        for row in range(0, num_queries, rows):
            of_heads = (query[row : row + rows].float() @ transposed).mul_(scale).relu_()
            scores[row : row + rows] = (weights[row : row + rows, None] @ of_heads).squeeze(1)
    return scores.masked_fill_(scores.isnan(), -torch.inf)


class Candidates:
    """The best ``num_kept`` positions of each query among all that were added, in whatever portions they came.

    Equal scores: the lower positions stay. So the result depends on the scores alone, not on pages or on ranks.
    """

    def __init__(self, num_kept: int, num_queries: int, like: Tensor) -> None:
        """``like``: any tensor of the type and on the device of the scores."""
        self.num_kept = num_kept
        self.scores = like.new_empty(num_queries, 0)
        """``[T, <= num_kept]``, -inf for what a query must not see."""
        self.refused = like.new_full((num_queries,), -torch.inf)
        """``[T]``: the best score that is not among them."""
        self._positions = like.new_empty(num_queries, 0, dtype=torch.int64)

    @property
    def positions(self) -> Tensor:
        """int64 ``[T, <= num_kept]``, ascending, but -1 for what must not be seen."""
        return self._positions.where(self.scores > -torch.inf, -1)

    def add(self, scores: Tensor, start: int) -> None:
        """``scores`` ``[T, P]`` of the positions from ``start`` on, all of them higher than those added before."""
        positions = torch.arange(start, start + scores.shape[1], device=scores.device).expand_as(scores)
        self._append(scores, positions)
        self._shrink()

    def merge(self, scores: Tensor, positions: Tensor, refused: Tensor) -> None:
        """Take in what another one has, its pages anywhere among these (context parallelism)."""
        self._append(scores, positions.long())
        known = self.positions
        order = known.where(known >= 0, torch.iinfo(known.dtype).max).argsort(dim=1)
        self.scores, self._positions = self.scores.gather(1, order), known.gather(1, order)
        self.refused = torch.maximum(self.refused, refused)
        self._shrink()

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """What ``merge`` takes, as wide as there may be candidates: scores and positions ``[T, num_kept]``, refused
        scores ``[T]``."""
        missing = 0, self.num_kept - self.scores.shape[1]
        pad = torch.nn.functional.pad
        positions = self.positions.int()  # half of what int64 would send
        return pad(self.scores, missing, value=-torch.inf), pad(positions, missing, value=-1), self.refused

    def _append(self, scores: Tensor, positions: Tensor) -> None:
        self.scores = torch.cat((self.scores, scores), dim=1)
        self._positions = torch.cat((self._positions, positions), dim=1)

    def _shrink(self) -> None:
        scores, positions = self.scores, self._positions  # positions ascend
        if scores.shape[1] <= self.num_kept:
            return
        last = scores.topk(self.num_kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        above, equal = scores > last, scores == last
        room = self.num_kept - above.sum(dim=1, keepdim=True)
        stays = above | (equal & (equal.cumsum(dim=1) <= room))
        self.refused = torch.maximum(self.refused, scores.masked_fill(stays, -torch.inf).amax(dim=1))
        columns = stays.nonzero()[:, 1].view(len(scores), self.num_kept)
        self.scores, self._positions = scores.gather(1, columns), positions.gather(1, columns)

    def near_ties(self) -> Tensor:
        """bool ``[T]``: queries for which another order of a sum could exchange the last chosen and the first refused
        position."""
        tolerance = NEAR_TIE * self.scores.abs().amax(dim=1)
        return (self.refused > -torch.inf) & (self.scores.amin(dim=1) - self.refused <= tolerance)


# -- the same choice again --------------------------------------------------------------------------------------------


def settle(context: ChunkContext, layer: int, best: Candidates) -> Tensor:
    """int64 ``[T, k]``: the best positions, with near ties as they were chosen when the chunk was first evaluated.

    Raises:
        TrainingError: other queries chose otherwise than then.
    """
    selected = best.positions

    def near() -> Tensor:
        rows = best.near_ties().nonzero()
        return torch.cat((rows, selected[rows[:, 0]]), dim=1).int()

    ties = context.chosen(layer, "choice.ties", near).long()
    selected[ties[:, 0]] = ties[:, 1:]
    digest = _digest(selected)
    if not torch.equal(context.chosen(layer, "choice.digest", lambda: digest), digest):
        raise TrainingError(
            f"the sparse attention of layer {layer} chose other positions when the chunk at position {context.start} "
            "was evaluated again.",
            "Some kernel does not repeat its results: set torch.use_deterministic_algorithms(True) and "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8, and keep dropout off.",
        )
    return selected


def _digest(selected: Tensor) -> Tensor:
    """int64 ``[1]``: equal for equal choices, and hardly ever otherwise."""
    rows = torch.arange(len(selected), device=selected.device)[:, None]
    mixed = (selected + 1 + (rows << 32)) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)).sum().view(1)
