"""What a model's layers see while one chunk of a tree goes through it: the states of the chunk's path, page by page.

No whole prefix is ever a tensor of the autograd graph. Attention walks over the path's pages, forward and backward, and
hands every page's gradient to the store; what later chunks have collected for this chunk's own states joins its
backward there. So one ``backward`` of a chunk's output pushes everything through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.tree.kernels import Merge, attend_page, attend_page_backward
from services.trainer.tree.store import StateKey, StateStore

Expand = Callable[..., tuple[Tensor, Tensor]]
"""From a page's token states to keys ``[1, Hk, P, D]`` and values ``[1, Hk, P, Dv]``."""

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]

TOKEN_STATES = "kv"
"""Part of the store that holds what ``ChunkContext.attend`` is given as ``own``."""
ATTENDED = "attended"
"""Part of the store that holds an attention's output and log-sum-exp, where they are kept."""


@dataclass(frozen=True, slots=True)
class Page:
    """A chunk on the path to another one."""

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
class _Piece:
    """One page as a layer's attention meets it, or the chunk's own keys (``page`` None)."""

    page: Page | None
    mask: Tensor | None
    causal: bool


class ChunkContext:
    """One evaluation of one chunk; handed to the model as ``past_key_values``."""

    def __init__(
        self,
        store: StateStore,
        path: Sequence[Page],
        chunk: Page,
        *,
        is_recorded: bool,
        is_inner: bool,
        anchor: Tensor,
        autocast: Autocast = contextlib.nullcontext,
        keep_attended: bool = False,
    ) -> None:
        """``path``: the pages before the chunk, oldest first. ``is_recorded``: autograd is on. ``is_inner``: later
        chunks read the states of this one, so they are kept in the store. ``anchor``: any scalar that requires a
        gradient. ``autocast``: what the model runs under, for what runs again in a backward. ``keep_attended``: keep
        what attention over the path gave, so that a recomputation need not walk over the path for it once more.
        """
        self.start = chunk.start
        self.num_tokens = chunk.num_tokens
        self.is_recorded = is_recorded
        self._store = store
        self._path = tuple(path)
        self._chunk = chunk
        self._is_inner = is_inner
        self.anchor = anchor
        self._autocast = autocast
        self._keep_attended = keep_attended
        self._made: dict[StateKey, Tensor] = {}

    # -- what Hugging Face's models ask of a cache --------------------------------------------------------------------

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[OwnStates, OwnStates]:
        """Hand a layer's own token states on to its attention."""
        own = OwnStates(self, layer_idx, (key, value))
        return own, own

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the chunk."""
        return self.start

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Tensor,
        own: tuple[Tensor, ...],
        *,
        scale: float,
        expand: Expand | None = None,
        window: int | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Attention of the chunk's queries to the whole path and, causally, to the chunk itself.

        ``query`` ``[1, Hq, T, D]``. ``own``: this chunk's token states ``[1, h, T, d]``, kept for later chunks and
        differentiable. ``expand`` makes keys and values of a page's states, page by page, with gradients also for
        the parameters that it uses; without it the states are key and value. ``window``: a query sees the last
        ``window`` positions, itself included. ``selected`` int64 ``[T, k]``: the positions that a query sees, -1 where
        there are fewer. Returns ``[1, Hq, T, Dv]``.
        """
        key = StateKey(self._chunk.chunk, layer, TOKEN_STATES)
        if self._is_inner and not self._store.has(key):
            self._store.put(key, tuple(state.detach() for state in own), needs_gradient=self._chunk.has_gradient)
        pieces = self._pieces(query.shape[2], query.device, window, selected)
        keeps = self._keep_attended and self._is_inner and self._chunk.has_gradient
        call = _AttendCall(self._store, layer, key, pieces, scale, expand, self._autocast, keeps)
        return _Attend.apply(call, query, *own)  # type: ignore[no-any-return]

    def _pieces(
        self, num_queries: int, device: torch.device, window: int | None, selected: Tensor | None
    ) -> tuple[_Piece, ...]:
        pieces = []
        for page in self._path:
            mask = None
            if window is not None:
                if self.start - (page.end - 1) >= window:
                    continue
                if self.start + num_queries - 1 - page.start >= window:
                    mask = _within(window, self.start, num_queries, page.start, page.num_tokens, device)
            if selected is not None:
                chosen = _chosen_in(selected, page.start, page.num_tokens)
                if chosen is None:
                    continue
                mask = chosen if mask is None else mask & chosen
            pieces.append(_Piece(page, mask, causal=False))
        own_mask = None
        if window is not None and window < num_queries:
            own_mask = _within(window, 0, num_queries, 0, num_queries, device)
            own_mask &= torch.ones_like(own_mask).tril()
        if selected is not None:
            chosen = _chosen_in(selected, self.start, num_queries)
            chosen = (
                torch.zeros(num_queries, num_queries, dtype=torch.bool, device=device) if chosen is None else chosen
            )
            own_mask = chosen.tril() if own_mask is None else own_mask & chosen
        pieces.append(_Piece(None, own_mask, causal=own_mask is None))
        return tuple(pieces)

    # -- states at the boundaries of chunks ---------------------------------------------------------------------------

    def read(self, layer: int, part: str) -> Tensor | None:
        """The state that the chunk begins with; None at a root. What it is used for gives it a gradient."""
        if not self._path:
            return None
        page = self._path[-1]
        key = StateKey(page.chunk, layer, part)
        if not (self.is_recorded and page.has_gradient):
            return self._store.get(key)[0]
        return _Read.apply(self._store, key, self.anchor)  # type: ignore[no-any-return]

    def leave(self, layer: int, part: str, state: Tensor, carrier: Tensor) -> Tensor:
        """Keep the state that the chunk ends with. ``carrier``: a tensor that the layer's output is made of; what is
        returned in its place brings the gradient that later chunks have collected for the state into the backward.
        """
        if not self._is_inner:
            return carrier
        key = StateKey(self._chunk.chunk, layer, part)
        if not self._store.has(key):
            self._store.put(key, (state.detach(),), needs_gradient=self._chunk.has_gradient)
        if not (self.is_recorded and self._chunk.has_gradient):
            return carrier
        return _Leave.apply(self._store, key, carrier, state)  # type: ignore[no-any-return]

    # -- states and choices without gradient --------------------------------------------------------------------------

    def keep(self, layer: int, part: str, tensor: Tensor) -> None:
        """Keep token states ``[..., T, d]`` that have no gradient."""
        key = StateKey(self._chunk.chunk, layer, part)
        self._made[key] = tensor.detach()
        if self._is_inner and not self._store.has(key):
            self._store.put(key, (tensor.detach(),), needs_gradient=False)

    def kept(self, layer: int, part: str) -> Iterator[tuple[int, Tensor]]:
        """What the chunks of the path have kept, oldest first, this chunk's own last: position of the first token of
        each, and the tensor."""
        for index, page in enumerate(self._path):
            if index + 1 < len(self._path):
                self._store.prefetch(StateKey(self._path[index + 1].chunk, layer, part))
            yield page.start, self._store.get(StateKey(page.chunk, layer, part))[0]
        own = StateKey(self._chunk.chunk, layer, part)
        yield self.start, self._store.get(own)[0] if self._store.has(own) else self._made[own]

    def chosen(self, layer: int, part: str, choose: Callable[[], Tensor]) -> Tensor:
        """A choice without gradient (of experts, of keys): made when the chunk is first evaluated, and the same one
        whenever it is evaluated again."""
        key = StateKey(self._chunk.chunk, layer, part)
        if self._store.has(key):
            return self._store.get(key)[0]
        if key not in self._made:
            self._made[key] = choose().detach()
            if self._is_inner:
                self._store.put(key, (self._made[key],), needs_gradient=False)
        return self._made[key]

    # -- what a graph keeps outside of it -----------------------------------------------------------------------------

    def stash(self, layer: int, part: str, tensor: Tensor) -> None:
        """Hold a tensor of this evaluation until its backward, where the store has room for it."""
        self._store.put(StateKey(self._chunk.chunk, layer, part), (tensor.detach(),), needs_gradient=False)

    def take(self, layer: int, part: str) -> Tensor:
        """A stashed tensor."""
        return self._store.get(StateKey(self._chunk.chunk, layer, part))[0]

    @property
    def choices(self) -> dict[StateKey, Tensor]:
        """What this evaluation made and kept without gradient."""
        return dict(self._made)

    # -- being the active one -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While it lasts ``current()`` is this context: for modules that no cache is handed to."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before


