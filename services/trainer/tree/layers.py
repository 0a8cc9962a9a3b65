"""Graphs of whole chunks that hold one layer at a time: each layer is evaluated again in the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.trainer.tree.states import ChunkContext

INPUT = "input"
"""Part of the store that holds a layer's input between its forward and its backward."""

Run = Callable[[Tensor], Any]
"""A layer, from its input to its output, or to a tuple that begins with it."""


class LayerRecompute:
    """Stands in for the forward of a model's decoder layers. While it is active a layer keeps only its input, in the
    store, which moves it off the device by its budget; the layer's own tensors live in its backward alone.
    """

    def __init__(self, model: Any, autocast: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._context: ChunkContext | None = None
        self._autocast = autocast
        for index, layer in enumerate(model.base_model.layers):
            layer.forward = partial(self._forward, index, layer.forward)

    @contextlib.contextmanager
    def active(self, context: ChunkContext) -> Iterator[None]:
        """While it lasts layers are recomputed."""
        self._context = context
        try:
            yield
        finally:
            self._context = None

    def _forward(self, index: int, forward: Callable[..., Any], hidden_states: Tensor, **kwargs: Any) -> Any:
        if self._context is None or not torch.is_grad_enabled():
            return forward(hidden_states, **kwargs)
        others: list[Any] = []
        run = partial(forward, **kwargs)
        hidden = _Recomputed.apply(
            self._context, index, run, self._autocast, others, self._context.anchor, hidden_states
        )
        return (hidden, *others) if others else hidden


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        context: ChunkContext,
        index: int,
        run: Run,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        others: list[Any],
        anchor: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        ctx.context, ctx.index, ctx.run, ctx.autocast = context, index, run, autocast
        ctx.random = torch.get_rng_state() if hidden.device.type == "cpu" else torch.cuda.get_rng_state(hidden.device)
        context.stash(index, INPUT, hidden)
        with torch.no_grad():
            output = run(hidden)
        if isinstance(output, tuple):  # beside the hidden states what has no gradient: chosen positions, say
            others += output[1:]
            output = output[0]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        leaf = ctx.context.take(ctx.index, INPUT).detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast(), _random_from(ctx.random, leaf.device):
            output = ctx.run(leaf)
        torch.autograd.backward(output[0] if isinstance(output, tuple) else output, gradients[0])
        return None, None, None, None, None, None, leaf.grad


@contextlib.contextmanager
def _random_from(state: Tensor, device: torch.device) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
