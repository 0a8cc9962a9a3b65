"""Nothing that a policy leaves behind keeps its work from being copied and removed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from services.rollout.workspaces import copy_tree, open_tree, remove_tree, sync


def test_copies_keep_links_and_modes_and_leave_pipes_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("true")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/shadow")
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    copy_tree(source, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert (copy / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (copy / "link").readlink() == Path("/etc/shadow")
    assert sorted(path.name for path in copy.iterdir()) == ["dangling", "link", "sub"]


def test_what_was_closed_is_opened_and_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "closed").mkdir(parents=True)
    (source / "closed" / "run.sh").write_text("true")
    (source / "closed" / "run.sh").chmod(0o111)
    (source / "closed").chmod(0)
    copy_tree(source, tmp_path / "copy")
    copy = tmp_path / "copy" / "closed"
    assert copy.stat().st_mode & 0o777 == 0o700
    assert (copy / "run.sh").stat().st_mode & 0o777 == 0o511


def make_deep(folder: Path) -> None:
    subprocess.run(["mkdir", "-p", folder / "/".join("d" * 1200)], check=True)


def test_folders_nested_too_deeply_are_an_os_error(tmp_path: Path) -> None:
    make_deep(tmp_path / "source")
    with pytest.raises(OSError, match="too deeply"):
        copy_tree(tmp_path / "source", tmp_path / "copy")
    for name in ("source", "copy"):  # pytest could not
        remove_tree(tmp_path / name)


def test_deep_and_closed_folders_are_removed(tmp_path: Path) -> None:
    make_deep(tmp_path / "work")
    (tmp_path / "work").chmod(0)
    remove_tree(tmp_path / "work")
    assert not (tmp_path / "work").exists()
    remove_tree(tmp_path / "absent")


def test_what_was_closed_can_be_read_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut" / "work").write_text("x")
    (tmp_path / "shut" / "work").chmod(0)
    (tmp_path / "shut").chmod(0)
    open_tree(tmp_path)
    assert (tmp_path / "shut").stat().st_mode & 0o700 == 0o700
    assert (tmp_path / "shut" / "work").stat().st_mode & 0o400


def test_files_and_folders_are_synced_and_a_pipe_or_a_link_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, *tmp_path.iterdir()):
        sync(path)
