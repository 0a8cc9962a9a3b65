"""The file that holds states and gradients which fit no memory.

It has no name: it is unlinked as soon as it is open, so nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.common.errors import MachineError
from services.trainer.tree.extents import Extent, Extents

PIECE_BYTES = 4 << 20
"""A record is changed in place piece by piece, so that changing it needs no memory for the whole."""


class PageFile:
    """One file in ``folder``, cut into extents. Bytes are CPU tensors of uint8.

    ``allocate`` and ``free`` belong to one thread; ``read``, ``write`` and ``add`` of different extents may run beside
    each other and them.
    """

    def __init__(self, folder: Path, limit_bytes: int | None) -> None:
        """Raises:
        MachineError: there is no such folder, or no file can be made in it.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._extents = Extents()
        self.peak_bytes = 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives as long as this object
        except OSError as error:
            raise _explained(error, folder, 0) from error

    @property
    def used_bytes(self) -> int:
        return self._extents.used_bytes

    def allocate(self, num_bytes: int) -> Extent:
        """Raises:
        MachineError: the disk is full, or the file would outgrow its limit.
        """
        if self._limit_bytes is not None and self.used_bytes + num_bytes > self._limit_bytes:
            raise MachineError(
                f"page files in {self._folder} may hold {self._limit_bytes} bytes: {self.used_bytes} are used and "
                f"{num_bytes} more are needed.",
                "Raise page_bytes, memory_bytes or host_bytes, or train on shorter contexts.",
            )
        end = self._extents.end
        extent = self._extents.allocate(num_bytes)
        if self._extents.end > end:
            try:
                self._grow(end)
            except OSError as error:
                self._extents.free(extent)
                raise _explained(error, self._folder, num_bytes) from error
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return extent

    def free(self, extent: Extent) -> None:
        """Gives the bytes back; what lies at the end of the file goes back to the disk."""
        end = self._extents.end
        self._extents.free(extent)
        if self._extents.end < end and not self._file.closed:
            self._file.truncate(self._extents.end)

    def write(self, extent: Extent, data: Tensor) -> None:
        """Raises:
        MachineError: the disk is full or fails.
        """
        self._write(_bytes(data), extent.offset)

    def read(self, extent: Extent, into: Tensor) -> None:
        """Fills ``into`` with the extent's bytes.

        Raises:
            MachineError: the disk fails.
        """
        self._read(_bytes(into), extent.offset)

    def add(self, extent: Extent, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Adds in place: each part is a flat, contiguous tensor for the values that begin at a byte of the extent.

        Raises:
            MachineError: the disk fails.
        """
        for offset, values in parts:
            step = PIECE_BYTES // values.dtype.itemsize
            for first in range(0, len(values), step):
                piece = values[first : first + step]
                at = extent.offset + offset + first * values.dtype.itemsize
                total = torch.empty_like(piece)
                self._read(_bytes(total), at)
                add_to(total, piece)
                self._write(_bytes(total), at)

    def set(self, extent: Extent, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Writes such parts; all else becomes zero.

        Raises:
            MachineError: the disk is full or fails.
        """
        at = 0
        for offset, values in parts:
            self._zero(extent.offset + at, offset - at)
            self._write(_bytes(values), extent.offset + offset)
            at = offset + values.nbytes
        self._zero(extent.offset + at, extent.num_bytes - at)

    def close(self) -> None:
        """The bytes go back to the disk."""
        self._file.close()

    def _grow(self, end: int) -> None:
        """Takes the disk's space at once, so that a full disk is found here and not while a record is being changed."""
        try:
            os.posix_fallocate(self._file.fileno(), end, self._extents.end - end)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            self._file.truncate(self._extents.end)  # a file system that cannot

    def _zero(self, offset: int, num_bytes: int) -> None:
        zeros = memoryview(bytes(min(PIECE_BYTES, num_bytes)))
        for first in range(0, num_bytes, PIECE_BYTES):
            self._write(zeros[: num_bytes - first], offset + first)

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise _explained(error, self._folder, len(data)) from error

    def _read(self, into: memoryview, offset: int) -> None:
        try:
            while into:
                num_bytes = os.preadv(self._file.fileno(), [into], offset)
                if not num_bytes:
                    raise OSError(errno.EIO, "the file ends early")
                into, offset = into[num_bytes:], offset + num_bytes
        except OSError as error:
            raise _explained(error, self._folder, len(into)) from error


def add_to(total: Tensor, part: Tensor) -> None:
    """Adds a CPU tensor to another, beside PyTorch's threads: it would start more of them in a background thread."""
    sums = total.numpy()
    np.add(sums, part.numpy(), out=sums)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def _explained(error: OSError, folder: Path, num_bytes: int) -> MachineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"the disk under {folder} is full: {num_bytes} more bytes of states were to be written.",
            "Free space there, set page_dir to a larger disk, or raise memory_bytes or host_bytes.",
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return MachineError(
            f"there is no folder {folder} for page files.",
            "Create it, or set page_dir to a folder on a fast local disk.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return MachineError(
            f"no page file can be written in {folder}: {error.strerror}.",
            "Let this user write there, or set page_dir to another folder.",
        )
    return MachineError(
        f"page files in {folder} cannot be read or written: {error.strerror}.",
        "Look at the machine's kernel log for a failing disk, or set page_dir to another one.",
    )
