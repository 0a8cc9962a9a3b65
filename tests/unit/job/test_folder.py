from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.errors import ConfigError
from services.job.config import JobConfig, TasksConfig
from services.job.folder import job_folder


def test_an_output_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = SimpleNamespace(folder=tmp_path / "file" / "j-1", config=JobConfig(tasks=TasksConfig(train="tasks")))
    with pytest.raises(ConfigError, match=r"output\.dir"), job_folder(plan):
        pass


def test_the_job_folder_tells_no_token(tmp_path: Path) -> None:
    config = JobConfig.model_validate(
        {"tasks": {"train": "t"}, "scheduler": {"grpc_token": "s3cret-1"}, "proxy": {"admin_token": "s3cret-2"}}
    )
    plan = SimpleNamespace(folder=tmp_path / "j-1", config=config, job_id="j-1")
    with job_folder(plan):
        pass
    assert "s3cret" not in (tmp_path / "j-1" / "job.json").read_text()
    assert (tmp_path / "latest").resolve() == (tmp_path / "j-1").resolve()


def test_a_folder_belongs_to_one_running_job(tmp_path: Path) -> None:
    plan = SimpleNamespace(folder=tmp_path / "j-1", config=JobConfig(tasks=TasksConfig(train="tasks")), job_id="j-1")
    with job_folder(plan), pytest.raises(ConfigError, match="running"), job_folder(plan):
        pass
