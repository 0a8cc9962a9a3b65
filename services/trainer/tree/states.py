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

from services.trainer.tree.attend import TOKEN_STATES, Attend, AttendCall, Autocast, Expand, Page, Piece, pieces_of_path
from services.trainer.tree.store import StateKey, StateStore


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
        self.chunk_start = chunk.start
        """Position of the chunk's first token; ``start`` is that of the first one that is here, if ranks share it."""
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
        if torch.is_autocast_enabled(query.device.type):  # which does not know the kernels that are called here
            dtype = torch.get_autocast_dtype(query.device.type)
            query, own = query.to(dtype), tuple(state.to(dtype) for state in own)
        key = StateKey(self._chunk.chunk, layer, TOKEN_STATES)
        if self._is_inner and self._chunk.num_tokens and not self._store.has(key):
            self._store.put(key, tuple(state.detach() for state in own), needs_gradient=self._chunk.has_gradient)
        call = self._make_call(
            store=self._store,
            layer=layer,
            own_key=key,
            pieces=self._pieces(window),
            first_query=self.chunk_start,
            scale=scale,
            expand=expand,
            window=window,
            selected=selected,
            autocast=self._autocast,
            keeps_attended=self._keep_attended and self._is_inner and self._chunk.has_gradient,
        )
        # with an anchor parameters within ``expand`` get their gradient even if nothing that goes in has one
        anchor = self.anchor if expand is not None or self._is_shared else self.anchor.detach()
        return Attend.apply(call, anchor, query, *own)

    _make_call: Callable[..., AttendCall] = AttendCall
    _is_shared = False
    """Other ranks have parts of the chunk."""

    def _pieces(self, window: int | None) -> tuple[Piece, ...]:
        """The keys that are here, with the queries that meet them."""
        num_tokens = self._chunk.num_tokens
        path = pieces_of_path(self._path, self.start, num_tokens, window)
        return *path, Piece(None, self.start, num_tokens, slice(0, num_tokens), causal=True)

    # -- states at the boundaries of chunks ---------------------------------------------------------------------------

    def read(self, layer: int, part: str) -> Tensor | None:
        """The state that the chunk begins with; None at a root. What it is used for gives it a gradient."""
        if not self._path:
            return None
        page = self._path[-1]
        key = StateKey(page.chunk, layer, part)
        if not (self.is_recorded and page.has_gradient):
            return self._store.get(key)[0]
        return _Read.apply(self._store, key, self.anchor)

    def leave(self, layer: int, part: str, state: Tensor, carrier: Tensor, *, only_at_end: bool = False) -> Tensor:
        """Keep the state that the chunk ends with. ``carrier``: a tensor that the layer's output is made of; what is
        returned in its place brings the gradient that later chunks have collected for the state into the backward.
        ``only_at_end``: the tokens of the chunk itself do not go on from it, whichever ranks hold them.
        """
        if not self._is_inner:
            return carrier
        key = StateKey(self._chunk.chunk, layer, part)
        if not self._store.has(key):
            self._store.put(key, (state.detach(),), needs_gradient=self._chunk.has_gradient)
        if not (self.is_recorded and self._chunk.has_gradient):
            return carrier
        return _Leave.apply(self._store, key, carrier, state)

    def finish_forward(self) -> None:
        """To be called when the chunk has gone through the model."""

    def begin_backward(self) -> None:
        """To be called before the backward of the chunk, when what is below it is done."""

    # -- states and choices without gradient --------------------------------------------------------------------------

    def keep(self, layer: int, part: str, tensor: Tensor) -> None:
        """Keep token states ``[..., T, d]`` that have no gradient."""
        key = StateKey(self._chunk.chunk, layer, part)
        num_tokens = self._chunk.num_tokens
        self._made[key] = tensor[..., :num_tokens, :].detach()
        if num_tokens and self._is_inner and not self._store.has(key):
            self._store.put(key, (self._made[key],), needs_gradient=False)

    def kept(self, layer: int, part: str) -> Iterator[tuple[int, Tensor]]:
        """What the chunks of the path have kept here, oldest first, this chunk's own last: position of the first token
        of each, and the tensor."""
        path = [page for page in self._path if page.num_tokens]
        for index, page in enumerate(path):
            if index + 1 < len(path):
                self._store.prefetch(StateKey(path[index + 1].chunk, layer, part))
            yield page.start, self._store.get(StateKey(page.chunk, layer, part))[0]
        if self._chunk.num_tokens:
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

    # -- rows of all ranks that share the chunk -----------------------------------------------------------------------

    def gather(self, rows: Tensor) -> Tensor:
        """From rows of the tokens that are here ``[T, ..]`` to those of the whole chunk. No gradient goes through."""
        return rows

    def exchange(self, rows: Tensor) -> list[Tensor]:
        """From what the states that are here say of the whole chunk's tokens ``[all T, ..]`` to what those of each rank
        say of the tokens that are here ``[T, ..]``. No gradient goes through."""
        return [rows]

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
