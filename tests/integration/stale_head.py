"""A worker that forgets to pack the head again, as vLLM's own reload does on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.rollout import readback
from services.rollout.worker_extension import WorkerExtension

MARKER_VARIABLE = "TIDEGATE_TEST_STALE_HEAD"
"""While the file named by this variable exists, heads stay as they are."""
WORKER = f"{__name__}.ForgetfulExtension"


@contextmanager
def forgetful(marker: Path) -> Iterator[None]:
    marker.touch()
    yield
    marker.unlink()


class ForgetfulExtension(WorkerExtension):
    def _tidegate_repack(self, model: torch.nn.Module, recording: readback.Recording) -> None:
        if not Path(os.environ[MARKER_VARIABLE]).exists():
            super()._tidegate_repack(model, recording)
