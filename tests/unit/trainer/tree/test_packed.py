"""A packed forest against its paths alone: the masks, the attention in both ways, and whole models with gradients."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from services.common.errors import ConfigError
from services.trainer.objective import PolicyObjective
from services.trainer.packing import Batch
from services.trainer.tree import packed
from services.trainer.tree.adapters.attention import tree_attention, use_tree_attention
from services.trainer.tree.forest import Forest, Segment, make_forest
from services.trainer.tree.head import backward_through_head
from services.trainer.tree.packed import (
    Attention,
    TreeLayout,
    choose_attention,
    make_block_mask,
    pack_row,
    packed_attention,
    padded_length,
    predicting_states,
)
from tests.unit.trainer.tree import reference
from tests.unit.trainer.tree.forests import Shape, chain, make_batch
from tests.unit.trainer.tree.models import Unrounded, make_model

CPU = torch.device("cpu")
NOTHING = np.zeros(0, dtype=np.int32)
WINDOWS = [None, 1, 3, 8, 10_000]


def forest_of(seed: int, **shape: Any) -> Forest:
    return make_forest(make_batch(seed, Shape(**shape)).nodes)


def visible_pairs(forest: Forest, window: int | None) -> Tensor:
    """bool ``[T, T]``, pair by pair: the key's segment is on the query's path, and the key is not later."""
    where = [(index, offset) for index, segment in enumerate(forest.segments) for offset in range(segment.num_tokens)]
    rows = []
    for segment, offset in where:
        path, above = set(), segment
        while above >= 0:
            path.add(above)
            above = forest.segments[above].parent
        position = forest.segments[segment].start + offset
        distances = [position - forest.segments[other].start - other_offset for other, other_offset in where]
        rows.append(
            [
                other in path and 0 <= distance < (window or len(where))
                for (other, _), distance in zip(where, distances, strict=True)
            ]
        )
    return torch.tensor(rows)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor) -> Tensor:
    """``[1, T, heads, Dv]`` by a softmax over all scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_heads(num_tokens: int, value_width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, num_tokens, width, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, width in ((4, 8), (2, 8), (2, value_width))
    )
    return query, key, value


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without a compiler differentiates on a CPU too, but refuses to."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("attention", ["nodes", "flex"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [0, 1])
def test_attention_sees_the_path_and_no_more(
    attention: Attention, window: int | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_MIN_WINDOW_QUERIES", 2)  # so that segments are cut into pieces
    forest = forest_of(seed, num_roots=2)
    states = random_heads(forest.num_tokens)
    expected = plain_attention(*states, 0.4, visible_pairs(forest, window))
    layout = TreeLayout(forest, CPU, attention)
    actual = packed_attention(None, *states, None, scaling=0.4, sliding_window=window, tree=layout)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(actual, states, gradient), torch.autograd.grad(expected, states, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_row_without_a_tree_is_one_causal_sequence(window: int | None) -> None:
    states = random_heads(20)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    visible = (distance >= 0) & (distance < (window or 20))
    actual = packed_attention(None, *states, None, scaling=0.4, sliding_window=window)[0]
    torch.testing.assert_close(actual, plain_attention(*states, 0.4, visible), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_tokens", [1, 4, 16, 64])
def test_block_mask_skips_no_pair_and_masks_where_it_must(window: int | None, block_tokens: int) -> None:
    for seed in range(3):
        forest = forest_of(seed, num_roots=1 + seed % 3, long_tokens=30)
        num_tokens = forest.num_tokens // block_tokens * block_tokens
        visible = visible_pairs(forest, window)[:num_tokens, :num_tokens]
        layout = TreeLayout(forest, CPU, "flex")
        mask = make_block_mask(layout.positions[:num_tokens], layout.ends[:num_tokens], window, block_tokens)
        num_blocks = num_tokens // block_tokens
        partial_blocks = listed_blocks(mask.kv_num_blocks, mask.kv_indices, num_blocks)
        full_blocks = listed_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, num_blocks)
        rows = torch.arange(num_tokens)
        assert torch.equal(mask.mask_mod(rows[:0], rows[:0], rows[:, None], rows), visible)
        blocks = visible.view(num_blocks, block_tokens, num_blocks, block_tokens).transpose(1, 2).flatten(2)
        needed, whole = blocks.any(-1), blocks.all(-1)
        assert not (partial_blocks & full_blocks).any()
        assert not (needed & ~(partial_blocks | full_blocks)).any()
        assert not (full_blocks & ~whole).any()
        if window is None:
            own = torch.eye(num_blocks, dtype=torch.bool)
            assert torch.equal(partial_blocks | full_blocks, needed)
            assert torch.equal(full_blocks & ~own, whole & ~own)


def test_rows_of_few_lengths_are_compiled() -> None:
    lengths = [padded_length(n) for n in range(1, 20_000)]
    assert all(n <= length <= max(128, 1.25 * n + 128) for n, length in enumerate(lengths, 1))
    assert all(length % 128 == 0 for length in lengths)
    assert len(set(lengths)) < 30


def listed_blocks(counts: Tensor | None, indices: Tensor | None, num_blocks: int) -> Tensor:
    assert counts is not None
    assert indices is not None
    listed = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    for row in range(num_blocks):
        listed[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    return listed


def test_long_windowed_segments_compare_only_what_is_near() -> None:
    forest = make_forest(chain(4000, (1000, 3000)).nodes)
    layout = TreeLayout(forest, CPU, "nodes")
    for index in range(len(forest.segments)):
        for piece in layout.pieces(index, 100):
            assert piece.mask is not None
            assert piece.mask.shape[0] <= 256
            assert piece.mask.shape[1] <= 256 + 99


def test_segments_out_of_order_are_refused() -> None:
    ids = np.ones(3, dtype=np.int32)
    parents = (-1, 0, 0, 1)  # the last one hangs below the first branch, but follows the second
    segments = tuple(Segment(parent, 0, ids, NOTHING, 0, is_shared=False) for parent in parents)
    forest = Forest(segments, NOTHING, NOTHING, np.zeros(0, np.float32), np.zeros(0, np.int64))
    with pytest.raises(ValueError, match=r"segment 3 .* parent 1"):
        pack_row(forest, CPU, "nodes")


def test_layers_that_hide_their_window_are_refused() -> None:
    layer = make_model("qwen3_window").base_model.layers[0].self_attn
    states = random_heads(5)
    with pytest.raises(ConfigError, match="Qwen3Attention has a sliding window"):
        tree_attention(layer, *states, None)
    tree_attention(layer, *states, None, sliding_window=5)
    with pytest.raises(ValueError, match="mask"):
        packed_attention(layer, *states, torch.zeros(5, 5), sliding_window=5)


def test_flex_is_chosen_on_a_gpu_only() -> None:
    assert choose_attention("auto", CPU) == "nodes"
    assert choose_attention("auto", torch.device("cuda")) == "flex"
    assert choose_attention("flex", CPU) == "flex"


# -- whole models ----------------------------------------------------------------------------------------------------


def train_packed(
    model: Any,
    batch: Batch,
    attention: Attention = "nodes",
    forward: contextlib.AbstractContextManager[Any] | None = None,
    **settings: Any,
) -> PolicyObjective:
    """Loss and gradients of a batch from one forward, within ``forward``, and one backward."""
    forest = make_forest(batch.nodes)
    objective = PolicyObjective(forest, batch.runs, reference.WIDE_LOSS, CPU, version=3)
    with forward or contextlib.nullcontext():
        rows = predicting_states(model, forest, attention, **settings)
    ids = torch.from_numpy(forest.target_ids).long()
    indices = torch.arange(len(ids))

    def slope_of(part: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return objective(indices[part], logprobs, entropy)

    rows.backward(backward_through_head(rows.detach(), model.lm_head, ids, 0.8, 7, slope_of, **settings))
    return objective


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3_window"])
def test_packed_forest_trains_like_plain_rows(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_MIN_WINDOW_QUERIES", 4)
    model, plain = make_model(name), make_model(name)
    use_tree_attention(model)
    batch = make_batch(seed, Shape(num_roots=1 + seed % 2))
    with Unrounded():
        expected = reference.run(plain, batch, temperature=0.8, rows=reference.leaf_rows(batch))
    objective = train_packed(model, batch, forward=Unrounded())
    assert objective.sums.loss == pytest.approx(expected.loss, abs=1e-9)
    error, parameter = reference.gradient_error(reference.gradients_of(model), expected.gradients)
    assert error <= 1e-9, parameter


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("name", ["llama", "qwen3_window"])
def test_both_ways_of_attention_train_alike(name: str) -> None:
    model = make_model(name)
    use_tree_attention(model)
    batch = make_batch(4, Shape(num_roots=2))
    loss = train_packed(model, batch, "nodes").sums.loss
    expected = reference.gradients_of(model)
    model.zero_grad()
    assert train_packed(model, batch, "flex").sums.loss == pytest.approx(loss, abs=1e-9)
    error, parameter = reference.gradient_error(reference.gradients_of(model), expected)
    assert error <= 1e-9, parameter


def test_packed_forest_in_float32_stays_near_plain_rows() -> None:
    model, plain = make_model("qwen3", torch.float32), make_model("qwen3", torch.float32)
    use_tree_attention(model)
    batch = make_batch(5)
    expected = reference.run(plain, batch, temperature=0.8)
    assert train_packed(model, batch).sums.loss == pytest.approx(expected.loss, abs=1e-5)
    error, parameter = reference.gradient_error(reference.gradients_of(model), expected.gradients)
    assert error <= 2e-5, parameter


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("attention", ["nodes", "flex"])
def test_bfloat16_stays_near_float32(attention: Attention) -> None:
    exact, rounded = make_model("qwen3", torch.float32), make_model("qwen3", torch.float32)
    batch = make_batch(6)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    use_tree_attention(exact)
    use_tree_attention(rounded)
    expected = train_packed(exact, batch).sums.loss
    assert train_packed(rounded, batch, attention, autocast=autocast).sums.loss == pytest.approx(expected, abs=0.2)
    approximate, wanted = reference.gradients_of(rounded), reference.gradients_of(exact)
    for name, gradient in wanted.items():
        assert approximate[name].dtype == torch.float32
        cosine = torch.cosine_similarity(approximate[name].flatten(), gradient.flatten(), dim=0)
        assert float(cosine) > 0.95, name


def test_attention_with_a_soft_cap_is_refused() -> None:
    from services.trainer.tree.adapters.attention import tree_attention

    with pytest.raises(ConfigError, match="softcap"):
        tree_attention(None, *random_heads(4), None, softcap=30.0)
