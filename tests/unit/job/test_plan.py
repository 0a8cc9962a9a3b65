from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.job.commit import Commit, read_commit, write_commit
from services.job.plan import _commit_of, checkpoints_of
from services.scheduler.types import Counters, ReadyGroup, ResumeState
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


def test_a_commit_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commit.json").write_text('{"step": 3')
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
