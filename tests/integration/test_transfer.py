"""The transfer engine moves bytes between real processes, and no dead peer makes it hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import zlib
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

from services.common.errors import WeightsError
from services.common.transfer import Exposed, TransferEngine, open_transfer_engine

SIZE_BYTES = 64 << 20
_spawn = multiprocessing.get_context("spawn")


def _publish(seed: int, size_bytes: int, inbox: Any, outbox: Any) -> None:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    data = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
    outbox.put((engine.expose(data), zlib.crc32(data.data)))
    inbox.get()
    engine.close()


class Publisher:
    """A process that exposes ``size_bytes`` pseudo-random bytes until it is told to stop."""

    def __init__(self, size_bytes: int = SIZE_BYTES) -> None:
        self._inbox, outbox = _spawn.Queue(), _spawn.Queue()
        self.process: BaseProcess = _spawn.Process(target=_publish, args=(7, size_bytes, self._inbox, outbox))
        self.process.start()
        exposed, self.checksum = outbox.get(timeout=60)
        self.exposed: Exposed = exposed

    def stop(self) -> int | None:
        """The exit code after an orderly end."""
        self._inbox.put("stop")
        self.process.join(30)
        return self.process.exitcode

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(30)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.kill()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    yield engine
    engine.close()


def test_bytes_arrive_exactly_and_both_processes_end_cleanly(publisher: Publisher, engine: TransferEngine) -> None:
    destination = np.zeros(SIZE_BYTES, dtype=np.uint8)
    for _ in range(2):  # memory is registered and given back each time
        destination[:] = 0
        engine.pull(publisher.exposed.segment, publisher.exposed.address, destination)
        assert zlib.crc32(destination.data) == publisher.checksum
    assert publisher.stop() == 0


def test_part_of_a_buffer_can_be_pulled_into_part_of_another(publisher: Publisher, engine: TransferEngine) -> None:
    expected = np.random.default_rng(7).integers(0, 256, SIZE_BYTES, dtype=np.uint8)
    destination = np.zeros(10_000, dtype=np.uint8)
    engine.pull(publisher.exposed.segment, publisher.exposed.address + 12_345, destination[500:1_501])
    np.testing.assert_array_equal(destination[500:1_501], expected[12_345:13_346])
    assert not destination[:500].any()
    assert not destination[1_501:].any()


def test_transport_is_what_is_used_not_what_was_asked_for() -> None:
    if os.path.isdir("/sys/class/infiniband"):  # noqa: PTH112
        pytest.skip("this machine has an RDMA device")
    engine = open_transfer_engine("rdma", "127.0.0.1")
    assert engine.transport == "tcp"
    engine.close()


def test_memory_that_is_not_exposed_cannot_be_pulled(publisher: Publisher, engine: TransferEngine) -> None:
    destination = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(WeightsError, match="failed"):
        engine.pull(publisher.exposed.segment, publisher.exposed.address + SIZE_BYTES + (1 << 30), destination)


def test_withdrawn_memory_cannot_be_pulled(engine: TransferEngine) -> None:
    owner = open_transfer_engine("tcp", "127.0.0.1")
    exposed = owner.expose(np.ones(4096, dtype=np.uint8))
    owner.withdraw(exposed)
    with pytest.raises(WeightsError):
        engine.pull(exposed.segment, exposed.address, np.zeros(4096, dtype=np.uint8))
    owner.close()


def test_dead_peer_is_an_error_at_once(publisher: Publisher, engine: TransferEngine) -> None:
    publisher.kill()
    started = time.monotonic()
    with pytest.raises(WeightsError, match="no transfer engine answers") as caught:
        engine.pull(publisher.exposed.segment, publisher.exposed.address, np.zeros(SIZE_BYTES, dtype=np.uint8))
    assert time.monotonic() - started < 5
    assert caught.value.hint


def test_peer_that_dies_after_a_transfer_is_an_error(publisher: Publisher, engine: TransferEngine) -> None:
    destination = np.zeros(SIZE_BYTES, dtype=np.uint8)
    engine.pull(publisher.exposed.segment, publisher.exposed.address, destination)
    publisher.kill()
    with pytest.raises(WeightsError):
        engine.pull(publisher.exposed.segment, publisher.exposed.address, destination, timeout_s=20)


def test_frozen_peer_is_an_error_at_the_deadline(publisher: Publisher, engine: TransferEngine) -> None:
    assert publisher.process.pid is not None
    os.kill(publisher.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WeightsError):
        engine.pull(publisher.exposed.segment, publisher.exposed.address, np.zeros(4096, dtype=np.uint8), timeout_s=1.0)
    assert time.monotonic() - started < 5


def _pull_and_freeze(exposed: Exposed, publisher_pid: int, outbox: Any) -> None:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    destination = np.zeros(exposed.size_bytes, dtype=np.uint8)
    engine.pull(exposed.segment, exposed.address, destination[:4096])  # the connection stands
    inner = engine._engine

    class FreezesItsPeer:
        def __getattr__(self, name: str) -> Any:
            if name == "batch_transfer_sync_read":
                os.kill(publisher_pid, signal.SIGSTOP)
            return getattr(inner, name)

    engine._engine = FreezesItsPeer()
    started = time.monotonic()
    try:
        engine.pull(exposed.segment, exposed.address, destination, timeout_s=2.0)
        outbox.put(("arrived", 0.0, ""))
    except WeightsError as error:
        second = ""
        try:
            engine.pull(exposed.segment, exposed.address, destination, timeout_s=2.0)
        except WeightsError as again:
            second = again.hint
        outbox.put((error.message, time.monotonic() - started, second))
    engine.close()


def test_peer_that_freezes_in_a_transfer_is_an_error_and_the_process_still_ends() -> None:
    publisher = Publisher()
    outbox = _spawn.Queue()
    assert publisher.process.pid is not None
    puller = _spawn.Process(target=_pull_and_freeze, args=(publisher.exposed, publisher.process.pid, outbox))
    puller.start()
    try:
        message, seconds, second_hint = outbox.get(timeout=60)
        assert "deadline" in message
        assert seconds < 6
        assert second_hint
        puller.join(30)
        assert puller.exitcode == 0
    finally:
        puller.kill()
        publisher.kill()


def test_port_of_something_else_is_an_error(engine: TransferEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(WeightsError):
            engine.pull(f"127.0.0.1:{port}", 4096, np.zeros(16, dtype=np.uint8), timeout_s=0.5)
