"""The worker's side of a weight update, without an engine: unpacking, and dying with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import WeightsError
from services.rollout.engine import OWNER_VARIABLE
from services.rollout.worker_extension import WorkerExtension, _unpack


def slot(name: str, data: np.ndarray, offset_bytes: int) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(data.shape),
        "dtype": str(data.dtype),
        "offset_bytes": offset_bytes,
        "size_bytes": data.nbytes,
        "checksum": zlib.crc32(data.tobytes()),
    }


def test_tensors_are_unpacked_as_they_were_sent() -> None:
    one, two = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1.5], dtype=np.float32)
    buffer = np.frombuffer(one.tobytes() + b"\0" + two.tobytes(), dtype=np.uint8).copy()
    weights = _unpack(buffer, [slot("one", one, 0), slot("two", two, one.nbytes + 1)])
    assert torch.equal(weights["one"], torch.from_numpy(one))
    assert torch.equal(weights["two"], torch.from_numpy(two))


def test_a_flipped_bit_is_refused_by_name() -> None:
    one = np.arange(6, dtype=np.float32)
    buffer = np.frombuffer(one.tobytes(), dtype=np.uint8).copy()
    buffer[3] ^= 1
    with pytest.raises(WeightsError, match="one arrived with another checksum"):
        _unpack(buffer, [slot("one", one, 0)])


def test_a_slot_beyond_the_buffer_is_refused() -> None:
    one = np.arange(6, dtype=np.float32)
    with pytest.raises(WeightsError):
        _unpack(np.zeros(8, dtype=np.uint8), [slot("one", one, 0)])


def test_whatever_goes_wrong_in_a_worker_is_told_and_not_raised() -> None:
    answer = WorkerExtension().tidegate_update('{"manifest": {}, "host": "127.0.0.1"}')
    assert not answer["loaded"]
    assert "KeyError" in answer["error"]


def test_a_worker_dies_with_its_owner_even_by_kill_9() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    program = (
        "import services.rollout.worker_extension as w, time; print(w.__name__, flush=True)\nwhile 1: time.sleep(1)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, OWNER_VARIABLE: str(owner.pid)},
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline()
    assert worker.poll() is None
    owner.kill()
    owner.wait()
    assert worker.wait(timeout=30) == -signal.SIGKILL
