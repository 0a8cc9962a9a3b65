"""Bad input: one clear error, before work starts where that can be, exit code not 0, nothing left running."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.models import resolve_model
from tests.e2e import jobs
from tests.waiting import wait_until

StartJob = Callable[..., jobs.Job]


def refused(job: jobs.Job, code: int, *expected: str, timeout_s: float = 150) -> str:
    """The job ends with this exit code and a message that holds all of ``expected``; nothing of it lives on."""
    actual, text = job.wait(timeout_s)
    flat = " ".join(text.split())
    assert actual == code, text
    assert flat.count("error:") == 1, text
    assert "Traceback" not in text
    for part in expected:
        assert part in flat, text
    wait_until(lambda: not job.descendants(), 20, "all processes of the job gone")
    return text


def test_an_unknown_key_is_refused(start_job: StartJob) -> None:
    refused(start_job("trainer.stepz=3"), 2, "trainer.stepz", "did you mean 'steps'")


def test_a_missing_task_file_is_refused(start_job: StartJob, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(jobs.ROOT / "examples" / "tiny" / "tasks", tasks)
    (tasks / "vowels-cry" / "instruction.md").unlink()
    refused(start_job(f"tasks.train={tasks}"), 2, "vowels-cry", "instruction.md")


def test_a_harness_that_is_not_installed_is_refused(start_job: StartJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_HARNESS_DIR", "/nonexistent")
    refused(start_job("rollout.harness.command=[]"), 3, "make harness")


def test_a_taken_port_is_refused(start_job: StartJob) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(start_job(f"proxy.port={port}"), 3, "proxy.port", str(port))


def test_a_certificate_that_is_not_there_is_refused(start_job: StartJob) -> None:
    refused(start_job("proxy.tls_cert=/nonexistent.pem", "proxy.tls_key=/nonexistent.key"), 2, "proxy.tls_cert")
    refused(start_job("proxy.tls_cert=/nonexistent.pem"), 2, "set both or neither")


def test_a_model_without_a_chat_template_is_refused(start_job: StartJob, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-qwen3"), model)
    (model / "chat_template.jinja").unlink()
    refused(start_job(f"model.path={model}"), 2, "chat template")


def test_a_dry_run_starts_and_writes_nothing(start_job: StartJob) -> None:
    job = start_job("--dry-run")
    code, text = job.wait(150)
    assert code == 0, text
    assert "cell-0 is the core" in text
    assert not job.output.exists()


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(320)
def test_an_engine_without_memory_is_one_clear_error(start_job: StartJob) -> None:
    job = start_job("rollout.engine.kv_cache_bytes=1000000000000000")
    refused(job, 1, "memory", timeout_s=280)
