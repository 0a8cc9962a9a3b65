"""The states of evaluated chunks and the gradients that later chunks collect for them, in memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from services.trainer.tree import saved
from services.trainer.tree.placement import Placement, StoreBudget
from services.trainer.tree.records import Layout, Record

__all__ = ["StateKey", "StateStore", "StoreBudget", "StoreBytes"]


class StateKey(NamedTuple):
    """What a state belongs to."""

    chunk: int
    layer: int
    """The number of layers for part ``hidden``."""
    part: str


@dataclass(frozen=True, slots=True)
class StoreBytes:
    """Bytes in each tier."""

    device: int
    """0 on a CPU device: its memory is the host's."""
    host: int
    disk: int


@dataclass(slots=True)
class _Entry:
    state: Record
    needs_gradient: bool
    gradient: Record | None = None


class StateStore:
    """Keeps states until their chunk is released, each in the highest tier that has room: device, host, page file.

    A state is written once; gradients add up in float32 (float64 for float64 states), in the order of the calls, so
    budgets change no bit of a result. Memory stays within its budget, but for one record at a time on its way. For one
    thread at a time. What ``get`` and ``gradient`` return may be the store's own memory: nobody may write to it.
    """

    def __init__(self, device: torch.device, budget: StoreBudget) -> None:
        """Raises:
        MachineError: no page file can be made in the budget's folder.
        """
        self._device = device
        self._placement = Placement(device, budget)
        self._entries: dict[StateKey, _Entry] = {}
        self._chunks: dict[int, list[StateKey]] = {}
        self._num_created = 0

    # -- states

    def put(self, key: StateKey, tensors: Sequence[Tensor], *, needs_gradient: bool = True) -> None:
        """Keeps copies of ``tensors``; a key is put once. Gradients are only collected where they are needed.

        Raises:
            MachineError: there is room in no tier, or the disk is full.
        """
        self._placement.traffic.check()
        if key in self._entries:
            raise ValueError(f"{key} has been put already")
        record = self._make(Layout.of(tensors), is_gradient=False)
        self._placement.add(record, lambda views: _copy(views, tensors))
        self._enter(key, _Entry(record, needs_gradient))

    def get(self, key: StateKey) -> tuple[Tensor, ...]:
        """The states, on the device.

        Raises:
            KeyError: the key has not been put, or its chunk was released.
            MachineError: the disk fails.
        """
        self._placement.traffic.check()
        record = self._entries[key].state
        self._placement.note_use(record)
        return self._placement.fetch(record)

    def has(self, key: StateKey) -> bool:
        """Whether the key has been put and not released."""
        return key in self._entries

    def prefetch(self, key: StateKey) -> None:
        """Hints that ``get`` of the key comes soon; returns at once."""
        entry = self._entries.get(key)
        if entry is not None:
            self._placement.fetch_ahead(entry.state)

    # -- gradients

    def add_gradient(self, key: StateKey, gradients: Sequence[Tensor | None]) -> None:
        """Adds to what was collected for the key; nothing happens where no gradient is needed.

        Raises:
            KeyError: the key has not been put, or its chunk was released.
            MachineError: there is room in no tier, or the disk is full or fails.
        """
        self._placement.traffic.check()
        entry = self._entries[key]
        for shape, gradient in zip(entry.state.layout.shapes, gradients, strict=True):
            if gradient is not None and gradient.shape != shape:
                raise ValueError(f"a gradient {tuple(gradient.shape)} for a state {shape} of {key}")
        if not entry.needs_gradient or all(gradient is None for gradient in gradients):
            return
        is_new = entry.gradient is None
        if entry.gradient is None:
            layout = entry.state.layout.accumulated()
            record = self._make(layout, is_gradient=True, uses=entry.state.uses + 1)
            self._placement.add_unfilled(record)
            entry.gradient = record
        else:
            self._placement.note_use(entry.gradient)
            self._placement.lift_gradient(entry.gradient)
        self._placement.accumulate(entry.gradient, gradients, is_new=is_new)

    def gradient(self, key: StateKey) -> tuple[Tensor, ...] | None:
        """What was collected, on the device, in the type of accumulation; None if nothing was. Good until the next
        addition.

        Raises:
            KeyError: the key has not been put, or its chunk was released.
            MachineError: the disk fails.
        """
        self._placement.traffic.check()
        record = self._entries[key].gradient
        if record is None:
            return None
        if record.level == 0:
            return record.tensors
        return record.layout.views(self._placement.read(record).to(self._device))

    # -- the end of states

    def release(self, chunk: int) -> None:
        """Frees all states and gradients of a chunk."""
        for key in self._chunks.pop(chunk, ()):
            entry = self._entries.pop(key)
            self._placement.remove(entry.state)
            if entry.gradient is not None:
                self._placement.remove(entry.gradient)

    def save(self, folder: Path, *, label: str = "") -> None:
        """Writes all states and gradients to a folder, for ``load``; what was saved there before is replaced at once
        or not at all. ``label``: what they belong to.

        Raises:
            MachineError: the folder cannot be written, or its disk is full.
        """
        self._placement.traffic.check()
        saved.write(folder, label, self._items())

    def load(self, folder: Path, *, label: str = "") -> None:
        """Brings an empty store to what ``save`` wrote.

        Raises:
            ConfigError: the folder holds no whole save, one of another format, or one with another label.
            MachineError: there is room in no tier.
        """
        if self._entries:
            raise ValueError("a store that holds states cannot load others")
        with saved.Reader(folder, label) as reader:
            for item, state, gradient in reader.items():
                key = StateKey(item.chunk, item.layer, item.part)
                entry = _Entry(self._load(reader, state, item.uses, is_gradient=False), item.needs_gradient)
                self._enter(key, entry)
                if gradient is not None:
                    entry.gradient = self._load(reader, gradient, item.uses, is_gradient=True)

    def close(self) -> None:
        """Frees everything and removes the store's file. It may be called again."""
        self._entries.clear()
        self._chunks.clear()
        self._placement.close()

    # -- counters

    @property
    def device_bytes(self) -> int:
        """Bytes in the device's memory; 0 on a CPU device, whose memory is the host's."""
        return sum(tier.used_bytes for tier in self._placement.tiers[:-1])

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, with what is on its way."""
        return self._placement.host.used_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes in the page file."""
        return 0 if self._placement.file is None else self._placement.file.used_bytes

    @property
    def peaks(self) -> StoreBytes:
        """The most bytes that each tier has held."""
        return StoreBytes(
            device=sum(tier.peak_bytes for tier in self._placement.tiers[:-1]),
            host=self._placement.host.peak_bytes,
            disk=0 if self._placement.file is None else self._placement.file.peak_bytes,
        )

    # -- the pieces

    def _make(self, layout: Layout, *, is_gradient: bool, uses: int = 0) -> Record:
        self._num_created += 1
        return Record(layout, is_gradient, self._num_created, uses)

    def _enter(self, key: StateKey, entry: _Entry) -> None:
        self._entries[key] = entry
        self._chunks.setdefault(key.chunk, []).append(key)

    def _items(self) -> Iterator[tuple[saved.Item, Iterator[tuple[Layout, Tensor]]]]:
        for key, entry in self._entries.items():
            records = [entry.state] if entry.gradient is None else [entry.state, entry.gradient]
            item = saved.Item(*key, needs_gradient=entry.needs_gradient, uses=entry.state.uses)
            yield item, ((record.layout, self._placement.read(record)) for record in records)

    def _load(self, reader: saved.Reader, place: saved.Place, uses: int, *, is_gradient: bool) -> Record:
        record = self._make(place.layout, is_gradient=is_gradient, uses=uses)
        tensors = place.layout.views(reader.read(place))
        self._placement.add(record, lambda views: _copy(views, tensors))
        return record


def _copy(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for target, tensor in zip(into, tensors, strict=True):
        target.copy_(tensor.detach())
