"""Attention of some queries over one page of keys: the parts that a whole softmax row is merged from.

A row over many pages is the sum of its parts, each weighted by its share of the row's exponentials, so a page gives
its normalised output with the logarithm of that sum (online softmax, Milakov and Gimelshein 2018; FlashAttention,
Dao et al. 2022). The backward of a page needs only the merged output and the merged logarithm (ring attention, Liu et
al. 2023): the probabilities of the page are ``exp(score - lse)`` again. Pure: tensors in, tensors out, no autograd.

Fused kernels serve what they can (``fused``), matrix products over tiles of rows the rest (``tiles``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.trainer.tree import fused
from services.trainer.tree.tiles import accumulation_dtype, tiled_backward, tiled_forward

__all__ = ["Merge", "accumulation_dtype", "attend_page", "attend_page_backward"]


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
    if query.numel() and value.numel() and fused.takes(query, value, mask):
        return fused.fused_forward(query, key, value, scale, mask, causal)
    with torch.autocast(query.device.type, enabled=False):  # its rounding would be in the forward alone
        return tiled_forward(query, key, value, scale, mask, causal)


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
    if query.numel() and value.numel() and fused.takes(query, value, mask):
        return fused.fused_backward(grad, query, key, value, out, lse, scale, mask, causal)
    with torch.autocast(query.device.type, enabled=False):
        return tiled_backward(grad, query, key, value, out, lse, scale, mask, causal)


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
