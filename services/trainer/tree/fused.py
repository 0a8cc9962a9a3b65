"""Attention over one page by PyTorch's fused kernels, with the logarithms that they keep for their own backward. Pure.

The kernels want one width for queries, keys and values, rows without gaps, and as many key heads as query heads. So
widths are padded with zeros, and grouped heads become either more rows of their key head or a batch in which the keys
are the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from services.trainer.tree.tiles import Tile, accumulation_dtype, additive, any_visible, row_tiles

_aten = torch.ops.aten
_TYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
_FLASH_MAX_WIDTH = 256
_FLASH_WIDTH_STEP = 8
_MASK_BYTES = 16 << 20
_MASK_ROWS = 256
"""Few enough that a tile of a sliding window is cut to little more than the window."""


def takes(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether ``fused_forward`` and ``fused_backward`` serve these tensors on their device."""
    if query.dtype not in _TYPES.get(query.device.type, ()):
        return False
    if query.device.type == "cpu":
        return True
    return mask is None and max(query.shape[-1], value.shape[-1]) <= _FLASH_MAX_WIDTH and _has_flash(query.device)


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """See ``kernels.attend_page``; no tensor may be empty."""
    if query.device.type == "cuda":
        return _flash_forward(query, key, value, scale, causal)
    width = max(query.shape[-1], value.shape[-1])
    rows, keys, values = _aligned(query, width), _aligned(key, width), _aligned(value, width)
    if mask is None and not causal:
        rows = _fold(rows, key.shape[1])
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, scale=scale)
        return out[..., : value.shape[-1]].reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])
    rows, keys, values = _batch(rows, key.shape[1]), _share(keys, query), _share(values, query)
    if mask is None:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, 0.0, True, scale=scale)
    else:
        out, lse = _masked_forward(rows, keys, values, scale, mask, causal)
    return _unbatch(out)[..., : value.shape[-1]], _unbatch(lse)


def fused_backward(
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
    """See ``kernels.attend_page_backward``; no tensor may be empty."""
    lse = lse.to(accumulation_dtype(query.dtype))
    if query.device.type == "cuda":
        return _flash_backward(grad, query, key, value, out, lse, scale, causal)
    num_heads, width = key.shape[1], max(query.shape[-1], value.shape[-1])
    rows, keys, values = _aligned(query, width), _aligned(key, width), _aligned(value, width)
    grad, out = _aligned(grad.to(query.dtype), width), _aligned(out.to(query.dtype), width)
    if mask is None and not causal:
        merged = [_split(_fold(part, num_heads)) for part in (grad, rows, out, lse)]
        parts = len(merged[0])
        shared = keys.expand(parts, -1, -1, -1), values.expand(parts, -1, -1, -1)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            merged[0], merged[1], *shared, merged[2], merged[3], 0.0, False, scale=scale
        )
        grad_query = grads[0].transpose(0, 1).reshape(1, query.shape[1], -1, width)
    else:
        grad, rows, out, lse = (_batch(part, num_heads) for part in (grad, rows, out, lse))
        shared = _share(keys, query), _share(values, query)
        if mask is None:
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, rows, *shared, out, lse, 0.0, True, scale=scale
            )
        else:
            grads = _masked_backward(grad, rows, *shared, out, lse, scale, mask, causal)
        grad_query = _unbatch(grads[0])
    return (
        grad_query[..., : query.shape[-1]],
        _sum_batch(grads[1]).to(key.dtype)[..., : key.shape[-1]],
        _sum_batch(grads[2]).to(value.dtype)[..., : value.shape[-1]],
    )


def _aligned(tensor: Tensor, width: int) -> Tensor:
    """Pads the last dimension with zeros; its elements stand side by side, which the kernels take for granted."""
    missing = width - tensor.shape[-1]
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _fold(rows: Tensor, num_heads: int) -> Tensor:
    """``[1, Hq, T, ..]`` as ``[1, Hk, G*T, ..]``: the query heads of one key head become rows of it."""
    return rows.reshape(1, num_heads, -1, *rows.shape[3:])


