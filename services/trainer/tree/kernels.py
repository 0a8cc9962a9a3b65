"""Attention of some queries over one page of keys: the parts that a whole softmax row is merged from.

A row over many pages is the sum of its parts, each weighted by its share of the row's exponentials, so a page gives
its normalised output with the logarithm of that sum (online softmax, Milakov and Gimelshein 2018; FlashAttention,
Dao et al. 2022). The backward of a page needs only the merged output and the merged logarithm (ring attention, Liu et
al. 2023): the probabilities of the page are ``exp(score - lse)`` again. Pure: tensors in, tensors out, no autograd.

Three ways to the same numbers: PyTorch's fused CPU kernel; its FlashAttention on CUDA, for half precisions; matrix
products and a softmax over tiles of rows, for masks and for whatever the fused kernels do not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten
_CPU_TILE_BYTES = 16 << 20
_DEVICE_TILE_BYTES = 256 << 20
_FLASH_MAX_WIDTH = 256
_FLASH_WIDTH_STEP = 8


def attend_page(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys of one page.

    ``query [1, Hq, T, D]``, ``key [1, Hk, P, D]``, ``value [1, Hk, P, Dv]``, ``Hq`` a multiple of ``Hk`` (query head
    ``h`` reads key head ``h // (Hq / Hk)``). ``mask``: bool ``[T, P]``, true where a query sees a key. ``causal``:
    ``T == P``, a query sees the keys up to its own; it combines with a mask. Returns the output ``[1, Hq, T, Dv]`` in
    the query's type and the natural logarithm of the sum of exponentials ``[1, Hq, T]``, float32 (float64 for
    float64). A row that sees nothing: output 0, logarithm -inf.
    """
    _check(query, key, value, mask, causal)
    if mask is None and query.numel() and key.numel():
        if _takes_cpu_kernel(query):
            return _cpu_forward(query, key, value, scale, causal)
        if _takes_flash(query, value):
            return _flash_forward(query, key, value, scale, causal)
    return _tiled_forward(query, key, value, scale, mask, causal)


