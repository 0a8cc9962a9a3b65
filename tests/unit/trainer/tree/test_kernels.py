"""Attention page by page against one plain softmax over all keys, with autograd for its gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.tree import fused
from services.trainer.tree.kernels import Merge, attend_page, attend_page_backward
from services.trainer.tree.tiles import additive, any_visible, row_tiles

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Page:
    first: int
    end: int
    mask: Tensor | None = None
    causal: bool = False

    @property
    def size(self) -> int:
        return self.end - self.first

    def visible(self, num_rows: int) -> Tensor:
        seen = torch.ones(num_rows, self.size, dtype=torch.bool) if self.mask is None else self.mask
        return seen.tril() if self.causal else seen


@dataclass(frozen=True)
class Attention:
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    scale: float

    @property
    def num_rows(self) -> int:
        return self.query.shape[2]

    def laid_out(self, change: Callable[[Tensor], Tensor]) -> Attention:
        return Attention(change(self.query), change(self.key), change(self.value), change(self.grad), self.scale)


def make_attention(
    dtype: torch.dtype,
    num_rows: int,
    num_keys: int,
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    seed: int = 0,
) -> Attention:
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (1, heads[0], num_rows, widths[0]),
        (1, heads[1], num_keys, widths[0]),
        (1, heads[1], num_keys, widths[1]),
        (1, heads[0], num_rows, widths[1]),
    )
    query, key, value, grad = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return Attention(query, key, value, grad, 1.3 / math.sqrt(widths[0]))


def split(num_keys: int, num_own: int, cuts: Sequence[int]) -> list[Page]:
    """Unmasked pages of earlier keys, and a causal one for the last ``num_own``."""
    edges = [0, *sorted(cuts), num_keys - num_own]
    pages = [Page(a, b) for a, b in itertools.pairwise(edges)]
    return [*pages, Page(num_keys - num_own, num_keys, causal=True)]


def by_pages(attention: Attention, pages: Sequence[Page]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merged output and logarithm, gradients of query, key, value."""
    a = attention
    merge = Merge()
    for page in pages:
        keys = slice(page.first, page.end)
        merge.add(
            *attend_page(a.query, a.key[:, :, keys], a.value[:, :, keys], a.scale, mask=page.mask, causal=page.causal)
        )
    out, lse = merge.result()
    parts = [
        attend_page_backward(
            a.grad,
            a.query,
            a.key[:, :, page.first : page.end],
            a.value[:, :, page.first : page.end],
            out,
            lse,
            a.scale,
            mask=page.mask,
            causal=page.causal,
        )
        for page in pages
    ]
    of_query, of_key, of_value = zip(*parts, strict=True)
    grad_query = torch.stack([part.to(out.dtype) for part in of_query]).sum(0)
    return out, lse, grad_query, torch.cat(of_key, 2), torch.cat(of_value, 2)


