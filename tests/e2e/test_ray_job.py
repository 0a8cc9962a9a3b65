"""A job submitted through the Ray job API."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from services.job.cluster import free_port
from tests.e2e.jobs import ROOT


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[str]:
    """A cluster with the job API, shut down afterwards; yields the API's URL."""
    port = free_port()
    context = ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=200 << 20,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        log_to_driver=False,
    )
    yield f"http://{context.dashboard_url}"
    ray.shutdown()


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_job_runs_through_the_ray_job_api(dashboard: str, tmp_path: Path) -> None:
    output = tmp_path / "runs"
    command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", dashboard, "--working-dir", "."]
    command += ["--", "python", "-m", "services.cli", "train", "examples/configs/tiny.yaml", f"output.dir={output}"]
    command += ["trainer.steps=1", "scheduler.group_size=4"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    assert '"status": "finished"' in (output / "latest" / "summary.json").read_text()
