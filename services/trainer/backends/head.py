"""Log-probabilities of targets out of logits, with their gradient, from one softmax."""

from __future__ import annotations

import torch
from torch import Tensor


class HeadChunk:
    """Targets' log-probabilities for one chunk of logits ``[n, vocabulary]``, at a temperature.

    The softmax is kept and becomes the gradient in place, so a chunk costs two tensors of its size, and the entropy
    comes from the same pass. Half-precision logits are widened first.
    """

    logprobs: Tensor
    """[n] Natural logarithms."""
    entropy: Tensor
    """[n] Nats."""

    def __init__(self, logits: Tensor, target_ids: Tensor, temperature: float) -> None:
        self._temperature = temperature
        self._target_ids = target_ids[:, None]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if temperature != 1.0:
            wide = wide / temperature
        self._probabilities = wide.softmax(-1)
        top, top_ids = wide.max(-1, keepdim=True)
        log_norm = top - self._probabilities.gather(-1, top_ids).log()  # the largest probability never underflows
        self.logprobs = (wide.gather(-1, self._target_ids) - log_norm)[:, 0]
        self.entropy = log_norm[:, 0] - torch.linalg.vecdot(self._probabilities, wide)

    def gradient(self, slope: Tensor) -> Tensor:
        """Gradient ``[n, vocabulary]`` at the logits, from that at ``logprobs`` ``[n]``. Can be taken once."""
        scaled = (slope / self._temperature)[:, None]
        gradient = self._probabilities.mul_(-scaled)
        return gradient.scatter_add_(-1, self._target_ids, scaled)