def at_once(attention: Attention, pages: Sequence[Page]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same by one softmax in float64 and autograd."""
    query, key, value = (
        part.double().clone().requires_grad_() for part in (attention.query, attention.key, attention.value)
    )
    visible = torch.cat([page.visible(attention.num_rows) for page in pages], dim=1)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * attention.scale
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.masked_fill(~visible.any(1)[:, None], 0.0).softmax(-1) * visible.any(1)[:, None]
    out = weights @ value.repeat_interleave(groups, 1)
    of_query, of_key, of_value = torch.autograd.grad(out, (query, key, value), attention.grad.double())
    return out.detach(), scores.detach().logsumexp(-1), of_query, of_key, of_value


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        finite = want.isfinite()
        assert torch.equal(got.double().where(~finite, 0.0), want.where(~finite, 0.0))
        scale = want.where(finite, 0.0).abs().max().clamp(min=1.0)
        assert (got.double() - want).where(finite, 0.0).abs().max() <= tolerance * scale


@pytest.fixture(params=["fused", "tiles"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiles":
        monkeypatch.setattr(fused, "takes", lambda *_: False)
        monkeypatch.setattr("services.trainer.tree.tiles._CPU_TILE_BYTES", 4096)  # several tiles
    else:
        monkeypatch.setattr(fused, "_MASK_ROWS", 3)
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_pages_merge_to_the_whole_softmax(dtype: torch.dtype, heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_own, num_before = (int(torch.randint(1, 40, (1,), generator=generator)) for _ in range(2))
    cuts = torch.randperm(num_before, generator=generator)[:3].tolist()
    attention = make_attention(dtype, num_own, num_before + num_own, heads=heads, seed=seed)
    pages = [page for page in split(num_before + num_own, num_own, cuts) if page.size]
    assert_same(by_pages(attention, pages), at_once(attention, pages), TOLERANCE[dtype])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("widths", [(8, 12), (12, 8), (5, 3), (24, 16)])
def test_values_may_be_of_another_width(widths: tuple[int, int]) -> None:
    attention = make_attention(torch.float64, 7, 20, widths=widths)
    pages = split(20, 7, [5])
    assert_same(by_pages(attention, pages), at_once(attention, pages), 1e-12)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_masks_hide_keys(dtype: torch.dtype, heads: tuple[int, int], share: float) -> None:
    num_rows = 17
    attention = make_attention(dtype, num_rows, 13 + 19 + num_rows, heads=heads)
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(num_rows, n, generator=generator) < share for n in (13, 19, num_rows)]
    pages = [Page(0, 13, masks[0]), Page(13, 32, masks[1]), Page(32, 49, masks[2], causal=True)]
    assert_same(by_pages(attention, pages), at_once(attention, pages), TOLERANCE[dtype])


@pytest.mark.usefixtures("path")
def test_autocast_changes_no_bit() -> None:
    """A forward runs under it, its backward does not, and both have to make the same of a score."""
    attention = make_attention(torch.bfloat16, 9, 30)
    pages = [Page(0, 21, torch.ones(9, 21, dtype=torch.bool).tril(5)), Page(21, 30, causal=True)]
    expected = by_pages(attention, pages)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = by_pages(attention, pages)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, expected, strict=True))


@pytest.mark.usefixtures("path")
def test_rows_that_see_nothing_give_nothing() -> None:
    """In one page (row 1), in all pages (row 2), in a page that nobody sees."""
    attention = make_attention(torch.float64, 5, 20)
    first, last = torch.ones(5, 8, dtype=torch.bool), torch.ones(5, 8, dtype=torch.bool)
    first[1] = first[2] = last[2] = False
    pages = [Page(0, 8, first), Page(8, 12, torch.zeros(5, 4, dtype=torch.bool)), Page(12, 20, last)]
    result = by_pages(attention, pages)
    assert_same(result, at_once(attention, pages), 1e-12)
    out, lse, grad_query, *_ = result
    assert torch.equal(out[:, :, 2], torch.zeros_like(out[:, :, 2]))
    assert torch.equal(lse[:, :, 2], torch.full_like(lse[:, :, 2], -torch.inf))
    assert torch.equal(grad_query[:, :, 2], torch.zeros_like(grad_query[:, :, 2]))
    assert all(part.isfinite().all() for part in (out, *result[2:]))


@pytest.mark.usefixtures("path")
def test_a_sliding_window_over_page_edges() -> None:
    num_rows, window = 24, 9
    attention = make_attention(torch.float64, num_rows, 16 + 16 + num_rows)
    positions = torch.arange(56)
    seen = (positions[32:, None] >= positions) & (positions[32:, None] - positions < window)
    pages = [Page(0, 16, seen[:, :16]), Page(16, 32, seen[:, 16:32]), Page(32, 56, seen[:, 32:])]
    assert_same(by_pages(attention, pages), at_once(attention, pages), 1e-12)


@pytest.mark.usefixtures("path")
def test_no_keys_and_no_queries() -> None:
    attention = make_attention(torch.float64, 6, 11)
    pages = [Page(0, 5), Page(5, 5), Page(5, 11, causal=True)]
    assert_same(by_pages(attention, pages), at_once(attention, pages), 1e-12)
    out, lse = attend_page(attention.query[:, :, :0], attention.key, attention.value, 1.0)
    assert out.shape == (1, 4, 0, 8)
    assert lse.shape == (1, 4, 0)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_any_memory_layout_gives_the_same(kind: str) -> None:
    plain = make_attention(torch.float64, 7, 7)
    page = Page(0, 7, torch.rand(7, 7) < 0.6 if kind == "mask" else None, causal=kind == "causal")
    across = plain.laid_out(lambda part: part.mT.contiguous().mT)
    tokens_first = plain.laid_out(lambda part: part.transpose(1, 2).contiguous().transpose(1, 2))
    expected = at_once(plain, [page])
    assert_same(by_pages(across, [page]), expected, 1e-12)
    assert_same(by_pages(tokens_first, [page]), expected, 1e-12)
    same_everywhere = Attention(plain.query, plain.key, plain.value, torch.ones(1).double().expand(1, 4, 7, 8), 0.4)
    assert_same(by_pages(same_everywhere, [page]), at_once(same_everywhere, [page]), 1e-12)


@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_threads_change_nothing(kind: str) -> None:
    attention = make_attention(torch.float64, 12, 12, heads=(3, 1))
    page = Page(0, 12, torch.rand(12, 12) < 0.6 if kind == "mask" else None, causal=kind == "causal")
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert_same(by_pages(attention, [page]), at_once(attention, [page]), 1e-12)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("path")
def test_large_scores_do_not_overflow() -> None:
    attention = make_attention(torch.float32, 9, 30)
    loud = Attention(attention.query * 60, attention.key * 60, attention.value, attention.grad, attention.scale)
    pages = split(30, 9, [10])
    result = by_pages(loud, pages)
    assert all(part.isfinite().all() for part in result)
    expected = at_once(loud, pages)
    assert_same(result[:1], expected[:1], 1e-3)  # scores of several thousand, rounded to float32


def test_merging_is_in_float32_and_leaves_its_inputs_alone() -> None:
    merge = Merge()
    parts = [(torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)) for _ in range(3)]
    copies = [(out.clone(), lse.clone()) for out, lse in parts]
    for part in parts:
        merge.add(*part)
    out, lse = merge.result()
    assert out.dtype == lse.dtype == torch.float32
    assert all(
        torch.equal(a, b) for part, copy in zip(parts, copies, strict=True) for a, b in zip(part, copy, strict=True)
    )
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    expected = sum(weight[..., None] * out.float() for weight, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(out, expected)


def test_merging_hides_no_nan() -> None:
    merge = Merge()
    merge.add(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1))
    merge.add(torch.full((1, 1, 1, 2), torch.nan), torch.full((1, 1, 1), torch.nan))
    assert merge.result()[0].isnan().all()


def test_nothing_merged_is_an_error() -> None:
    with pytest.raises(ValueError, match="no page"):
        Merge().result()


def test_what_does_not_fit_is_refused() -> None:
    query, key = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attend_page(query, key, key, 1.0, causal=True)
    with pytest.raises(ValueError, match="mask must be bool"):
        attend_page(query, key, key, 1.0, mask=torch.zeros(5, 6))
    with pytest.raises(ValueError, match="grouped heads"):
        attend_page(query[:, :3], key, key, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attend_page(query, key, key[:, :, :5], 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_additive_mask_is_zero_or_minus_infinity(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False], [False, True]])
    assert torch.equal(additive(mask, dtype), torch.tensor([[0, -torch.inf], [-torch.inf, 0]], dtype=dtype))


def test_tiles_cover_what_is_visible_and_no_more() -> None:
    mask = torch.zeros(10, 30, dtype=torch.bool)
    mask[2, 5] = mask[3, 9] = mask[9, 29] = True
    tiles = list(row_tiles(10, 30, mask, 4, mask.device, causal=False))
    assert [(tile.rows, tile.keys) for tile in tiles] == [(slice(0, 4), slice(5, 10)), (slice(8, 10), slice(29, 30))]
    assert sum(int(tile.visible.sum()) for tile in tiles if tile.visible is not None) == 3
    assert torch.equal(any_visible(mask, 1), mask.any(1))


class FlashOnCpu:
    """The operators of CUDA's FlashAttention, as strict as they are, computed by the CPU's kernel."""

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        self.check(query, key, value)
        assert (dropout, debug) == (0.0, False)
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(query, key, value, 0.0, causal, scale=scale)
        return out, lse.contiguous(), *[torch.empty(0)] * 7

    def _scaled_dot_product_flash_attention_backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        query_lengths: None,
        key_lengths: None,
        max_queries: int,
        max_keys: int,
        dropout: float,
        causal: bool,
        seed: Tensor,
        offset: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.check(query, key, value)
        assert query_lengths is key_lengths is None
        assert (max_queries, max_keys, dropout) == (query.shape[2], key.shape[2], 0.0)
        assert grad.shape == out.shape == query.shape
        assert grad.dtype == out.dtype == query.dtype
        assert lse.shape == query.shape[:3]
        assert lse.is_contiguous()
        assert (seed.shape, offset.shape) == ((2,), ())
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: tuple[Tensor, Tensor, Tensor] = backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return grads

    def check(self, *tensors: Tensor) -> None:
        assert len({tensor.shape[-1] for tensor in tensors}) == len({tensor.shape[1] for tensor in tensors}) == 1
        assert all(tensor.shape[-1] % 8 == 0 and tensor.stride(-1) == 1 for tensor in tensors)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_aten", FlashOnCpu())
    for way in ("forward", "backward"):

        def call(*args: Any, way: str = way) -> Any:
            *rest, mask, causal = args
            assert mask is None
            return getattr(fused, f"_flash_{way}")(*rest, causal)

        monkeypatch.setattr(fused, f"fused_{way}", call)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("widths", [(8, 8), (12, 5), (5, 20)])
def test_flash_attention_on_cuda_is_called_as_it_wants(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    attention = make_attention(torch.float64, 7, 20, heads=heads, widths=widths)
    pages = split(20, 7, [5])
    assert_same(by_pages(attention, pages), at_once(attention, pages), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_calls_of_flash_attention_fit_pytorchs_operators(causal: bool) -> None:
    """On tensors without data, which go through the operators' real signatures."""
    query, key, value, grad = (
        torch.empty(1, heads, 6, width, dtype=torch.bfloat16, device="meta")
        for heads, width in ((4, 12), (2, 12), (2, 20), (4, 20))
    )
    out, lse = fused._flash_forward(query, key, value, 0.3, causal)
    assert (out.shape, out.dtype) == (grad.shape, torch.bfloat16)
    assert lse.shape == (1, 4, 6)
    grads = fused._flash_backward(grad, query, key, value, out.float(), lse, 0.3, causal)
    assert [part.shape for part in grads] == [query.shape, key.shape, value.shape]
