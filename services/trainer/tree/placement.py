"""Which memory, or the page file, holds each record of the store, and how it gets from one to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.errors import MachineError
from services.trainer.tree.pagefile import PageFile, add_to
from services.trainer.tree.records import Record
from services.trainer.tree.tiers import MemoryTier
from services.trainer.tree.traffic import Traffic


@dataclass(frozen=True, slots=True)
class StoreBudget:
    """Bytes that each tier may hold; None: no limit."""

    device_bytes: int | None = None
    """Memory of a GPU. A CPU device has no tier of its own: its memory is the host's."""
    host_bytes: int | None = None
    folder: Path | None = None
    """Where pages go that fit neither; None: they may not."""
    disk_bytes: int | None = None
    """Size of the page file."""


class Placement:
    """Memory tiers, fastest first, and the page file below them. For one thread."""

    def __init__(self, device: torch.device, budget: StoreBudget) -> None:
        """Raises:
        MachineError: no page file can be made in the budget's folder.
        """
        host = torch.device("cpu")
        if device.type == "cpu":
            self.tiers = [MemoryTier(0, host, budget.host_bytes)]
        else:
            pinned = device.type == "cuda"
            self.tiers = [
                MemoryTier(0, device, budget.device_bytes),
                MemoryTier(1, host, budget.host_bytes, pinned=pinned),
            ]
        self.file = None if budget.folder is None else PageFile(budget.folder, budget.disk_bytes)
        self.traffic = Traffic()
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def host(self) -> MemoryTier:
        """The lowest memory tier."""
        return self.tiers[-1]

    def require_file(self) -> PageFile:
        """Raises:
        MachineError: there is no page file.
        """
        if self.file is None:
            raise MachineError(
                "states and their gradients do not fit memory: "
                + ", ".join(f"{tier.used_bytes} bytes of {tier.device.type} memory are used" for tier in self.tiers)
                + ", and there is no folder for page files.",
                "Raise memory_bytes or host_bytes, or set page_dir to a folder on a fast local disk.",
            )
        return self.file

    def add(self, record: Record, fill: Callable[[tuple[Tensor, ...]], None]) -> None:
        """Gives a new record a place and has its tensors filled there.

        Raises:
            MachineError: there is room nowhere, or the disk is full.
        """
        level = self._make_room(record, 0)
        if level is None:
            self._reserve()
            with self.host.passing(record.num_bytes):
                buffer = self.host.allocate(record.num_bytes)
                fill(record.layout.views(buffer))
                self._write(record, buffer)
        else:
            buffer = self.tiers[level].allocate(record.num_bytes)
            fill(record.layout.views(buffer))
            self.tiers[level].hold(record, buffer)

    def add_unfilled(self, record: Record) -> None:
        """Gives a new record a place: zeros in memory, or any bytes in the page file.

        Raises:
            MachineError: there is room nowhere, or the disk is full.
        """
        level = self._make_room(record, 0)
        if level is None:
            self._reserve()
            record.extent = self.require_file().allocate(record.num_bytes)
        else:
            self.tiers[level].hold(record, self.tiers[level].allocate(record.num_bytes).zero_())

    def fetch(self, record: Record) -> tuple[Tensor, ...]:
        """A state's tensors, on the device; it moves up if there is room.

        Raises:
            MachineError: the disk fails.
        """
        if record.level == 0:
            return record.tensors
        buffer = self.traffic.take(record)
        if buffer is None:
            buffer = self.read(record) if record.buffer is None else record.buffer
        level = self._make_room(record, 0, lifts=True)
        if level is not None:
            buffer = self._hold(level, record, buffer)
        if level == 0:
            return record.tensors
        if buffer.device.type != self._device.type:
            buffer = buffer.to(self._device, non_blocking=self._copies is not None)
        return record.layout.views(buffer)

    def fetch_ahead(self, record: Record) -> None:
        """Brings a state nearer in the background."""
        if record.level == 0 or self.traffic.reads_ahead(record):
            return
        if record.level is None:
            self.traffic.read_ahead(record, self.host, lambda buffer: self._read(record, buffer))
        elif self._copies is not None:
            self.traffic.copy_ahead(record, self.tiers[0], self._copies)

    def lift_gradient(self, record: Record) -> None:
        """Moves a gradient up if there is room.

        Raises:
            MachineError: the disk fails.
        """
        if record.level == 0:
            return
        level = self._make_room(record, 0, lifts=True)
        if level is None:
            return
        self._hold(level, record, self.read(record))
        if record.extent is not None:
            self.require_file().free(record.extent)
            record.extent = None

    def accumulate(self, record: Record, gradients: Sequence[Tensor | None], *, is_new: bool) -> None:
        """Adds to a gradient, in the background unless it is near. ``is_new``: it has a place and no value.

        Raises:
            MachineError: the disk fails; if it does so in the background, the next call of ``traffic.check`` says so.
        """
        given = [(index, gradient.detach()) for index, gradient in enumerate(gradients) if gradient is not None]
        if record.level == 0:
            for index, gradient in given:
                record.tensors[index].add_(gradient)
        elif self.traffic.waits_for_room(self.host, record.num_bytes):
            copies = record.layout.views(self.host.allocate(record.num_bytes))
            event = self._copy_down(copies, given)
            parts = [(index, copies[index]) for index, _ in given]

            def add() -> None:
                if event is not None:
                    event.synchronize()
                self._add(record, parts, is_new=is_new)

            self.traffic.add_behind(record, self.host, record.num_bytes, add)
        else:
            self.traffic.settle(record)
            dtypes = record.layout.dtypes
            self._add(record, [(index, part.to("cpu", dtypes[index])) for index, part in given], is_new=is_new)

    def _copy_down(self, into: Sequence[Tensor], tensors: Sequence[tuple[int, Tensor]]) -> torch.cuda.Event | None:
        """Copies tensors to the host's memory. The event, if there is one, says when that is done."""
        if self._copies is None:
            for index, tensor in tensors:
                into[index].copy_(tensor)
            return None
        for index, tensor in tensors:
            same_type = tensor.to(into[index].dtype)  # on the GPU: else the copy would go through unpinned memory
            into[index].copy_(same_type, non_blocking=True)
        return torch.cuda.current_stream(self._device).record_event()

    def _add(self, record: Record, parts: Sequence[tuple[int, Tensor]], *, is_new: bool) -> None:
        """Adds tensors of the record's own types, in CPU memory."""
        if record.level is not None:
            for index, part in parts:
                add_to(record.tensors[index], part)
            return
        assert record.extent is not None
        flat = [(record.layout.offsets[index], part.reshape(-1).contiguous()) for index, part in parts]
        if is_new:
            self.require_file().set(record.extent, flat)
        else:
            self.require_file().add(record.extent, flat)

    def read(self, record: Record) -> Tensor:
        """A copy of a record's bytes, in the host's memory.

        Raises:
            MachineError: the disk fails.
        """
        self.traffic.settle(record)
        with self.host.passing(record.num_bytes):
            buffer = self.host.allocate(record.num_bytes)
            if record.buffer is not None:
                buffer.copy_(record.buffer)
            else:
                self._read(record, buffer)
        return buffer

    def remove(self, record: Record) -> None:
        """Frees what a record occupies."""
        self.traffic.settle(record)
        self.traffic.forget(record)
        if record.level is not None:
            self.tiers[record.level].drop(record)
        if record.extent is not None and self.file is not None:
            self.file.free(record.extent)
            record.extent = None

    def note_use(self, record: Record) -> None:
        """Counts a use of a record."""
        before = record.rank
        record.uses += 1
        if record.rank != before and record.level is not None:
            self.tiers[record.level].note_rank(record)

    def close(self) -> None:
        """Ends the thread and removes the file."""
        self.traffic.close()
        if self.file is not None:
            self.file.close()

    def _make_room(self, record: Record, first: int, *, lifts: bool = False) -> int | None:
        """The first memory tier from ``first`` on with room for a record, after others have moved down for it.

        ``lifts``: the record has a place, so it need not displace others unless they surely find one too.
        """
        end = len(self.tiers) if record.level is None else record.level if lifts else len(self.tiers)
        for tier in self.tiers[first:end]:
            losers = tier.losers(record, reserve=self.file is not None and self.file.used_bytes > 0)
            if losers is None or (losers and lifts and self.file is None):
                continue
            for loser in losers:
                self._lower(loser)
            self.traffic.make_room(tier, record.num_bytes)
            return tier.level
        return None

    def _reserve(self) -> None:
        """Where records lie in the page file, others pass through the host's memory: makes room for them."""
        self.require_file()
        for record in self.host.excess():
            self._lower(record)

    def _lower(self, record: Record) -> None:
        """Moves a record to a lower tier, or to the page file."""
        self.traffic.settle(record)
        self.traffic.forget(record)
        assert record.level is not None
        assert record.buffer is not None
        level = self._make_room(record, record.level + 1)
        if level is not None:
            self._hold(level, record, record.buffer)
            return
        self.require_file()
        if record.extent is None and record.buffer.device.type == "cpu":
            self._write(record, record.buffer)
        elif record.extent is None:
            self._write(record, self.read(record))
        self.tiers[record.level].drop(record)

    def _hold(self, level: int, record: Record, buffer: Tensor) -> Tensor:
        """Moves a record to a tier, given its bytes in whatever memory; returns them in that of the tier."""
        tier = self.tiers[level]
        if buffer.device.type != tier.device.type:
            source, buffer = buffer, tier.allocate(record.num_bytes)
            buffer.copy_(source)
        if record.level is not None:
            self.tiers[record.level].drop(record)
        tier.hold(record, buffer)
        return buffer

    def _read(self, record: Record, into: Tensor) -> None:
        assert record.extent is not None
        self.require_file().read(record.extent, into)

    def _write(self, record: Record, buffer: Tensor) -> None:
        file = self.require_file()
        extent = file.allocate(record.num_bytes)
        try:
            file.write(extent, buffer)
        except MachineError:
            file.free(extent)
            raise
        record.extent = extent
