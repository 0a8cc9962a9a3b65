"""The small interface that every transport implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Exposed:
    """A buffer that peers may read."""

    segment: str
    """The owner's address in the transfer engine, ``host:port``."""
    address: int
    """Where the buffer starts in the owner's memory."""
    size_bytes: int


class TransferEngine(Protocol):
    """One-sided reads of other processes' memory. Methods block; call them from a thread in async code."""

    @property
    def transport(self) -> str:
        """The transport that is really used: 'tcp', 'rdma'."""

    def expose(self, array: Bytes) -> Exposed:
        """Let peers read a contiguous uint8 array ``[n]`` until ``withdraw`` or ``close``. It is not copied:
        what a peer reads is what stands there at that moment, so the owner must not write while a peer pulls.

        Raises:
            WeightsError: the transport refused the buffer.
        """

    def withdraw(self, exposed: Exposed) -> None:
        """Take a buffer back; unknown ones are ignored."""

    def pull(self, segment: str, address: int, destination: Bytes, timeout_s: float = 120.0) -> None:
        """Read ``destination.size`` bytes at ``address`` of ``segment`` into a contiguous uint8 array ``[n]``.

        Raises:
            WeightsError: the peer is gone, has no such buffer, or the deadline passed. The destination's content
                is then undefined; late bytes may still arrive in it.
        """

    def close(self) -> None:
        """Take everything back and stop. Closing twice is allowed."""
