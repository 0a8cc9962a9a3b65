"""A job that a test started ends with it, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e import jobs


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., jobs.Job]]:
    started: list[jobs.Job] = []

    def start(*arguments: str, config: Path = jobs.TINY) -> jobs.Job:
        started.append(jobs.start(tmp_path, *arguments, config=config))
        return started[-1]

    yield start
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()
        for process in job.descendants():
            try:
                process.kill()
            except psutil.Error:
                continue
