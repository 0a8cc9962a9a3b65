"""The publishing side of a weight update: one host buffer, a checksum for each tensor, a canary."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from services.common.errors import WeightsError
from services.common.transfer.base import Bytes, Exposed, TransferEngine
from services.trainer.types import Canary, TensorSlot, WeightManifest

CANARY_TOKENS = 48
_ALIGNMENT_BYTES = 64
_CANARY_SEED = 48

Score = Callable[[Sequence[int], Mapping[str, Tensor]], list[float]]
"""``TrainingBackend.score``."""


class WeightPublisher:
    """Lays weights out in one buffer and exposes it.

    The buffer is registered once and overwritten by each publication, so version v + 1 may be published only after
    every pull of version v has ended (the caller awaits them). A pull that breaks the rule gets bytes whose checksums
    do not match its manifest, and its cell becomes STALE.
    """

    def __init__(self, engine: TransferEngine, dtype: torch.dtype) -> None:
        """``dtype``: the rollout engine's data type for its weights."""
        self._engine = engine
        self._dtype = dtype
        self._buffer: Bytes | None = None
        self._exposed: Exposed | None = None

    def publish(
        self, version: int, weights: Iterable[tuple[str, Tensor]], canary_ids: Sequence[int], score: Score
    ) -> WeightManifest:
        """Copy ``weights`` (Hugging Face names, tied tensors once) and describe them.

        Floating-point tensors are rounded to the engine's data type; the canary is scored with what was rounded.

        Raises:
            WeightsError: the weights are not finite, or the transport refused the buffer.
        """
        named = list(weights)
        slots, size_bytes = plan_slots(named, self._dtype)
        buffer = self._reserve(size_bytes)
        views = {slot.name: _view(buffer, slot) for slot in slots}
        for name, tensor in named:
            views[name].copy_(tensor)
        slots = [_with_checksum(slot, buffer) for slot in slots]
        logprobs = score(canary_ids, views)
        if not np.isfinite(logprobs).all():
            raise WeightsError(
                f"the weights of version {version} give log-probabilities that are not finite.",
                "Lower trainer.optimizer.learning_rate and resume from the last checkpoint.",
            )
        assert self._exposed is not None
        return WeightManifest(
            version=version,
            segment=self._exposed.segment,
            address=self._exposed.address,
            size_bytes=size_bytes,
            transport=self._engine.transport,
            tensors=tuple(slots),
            canary=Canary(tuple(canary_ids), tuple(logprobs)),
        )

    def close(self) -> None:
        """Take the buffer back."""
        if self._exposed is not None:
            self._engine.withdraw(self._exposed)
        self._exposed = self._buffer = None

    def _reserve(self, size_bytes: int) -> Bytes:
        if self._buffer is None or self._buffer.nbytes != size_bytes:
            self.close()
            self._buffer = np.zeros(size_bytes, dtype=np.uint8)
            self._exposed = self._engine.expose(self._buffer)
        return self._buffer


def plan_slots(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> tuple[list[TensorSlot], int]:
    """Where each tensor goes, aligned, in the given order; the buffer's size. Checksums are 0."""
    slots = []
    offset = 0
    for name, tensor in named:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        size_bytes = tensor.numel() * kind.itemsize
        slots.append(TensorSlot(name, tuple(tensor.shape), str(kind).removeprefix("torch."), offset, size_bytes, 0))
        offset += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return slots, offset


def canary_tokens(ordinary_ids: Sequence[int], num_tokens: int = CANARY_TOKENS) -> list[int]:
    """A fixed pseudo-random sequence of a vocabulary's ordinary ids (no special tokens)."""
    chosen = np.random.default_rng(_CANARY_SEED).integers(0, len(ordinary_ids), num_tokens)
    return [int(ordinary_ids[index]) for index in chosen]


def _view(buffer: Bytes, slot: TensorSlot) -> Tensor:
    part = buffer[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
    return torch.from_numpy(part).view(getattr(torch, slot.dtype)).view(slot.shape)


def _with_checksum(slot: TensorSlot, buffer: Bytes) -> TensorSlot:
    part = buffer[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
    return TensorSlot(slot.name, slot.shape, slot.dtype, slot.offset_bytes, slot.size_bytes, zlib.crc32(part.data))
