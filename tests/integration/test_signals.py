"""A driver whose Ray cluster is up ends in good order when it is told to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DRIVER = """
import os, signal
from services.job.cluster import ray_cluster
from services.job.config import RayConfig

try:
    with ray_cluster(RayConfig(object_store_bytes=80 << 20)):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
except KeyboardInterrupt:
    print("in good order")
"""


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_a_termination_is_heeded_while_ray_runs() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout.strip() == "in good order", done.stdout + done.stderr
    assert done.returncode == 0