_current: ChunkContext | None = None


def current() -> ChunkContext | None:
    """The context of the chunk that goes through the model now."""
    return _current


@dataclass(frozen=True, slots=True)
class OwnStates:
    """A chunk's own token states on their way from a layer's cache update to its attention function."""

    context: ChunkContext
    layer: int
    states: tuple[Tensor, ...]
    expand: Expand | None = None
    selected: Tensor | None = None

    def attend(self, query: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        """``ChunkContext.attend`` of these states."""
        return self.context.attend(
            self.layer, query, self.states, scale=scale, expand=self.expand, window=window, selected=self.selected
        )


@dataclass(frozen=True, slots=True)
class _AttendCall:
    store: StateStore
    layer: int
    own_key: StateKey
    pieces: tuple[_Piece, ...]
    scale: float
    expand: Expand | None
    autocast: Autocast
    keeps_attended: bool

    def attended(self, query: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, over all pieces."""
        key = StateKey(self.own_key.chunk, self.layer, ATTENDED)
        if self.keeps_attended and self.store.has(key):
            out, lse = self.store.get(key)
            return out, lse
        merge = Merge()
        for piece, states in self.walk(own):
            keys, values = self.keys_and_values(states)
            merge.add(*attend_page(query, keys, values, self.scale, mask=piece.mask, causal=piece.causal))
        merged, lse = merge.result()
        out = merged.to(query.dtype)
        if self.keeps_attended:
            self.store.put(key, (out, lse), needs_gradient=False)
        return out, lse

    def walk(self, own: tuple[Tensor, ...]) -> Iterator[tuple[_Piece, tuple[Tensor, ...]]]:
        """Each piece with its token states, the next one read ahead."""
        for index, piece in enumerate(self.pieces):
            following = self.pieces[index + 1].page if index + 1 < len(self.pieces) else None
            if following is not None:
                self.store.prefetch(StateKey(following.chunk, self.layer, TOKEN_STATES))
            if piece.page is None:
                yield piece, own
            else:
                yield piece, self.store.get(StateKey(piece.page.chunk, self.layer, TOKEN_STATES))

    def keys_and_values(self, states: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if self.expand is not None:
            return self.expand(*states)
        key, value = states
        return key, value


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _AttendCall, query: Tensor, *own: Tensor) -> Tensor:
        out, lse = call.attended(query, own)
        ctx.call = call
        ctx.save_for_backward(query, out, lse, *own)
        return out.view_as(out)  # what is returned joins the graph; the store's own tensor must not

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call: _AttendCall = ctx.call
        query, out, lse, *own = ctx.saved_tensors
        grad = gradients[0]
        query_gradient = torch.zeros_like(query, dtype=lse.dtype)
        own_gradients: tuple[Tensor, ...] = ()
        for piece, states in call.walk(tuple(own)):
            through = _page_backward(call, piece, states, grad, query, out, lse)
            query_gradient += through[0]
            if piece.page is None:
                own_gradients = through[1]
            elif piece.page.has_gradient:
                call.store.add_gradient(StateKey(piece.page.chunk, call.layer, TOKEN_STATES), through[1])
        collected = call.store.gradient(call.own_key) if call.store.has(call.own_key) else None
        if collected is not None:
            own_gradients = tuple(
                (gradient + more).to(state.dtype)
                for gradient, more, state in zip(own_gradients, collected, own, strict=True)
            )
        return None, query_gradient.to(query.dtype), *own_gradients


def _page_backward(
    call: _AttendCall,
    piece: _Piece,
    states: tuple[Tensor, ...],
    grad: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradient of the queries by one page, and of the page's token states."""
    if call.expand is None:
        key, value = states
        of_query, *of_states = attend_page_backward(
            grad, query, key, value, out, lse, call.scale, mask=piece.mask, causal=piece.causal
        )
        return of_query, tuple(of_states)
    leaves = tuple(state.detach().requires_grad_() for state in states)
    with torch.enable_grad(), call.autocast():
        key, value = call.expand(*leaves)
    of_query, of_key, of_value = attend_page_backward(
        grad, query, key.detach(), value.detach(), out, lse, call.scale, mask=piece.mask, causal=piece.causal
    )
    torch.autograd.backward((key, value), (of_key.to(key.dtype), of_value.to(value.dtype)))
    return of_query, tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: StateStore, key: StateKey, anchor: Tensor) -> Tensor:
        ctx.store, ctx.key = store, key
        return store.get(key)[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.store.add_gradient(ctx.key, (gradients[0],))
        return None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, store: StateStore, key: StateKey, carrier: Tensor, state: Tensor) -> Tensor:
        ctx.store, ctx.key, ctx.dtype = store, key, state.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        collected = ctx.store.gradient(ctx.key)
        return None, None, gradients[0], None if collected is None else collected[0].to(ctx.dtype)


def _within(
    window: int, query_start: int, num_queries: int, key_start: int, num_keys: int, device: torch.device
) -> Tensor:
    queries = torch.arange(query_start, query_start + num_queries, device=device)
    keys = torch.arange(key_start, key_start + num_keys, device=device)
    return queries[:, None] - keys[None, :] < window


def _chosen_in(selected: Tensor, start: int, num_tokens: int) -> Tensor | None:
    """bool ``[T, num_tokens]``: which positions of a page are selected; None if none is."""
    local = selected - start
    local = local.where((local >= 0) & (local < num_tokens), num_tokens)
    if bool((local == num_tokens).all()):
        return None
    mask = torch.zeros(len(selected), num_tokens + 1, dtype=torch.bool, device=selected.device)
    return mask.scatter_(1, local, True)[:, :num_tokens]
