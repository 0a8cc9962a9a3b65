"""The model's head and the cross-entropy behind it, a chunk of targets at a time.

Logits are made only for the rows that predict a target, and only for a chunk of them at once. From one softmax come the
targets' log-probabilities, the entropy, and the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from services.common.errors import ConfigError

Slopes = Tensor | tuple[Tensor, Tensor]
"""Derivatives of the loss by the targets' log-probabilities ``[n]``; of a loss that reads the entropies too, a pair:
by the log-probabilities and by the entropies."""
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class HeadChunk:
    """Targets' log-probabilities for one chunk of logits ``[n, vocabulary]``, at a temperature.

    The softmax is kept and becomes the gradient in place, so a chunk costs one tensor of its size beside the logits,
    which nothing needs afterwards. Half-precision logits are widened to float32 first.
    """

    logprobs: Tensor
    """[n] Natural logarithms."""
    entropy: Tensor
    """[n] Nats."""

    def __init__(self, logits: Tensor, target_ids: Tensor, temperature: float) -> None:
        """To be made outside autocast, which would round the entropy."""
        self._temperature = temperature
        self._target_ids = target_ids[:, None]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        top = logits.amax(-1, keepdim=True).to(dtype) / temperature
        weights = logits.to(dtype, copy=True).div_(temperature).sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)  # at least 1
        self._probabilities = weights.div_(total)
        log_total = total.log()
        # by the top logit, not by the logarithm of the norm, beside which a small log_total would lose its digits
        target = logits.gather(-1, self._target_ids).to(dtype) / temperature - top
        self.logprobs = (target - log_total)[:, 0]
        mean = torch.bmm(self._probabilities[:, None], logits.to(dtype)[:, :, None])[:, 0] / temperature - top
        self.entropy = (log_total - mean)[:, 0]

    def gradient(self, slopes: Slopes) -> Tensor:
        """Gradient ``[n, vocabulary]`` at the logits, from that at ``logprobs`` and ``entropy``. Can be taken once.

        With ``p`` the probabilities, ``t`` the temperature and ``H`` the entropy, the derivative by logit ``j`` of a
        target's log-probability is ``([j is the target] - p_j) / t``, and that of ``H`` is ``-p_j (log p_j + H) / t``.
        """
        slope, entropy_slope = slopes if isinstance(slopes, tuple) else (slopes, None)
        scaled = (slope.to(self.logprobs.dtype) / self._temperature)[:, None]
        if entropy_slope is None:
            gradient = self._probabilities.mul_(-scaled)
        else:
            bend = (entropy_slope.to(self.logprobs.dtype) / self._temperature)[:, None]
            spread = torch.special.entr(self._probabilities).mul_(bend)
            gradient = self._probabilities.mul_(-(scaled + bend * self.entropy[:, None])).add_(spread)
        return gradient.scatter_add_(-1, self._target_ids, scaled)


@torch.no_grad()
def target_scores(
    hidden_rows: Tensor,
    head: nn.Module,
    target_ids: Tensor,
    temperature: float,
    rows_per_chunk: int,
    autocast: Autocast = contextlib.nullcontext,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[m]`` and entropies ``[m]`` of targets, without gradient.

    ``hidden_rows`` ``[m, hidden]`` predict ``target_ids`` int64 ``[m]``. The results are float32, float64 for logits in
    float64.
    """
    with autocast():  # one context for all chunks: it keeps the weights that it has cast
        parts = [
            _scores(hidden_rows[part], head, target_ids[part], temperature)
            for part in _chunks(len(hidden_rows), rows_per_chunk)
        ]
    if not parts:
        nothing = hidden_rows.new_zeros(0, dtype=torch.promote_types(hidden_rows.dtype, torch.float32))
        return nothing, nothing.clone()
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def backward_through_head(
    hidden_rows: Tensor,
    head: nn.Module,
    target_ids: Tensor,
    temperature: float,
    rows_per_chunk: int,
    slope_of: Callable[[slice, Tensor, Tensor], Slopes],
    autocast: Autocast = contextlib.nullcontext,
) -> Tensor:
    """Gradient of a loss at the hidden rows ``[m, hidden]``, in their type; that of the head's parameters is added to
    their ``grad``.

    ``slope_of`` is called once for each chunk of targets, in order: with the chunk's slice of the targets, their
    log-probabilities and entropies, both detached. It gives the slopes of the loss there. The rest is as for
    ``target_scores``.
    """
    gradient = torch.zeros_like(hidden_rows)
    with torch.enable_grad(), autocast():
        for part in _chunks(len(hidden_rows), rows_per_chunk):
            leaf = hidden_rows[part].detach().requires_grad_()
            _push(leaf, head, target_ids[part], temperature, partial(slope_of, part))
            if leaf.grad is not None:
                gradient[part] = leaf.grad
    return gradient


def reference_kl(logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """An estimate of the KL divergence from fixed reference log-probabilities, of each target, and its slope.

    For a token that the policy sampled, ``exp(d) - 1 - d`` with ``d = reference - logprob`` is never negative and its
    mean is ``KL(policy || reference)`` (Schulman 2020, "Approximating KL Divergence", the estimator k3). The slope, by
    ``logprobs``, is ``1 - exp(d)``. Both ``[m]``, in nats and in the type of ``logprobs``.
    """
    difference = reference.to(logprobs.dtype) - logprobs
    growth = difference.expm1()
    return growth - difference, -growth


@torch.no_grad()
def check_head(model: Any) -> None:
    """Make sure that the model's logits are what its head makes of the last hidden states, and nothing more.

    Raises:
        ConfigError: the model scales or caps its logits, or hands its head something else.
    """
    input_ids = torch.tensor([[0, 1]], device=model.device)
    seen: list[tuple[Tensor, Tensor]] = []

    def stand_in(_head: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        made_up = torch.linspace(-100, 100, logits.numel(), device=logits.device).to(logits.dtype).view(logits.shape)
        seen.append((inputs[0], made_up))
        return made_up

    head = model.get_output_embeddings()
    handle = head.register_forward_hook(stand_in)
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits
    finally:
        handle.remove()
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    if len(seen) == 1:
        given, made_up = seen[0]
        is_plain = given.shape == hidden.shape and torch.allclose(given, hidden, rtol=1e-2, atol=1e-3)
        if is_plain and torch.equal(logits, made_up.to(logits.dtype)):
            return
    raise ConfigError(
        f"the logits of {model.config.model_type} are not its head's output as it is: they are scaled, capped or made "
        "otherwise.",
        "Use a model whose logits are one linear layer behind the last hidden state (Llama, Qwen, Mistral and the "
        "like).",
    )


def _scores(rows: Tensor, head: nn.Module, target_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(rows)
    with torch.autocast(logits.device.type, enabled=False):
        chunk = HeadChunk(logits, target_ids, temperature)
    return chunk.logprobs, chunk.entropy


def _push(
    leaf: Tensor, head: nn.Module, target_ids: Tensor, temperature: float, slope_of: Callable[[Tensor, Tensor], Slopes]
) -> None:
    logits = head(leaf)
    dtype = logits.dtype
    edge = torch.autograd.graph.get_gradient_edge(logits)  # so that the logits themselves can go
    with torch.autocast(leaf.device.type, enabled=False):
        chunk = HeadChunk(logits.detach(), target_ids, temperature)
        del logits
        gradient = chunk.gradient(slope_of(chunk.logprobs, chunk.entropy))
        torch.autograd.backward((edge,), (gradient.to(dtype),))


def _chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))
