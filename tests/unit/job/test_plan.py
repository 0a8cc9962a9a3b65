from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.ids import JobId
from services.job.commit import Commit, read_commit, write_commit
from services.job.config import JobConfig
from services.job.plan import (
    _commit_of,
    _from,
    _with_own_store,
    check_mode,
    check_output,
    check_page_dir,
    checkpoints_of,
)
from services.scheduler.types import Counters, ReadyGroup, ResumeState
from services.trainer.tree.plan import ModeChoice
from services.trajectory.types import GroupResult, GroupSpec

READY = ReadyGroup(
    GroupSpec("g000007", "t", ("g000007-r0", "g000007-r1"), 3),
    2,
    GroupResult("g000007", True, "", 2, 2, 10, 40, 0.5, (0.0, 1.0), 3),
)
COMMIT = Commit("step-000004", ResumeState(4, 4, ready=(READY,), training=Counters(8, 8, 8), best_eval_reward=0.25))


def test_a_commit_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_commit(tmp_path) is None
    write_commit(tmp_path, COMMIT)
    assert read_commit(tmp_path) == COMMIT
    assert [path.name for path in tmp_path.iterdir()] == ["commit.json"]


def test_a_commit_of_an_older_version_is_understood(tmp_path: Path) -> None:
    """It has the same fields, but no value says of what type it is."""
    (tmp_path / "commit.json").write_text(json.dumps(dataclasses.asdict(COMMIT)))
    assert read_commit(tmp_path) == COMMIT


@pytest.mark.parametrize("text", ['{"step": 3', "{}", '{"checkpoint": "a", "resume": {"colour": "red"}}', "[]"])
def test_a_commit_of_another_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "commit.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be understood"):
        read_commit(tmp_path)


def test_a_job_is_resumed_only_from_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        _commit_of(tmp_path)
    write_commit(tmp_path, COMMIT)
    folder = checkpoints_of(tmp_path) / COMMIT.checkpoint
    folder.mkdir(parents=True)
    assert _commit_of(tmp_path) == COMMIT
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="is gone"):
        _commit_of(tmp_path)


def test_a_path_of_the_configuration_starts_at_its_file_or_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert _from(tmp_path, "../tasks") == tmp_path.parent / "tasks"
    assert _from(tmp_path, "/tasks") == Path("/tasks")
    assert _from(tmp_path, "~/tasks") == Path("/home/me/tasks")
    with pytest.raises(ConfigError, match="whole path"):
        _from(tmp_path, "~nobody-of-this-name/tasks")


def test_an_output_folder_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    check_output(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(ConfigError, match="is not a folder"):
            check_output(output)
    (tmp_path / "latest").symlink_to("gone")
    check_output(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="not a link"):
        check_output(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output(tmp_path / "runs")


def make_config(**keys: Any) -> JobConfig:
    return JobConfig.model_validate({"name": "t", "model": {"path": "tiny-qwen3"}, "tasks": {"train": "tasks"}, **keys})


def test_jobs_that_share_a_folder_of_sqlite_files_share_no_file(tmp_path: Path) -> None:
    """Group ids are the same in every job: in one file a job would replace the groups of another."""
    config = make_config(trajectory={"store": {"url": f"sqlite:///{tmp_path}/"}})
    urls = [_with_own_store(config, JobId(name)).trajectory.store.url for name in ("a", "b")]
    assert urls == [f"sqlite:///{tmp_path}/a", f"sqlite:///{tmp_path}/b"]
    for url in ("", "postgresql://me@db/runs"):
        config = make_config(trajectory={"store": {"url": url}})
        assert _with_own_store(config, JobId("a")).trajectory.store.url == url


def test_keys_of_the_default_scorer_need_no_kind() -> None:
    config = make_config(rollout={"scoring": {"timeout_s": 5}})
    assert (config.rollout.scoring.kind, config.rollout.scoring.timeout_s) == ("harbor", 5)
    with pytest.raises(ValueError, match="path"):
        make_config(rollout={"scoring": {"path": "vowels:score"}})


def test_page_files_need_a_folder_that_can_be_written(tmp_path: Path) -> None:
    check_page_dir(None)
    check_page_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"page_dir.*nowhere"):
        check_page_dir(tmp_path / "nowhere")


def test_a_model_with_recurrent_layers_is_not_packed() -> None:
    attention = SimpleNamespace(is_attention_only=True)
    hybrid = SimpleNamespace(is_attention_only=False)
    check_mode(ModeChoice.PACK, attention)  # type: ignore[arg-type]
    check_mode(ModeChoice.AUTO, hybrid)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"trainer\.tree\.mode.*not all attention"):
        check_mode(ModeChoice.PACK, hybrid)  # type: ignore[arg-type]