def _split(rows: Tensor) -> Tensor:
    """``[1, H, R, ..]`` as ``[n, H, R/n, ..]``: the CPU kernel's backward uses a thread for each batch and head."""
    num_heads, num_rows = rows.shape[1], rows.shape[2]
    parts = -(-torch.get_num_threads() // num_heads)
    while num_rows % parts:
        parts -= 1
    return rows.reshape(num_heads, parts, -1, *rows.shape[3:]).transpose(0, 1)


def _batch(rows: Tensor, num_heads: int) -> Tensor:
    """``[1, Hq, T, ..]`` as ``[G, Hk, T, ..]``."""
    return rows.reshape(num_heads, -1, *rows.shape[2:]).transpose(0, 1)


def _unbatch(rows: Tensor) -> Tensor:
    """``[G, Hk, T, ..]`` as ``[1, Hq, T, ..]``."""
    return rows.transpose(0, 1).reshape(1, -1, *rows.shape[2:])


def _share(keys: Tensor, query: Tensor) -> Tensor:
    """``[1, Hk, P, d]`` as ``[G, Hk, P, d]``, the same memory for each group."""
    return keys.expand(query.shape[1] // keys.shape[1], -1, -1, -1)


def _sum_batch(grad: Tensor) -> Tensor:
    """``[G, Hk, P, d]`` as ``[1, Hk, P, d]``: what shared keys collected."""
    return grad if len(grad) == 1 else grad.sum(dim=0, keepdim=True, dtype=accumulation_dtype(grad.dtype))


def _masked_forward(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(rows)
    lse = rows.new_full(rows.shape[:3], -torch.inf, dtype=accumulation_dtype(rows.dtype))
    for tile in _mask_tiles(rows, mask, causal):
        assert tile.visible is not None  # there is a mask
        out_tile, lse_tile = _aten._scaled_dot_product_flash_attention_for_cpu(
            rows[:, :, tile.rows],
            keys[:, :, tile.keys],
            values[:, :, tile.keys],
            attn_mask=additive(tile.visible, rows.dtype),
            scale=scale,
        )
        out[:, :, tile.rows] = out_tile
        sees_none = ~any_visible(tile.visible, dim=1)
        lse[:, :, tile.rows] = lse_tile.masked_fill(sees_none, -torch.inf)  # the kernel says 0
    return out, lse


def _masked_backward(
    grad: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(rows.dtype)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that sees nothing anywhere: all its scores are -inf too
    grad_rows = torch.zeros_like(rows)
    grad_keys, grad_values = (torch.zeros_like(part[:1], dtype=dtype) for part in (keys, values))
    for tile in _mask_tiles(rows, mask, causal):
        assert tile.visible is not None  # there is a mask
        of_rows, of_keys, of_values = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, tile.rows],
            rows[:, :, tile.rows],
            keys[:, :, tile.keys],
            values[:, :, tile.keys],
            out[:, :, tile.rows],
            lse[:, :, tile.rows],
            0.0,
            False,
            attn_mask=additive(tile.visible, rows.dtype),
            scale=scale,
        )
        grad_rows[:, :, tile.rows] = of_rows
        grad_keys[:, :, tile.keys] += _sum_batch(of_keys)
        grad_values[:, :, tile.keys] += _sum_batch(of_values)
    return grad_rows, grad_keys, grad_values


def _mask_tiles(rows: Tensor, mask: Tensor, causal: bool) -> Iterator[Tile]:
    num_rows, num_keys = mask.shape
    rows_per_tile = max(1, min(_MASK_ROWS, _MASK_BYTES // (num_keys * rows.dtype.itemsize)))
    return row_tiles(num_rows, num_keys, mask, rows_per_tile, mask.device, causal=causal)


# CUDA. Written from the operators' signatures and PyTorch's use of them; the test suite runs on CPU, so only a machine
# with a GPU checks what follows.


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


def _flash_arranged(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys, values = _aligned(query, width), _aligned(key, width), _aligned(value, width)
    if not causal:
        return _fold(rows, key.shape[1]), keys, values
    groups = query.shape[1] // key.shape[1]
    return rows, keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)


def _flash_width(query: Tensor, value: Tensor) -> int:
    return -(-max(query.shape[-1], value.shape[-1]) // _FLASH_WIDTH_STEP) * _FLASH_WIDTH_STEP


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention on CUDA, not run by the test suite."""
    arranged = _flash_arranged(query, key, value, causal, _flash_width(query, value))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(*arranged, 0.0, causal, False, scale=scale)
    return out[..., : value.shape[-1]].reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward on CUDA, not run by the test suite.

    It sums over rows in no fixed order unless PyTorch is told to be deterministic.
    """
    num_heads, width = key.shape[1], _flash_width(query, value)
    rows, keys, values = _flash_arranged(query, key, value, causal, width)
    grad, out = _aligned(grad.to(query.dtype), width), _aligned(out.to(query.dtype), width)
    if not causal:
        grad, out, lse = (_fold(part, num_heads) for part in (grad, out, lse))
    of_rows, of_keys, of_values = _aten._scaled_dot_product_flash_attention_backward(
        grad,
        rows,
        keys,
        values,
        out,
        lse.contiguous(),
        None,  # all rows are of one length
        None,
        rows.shape[2],
        keys.shape[2],
        0.0,
        causal,
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # seed and offset of a dropout that is off
        torch.zeros((), dtype=torch.uint64, device=query.device),
        scale=scale,
    )
    return (
        of_rows[..., : query.shape[-1]].reshape(query.shape),
        _sum_groups(of_keys, num_heads)[..., : key.shape[-1]],
        _sum_groups(of_values, num_heads)[..., : value.shape[-1]],
    )


def _sum_groups(grad: Tensor, num_heads: int) -> Tensor:
    """``[1, Hq, P, d]`` as ``[1, Hk, P, d]``: what repeated keys collected."""
    if grad.shape[1] == num_heads:
        return grad
    groups = grad.reshape(1, num_heads, -1, *grad.shape[2:])
    return groups.sum(dim=2, dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)