def attend_page_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that one page contributes, given the gradient ``grad [1, Hq, T, Dv]`` of the merged output.

    ``out [1, Hq, T, Dv]`` and ``lse [1, Hq, T]`` are those of the whole rows, merged over all pages; the rest is what
    ``attend_page`` was called with. Returns this page's share of the query's gradient, to be summed over pages, and
    the gradients of ``key`` and ``value``, each in the shape and type of its tensor.
    """
    _check(query, key, value, mask, causal)
    if mask is None and query.numel() and key.numel():
        if _takes_cpu_kernel(query):
            return _cpu_backward(grad, query, key, value, out, lse, scale, causal)
        if _takes_flash(query, value):
            return _flash_backward(grad, query, key, value, out, lse, scale, causal)
    return _tiled_backward(grad, query, key, value, out, lse, scale, mask, causal)


class Merge:
    """Joins the parts of attention rows, page by page, in any order, in float32 (float64 for float64)."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds a page's ``out [.., T, Dv]`` and ``lse [.., T]``; neither is written to."""
        dtype = accumulation_dtype(out.dtype)
        if self._out is None or self._lse is None:
            self._out = out.to(dtype, copy=True)
            self._lse = lse.to(dtype, copy=True)
            return
        lse = lse.to(dtype)
        share = torch.sigmoid(lse - self._lse).masked_fill_(lse == -torch.inf, 0.0)  # neither side may have seen a key
        self._out.lerp_(out.to(dtype), share.unsqueeze(-1))
        self._lse = torch.logaddexp(self._lse, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The merged output ``[.., T, Dv]`` and logarithm ``[.., T]``, both in the type of accumulation."""
        if self._out is None or self._lse is None:
            raise ValueError("no page has been added")
        return self._out, self._lse


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of this type are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
    num_rows, num_keys = query.shape[2], key.shape[2]
    if query.shape[0] != 1 or key.shape[0] != 1 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit: batch 1, grouped heads")
    if query.shape[3] != key.shape[3] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit")
    if causal and num_rows != num_keys:
        raise ValueError(f"a causal page needs as many queries as keys, not {num_rows} and {num_keys}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (num_rows, num_keys)):
        raise ValueError(f"the mask must be bool [{num_rows}, {num_keys}], not {mask.dtype} {tuple(mask.shape)}")


# Grouped heads and widths: the fused kernels take one width and as many key heads as query heads.


def _fold(rows: Tensor, num_heads: int) -> Tensor:
    """``[1, Hq, T, ..]`` as ``[1, Hk, G*T, ..]``: the query heads of one key head become rows of it."""
    return rows.reshape(1, num_heads, -1, *rows.shape[3:])


def _repeat(keys: Tensor, num_heads: int) -> Tensor:
    """``[1, Hk, P, d]`` as ``[1, Hq, P, d]``: a causal page cannot fold heads into rows, so it repeats the keys."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1) if keys.shape[1] != num_heads else keys


def _sum_groups(grad: Tensor, num_heads: int) -> Tensor:
    """``[1, Hq, P, d]`` as ``[1, Hk, P, d]``: the transpose of ``_repeat``, summed in the type of accumulation."""
    if grad.shape[1] == num_heads:
        return grad
    groups = grad.reshape(1, num_heads, -1, *grad.shape[2:])
    return groups.sum(dim=2, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)


def _pad(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _arrange(query: Tensor, key: Tensor, value: Tensor, width: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _pad(query, width), _pad(key, width), _pad(value, width)
    if causal:
        return query, _repeat(key, query.shape[1]), _repeat(value, query.shape[1])
    return _fold(query, key.shape[1]), key, value


def _arrange_merged(
    grad: Tensor, out: Tensor, lse: Tensor, query: Tensor, num_heads: int, width: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = _pad(grad.to(query.dtype), width), _pad(out.to(query.dtype), width)
    lse = lse.to(accumulation_dtype(query.dtype))
    if causal:
        return grad, out, lse.contiguous()
    return _fold(grad, num_heads), _fold(out, num_heads), _fold(lse, num_heads).contiguous()


def _restore(
    grads: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Brings the gradients of arranged tensors back to the shapes of the tensors."""
    grad_query = grads[0][..., : query.shape[-1]].reshape(query.shape)
    grad_key = _sum_groups(grads[1], key.shape[1])[..., : key.shape[-1]]
    grad_value = _sum_groups(grads[2], value.shape[1])[..., : value.shape[-1]]
    return grad_query, grad_key, grad_value


# CPU


def _takes_cpu_kernel(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    arranged = _arrange(query, key, value, max(query.shape[-1], value.shape[-1]), causal)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*arranged, 0.0, causal, scale=scale)
    rows = query.shape[:3]
    return out[..., : value.shape[-1]].reshape(*rows, value.shape[-1]), lse.reshape(rows)


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = max(query.shape[-1], value.shape[-1])
    grad, out, lse = _arrange_merged(grad, out, lse, query, key.shape[1], width, causal)
    arranged = _arrange(query, key, value, width, causal)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *arranged, out, lse, 0.0, causal, scale=scale
    )
    return _restore(grads, query, key, value)


# CUDA


def _takes_flash(query: Tensor, value: Tensor) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= _FLASH_MAX_WIDTH
    )


def _flash_width(query: Tensor, value: Tensor) -> int:
    return -(-max(query.shape[-1], value.shape[-1]) // _FLASH_WIDTH_STEP) * _FLASH_WIDTH_STEP


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention on CUDA.

    Written from the operator's signature; the test suite runs on CPU, so only a machine with a GPU checks it.
    """
    arranged = _arrange(query, key, value, _flash_width(query, value), causal)
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(*arranged, 0.0, causal, False, scale=scale)
    rows = query.shape[:3]
    return out[..., : value.shape[-1]].reshape(*rows, value.shape[-1]), lse.reshape(rows)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward on CUDA; its sums over rows are in no fixed order unless PyTorch is told to be
    deterministic.

    Written from the operator's signature; the test suite runs on CPU, so only a machine with a GPU checks it.
    """
    width = _flash_width(query, value)
    grad, out, lse = _arrange_merged(grad, out, lse, query, key.shape[1], width, causal)
    arranged = _arrange(query, key, value, width, causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of the dropout, which is off
    grads = _aten._scaled_dot_product_flash_attention_backward(
        grad,
        *arranged,
        out,
        lse,
        None,
        None,
        arranged[0].shape[2],
        arranged[1].shape[2],
        0.0,
        causal,
        seed,
        torch.zeros((), dtype=torch.uint64, device=query.device),
        scale=scale,
    )
    return _restore(grads, query, key, value)


# Tiles of rows


@dataclass(frozen=True, slots=True)
class _Tile:
    rows: slice
    keys: slice
    """The keys that any row of the tile sees lie in here."""
    hidden: Tensor | None
    """Bool ``[rows, keys]``, true where a row does not see a key; None: it sees all of them."""


def _tiles(query: Tensor, num_keys: int, mask: Tensor | None, causal: bool) -> Iterator[_Tile]:
    num_heads, num_rows = query.shape[1], query.shape[2]
    if not query.numel() or not num_keys:
        return
    tile_bytes = _CPU_TILE_BYTES if query.device.type == "cpu" else _DEVICE_TILE_BYTES
    row_bytes = num_heads * num_keys * accumulation_dtype(query.dtype).itemsize
    step = max(1, tile_bytes // row_bytes)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        keys = slice(0, rows.stop if causal else num_keys)
        visible = None if mask is None else mask[rows, keys]
        if causal:
            seen = torch.ones(rows.stop - first, keys.stop, dtype=torch.bool, device=query.device).tril_(first)
            visible = seen if visible is None else visible & seen
        if visible is None:
            yield _Tile(rows, keys, None)
            continue
        columns = visible.any(dim=0).nonzero()
        if columns.numel():
            low, high = int(columns[0]), int(columns[-1]) + 1
            yield _Tile(rows, slice(low, high), ~visible[:, low:high])


def _scores(query: Tensor, key: Tensor, tile: _Tile, scale: float) -> Tensor:
    """``[Hk, G, rows, keys]``, -inf where hidden, for ``query [Hk, G, T, D]`` and ``key [Hk, P, D]``."""
    rows = query[:, :, tile.rows] * scale
    scores = torch.matmul(rows, key[:, None, tile.keys].transpose(2, 3))
    return scores if tile.hidden is None else scores.masked_fill_(tile.hidden, -torch.inf)


def _grouped(rows: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """``[1, Hq, T, ..]`` as ``[Hk, G, T, ..]`` in the type of accumulation."""
    return rows.to(dtype).reshape(num_heads, -1, *rows.shape[2:])


def _tiled_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    num_heads = key.shape[1]
    rows, keys, values = _grouped(query, num_heads, dtype), key[0].to(dtype), value[0].to(dtype)
    out = query.new_zeros(*rows.shape[:3], value.shape[-1])
    lse = rows.new_full(rows.shape[:3], -torch.inf)
    for tile in _tiles(query, key.shape[2], mask, causal):
        scores = _scores(rows, keys, tile, scale)
        top = scores.amax(dim=-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)  # a row that sees nothing: exp(-inf - 0) = 0, not nan
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        part = torch.matmul(weights, values[:, None, tile.keys])
        out[:, :, tile.rows] = (part / total.masked_fill(total == 0, 1.0)).to(out.dtype)
        lse[:, :, tile.rows] = (total.log() + top).squeeze(-1)
    return out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])


def _tiled_backward(
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
    dtype = accumulation_dtype(query.dtype)
    num_heads = key.shape[1]
    rows, keys, values = _grouped(query, num_heads, dtype), key[0].to(dtype), value[0].to(dtype)
    grad, lse = _grouped(grad, num_heads, dtype), _grouped(lse, num_heads, dtype)
    common = (grad * _grouped(out, num_heads, dtype)).sum(dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that sees nothing anywhere: all its scores are -inf too
    grad_rows, grad_keys, grad_values = torch.zeros_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
    for tile in _tiles(query, key.shape[2], mask, causal):
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
