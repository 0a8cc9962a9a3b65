"""Attention over a packed tree, node by node: each node's queries meet the keys of its path and no others.

Compared with one row-wide tree mask it spares the scores between nodes that do not see each other, and the mask of
T x T. It plugs into Hugging Face's attention interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.trainer.packing import Pack

NAME = "tidegate_tree"


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Where the nodes of a pack lie and what they see."""

    sizes: tuple[int, ...]
    """Tokens of each node that has any."""
    paths: tuple[tuple[int, ...], ...]
    """For each of those nodes the nodes from its root to itself, as indices into ``sizes``."""
    masks: tuple[Tensor | None, ...]
    """For each node bool ``[own, path]``; None for a root, which is plainly causal."""


def make_layout(pack: Pack, device: torch.device) -> TreeLayout:
    """The layout of a pack, on the model's device."""
    counts = np.diff(pack.node_starts)
    place: dict[int, int] = {}
    paths: list[tuple[int, ...]] = []
    by_node: list[tuple[int, ...]] = []  # the path of every node, empty nodes left out
    masks: list[Tensor | None] = []
    sizes: list[int] = []
    for node, parent in enumerate(pack.parents):
        above = by_node[parent] if parent >= 0 else ()
        size = int(counts[node])
        if size == 0:
            by_node.append(above)
            continue
        place[node] = len(sizes)
        before = sum(sizes[other] for other in above)
        sizes.append(size)
        by_node.append((*above, place[node]))
        paths.append(by_node[-1])
        masks.append(
            torch.ones(size, before + size, dtype=torch.bool, device=device).tril(diagonal=before) if before else None
        )
    return TreeLayout(tuple(sizes), tuple(paths), tuple(masks))


def register() -> None:
    """Make the attention known to transformers as ``NAME``. Registering again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention function. ``query`` ``[1, heads, T, head]``, ``key`` and ``value`` with their own
    number of heads; the result ``[1, T, heads, head]``. Without ``tree`` the row is one causal sequence.

    Raises:
        ValueError: the model wants something of its attention that is not computed here.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or dropout:
        raise ValueError(f"attention with {', '.join(unknown) or 'a mask or dropout'} is not supported")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if tree is None:
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    queries, keys, values = (tensor.split(tree.sizes, dim=2) for tensor in (query, key, value))
    parts = []
    for own, path, mask in zip(queries, tree.paths, tree.masks, strict=True):
        path_keys = torch.cat([keys[node] for node in path], dim=2) if len(path) > 1 else keys[path[0]]
        path_values = torch.cat([values[node] for node in path], dim=2) if len(path) > 1 else values[path[0]]
        parts.append(
            functional.scaled_dot_product_attention(
                own, path_keys, path_values, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None
