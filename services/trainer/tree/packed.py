"""Mode ``pack``: a whole forest in one forward and backward, as one row of tokens whose branches a mask keeps apart.

For models whose only token mixer is softmax attention, full or in a sliding window. The row holds the segments in
depth-first order, so the tokens below a segment follow it without a gap, and one number per key says all: the row
position ``end`` at which the last segment below its own ends. A query at row position ``q`` sees a key at ``k`` iff
``k <= q < end[k]``, and within a window iff fewer than ``window`` positions of the path lie between.

Two ways to the same numbers: segment by segment with PyTorch's scaled dot product attention, which never compares
segments that do not see each other; or one FlexAttention (arXiv 2412.05496) with a block mask, which on a GPU is one
kernel for all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from services.trainer.tree.forest import Forest

Attention = Literal["nodes", "flex"]
"""Segment by segment, or one FlexAttention."""

_BLOCK_TOKENS = 128
_MIN_WINDOW_QUERIES = 256
_MAX_BLOCK_TOKENS = 256
"""Small branches that hang together attend in blocks of about so many tokens: fewer calls for a few scores more."""
_MAX_KERNELS = 256


def choose_attention(choice: Literal["auto", "nodes", "flex"], device: torch.device) -> Attention:
    """What ``TreeConfig.pack_attention`` means on a device."""
    if choice == "auto":
        return "flex" if device.type == "cuda" else "nodes"
    return choice


@dataclass(frozen=True, slots=True)
class Piece:
    """Some queries of a segment, and what they see."""

    queries: slice
    """Offsets in the segment."""
    keys: slice
    """Offsets in the tokens of ``TreeLayout.visible_path``; the last is that of the last query."""
    mask: Tensor | None
    """bool ``[queries, keys]``; None where queries and keys are the same tokens, plainly causal."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole subtrees below one segment, or one segment alone, that attend together."""

    path: tuple[int, ...]
    """The segments above, oldest first."""
    rows: slice
    """Row positions of the block."""
    mask: Tensor | None
    """bool ``[block, path + block]``; None for a single segment without a path, plainly causal."""


