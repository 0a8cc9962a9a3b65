"""Processes die under a job; a user interrupts it, and goes on with it on another cluster, through the Ray job API."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from services.job.cluster import free_port
from tests.e2e import jobs
from tests.ray_cluster import start_ray
from tests.waiting import wait_until

PROGRAMS = Path(sys.executable).parent
SLOW_HARNESS = "[sh, -c, 'sleep 1; exec python3 /config/agent.py {instruction_file}']"
OPTIONS = (
    f"rollout.harness.command={SLOW_HARNESS}",
    "trainer.checkpoint_every=2",
    "scheduler.group_size=4",
    "scheduler.carry_over_steps=1",
)


def kill_one(job: jobs.Job, program: str, argument: str) -> None:
    """kill -9 of the next process of this program."""

    def attempt() -> bool:
        process = job.find(program, argument)
        if process is None:
            return False
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
        return True

    wait_until(attempt, 120, f"a process to kill: {program} {argument}")


@pytest.fixture
def slow_tasks(tmp_path: Path) -> Path:
    """The tiny tasks with verifiers that live long enough to be killed."""
    folder = tmp_path / "tasks"
    shutil.copytree(jobs.ROOT / "examples" / "tiny" / "tasks", folder)
    for script in folder.glob("*/tests/test.sh"):
        script.write_text(script.read_text().replace("#!/bin/bash\n", "#!/bin/bash\nsleep 0.5\n"))
    return folder


@pytest.fixture
def job_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster with the job API, started in the project's environment and shut down afterwards; yields its URL."""
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    context = start_ray(
        address="local",
        num_cpus=4,
        object_store_memory=200 << 20,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=free_port(),
        log_to_driver=False,
    )
    yield f"http://{context.dashboard_url}"
    ray.shutdown()


def submit(job_api: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ray job submit` of a training job, as the README shows it."""
    command = [str(PROGRAMS / "ray"), "job", "submit", "--address", job_api, "--working-dir", "."]
    command += ["--", "python", "-m", "services.cli", "train", "examples/configs/tiny.yaml", *arguments]
    return subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True, timeout=420, check=False)


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_job_survives_kills_and_an_interrupt_and_is_resumed_as_a_ray_job(
    start_job: Callable[..., jobs.Job], slow_tasks: Path, request: pytest.FixtureRequest
) -> None:
    options = (*OPTIONS, f"tasks.train={slow_tasks}")
    job = start_job(*options, "trainer.steps=100")
    wait_until(lambda: job.metrics("weights"), 300, "the first weights published")
    kill_one(job, "python3", "/config/agent.py")
    kill_one(job, "bash", "/tests/test.sh")
    wait_until(lambda: len(job.metrics("step")) >= 1, 240, "a step")
    kill_one(job, "ray::RolloutCell", "ray::RolloutCell")
    num_steps, num_updates = len(job.metrics("step")), len(job.metrics("weights"))

    def both_cells_were_updated() -> bool:
        return {line["cell"] for line in job.metrics("weights")[num_updates:] if line["ok"]} == {"cell-0", "cell-1"}

    wait_until(both_cells_were_updated, 300, "the killed cell serving again, with new weights")
    wait_until(lambda: len(job.metrics("step")) >= num_steps + 2, 240, "two more steps")
    assert "harness_crash" in job.runs()
    assert job.process.poll() is None
    jobs.interrupt(job)
    code, text = job.wait(180)
    assert code == 130, text
    summary = job.summary()
    assert summary["status"] == "cancelled"
    wait_until(lambda: not job.descendants(), 20, "all processes of the job gone")

    steps = summary["steps_completed"] + 2
    done = submit(
        request.getfixturevalue("job_api"), *options, f"output.dir={job.output}", f"trainer.steps={steps}", "--resume"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    resumed = job.summary()
    assert (resumed["job_id"], resumed["status"]) == (summary["job_id"], "finished")
    assert resumed["steps_completed"] == resumed["policy_version"] == steps
