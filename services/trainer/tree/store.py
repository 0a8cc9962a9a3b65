"""The states of evaluated chunks and the gradients that later chunks collect for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.tree.kernels import accumulation_dtype


class StateKey(NamedTuple):
    """What a state belongs to."""

    chunk: int
    layer: int
    """The number of layers for part ``hidden``."""
    part: str


@dataclass(frozen=True, slots=True)
class StoreBudget:
    """Bytes that each tier may hold; None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    folder: Path | None = None
    """Where pages go that fit neither; None: they may not."""


@dataclass(slots=True)
class _Entry:
    states: tuple[Tensor, ...]
    needs_gradient: bool
    gradients: list[Tensor] | None = None


class StateStore:
    """Keeps states until their chunk is released."""

    def __init__(self, device: torch.device, budget: StoreBudget) -> None:
        self._device = device
        self._budget = budget
        self._entries: dict[StateKey, _Entry] = {}

    def put(self, key: StateKey, tensors: Sequence[Tensor], *, needs_gradient: bool = True) -> None:
        """Keeps copies of ``tensors``; a key is written once."""
        if key in self._entries:
            raise ValueError(f"{key} has been put already")
        states = tuple(tensor.detach().contiguous().clone() for tensor in tensors)
        self._entries[key] = _Entry(states, needs_gradient)

    def get(self, key: StateKey) -> tuple[Tensor, ...]:
        """The states, on the device; the caller must not write to them."""
        return self._entries[key].states

    def has(self, key: StateKey) -> bool:
        """Whether the key has been put and not released."""
        return key in self._entries

    def prefetch(self, key: StateKey) -> None:
        """Hints that the key is needed soon; returns at once."""

    def add_gradient(self, key: StateKey, gradients: Sequence[Tensor | None]) -> None:
        """Adds to what was collected for the key, in float32 (float64 for float64 states)."""
        entry = self._entries[key]
        if not entry.needs_gradient:
            return
        if entry.gradients is None:
            entry.gradients = [torch.zeros_like(s, dtype=accumulation_dtype(s.dtype)) for s in entry.states]
        for total, gradient in zip(entry.gradients, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient.detach())

    def gradient(self, key: StateKey) -> tuple[Tensor, ...] | None:
        """What was collected, in the type of accumulation; None if nothing was."""
        gradients = self._entries[key].gradients
        return None if gradients is None else tuple(gradients)

    def release(self, chunk: int) -> None:
        """Frees all states and gradients of a chunk."""
        for key in [key for key in self._entries if key.chunk == chunk]:
            del self._entries[key]

    def close(self) -> None:
        """Frees everything and removes the store's files."""
        self._entries.clear()
