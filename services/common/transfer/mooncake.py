"""Mooncake Transfer Engine: RDMA where there is a device, else TCP, with a peer-to-peer handshake (no metadata server).

Mooncake does not validate the protocol name that it is given: it takes RDMA when it finds a device and TCP when it
finds none. So ``transport`` is read from the segment descriptor that the engine hands to its peers.

It listens on all interfaces (``host`` is only what it tells its peers) and serves registered memory to whoever can
reach its ports: run it in a network that you trust.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from typing import Any, Literal

from services.common.errors import MachineError, WeightsError
from services.common.transfer.base import Bytes, Exposed

REQUEST_BYTES = 4 << 20
"""Bytes of one read request."""
REQUESTS_PER_BATCH = 16
"""Requests submitted at once. Mooncake fails a batch of 4096; up to 1024 work."""

_METADATA_REQUEST = 1
_STALL_TIMEOUT_S = 10
_DEAD_PEER_HINT = "Check that the publishing process lives and that its host and ports can be reached from here."


def open_transfer_engine(protocol: Literal["tcp", "rdma"], host: str) -> MooncakeEngine:
    """Start an engine that peers reach at ``host``.

    ``rdma`` without a device becomes TCP; ``transport`` of the result says what it is. ``tcp`` is never anything else.

    Raises:
        MachineError: Mooncake or a library that it needs is missing, or it could not start.
    """
    return MooncakeEngine(protocol, host)


def describe_segment(segment: str, timeout_s: float) -> dict[str, Any]:
    """What an engine tells a peer that asks for its segment: ``protocol``, ``buffers`` and addresses.

    Speaks Mooncake's handshake: a little-endian uint64 length, one byte of message type, JSON.

    Raises:
        OSError: nobody answers at ``host:port`` within the deadline.
        ValueError: the answer is not a segment descriptor.
    """
    host, _, port = segment.rpartition(":")
    request = b"{}"
    reply = bytearray()
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        connection.sendall(struct.pack("<QB", len(request) + 1, _METADATA_REQUEST) + request)
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = connection.recv(1 << 16)
            if not piece:
                break
            reply += piece
    if len(reply) < 9:
        raise ValueError(f"{segment} answered {len(reply)} bytes")
    descriptor = json.loads(reply[9:])
    if not isinstance(descriptor, dict) or "protocol" not in descriptor:
        raise ValueError(f"{segment} answered something else than a segment descriptor")
    return descriptor


class MooncakeEngine:
    """``TransferEngine`` by Mooncake."""

    def __init__(self, protocol: Literal["tcp", "rdma"], host: str) -> None:
        self._engine: Any = _start(protocol, host)
        self.segment = f"{host}:{self._engine.get_rpc_port()}"
        try:
            self.transport = str(describe_segment(self.segment, timeout_s=10.0)["protocol"])
        except (OSError, ValueError) as error:
            raise MachineError(
                f"the transfer engine at {self.segment} does not say which transport it uses: {error}",
                f"Check that {host} is an address of this machine and that its ports 15000-17000 are not filtered.",
            ) from error
        self._registered: dict[int, Bytes] = {}
        self._broken = ""

    def expose(self, array: Bytes) -> Exposed:
        self._register(array)
        return Exposed(self.segment, array.ctypes.data, array.nbytes)

    def withdraw(self, exposed: Exposed) -> None:
        if exposed.address in self._registered:
            self._unregister(exposed.address)

    def pull(self, segment: str, address: int, destination: Bytes, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            describe_segment(segment, timeout_s)  # a peer that hangs would hold Mooncake's own handshake for a minute
        except (OSError, ValueError) as error:
            raise WeightsError(f"no transfer engine answers at {segment}: {error}", _DEAD_PEER_HINT) from error
        was_registered = self._register(destination)
        failure: list[str] = []
        worker = threading.Thread(
            target=self._read, args=(segment, address, destination, deadline, failure), name="pull", daemon=True
        )
        worker.start()
        worker.join(max(deadline - time.monotonic(), 0.0))
        if worker.is_alive():
            self._broken = f"a transfer from {segment} passed its deadline of {timeout_s:g} s and hangs"
            raise WeightsError(self._broken, f"{_DEAD_PEER_HINT} This engine stays unusable: open another one.")
        if failure:  # its memory stays registered: slices in flight may still be written
            raise WeightsError(failure[0], _DEAD_PEER_HINT)
        if not was_registered:
            self._unregister(destination.ctypes.data)

    def close(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if self._broken:
            _leaked.append((engine, list(self._registered.values())))
            return
        for address in self._registered:
            engine.unregister_memory(address)
        self._registered.clear()

    def _read(self, segment: str, address: int, destination: Bytes, deadline: float, failure: list[str]) -> None:
        base, size = destination.ctypes.data, destination.nbytes
        batch_bytes = REQUEST_BYTES * REQUESTS_PER_BATCH
        for start in range(0, size, batch_bytes):
            if time.monotonic() >= deadline:
                failure.append(f"the transfer from {segment} passed its deadline after {start} of {size} bytes")
                return
            end = min(start + batch_bytes, size)
            offsets = list(range(start, end, REQUEST_BYTES))
            rc = self._engine.batch_transfer_sync_read(
                segment,
                [base + offset for offset in offsets],
                [address + offset for offset in offsets],
                [min(REQUEST_BYTES, end - offset) for offset in offsets],
            )
            if rc != 0:
                failure.append(f"reading bytes {start} to {end} of {size} from {segment} failed (Mooncake: {rc})")
                return

    def _register(self, array: Bytes) -> bool:
        """Whether the memory was registered already."""
        if self._engine is None or self._broken:
            raise WeightsError(self._broken or "the transfer engine is closed", "Open another engine.")
        if not array.flags.c_contiguous or array.dtype.itemsize != 1:
            raise ValueError("the transfer engine moves contiguous uint8 arrays")
        start = array.ctypes.data
        for base, known in self._registered.items():
            if base <= start and start + array.nbytes <= base + known.nbytes:
                return True
        rc = self._engine.register_memory(start, array.nbytes)
        if rc != 0:
            raise WeightsError(
                f"the transfer engine refused {array.nbytes} bytes (Mooncake: {rc})",
                "The memory may overlap a registered buffer; with RDMA, raise the limit on locked memory (ulimit -l).",
            )
        self._registered[start] = array
        return False

    def _unregister(self, address: int) -> None:
        rc = self._engine.unregister_memory(address)
        del self._registered[address]
        if rc != 0:
            raise WeightsError(f"the transfer engine did not give memory back (Mooncake: {rc})", "Open another engine.")


_leaked: list[Any] = []  # engines with a transfer that hangs: destroying one would wait for it for ever


def _start(protocol: str, host: str) -> Any:
    # Mooncake reads these when an engine is made
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_STALL_TIMEOUT_S))
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    else:
        os.environ.pop("MC_FORCE_TCP", None)
    try:
        from mooncake.engine import TransferEngine as Engine
    except ImportError as error:
        raise MachineError(
            f"Mooncake's transfer engine cannot be loaded: {error}",
            "Install tidegate with its extra 'cpu' or 'gpu', and the Debian packages libibverbs1, ibverbs-providers, "
            "libnuma1 and libcurl4.",
        ) from error
    engine = Engine()
    rc = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if rc != 0:
        raise MachineError(
            f"Mooncake's transfer engine did not start at {host} (rc {rc})",
            "Check that this is an address of this machine and that ports 15000-17000 are free.",
        )
    return engine
