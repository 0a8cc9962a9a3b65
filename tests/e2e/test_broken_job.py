"""Processes die under a job; a user interrupts it and resumes it."""

from collections.abc import Callable

import psutil
import pytest

from tests.e2e import jobs
from tests.waiting import wait_until

STEPS = 12
SLOW_HARNESS = "[sh, -c, 'sleep 1; exec python3 /config/agent.py {instruction_file}']"


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


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(420)
def test_a_job_survives_kills_and_an_interrupt_and_is_resumed(start_job: Callable[..., jobs.Job]) -> None:
    slow = (f"rollout.harness.command={SLOW_HARNESS}", f"trainer.steps={STEPS}", "trainer.checkpoint_every=2")
    slow += ("scheduler.group_size=4", "scheduler.carry_over_steps=1")
    job = start_job(*slow)
    wait_until(lambda: job.metrics("weights"), 150, "the first weights published")
    kill_one(job, "python3", "agent.py")
    kill_one(job, "bash", "/tests/test.sh")
    wait_until(lambda: len(job.metrics("step")) >= 1, 120, "a step")
    kill_one(job, "ray::RolloutCell", "ray::RolloutCell")
    num_updates = len(job.metrics("weights"))
    wait_until(lambda: len(job.metrics("step")) >= 3, 180, "two more steps after a cell's death")

    def both_cells_were_updated() -> bool:
        return {line["cell"] for line in job.metrics("weights")[num_updates:] if line["ok"]} == {"cell-0", "cell-1"}

    wait_until(both_cells_were_updated, 120, "the killed cell serving again, with new weights")
    listing = job.runs()
    assert "harness_crash" in listing
    assert job.process.poll() is None
    jobs.interrupt(job)
    code, text = job.wait(90)
    assert code == 130, text
    done = job.summary()["steps_completed"]
    assert 3 <= done < STEPS
    wait_until(lambda: not job.descendants(), 20, "all processes of the job gone")

    resumed = start_job(*slow, "--resume")
    code, text = resumed.wait(240)
    assert code == 0, text
    assert "resumes" in text
    summary = resumed.summary()
    assert summary["steps_completed"] == STEPS
    assert summary["policy_version"] == STEPS
    assert summary["job_id"] == job.summary()["job_id"]
    wait_until(lambda: not resumed.descendants(), 20, "all processes of the job gone")
