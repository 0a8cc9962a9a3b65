"""Context parallelism: several ranks send one chunk through the model, each its part of the tokens.

A rank's part of a chunk leaves its states on that rank, so a path of any length is spread evenly. Queries go to the
states, not states to queries: each rank attends with the queries of all ranks to the pages that it holds, and the parts
of each row are merged where the query is; so what is sent does not grow with the path. The gradients of states arise
where the states are. States at boundaries are handed from rank to rank within a chunk, and from the last rank to the
first one for the chunks below; their gradients go the other way.

All ranks run the same visits and the same modules, also a rank that has no token of a chunk: it is given a stand-in
token, which no other token sees and which has no gradient. Autograd runs a graph backward in the reverse order of its
making, so all ranks come to each exchange in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.trainer.tree.attend import AttendCall, Expand, Page, Piece, pieces_of_path
from services.trainer.tree.kernels import Merge
from services.trainer.tree.ranks import Ranks
from services.trainer.tree.states import ChunkContext
from services.trainer.tree.store import StateKey, StateStore


class ParallelContext(ChunkContext):
    """One rank's evaluation of its part of a chunk."""

    _is_shared = True  # so the backward comes to every exchange on every rank, whatever has a gradient on this one

    def __init__(self, ranks: Ranks, store: StateStore, path: Sequence[Page], chunk: Page, **kwargs: Any) -> None:
        """``path`` and ``chunk`` as they are for all ranks together; the rest as for ``ChunkContext``."""
        super().__init__(store, [_part(page, ranks) for page in path], _part(chunk, ranks), **kwargs)
        self.ranks = ranks
        self.chunk_start = chunk.start
        self._whole = chunk
        self._make_call = functools.partial(SharedAttendCall, ranks=ranks, num_queries=chunk.num_tokens)
        self._last_rank = min(chunk.num_tokens, ranks.size) - 1
        """That has tokens."""
        self._ends: dict[StateKey, Tensor | None] = {}
        """On the first and on the last rank: the states at the end of the chunk, until they are where they are kept."""
        self.collected: dict[StateKey, Tensor] = {}
        """On the last rank, in a backward: their gradients."""
        self._is_idle = self._chunk.num_tokens == 0
        if self._is_idle:
            self.start, self.num_tokens = chunk.end - 1, 1

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
        if not self._is_idle:
            return super().attend(layer, query, own, scale=scale, expand=expand, window=window, selected=selected)
        query, selected = query[:, :, :0], None if selected is None else selected[:0]
        out = super().attend(layer, query, own, scale=scale, expand=expand, window=window, selected=selected)
        return functional.pad(out, (0, 0, 0, 1))

    def _pieces(self, window: int | None) -> tuple[Piece, ...]:
        num_queries = self._whole.num_tokens
        path = pieces_of_path(self._path, self.chunk_start, num_queries, window)
        if self._is_idle:
            return *path, Piece(None, self.start, 1, slice(0, 1), is_hidden=True)
        num_keys = self._chunk.num_tokens
        first = self.start - self.chunk_start
        end = first + num_keys
        own = [Piece(None, self.start, num_keys, slice(first, end), causal=True)]
        if end < num_queries and (window is None or window > 1):  # the queries of later ranks see all of these keys
            own.append(Piece(None, self.start, num_keys, slice(end, num_queries)))
        return *path, *own

    # -- states at the boundaries of chunks and of parts --------------------------------------------------------------

    def read(self, layer: int, part: str) -> Tensor | None:
        if self._is_idle:
            return None
        if self.ranks.rank == 0:
            return super().read(layer, part)
        return _Receive.apply(self.ranks, StateKey(self._chunk.chunk, layer, part), self.anchor)

    def leave(self, layer: int, part: str, state: Tensor, carrier: Tensor, *, only_at_end: bool = False) -> Tensor:
        if self._is_idle:
            return carrier
        if self._last_rank == 0:
            return super().leave(layer, part, state, carrier)
        key = StateKey(self._chunk.chunk, layer, part)
        is_last = self.ranks.rank == self._last_rank
        is_passed_on = not is_last and not only_at_end
        if is_passed_on:
            self.ranks.send(state, self.ranks.rank + 1, _label(key), with_header=True)
        if self._is_inner and (is_last or self.ranks.rank == 0):
            self._ends[key] = state.detach() if is_last else None
        if not self.is_recorded:
            return carrier
        return _PassOn.apply(self, key, is_passed_on, self.anchor, carrier, state)

    def finish_forward(self) -> None:
        """The last rank's states go to the first one, which begins the chunks below. They are not sent where they are
        left: the last rank may still wait for another state by which the first one begins, and so for the first one."""
        for key, state in self._ends.items():
            if self._store.has(key):  # the chunk was evaluated before
                continue
            if self.ranks.rank == 0:
                arrived = self.ranks.receive(self._last_rank, _label(key), self.anchor.device)
                self._store.put(key, (arrived,), needs_gradient=self._chunk.has_gradient)
            elif state is not None:
                self.ranks.send(state, 0, _label(key), with_header=True)
                self._store.put(key, (state.new_zeros(1),), needs_gradient=False)  # a note that it was sent
        self._ends = dict.fromkeys(self._ends)

    def begin_backward(self) -> None:
        """What the first rank has collected for them comes back."""
        for key in self._ends if self._chunk.has_gradient else ():
            if self.ranks.rank == 0:
                collected = self._store.gradient(key) or [torch.zeros_like(s) for s in self._store.get(key)]
                self.ranks.send(collected[0], self._last_rank, _label(key), with_header=True)
            else:
                self.collected[key] = self.ranks.receive(0, _label(key), self.anchor.device)

    # -- rows of all ranks --------------------------------------------------------------------------------------------

    def gather(self, rows: Tensor) -> Tensor:
        return self.ranks.gather(rows[: self._chunk.num_tokens], self._whole.num_tokens)

    def exchange(self, rows: Tensor) -> list[Tensor]:
        return [self._with_stand_in(part) for part in self.ranks.exchange(rows, self._whole.num_tokens)]

    def exchange_sum(self, rows: Tensor) -> Tensor:
        """``exchange``, summed over ranks."""
        return self._with_stand_in(self.ranks.total(rows, self._whole.num_tokens))

    def _with_stand_in(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(1, *rows.shape[1:]) if self._is_idle else rows


def _part(page: Page, ranks: Ranks) -> Page:
    part = ranks.part(page.num_tokens)
    return replace(page, start=page.start + part.start, num_tokens=part.stop - part.start)


@dataclass(frozen=True, slots=True)
class SharedAttendCall(AttendCall):
    """Attention of the queries of all ranks to the states of this one; each rank keeps the rows of its own queries."""

    ranks: Ranks
    num_queries: int
    """Of all ranks."""

    def attend(self, query: Tensor, own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        out, lse = AttendCall.attend(self._of_all_queries(), self._of_all(query), own)
        merge = Merge()
        for part in self.ranks.exchange(torch.cat((out, lse.unsqueeze(-1)), -1), self.num_queries, dim=2):
            merge.add(part[..., :-1], part[..., -1])
        return merge.result()

    def backward(
        self, grad: Tensor, query: Tensor, out: Tensor, lse: Tensor, own: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        widths = query.shape[-1], out.shape[-1], out.shape[-1]
        rows = self._of_all(torch.cat((query, out, grad.to(out.dtype)), -1))
        query, out, grad = rows.split(widths, -1)
        of_query, of_own = AttendCall.backward(self._of_all_queries(), grad, query, out, self._of_all(lse), own)
        return self.ranks.total(of_query, self.num_queries, dim=2), of_own

    def _of_all(self, tensor: Tensor) -> Tensor:
        return self.ranks.gather(tensor, self.num_queries, dim=2)

    def _of_all_queries(self) -> AttendCall:
        """With the positions that all queries see: too much to be held from the forward to the backward."""
        if self.selected is None:
            return self
        return replace(self, selected=self.ranks.gather(self.selected, self.num_queries))


class _PassOn(torch.autograd.Function):
    """The carrier, which brings the gradient of the state with it: from the next rank, or what the first rank has
    collected."""

    @staticmethod
    def forward(
        ctx: Any,
        context: ParallelContext,
        key: StateKey,
        is_passed_on: bool,
        anchor: Tensor,
        carrier: Tensor,
        state: Tensor,
    ) -> Tensor:
        ctx.context, ctx.key, ctx.is_passed_on = context, key, is_passed_on
        ctx.empty = functools.partial(torch.empty, state.shape, dtype=state.dtype, device=state.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        empty: Tensor = ctx.empty()
        if ctx.is_passed_on:
            ranks: Ranks = ctx.context.ranks
            gradient: Tensor | None = ranks.receive_into(empty, ranks.rank + 1, _label(ctx.key))
        else:
            collected = ctx.context.collected.pop(ctx.key, None)
            gradient = None if collected is None else collected.to(empty.dtype)
        return None, None, None, None, gradients[0], gradient


class _Receive(torch.autograd.Function):
    """The state at the end of the part before."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, key: StateKey, anchor: Tensor) -> Tensor:
        ctx.ranks, ctx.key = ranks, key
        return ranks.receive(ranks.rank - 1, _label(key), anchor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.ranks.send(gradients[0], ctx.ranks.rank - 1, _label(ctx.key))
        return None, None, None


def _label(key: StateKey) -> str:
    return f"{key.part} of layer {key.layer}"
