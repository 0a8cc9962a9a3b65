"""How much memory live tensors take, operation by operation, and what the process has held at most."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass(slots=True)
class _Entry:
    reference: weakref.ref[Any]
    is_counted: bool
    size_bytes: int


class AllocationTracker:
    """Counts the bytes of all live tensor storages while its ``with`` block lasts, backward passes included.

    A storage counts once, however many tensors view it, from the operation that first returns or takes it to the
    moment at which nothing holds it any more. What exists before the block is left out, unless ``count_existing``. Not
    seen: buffers that a kernel allocates and frees inside, tensors that another thread makes until an operation of this
    one takes them, and storages resized behind PyTorch's operators. Tensors without data (``meta``) count nothing.
    """

    def __init__(self, *, count_existing: bool = False) -> None:
        self.peak_bytes = 0
        """Most bytes that were alive at once."""
        self.phase_peak_bytes: dict[str, int] = {}
        """The same within each phase; of a phase that came several times, over all its times."""
        self._count_existing = count_existing
        self._bytes = 0
        self._entries: dict[int, _Entry] = {}  # by the storage's id, which is its own while it lives
        self._gone: deque[int] = deque()  # a storage may die in any thread, at any point
        self._phases: list[str] = []
        self._lock = threading.Lock()
        self._mode = _Observer(self._see)

    @property
    def current_bytes(self) -> int:
        """Bytes that are alive now."""
        with self._lock:
            self._forget_gone()
            return self._bytes

    def __enter__(self) -> Self:
        for tensor in _existing_tensors():
            self._add(tensor, counted=self._count_existing)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak within the block under ``name``. Phases may lie in one another."""
        self._phases.append(name)
        with self._lock:
            self._note_peaks()
        try:
            yield
        finally:
            self._phases.remove(name)

    def exclude(self, *tensors: Tensor) -> None:
        """Leave out the storages of ``tensors``: of a mapped file, say."""
        for tensor in tensors:
            self._add(tensor, counted=False)

    def _see(self, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            self._add(tensor, counted=True)

    def _add(self, tensor: Tensor, *, counted: bool) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        with self._lock:
            self._forget_gone()
            entry = self._entries.get(key)
            if entry is None:
                gone = self._gone
                entry = self._entries[key] = _Entry(weakref.ref(storage, lambda _: gone.append(key)), counted, 0)
            entry.is_counted &= counted
            size_bytes = storage.nbytes() if entry.is_counted else 0
            if size_bytes != entry.size_bytes:
                self._bytes += size_bytes - entry.size_bytes
                entry.size_bytes = size_bytes
                self._note_peaks()

    def _forget_gone(self) -> None:
        while self._gone:
            self._bytes -= self._entries.pop(self._gone.popleft()).size_bytes

    def _note_peaks(self) -> None:
        self._forget_gone()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        for name in self._phases:
            self.phase_peak_bytes[name] = max(self.phase_peak_bytes.get(name, 0), self._bytes)


class _Observer(TorchDispatchMode):
    """Shows the tensors of every operation, what it takes first, then what it returns."""

    def __init__(self, see: Callable[[Iterator[Tensor]], None]) -> None:
        super().__init__()
        self._show = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._show(_tensors((args, kwargs)))
        result = func(*args, **kwargs)
        self._show(_tensors(result))
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _existing_tensors() -> Iterator[Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would ask lazy modules for their __class__
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def peak_resident_bytes() -> int:
    """The most memory that this process has had resident, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the parent held when it forked
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
