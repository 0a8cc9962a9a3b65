"""Load for the proxy benchmark, in a process of its own: ``python -m benchmarks.proxy_load < SPEC > RESULT``.

The same generator drives every server that is compared. It writes prepared bytes to kept-alive connections and reads
answers with as little of Python as it can, so that it costs each server alike, and little.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

MAX_HEADER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """A POST of a JSON body."""

    path: str
    key: str
    """Sent as a bearer token."""
    body: str

    def to_bytes(self, authority: str) -> bytes:
        body = self.body.encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {authority}\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True, slots=True)
class Load:
    """What the generator sends. Each client sends its requests one after the other on one connection."""

    host: str
    port: int
    clients: tuple[tuple[Request, ...], ...]
    num_warm_up: int
    """First requests of each client that are not counted; the clock starts when all clients have made theirs."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came back. Every answer was a 200."""

    latencies_ms: list[float]
    """Of each counted request, from its first byte out to the last byte in."""
    wall_s: float
    """From the first counted request's start to the last one's end."""
    num_bytes: int
    """Of the counted answers' bodies."""
    last_body: str

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_ms) / self.wall_s


async def generate(load: Load) -> LoadResult:
    """Send a load. Raises ``RuntimeError`` with the answer of the first request that was not answered with 200."""
    loop = asyncio.get_running_loop()
    connections = [
        (await loop.create_connection(lambda: _Connection(loop), load.host, load.port))[1] for _ in load.clients
    ]
    authority = f"{load.host}:{load.port}"
    prepared = [[request.to_bytes(authority) for request in client] for client in load.clients]
    pairs = list(zip(connections, prepared, strict=True))
    await asyncio.gather(*(connection.run(sent[: load.num_warm_up]) for connection, sent in pairs))
    started_s = time.perf_counter()
    done = await asyncio.gather(*(connection.run(sent[load.num_warm_up :]) for connection, sent in pairs))
    wall_s = time.perf_counter() - started_s
    for connection in connections:
        connection.close()
    latencies_ms = [took_ms for times_ms, _ in done for took_ms in times_ms]
    num_bytes = sum(size for _, size in done)
    return LoadResult(latencies_ms, wall_s, num_bytes, connections[0].last_body.decode())


class _Connection(asyncio.Protocol):
    """One client: a request, its whole answer, the next request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._body_at = -1
        """Where the body begins; -1 until the headers are here."""
        self._body_bytes: int | None = None
        """None: the body is chunked."""
        self._answered: asyncio.Future[bytes] | None = None
        self.last_body = b""

    async def run(self, requests: Sequence[bytes]) -> tuple[list[float], int]:
        """Milliseconds of each request, and the bytes of all bodies."""
        times_ms, num_bytes = [], 0
        assert self._transport is not None
        for request in requests:
            self._answered = self._loop.create_future()
            started_s = time.perf_counter()
            self._transport.write(request)
            self.last_body = await self._answered
            times_ms.append(1e3 * (time.perf_counter() - started_s))
            num_bytes += len(self.last_body)
        return times_ms, num_bytes

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed the connection ({exc})")

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._body_at < 0 and not self._read_head():
            return
        if self._body_bytes is None:
            if self._received.endswith(b"0\r\n\r\n"):
                self._finish(_dechunked(bytes(self._received[self._body_at :])))
        elif len(self._received) - self._body_at >= self._body_bytes:
            self._finish(bytes(self._received[self._body_at :]))

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > MAX_HEADER_BYTES:
                self._fail("no end of the headers")
            return False
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            self._fail(bytes(self._received).decode(errors="replace"))
            return False
        self._body_at = end + 4
        _, found, rest = head.partition(b"\r\ncontent-length:")
        self._body_bytes = int(rest.partition(b"\r\n")[0]) if found else None
        return True

    def _finish(self, body: bytes) -> None:
        self._received.clear()
        self._body_at = -1
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(body)

    def _fail(self, why: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"a request of the load failed: {why}"))


def _dechunked(body: bytes) -> bytes:
    """The content of a body in chunked transfer encoding."""
    content, at = bytearray(), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return bytes(content)
        content += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


def drive(load: Load, timeout_s: float = 300.0) -> LoadResult:
    """Have a generator's process send a load."""
    command = [sys.executable, "-m", "benchmarks.proxy_load"]
    done = subprocess.run(command, input=to_json(load), capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise SystemExit(f"the load failed: {done.stderr[-2000:]}")
    return LoadResult(**json.loads(done.stdout))


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def to_json(load: Load) -> str:
    """A load as the generator's process reads it."""
    return json.dumps(asdict(load))


def from_json(text: str) -> Load:
    given = json.loads(text)
    clients = tuple(tuple(Request(**request) for request in client) for client in given.pop("clients"))
    return Load(clients=clients, **given)


def main() -> None:
    """Entry point."""
    try:
        result = asyncio.run(generate(from_json(sys.stdin.read())))
    except (RuntimeError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
