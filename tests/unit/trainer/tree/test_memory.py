"""The allocation tracker, on tensors whose sizes are known."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.tree.memory import AllocationTracker, peak_resident_bytes

KIB = 1024


def make(kib: int, **settings: Any) -> Tensor:
    return torch.zeros(kib * KIB // 4, **settings)


def test_live_storages_count_once_and_until_the_last_holder_goes() -> None:
    with AllocationTracker() as tracker:
        whole = make(8)
        views = [whole[:10], whole.view(2, -1), whole.detach()]
        assert tracker.current_bytes == 8 * KIB
        del whole, views[1:]
        assert tracker.current_bytes == 8 * KIB
        views.clear()
        assert tracker.current_bytes == 0
        assert tracker.peak_bytes == 8 * KIB


def test_transients_between_operations_are_in_the_peak() -> None:
    with AllocationTracker() as tracker:
        small = make(4)
        (small[None, :] + make(64).view(16, -1)).sum()
        assert tracker.peak_bytes == (4 + 64 + 64) * KIB
        assert tracker.current_bytes == 4 * KIB


def test_what_existed_before_is_left_out_or_counted() -> None:
    layer = nn.Linear(64, 64, bias=False)  # 16 KiB
    layer.weight.grad = torch.zeros(64, 64)
    rows = torch.zeros(2, 64)
    with AllocationTracker() as tracker:
        layer.weight.detach().t().mul_(2)
        layer(rows).sum().backward()
        layer.weight.grad.zero_()
        assert tracker.current_bytes == 0
    with AllocationTracker(count_existing=True) as tracker:
        before = tracker.current_bytes
        assert before >= 32 * KIB + rows.nbytes
        layer.weight.grad = None
        assert tracker.current_bytes == before - 16 * KIB


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        torch.zeros(256 * KIB // 4)  # gone before the next line
        return 2 * x * gradients[0]


class _Nested(torch.autograd.Function):
    """Evaluates and differentiates inside its own backward, as recomputation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x.exp().exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor | None:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            _Square.apply(leaf.exp().exp()).backward(gradients[0])
        return leaf.grad


def test_backward_counts_inside_custom_functions_and_nested_backwards() -> None:
    x = make(16, requires_grad=True)
    with AllocationTracker() as tracker:
        out = _Square.apply(x)
        assert tracker.current_bytes == 16 * KIB
        out.backward(torch.ones_like(out))
        # the output, its gradient, the transient; the gradient of x stays
        assert tracker.peak_bytes == (16 + 16 + 256) * KIB
        del out
        assert tracker.current_bytes == 16 * KIB
    x.grad = None
    with AllocationTracker() as tracker:
        out = _Nested.apply(x)
        out.backward(torch.ones_like(out))
        # inside, two exponentials and their square are alive as well
        assert tracker.peak_bytes == (16 + 16 + 3 * 16 + 256) * KIB


def test_saved_activations_count_while_the_graph_lives() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    rows = torch.randn(16, 64, requires_grad=True)  # 4 KiB
    with AllocationTracker() as tracker:
        out = layers(rows)
        assert tracker.current_bytes == 16 * KIB
        out.sum().backward()
        del out
        assert tracker.current_bytes == 4 * 16 * KIB + 4 * KIB
    layers.zero_grad()
    with AllocationTracker() as tracker:
        out = checkpoint(layers, rows, use_reentrant=False)
        assert out.nbytes <= tracker.current_bytes < 5 * KIB


def test_each_phase_has_its_own_peak() -> None:
    with AllocationTracker() as tracker:
        with tracker.phase("capture"):
            kept = make(8)
            make(32)
        with tracker.phase("replay"), tracker.phase("head"):
            make(2)
        with tracker.phase("replay"):
            make(16)
        with tracker.phase("idle"):
            pass
        make(100)
        assert tracker.phase_peak_bytes == {
            "capture": 40 * KIB,
            "replay": 24 * KIB,
            "head": 10 * KIB,
            "idle": 8 * KIB,
        }
        assert tracker.peak_bytes == 108 * KIB
        del kept


def test_resized_and_excluded_storages() -> None:
    with AllocationTracker() as tracker:
        grown = torch.empty(0)
        grown.resize_(KIB)
        assert tracker.current_bytes == 4 * KIB
        mapped = make(8)
        tracker.exclude(mapped)
        mapped.add_(1)
        assert tracker.current_bytes == 4 * KIB


def test_tensors_of_another_thread_count_once_they_are_used_and_may_die_there() -> None:
    box: list[Tensor] = []
    with AllocationTracker() as tracker:
        thread = threading.Thread(target=lambda: box.append(make(8)))
        thread.start()
        thread.join()
        assert tracker.current_bytes == 0
        box[0].add_(1)
        assert tracker.current_bytes == 8 * KIB
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert tracker.current_bytes == 0


def test_tensors_without_data_count_nothing() -> None:
    with AllocationTracker() as tracker:
        kept = torch.zeros(1 << 40, device="meta")
        assert (tracker.current_bytes, kept.numel()) == (0, 1 << 40)


def test_peak_of_the_process_covers_what_it_touched() -> None:
    touched = torch.ones(1 << 24)
    size_bytes = touched.nbytes
    del touched
    assert size_bytes < peak_resident_bytes() < 1 << 40
