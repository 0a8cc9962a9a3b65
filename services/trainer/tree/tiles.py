"""Attention over one page by matrix products and a softmax, a tile of rows at a time.

It takes any mask, type and width, on any device, and never holds more than a tile of scores. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CPU_TILE_BYTES = 16 << 20
_DEVICE_TILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of a page, with the keys that they see."""

    rows: slice
    keys: slice
    """The keys that any row of the tile sees lie in here."""
    visible: Tensor | None
    """Bool ``[rows, keys]``, true where a row sees a key; None: it sees all of them."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this type are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_tiles(
    num_rows: int, num_keys: int, mask: Tensor | None, rows_per_tile: int, device: torch.device, *, causal: bool
) -> Iterator[Tile]:
    """Cuts a page into tiles and each tile to the keys that it sees; rows that see nothing may be in no tile."""
    for first in range(0, num_rows, rows_per_tile):
        rows = slice(first, min(first + rows_per_tile, num_rows))
        keys = slice(0, rows.stop if causal else num_keys)
        visible = None if mask is None else mask[rows, keys]
        if causal:
            seen = torch.ones(rows.stop - first, keys.stop, dtype=torch.bool, device=device).tril_(first)
            visible = seen if visible is None else visible & seen
        if visible is None:
            yield Tile(rows, keys, None)
            continue
        columns = any_visible(visible, dim=0).nonzero()
        if columns.numel():
            low, high = int(columns[0]), int(columns[-1]) + 1
            yield Tile(rows, slice(low, high), visible[:, low:high])


def any_visible(visible: Tensor, dim: int) -> Tensor:
    """``visible.any(dim)``, many times faster on CPU."""
    return visible.view(torch.uint8).amax(dim=dim) != 0


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a key, else -inf; made by arithmetic, which is much faster on CPU than ``masked_fill``."""
    return visible.to(dtype).sub_(1).mul_(torch.finfo(dtype).max).mul_(2)


def tiled_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """See ``kernels.attend_page``."""
    dtype = accumulation_dtype(query.dtype)
    rows, keys, values = _grouped(query, key.shape[1], dtype), key[0].to(dtype), value[0].to(dtype)
    out = query.new_zeros(*rows.shape[:3], value.shape[-1])
    lse = rows.new_full(rows.shape[:3], -torch.inf)
    for tile in _tiles(query, key, mask, causal):
        scores = _scores(rows, keys, tile, scale)
        top = scores.amax(dim=-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not nan
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        part = torch.matmul(weights, values[:, None, tile.keys])
        out[:, :, tile.rows] = (part / total.masked_fill(total == 0, 1.0)).to(out.dtype)
        lse[:, :, tile.rows] = (total.log() + top).squeeze(-1)
    return out.reshape(*query.shape[:3], value.shape[-1]), lse.reshape(query.shape[:3])


def tiled_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.attend_page_backward``."""
    dtype = accumulation_dtype(query.dtype)
    num_heads = key.shape[1]
    rows, keys, values = _grouped(query, num_heads, dtype), key[0].to(dtype), value[0].to(dtype)
    grad, lse = _grouped(grad, num_heads, dtype), _grouped(lse, num_heads, dtype)
    common = (grad * _grouped(out, num_heads, dtype)).sum(dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that sees nothing anywhere: all its scores are -inf too
    grad_rows, grad_keys, grad_values = torch.zeros_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
    for tile in _tiles(query, key, mask, causal):
        weights = _scores(rows, keys, tile, scale).sub_(lse[:, :, tile.rows, None]).exp_()
        grad_tile = grad[:, :, tile.rows]
        grad_values[:, tile.keys] += torch.einsum("hgtp,hgtd->hpd", weights, grad_tile)
        slopes = torch.matmul(grad_tile, values[:, None, tile.keys].transpose(2, 3))
        slopes.sub_(common[:, :, tile.rows, None]).mul_(weights).mul_(scale)
        grad_rows[:, :, tile.rows] = torch.matmul(slopes, keys[:, None, tile.keys])
        grad_keys[:, tile.keys] += torch.einsum("hgtp,hgtd->hpd", slopes, rows[:, :, tile.rows])
    return (
        grad_rows.reshape(query.shape).to(query.dtype),
        grad_keys[None].to(key.dtype),
        grad_values[None].to(value.dtype),
    )


def _tiles(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Iterator[Tile]:
    num_heads, num_rows, num_keys = query.shape[1], query.shape[2], key.shape[2]
    if not num_keys:
        return iter(())
    tile_bytes = _CPU_TILE_BYTES if query.device.type == "cpu" else _DEVICE_TILE_BYTES
    rows_per_tile = max(1, tile_bytes // (num_heads * num_keys * accumulation_dtype(query.dtype).itemsize))
    return row_tiles(num_rows, num_keys, mask, rows_per_tile, query.device, causal=causal)


def _scores(query: Tensor, key: Tensor, tile: Tile, scale: float) -> Tensor:
    """``[Hk, G, rows, keys]``, -inf where hidden, for ``query [Hk, G, T, D]`` and ``key [Hk, P, D]``."""
    rows = query[:, :, tile.rows] * scale
    scores = torch.matmul(rows, key[:, None, tile.keys].transpose(2, 3))
    return scores if tile.visible is None else scores.add_(additive(tile.visible, scores.dtype))


def _grouped(rows: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """``[1, Hq, T, ..]`` as ``[Hk, G, T, ..]`` in the type of accumulation."""
    return rows.to(dtype).reshape(num_heads, rows.shape[1] // num_heads, *rows.shape[2:])
