"""A transfer engine for tests of what is published."""

from __future__ import annotations

from services.common.transfer.base import Bytes, Exposed


class LocalEngine:
    """A transfer engine within one process."""

    transport = "local"

    def __init__(self) -> None:
        self.exposed: dict[int, Bytes] = {}
        self.num_exposed = 0

    def expose(self, array: Bytes) -> Exposed:
        self.exposed[array.ctypes.data] = array
        self.num_exposed += 1
        return Exposed("local:1", array.ctypes.data, array.nbytes)

    def withdraw(self, exposed: Exposed) -> None:
        del self.exposed[exposed.address]

    def pull(self, segment: str, address: int, destination: Bytes, timeout_s: float = 120.0) -> None:
        destination[:] = self.exposed[address]

    def close(self) -> None:
        self.exposed.clear()
