"""Attention of a chunk's queries over the pages of its path, as one step of autograd.

No whole prefix is ever a tensor of the graph. The forward walks over the pages and merges their parts; the backward
walks over them again, hands each page's gradient to the store, and adds to the gradient of the chunk's own states what
later chunks have collected for them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.tree.kernels import Merge, accumulation_dtype, attend_page, attend_page_backward
from services.trainer.tree.store import StateKey, StateStore

Expand = Callable[..., tuple[Tensor, Tensor]]
"""From a page's token states to keys ``[1, Hk, P, D]`` and values ``[1, Hk, P, Dv]``."""

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

TOKEN_STATES = "kv"
"""Part of the store that holds a chunk's token states, one page a layer."""
ATTENDED = "attended"
"""Part of the store that holds an attention's output and log-sum-exp, where they are kept."""


@dataclass(frozen=True, slots=True)
class Page:
    """A chunk on the path to another one, or the part of it whose states are here."""

    chunk: int
    start: int
    """Position of its first token."""
    num_tokens: int
    has_gradient: bool
    """Gradients of its states are collected: it will be pushed back."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Some keys and the queries that meet them."""

    page: Page | None
    """Whose keys they are; None: the chunk's own."""
    start: int
    """Position of the first key."""
    num_keys: int
    rows: slice
    """Of the queries."""
    causal: bool = False
    """The queries stand where the keys stand."""
    is_hidden: bool = False
    """No query sees any of the keys."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def pieces_of_path(path: Sequence[Page], first_query: int, num_queries: int, window: int | None) -> list[Piece]:
    """The pages before a chunk that some of its queries see, the first of which stands at ``first_query``."""
    return [
        Piece(page, page.start, page.num_tokens, slice(0, num_queries))
        for page in path
        if page.num_tokens and (window is None or first_query - (page.end - 1) < window)
    ]


@dataclass(frozen=True, slots=True)
class AttendCall:
    """What a layer's attention does for one chunk."""

    store: StateStore
    layer: int
    own_key: StateKey
    """Of the chunk's own token states."""
    pieces: tuple[Piece, ...]
    """In the end those of the chunk's own keys, of which there is at least one."""
    first_query: int
    """Position of the first query."""
    scale: float
    expand: Expand | None
    window: int | None
    selected: Tensor | None
    """Integers ``[T, k]``: the positions that each query sees, -1 where fewer."""
    autocast: Autocast
    keeps_attended: bool

    def forward(self, query: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Output ``[1, Hq, T, Dv]`` in the query's type and log-sum-exp ``[1, Hq, T]``, kept if they are to be."""
        key = StateKey(self.own_key.chunk, self.layer, ATTENDED)
        if self.keeps_attended and self.store.has(key):
            out, lse = self.store.get(key)
            return out, lse
        merged, lse = self.attend(query, own)
        out = merged.to(query.dtype)
        if self.keeps_attended:
            self.store.put(key, (out, lse), needs_gradient=False)
        return out, lse

    def attend(self, query: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over all pieces, in the type of accumulation."""
        merge = Merge()
        for piece, mask, states in self.walk(own):
            keys, values = self.keys_and_values(states)
            part = attend_page(query[:, :, piece.rows], keys, values, self.scale, mask=mask, causal=piece.causal)
            merge.add(*_spread(*part, piece.rows, query.shape[2]))
        return merge.result()

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, own: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the queries and of the chunk's own states, in the type of accumulation; those of the pages go
        to the store. ``out`` and ``lse``: of the whole rows.
        """
        of_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
        of_own = [torch.zeros_like(state, dtype=accumulation_dtype(state.dtype)) for state in own]
        for piece, mask, states in self.walk(own):
            of_rows, of_states = self._piece_backward(piece, mask, states, grad, query, out, lse)
            of_query[:, :, piece.rows] += of_rows
            if piece.page is None:
                for total, part in zip(of_own, of_states, strict=True):
                    total += part
            elif piece.page.has_gradient:
                self.store.add_gradient(StateKey(piece.page.chunk, self.layer, TOKEN_STATES), of_states)
        return of_query, of_own

    def collected(self) -> tuple[Tensor, ...] | None:
        """What later chunks have collected for the chunk's own states."""
        return self.store.gradient(self.own_key) if self.store.has(self.own_key) else None

    def walk(self, own: tuple[Tensor, ...]) -> Iterator[tuple[Piece, Tensor | None, tuple[Tensor, ...]]]:
        """Each piece with its mask and its token states, the next page read ahead."""
        for index, piece in enumerate(self.pieces):
            following = self.pieces[index + 1].page if index + 1 < len(self.pieces) else None
            if following is not None:
                self.store.prefetch(StateKey(following.chunk, self.layer, TOKEN_STATES))
            mask = self._mask(piece, own[0].device)
            if piece.page is None:
                yield piece, mask, own
            elif mask is None or bool(mask.any()):
                yield piece, mask, self.store.get(StateKey(piece.page.chunk, self.layer, TOKEN_STATES))

    def keys_and_values(self, states: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if self.expand is not None:
            return self.expand(*states)
        key, value = states
        return key, value

    def _mask(self, piece: Piece, device: torch.device) -> Tensor | None:
        """bool ``[rows, keys]``, where the piece's shape and ``causal`` do not say it all."""
        if piece.is_hidden:
            return torch.zeros(piece.num_rows, piece.num_keys, dtype=torch.bool, device=device)
        mask = None
        first = self.first_query + int(piece.rows.start)
        if self.window is not None and first + piece.num_rows - 1 - piece.start >= self.window:
            queries = torch.arange(first, first + piece.num_rows, device=device)
            keys = torch.arange(piece.start, piece.start + piece.num_keys, device=device)
            mask = queries[:, None] - keys[None, :] < self.window
        if self.selected is not None:
            chosen = _chosen_in(self.selected[piece.rows], piece.start, piece.num_keys)
            mask = chosen if mask is None else mask & chosen
        return mask

    def _piece_backward(
        self,
        piece: Piece,
        mask: Tensor | None,
        states: tuple[Tensor, ...],
        grad: Tensor,
        query: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradient of the piece's queries, and of its token states."""
        grad, query, out, lse = (tensor[:, :, piece.rows] for tensor in (grad, query, out, lse))
        if self.expand is None:
            key, value = states
            of_query, *of_states = attend_page_backward(
                grad, query, key, value, out, lse, self.scale, mask=mask, causal=piece.causal
            )
            return of_query, tuple(of_states)
        leaves = tuple(state.detach().requires_grad_() for state in states)
        with torch.enable_grad(), self.autocast():
            key, value = self.expand(*leaves)
        of_query, of_key, of_value = attend_page_backward(
            grad, query, key.detach(), value.detach(), out, lse, self.scale, mask=mask, causal=piece.causal
        )
        torch.autograd.backward((key, value), (of_key.to(key.dtype), of_value.to(value.dtype)))
        return of_query, tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)


class Attend(torch.autograd.Function):
    """``apply(call, anchor, query, *own)`` gives the output ``[1, Hq, T, Dv]``."""

    @staticmethod
    def forward(ctx: Any, call: AttendCall, anchor: Tensor, query: Tensor, *own: Tensor) -> Tensor:
        out, lse = call.forward(query, own)
        ctx.call = call
        ctx.save_for_backward(query, out, lse, *own)
        return out.view_as(out)  # what is returned joins the graph; the store's own tensor must not

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call: AttendCall = ctx.call
        query, out, lse, *own = ctx.saved_tensors
        of_query, of_own = call.backward(gradients[0], query, out, lse, tuple(own))
        for total, more in zip(of_own, call.collected() or (), strict=False):
            total += more
        cast = (total.to(state.dtype) for total, state in zip(of_own, own, strict=True))
        return None, None, of_query.to(query.dtype), *cast


def _spread(out: Tensor, lse: Tensor, rows: slice, num_rows: int) -> tuple[Tensor, Tensor]:
    """A part of some rows as a part of all, where the others see nothing."""
    if out.shape[2] == num_rows:
        return out, lse
    all_out = out.new_zeros(*out.shape[:2], num_rows, out.shape[3])
    all_lse = lse.new_full((*lse.shape[:2], num_rows), -torch.inf)
    all_out[:, :, rows], all_lse[:, :, rows] = out, lse
    return all_out, all_lse


def _chosen_in(selected: Tensor, start: int, num_keys: int) -> Tensor:
    """bool ``[T, num_keys]``: which of the positions from ``start`` on are selected."""
    local = selected - start
    local = local.where((local >= 0) & (local < num_keys), num_keys)
    mask = torch.zeros(len(selected), num_keys + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, local.long(), True)[:, :num_keys]
