"""What the store keeps as one piece: a key's tensors, or their gradients, one after another in a buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.trainer.tree.extents import Extent
from services.trainer.tree.kernels import accumulation_dtype

_ALIGNMENT_BYTES = 64
_WALKED_USES = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies in a buffer."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    """Bytes, aligned."""
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        """The layout for copies of ``tensors``."""
        return cls.make((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    @classmethod
    def make(cls, parts: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Layout:
        """The layout for tensors of these shapes and types."""
        shapes, dtypes, offsets, end = [], [], [], 0
        for shape, dtype in parts:
            shapes.append(shape)
            dtypes.append(dtype)
            offsets.append(end)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(tuple(shapes), tuple(dtypes), tuple(offsets), max(end, _ALIGNMENT_BYTES))

    def accumulated(self) -> Layout:
        """The layout for the sums of these tensors' gradients."""
        dtypes = (accumulation_dtype(dtype) for dtype in self.dtypes)
        return Layout.make(zip(self.shapes, dtypes, strict=True))

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors in a buffer ``[num_bytes]`` of uint8; autograd can use them even if they are made where it is
        off."""
        with torch.inference_mode(mode=False):
            return tuple(
                buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
                for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
            )

    def to_json(self) -> list[list[Any]]:
        """``[shape, name of the type]`` for each tensor."""
        return [
            [list(shape), str(dtype).removeprefix("torch.")]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    @classmethod
    def from_json(cls, parts: Iterable[Sequence[Any]]) -> Layout:
        """The inverse of ``to_json``."""
        return cls.make((tuple(shape), getattr(torch, name)) for shape, name in parts)


@dataclass(eq=False, slots=True)
class Record:
    """A state or the gradient of one, and where it is."""

    layout: Layout
    is_gradient: bool
    created: int
    """Its place in the order in which records were made."""
    uses: int = 0
    """How often it was read (a state) or added to (a gradient)."""
    level: int | None = None
    """Index of the memory tier that holds it; None: it is only in the page file."""
    buffer: Tensor | None = None
    """Bytes, in that tier's memory."""
    tensors: tuple[Tensor, ...] = field(default=())
    """Views of the buffer."""
    extent: Extent | None = None
    """Its bytes in the page file. A state may be in memory as well, a gradient not."""

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    @property
    def rank(self) -> int:
        """What is worth more to have in memory: a walk over the path's pages reads each of them, and adds to each
        gradient (which costs a read and a write), at every visit; states at boundaries are read once or twice.
        """
        return 2 * (self.uses >= _WALKED_USES) + self.is_gradient
