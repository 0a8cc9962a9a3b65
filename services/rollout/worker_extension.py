"""What runs inside vLLM's worker processes: pull published weights, load them, read them back.

vLLM mixes ``WorkerExtension`` into its worker class (``worker_extension_cls``); the methods are called by
``collective_rpc``. Failures are returned as text, for vLLM turns exceptions of a worker into the end of the engine.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from services.common.errors import TidegateError, WeightsError
from services.common.transfer import TransferEngine, open_transfer_engine
from services.rollout import readback
from services.rollout.engine import OWNER_VARIABLE, WorkerUpdate


class WorkerExtension:
    """Methods added to a vLLM worker. Their names carry the project's, they share the worker's namespace."""

    # of the vLLM worker that this is mixed into
    model_runner: Any
    vllm_config: Any

    def tidegate_update(self, request: str) -> dict[str, Any]:
        """Pull, load and read back; ``request`` is JSON: ``manifest`` (a ``WeightManifest``) and ``host``."""
        try:
            return asdict(self._tidegate_update(**json.loads(request)))
        except TidegateError as error:
            return asdict(WorkerUpdate(error=str(error)))
        except Exception as error:  # an exception would end the engine; this is one failed update
            return asdict(WorkerUpdate(error=f"the engine refused the weights: {type(error).__name__}: {error}"))

    def _tidegate_update(self, manifest: dict[str, Any], host: str) -> WorkerUpdate:
        started = time.monotonic()
        buffer, transport = self._tidegate_pull(manifest, host)
        weights = _unpack(buffer, manifest["tensors"])
        pulled = time.monotonic()
        model = self.model_runner.get_model()
        recording = readback.load(model, self.vllm_config, weights)
        self._tidegate_repack(model, recording)
        found = readback.read_back(model, recording, weights, manifest["version"])
        return WorkerUpdate(
            error="; ".join(found.complaints[: readback.MAX_COMPLAINTS]),
            loaded=True,
            transport=transport,
            pull_s=pulled - started,
            load_s=time.monotonic() - pulled,
            num_equal=found.num_equal,
            num_probed=found.num_probed,
            num_unread=found.num_unread,
        )

    def _tidegate_repack(self, model: torch.nn.Module, recording: readback.Recording) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            readback.repack_tied_heads(model, recording)

    def _tidegate_pull(self, manifest: dict[str, Any], host: str) -> tuple[np.ndarray, str]:
        engine: TransferEngine | None = getattr(self, "_tidegate_transfer", None)
        if engine is None:
            engine = open_transfer_engine("rdma" if manifest["transport"] == "rdma" else "tcp", host)
        self._tidegate_transfer: TransferEngine | None = None  # kept only after a success: a failed one may be stuck
        buffer = np.empty(manifest["size_bytes"], dtype=np.uint8)
        try:
            engine.pull(manifest["segment"], manifest["address"], buffer)
        except TidegateError:
            engine.close()
            raise
        self._tidegate_transfer = engine
        return buffer, engine.transport


def _unpack(buffer: np.ndarray, slots: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors in a pulled buffer ``[size_bytes]``, as views.

    Raises ``WeightsError`` if one of them is not as it was sent.
    """
    weights = {}
    for slot in slots:
        start, size = slot["offset_bytes"], slot["size_bytes"]
        data = buffer[start : start + size]
        if data.nbytes != size or zlib.crc32(data.data) != slot["checksum"]:
            raise WeightsError(
                f"{slot['name']} arrived with another checksum than it was sent with.",
                "The publisher may have written its buffer while it was pulled; publish again.",
            )
        dtype = getattr(torch, slot["dtype"])
        aligned = data if start % dtype.itemsize == 0 else data.copy()
        weights[slot["name"]] = torch.from_numpy(aligned).view(dtype).reshape(slot["shape"])
    return weights


def _die_with_owner(owner_pid: int) -> None:
    """End this process as soon as its owner is gone, however that ended: vLLM's engine process outlives a kill -9."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if OWNER_VARIABLE in os.environ and int(os.environ[OWNER_VARIABLE]) != os.getpid():
    # vLLM imports this module first thing in each worker process, before it loads a model
    threading.Thread(
        target=_die_with_owner, args=(int(os.environ[OWNER_VARIABLE]),), name="die-with-owner", daemon=True
    ).start()
