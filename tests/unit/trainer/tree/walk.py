"""Sends hidden states through one attention module, chunk by chunk, as an executor does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.tree.attend import Page
from services.trainer.tree.states import ChunkContext
from services.trainer.tree.store import StateStore, StoreBudget
from tests.unit.trainer.tree.models import Unrounded
from tests.unit.trainer.tree.reference import gradient_error, gradients_of

Evaluate = Callable[[Tensor, ChunkContext], Tensor]
"""From the hidden states of a chunk ``[1, T, hidden]`` and its context to its output ``[1, T, hidden]``."""


@dataclass(frozen=True, slots=True)
class Walked:
    """What evaluating hidden states gave. The gradients of parameters are in their ``grad``."""

    output: Tensor
    """[1, T, hidden]"""
    input_gradient: Tensor
    """[1, T, hidden]"""


def walk(evaluate: Evaluate, hidden: Tensor, gradient: Tensor, sizes: Sequence[int]) -> Walked:
    """All chunks forward without autograd, then backward from the last one, with ``gradient`` at the output.

    ``hidden``, ``gradient`` ``[1, T, hidden]``; ``sizes`` of the chunks add up to ``T``.
    """
    store = StateStore(torch.device("cpu"), StoreBudget())
    anchor = torch.zeros((), requires_grad=True)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pages = [Page(index, starts[index], size, has_gradient=True) for index, size in enumerate(sizes)]

    def context(index: int, *, is_recorded: bool) -> ChunkContext:
        return ChunkContext(
            store,
            pages[:index],
            pages[index],
            is_recorded=is_recorded,
            is_inner=index + 1 < len(pages),
            anchor=anchor,
        )

    captured = []
    for index, page in enumerate(pages):
        with torch.no_grad():
            captured.append(evaluate(hidden[:, page.start : page.end], context(index, is_recorded=False)))
    of_input = torch.zeros_like(hidden)
    for index in reversed(range(len(pages))):
        page = pages[index]
        leaf = hidden[:, page.start : page.end].clone().requires_grad_()
        output = evaluate(leaf, context(index, is_recorded=True))
        torch.testing.assert_close(output.detach(), captured[index], rtol=0, atol=0)
        output.backward(gradient[:, page.start : page.end])
        assert leaf.grad is not None
        of_input[:, page.start : page.end] = leaf.grad
        store.release(index)
    return Walked(torch.cat(captured, dim=1), of_input)


def through(model: Any, layer: int = 0) -> Evaluate:
    """Through the attention of a layer of a Hugging Face model, in float64 throughout."""

    def evaluate(hidden: Tensor, context: ChunkContext) -> Tensor:
        with context.active(), Unrounded():
            return attend(model, layer, hidden, context.start, past_key_values=context)

    return evaluate


def attend(model: Any, layer: int, hidden: Tensor, start: int, **kwargs: Any) -> Tensor:
    """The output of a layer's attention for hidden states whose first token stands at ``start``."""
    positions = torch.arange(start, start + hidden.shape[1])[None]
    rotation = model.base_model.rotary_emb(hidden, position_ids=positions)
    arguments = {"attention_mask": None, "position_ids": positions, "position_embeddings": rotation, **kwargs}
    output: Tensor = model.base_model.layers[layer].self_attn(hidden, **arguments)[0]
    return output


def whole_sequence(model: Any, hidden: Tensor, gradient: Tensor, layer: int = 0) -> Walked:
    """The same by one call of an unchanged model's attention with a causal mask, in float64 throughout."""
    num_tokens = hidden.shape[1]
    leaf = hidden.clone().requires_grad_()
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()[None, None]
    with Unrounded():
        output = attend(model, layer, leaf, 0, attention_mask=mask)
    output.backward(gradient)
    assert leaf.grad is not None
    return Walked(output.detach(), leaf.grad)


def difference(ours: Any, plain: Any, states: tuple[Tensor, Tensor], sizes: Sequence[int], layer: int = 0) -> float:
    """The largest relative error of output, input gradient and parameter gradients of a layer's attention.

    ``ours`` goes in chunks of these sizes, ``plain`` is the same model, unchanged.
    """
    walked, expected = walk(through(ours, layer), *states, sizes), whole_sequence(plain, *states, layer)
    error = max(_relative(walked.output, expected.output), _relative(walked.input_gradient, expected.input_gradient))
    gradients, references = gradients_of(ours), gradients_of(plain)
    assert references
    return max(error, gradient_error(gradients, references)[0])


def _relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def random_states(num_tokens: int, seed: int, width: int = 32) -> tuple[Tensor, Tensor]:
    """Hidden states ``[1, T, width]`` and a gradient for the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden, gradient = torch.randn(2, 1, num_tokens, width, generator=generator, dtype=torch.float64)
    return hidden, gradient


def cuts(num_tokens: int, seed: int) -> list[int]:
    """Random sizes of chunks, some of one token."""
    generator = torch.Generator().manual_seed(seed)
    sizes: list[int] = []
    while (left := num_tokens - sum(sizes)) > 0:
        largest = 1 if torch.rand((), generator=generator) < 0.3 else 12
        sizes.append(min(left, int(torch.randint(1, largest + 1, (), generator=generator))))
    return sizes
