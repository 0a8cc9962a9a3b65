"""What counts as a reward."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.rollout.scoring.harbor import read_reward


@pytest.mark.parametrize(("text", "reward"), [("1", 1.0), (" 0.25\n", 0.25), ("0", 0.0), ("-1.5", -1.5)])
def test_a_number_in_reward_txt_is_the_reward(tmp_path: Path, text: str, reward: float) -> None:
    (tmp_path / "reward.txt").write_text(text)
    assert read_reward(tmp_path) == (reward, "")


def test_reward_json_counts_where_there_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"reward": 0.5, "tests": 3}')
    assert read_reward(tmp_path) == (0.5, "")
    (tmp_path / "reward.txt").write_text("1")
    assert read_reward(tmp_path) == (1.0, "")


@pytest.mark.parametrize("text", ["", "good", "nan", "inf", "1 0", "1" * 5000])
def test_anything_else_is_no_reward(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.txt").write_text(text)
    reward, reason = read_reward(tmp_path)
    assert reward is None
    assert "reward.txt" in reason


@pytest.mark.parametrize("text", ["", "[1]", '{"score": 1}', '{"reward": null}', '{"reward": NaN}', "[" * 4000])
def test_anything_else_in_json_is_no_reward(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward.json").write_text(text)
    assert read_reward(tmp_path)[0] is None


def test_no_file_is_no_reward(tmp_path: Path) -> None:
    assert read_reward(tmp_path) == (None, "it left no reward.txt or reward.json")


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "secret")
    assert read_reward(tmp_path)[0] is None
    (tmp_path / "reward.txt").unlink()
    os.mkfifo(tmp_path / "reward.txt")
    assert read_reward(tmp_path) == (None, "reward.txt cannot be read: not a regular file")