class TreeLayout:
    """Where the segments of a packed row lie and what they see. Handed to the model as ``tree``; for one pass, whose
    layers share the masks that it makes.
    """

    def __init__(self, forest: Forest, device: torch.device, attention: Attention) -> None:
        """
        Raises:
            ValueError: the forest's segments are not in depth-first order.
        """
        self.attention = attention
        self.sizes = tuple(segment.num_tokens for segment in forest.segments)
        """Tokens of each segment."""
        self.first = np.concatenate([[0], np.cumsum(self.sizes)])
        """[segments + 1] Row position of the first token of each segment; the last is the length of the row."""
        self._paths: list[tuple[int, ...]] = []  # from the root to the segment
        for index, segment in enumerate(forest.segments):
            self._paths.append((*self._paths[segment.parent], index) if segment.parent >= 0 else (index,))
            if segment.parent >= 0 and segment.parent not in self._paths[index - 1]:
                raise ValueError(f"segment {index} does not follow what else is below its parent {segment.parent}")
        self._starts = [segment.start for segment in forest.segments]
        self._device = device
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}
        self._below: list[list[int]] = [[] for _ in range(len(self.sizes) + 1)]  # the last: of no segment, the roots
        for index, segment in enumerate(forest.segments):
            self._below[segment.parent].append(index)

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 ``[T]``: distance from the start of the root, as if the path to the token stood alone."""
        parts = [np.arange(start, start + size) for start, size in zip(self._starts, self.sizes, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts])).to(self._device)

    @functools.cached_property
    def ends(self) -> Tensor:
        """int64 ``[T]``: the row position behind the last token that may see the token."""
        return torch.from_numpy(np.repeat(self._segment_ends(), self.sizes)).to(self._device)

    def _segment_ends(self) -> NDArray[np.int64]:
        """[segments] Row position behind the last token below each."""
        ends = self.first[1:].copy()
        for index in reversed(range(len(self.sizes))):
            for above in self._paths[index][-2:-1]:
                ends[above] = max(ends[above], ends[index])
        return ends

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All rows, in order, in blocks for attention without a window."""
        return tuple(self._cover())

    def _cover(self) -> Iterator[Block]:
        """Depth first: siblings with all that is below them while they are small together; a larger one alone, before
        what is below it."""
        ends = [int(end) for end in self._segment_ends()]
        pending: list[tuple[tuple[int, ...], list[int]]] = [((), self._below[-1])]
        while pending:
            path, siblings = pending.pop()
            first = siblings[0]
            last, more = first, siblings[1:]
            if ends[first] - self.first[first] > _MAX_BLOCK_TOKENS:
                yield self._block(path, int(self.first[first]), int(self.first[first + 1]), is_plain=True)
                if more:
                    pending.append((path, more))
                if self._below[first]:
                    pending.append(((*path, first), self._below[first]))
                continue
            while more and ends[more[0]] - self.first[first] <= _MAX_BLOCK_TOKENS:
                last, more = more[0], more[1:]
            is_plain = first == last and not self._below[first]
            yield self._block(path, int(self.first[first]), ends[last], is_plain=is_plain)
            if more:
                pending.append((path, more))

    def _block(self, path: tuple[int, ...], start: int, end: int, *, is_plain: bool) -> Block:
        rows = slice(start, end)
        num_before = sum(self.sizes[above] for above in path)
        if is_plain:
            return Block(path, rows, self._mask(end - start, num_before + end - start, None))
        place = torch.arange(start, end, device=self._device)
        own = (place[None, :] <= place[:, None]) & (place[:, None] < self.ends[rows][None, :])
        before = own.new_ones(end - start, num_before)
        return Block(path, rows, torch.cat([before, own], dim=1))

    def visible_path(self, index: int, window: int | None) -> tuple[int, ...]:
        """The segments that a segment sees, oldest first, itself last."""
        path = self._paths[index]
        if window is None:
            return path
        oldest = self._starts[index] - window + 1  # the first position that the first token sees
        return tuple(above for above in path if self._starts[above] + self.sizes[above] > oldest)

    def pieces(self, index: int, window: int | None) -> Iterator[Piece]:
        """A segment's queries in pieces, as long as makes sense with the window."""
        start, size = self._starts[index], self.sizes[index]
        base = self._starts[self.visible_path(index, window)[0]]
        step = size if window is None else max(window, _MIN_WINDOW_QUERIES)
        for first in range(0, size, step):
            last = min(first + step, size)
            oldest = base if window is None else max(base, start + first - window + 1)
            mask = self._mask(last - first, start + last - oldest, window)
            yield Piece(slice(first, last), slice(oldest - base, start + last - base), mask)

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> Tensor | None:
        if window is not None and num_keys <= window:
            window = None
        if window is None and num_queries == num_keys:
            return None
        shape = num_queries, num_keys, window
        if shape not in self._masks:
            visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self._device)
            visible.tril_(num_keys - num_queries)
            if window is not None:
                visible.triu_(num_keys - num_queries - window + 1)
            self._masks[shape] = visible
        return self._masks[shape]

    def block_mask(self, window: int | None) -> BlockMask:
        """The mask of the whole row for FlexAttention, of ``padded_length`` tokens; those of the padding see only
        themselves."""
        if window not in self._block_masks:
            num_tokens = len(self.positions)
            padding = torch.arange(num_tokens, padded_length(num_tokens), device=self._device)
            positions = torch.cat([self.positions, torch.zeros_like(padding)])
            ends = torch.cat([self.ends, padding + 1])
            self._block_masks[window] = make_block_mask(positions, ends, window)
        return self._block_masks[window]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A forest as one row of T tokens."""

    token_ids: Tensor
    """int64 [T]"""
    predictors: Tensor
    """int64 [M]: row position of the token whose hidden state predicts each target."""
    layout: TreeLayout


def pack_row(forest: Forest, device: torch.device, attention: Attention) -> PackedRow:
    """Lay a forest out as one row.

    Raises:
        ValueError: the forest's segments are not in depth-first order.
    """
    layout = TreeLayout(forest, device, attention)
    predictors = [np.zeros(0, dtype=np.int64)]
    for index, segment in enumerate(forest.segments):
        before = layout.first[segment.parent + 1] - 1 if segment.parent >= 0 else -1
        offsets = segment.predecessors.astype(np.int64)
        predictors.append(np.where(offsets < 0, before, layout.first[index] + offsets))
    token_ids = np.concatenate([np.zeros(0, dtype=np.int64), *(segment.token_ids for segment in forest.segments)])
    return PackedRow(
        torch.from_numpy(token_ids).to(device), torch.from_numpy(np.concatenate(predictors)).to(device), layout
    )


def predicting_states(
    model: Any,
    forest: Forest,
    attention: Attention,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Tensor:
    """The hidden states ``[M, hidden]`` that predict a forest's targets, from one forward of all of it.

    The model must use this attention (``adapters.attention.use_tree_attention``). With autograd on, one backward from
    here is the exact gradient over the forest.
    """
    row = pack_row(forest, model.device, attention)
    with autocast():
        output = model.base_model(
            input_ids=row.token_ids[None], position_ids=row.layout.positions[None], use_cache=False, tree=row.layout
        )
    return output.last_hidden_state[0][row.predictors]


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: TreeLayout | None = None,
) -> tuple[Tensor, None]:
    """Attention as Hugging Face's models call it. ``query`` ``[1, heads, T, D]``, ``key`` ``[1, h, T, D]`` and
    ``value`` ``[1, h, T, Dv]`` with ``heads`` a multiple of ``h``; the result ``[1, T, heads, Dv]``. A query sees the
    last ``sliding_window`` positions of its path, itself included, or all. Without ``tree`` each row is one causal
    sequence.

    Raises:
        ValueError: there is a mask beside the tree.
    """
    if attention_mask is not None:
        raise ValueError("a packed row has its own mask and takes no other")
    if tree is None:
        output = _attend_alone(query, key, value, scaling, sliding_window)
    elif tree.attention == "flex":
        output = _attend_flex(query, key, value, scaling, sliding_window, tree)
    else:
        output = _attend_by_segments(query, key, value, scaling, sliding_window, tree)
    return output.transpose(1, 2).contiguous(), None


def padded_length(num_tokens: int) -> int:
    """A row's length for FlexAttention: whole blocks, and few different lengths (four for each doubling), because a
    kernel is compiled for each. At most a quarter more tokens, which cost next to nothing."""
    num_blocks = max(1, -(-num_tokens // _BLOCK_TOKENS))
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return -(-num_blocks // step) * step * _BLOCK_TOKENS


def make_block_mask(
    positions: Tensor, ends: Tensor, window: int | None, block_tokens: int = _BLOCK_TOKENS
) -> BlockMask:
    """FlexAttention's mask of a row, by ``TreeLayout.positions`` and ``TreeLayout.ends`` ``[T]``, T in whole blocks.

    Made of the bounds of blocks, without a mask of ``T x T``: blocks of which no pair sees each other are skipped,
    those of which all do need no mask inside.
    """
    num_tokens, device = len(positions), positions.device
    ends_of, positions_of = ends.view(-1, block_tokens), positions.view(-1, block_tokens)
    low = torch.arange(0, num_tokens, block_tokens, device=device)
    high = low + block_tokens - 1
    is_before = low[None, :] < low[:, None]  # [query block, key block]
    is_seen = is_before & (ends_of.amax(1)[None, :] > low[:, None])
    is_full = is_before & (ends_of.amin(1)[None, :] > high[:, None])
    if window is not None:
        is_seen &= positions_of.amin(1)[:, None] - positions_of.amax(1)[None, :] < window
        is_full &= positions_of.amax(1)[:, None] - positions_of.amin(1)[None, :] < window
    is_partial = (is_seen & ~is_full) | torch.eye(len(low), dtype=torch.bool, device=device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key <= query) & (query < ends[key])
        return visible if window is None else visible & (positions[query] - positions[key] < window)

    return BlockMask.from_kv_blocks(
        *_listed(is_partial),
        *_listed(is_full),
        BLOCK_SIZE=block_tokens,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def _attend_by_segments(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, tree: TreeLayout
) -> Tensor:
    queries, keys, values = (tensor.split(tree.sizes, dim=2) for tensor in (query, key, value))
    if window is None:
        return torch.cat([_attend_block(block, query, key, value, keys, values, scale) for block in tree.blocks], dim=2)
    outputs = []
    for index, own in enumerate(queries):
        path = tree.visible_path(index, window)
        path_keys, path_values = (
            torch.cat([parts[segment] for segment in path], dim=2) if len(path) > 1 else parts[index]
            for parts in (keys, values)
        )
        for piece in tree.pieces(index, window):
            seen_keys, seen_values = path_keys[:, :, piece.keys], path_values[:, :, piece.keys]
            outputs.append(_attend(own[:, :, piece.queries], seen_keys, seen_values, scale, piece.mask))
    return torch.cat(outputs, dim=2)


def _attend_block(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float | None,
) -> Tensor:
    own_keys, own_values = key[:, :, block.rows], value[:, :, block.rows]
    if block.path:
        own_keys = torch.cat([*(keys[above] for above in block.path), own_keys], dim=2)
        own_values = torch.cat([*(values[above] for above in block.path), own_values], dim=2)
    return _attend(query[:, :, block.rows], own_keys, own_values, scale, block.mask)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    num_tokens = query.shape[2]
    mask = None
    if window is not None and num_tokens > window:
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
    return _attend(query, key, value, scale, mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and query.device.type != "cpu":  # fused kernels that take a mask do not take grouped heads there
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        is_grouped = False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


def _attend_flex(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, tree: TreeLayout
) -> Tensor:
    num_tokens = query.shape[2]
    if torch.is_autocast_enabled(query.device.type):  # which knows nothing of FlexAttention
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    missing = padded_length(num_tokens) - num_tokens
    query, key, value = (functional.pad(tensor, (0, 0, 0, missing)) for tensor in (query, key, value))
    attend: Any = _compiled_flex if query.device.type == "cuda" else flex_attention
    is_grouped = query.shape[1] != key.shape[1]
    output = attend(query, key, value, block_mask=tree.block_mask(window), scale=scale, enable_gqa=is_grouped)
    return output[:, :, :num_tokens]


def _compiled_flex(*args: Any, **kwargs: Any) -> Any:
    """Uncompiled it would hold all scores of the row: that is what a length beyond the limit must not fall back to."""
    with torch._dynamo.config.patch(recompile_limit=_MAX_KERNELS):
        return _compile_flex()(*args, **kwargs)


@functools.cache
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _listed(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of the key blocks of each query block, ``[1, 1, blocks]`` and ``[1, 1, blocks, blocks]``."""
    counts = is_listed.sum(-1, dtype=torch.int32)
    indices = is_listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
