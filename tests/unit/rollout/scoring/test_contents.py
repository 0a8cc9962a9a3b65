"""A digest names one tree: equal work has the same, any change another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.rollout.scoring.contents import diff, listing, read_texts, tree_digest
from services.rollout.workspaces import remove_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\n")
    (root / "sub" / "run.sh").write_text("true\n")
    (root / "link").symlink_to("a.txt")
    os.mkfifo(root / "pipe")
    return root


def test_a_copy_has_the_same_digest_whenever_it_was_made(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("pipe"))
    os.mkfifo(tmp_path / "copy" / "pipe")
    os.utime(tmp_path / "copy" / "a.txt", (1, 1))
    (tmp_path / "copy" / "a.txt").chmod(0o600)
    assert tree_digest(tree) == tree_digest(tmp_path / "copy")
    assert tree_digest(tree).startswith("sha256:")


CHANGES: list[Callable[[Path], object]] = [
    lambda root: (root / "a.txt").write_text("one\ntwo"),
    lambda root: (root / "a.txt").rename(root / "b.txt"),
    lambda root: (root / "sub" / "run.sh").chmod(0o755),
    lambda root: (root / "sub" / "empty").rmdir(),
    lambda root: (root / "sub" / "run.sh").rename(root / "run.sh"),
    lambda root: ((root / "link").unlink(), (root / "link").symlink_to("sub")),
    lambda root: ((root / "link").unlink(), (root / "link").write_text("a.txt")),
    lambda root: (root / "pipe").unlink(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_gives_another(tree: Path, change: Callable[[Path], object]) -> None:
    before = tree_digest(tree)
    change(tree)
    assert tree_digest(tree) != before


def test_names_and_contents_cannot_be_mistaken_for_each_other(tmp_path: Path) -> None:
    for name, content in (("a", "bc"), ("ab", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(content)
    assert tree_digest(tmp_path / "a") != tree_digest(tmp_path / "ab")


def test_a_deep_tree_has_a_digest(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(1500):
        folder = folder / "d"
        folder.mkdir()
    assert tree_digest(tmp_path).startswith("sha256:")
    remove_tree(tmp_path / "d")


def test_texts_leave_out_links_pipes_and_what_is_no_text(tree: Path) -> None:
    (tree / "image.png").write_bytes(b"\x89PNG\xff")
    assert read_texts(tree) == {"a.txt": "one\ntwo\n", "sub/run.sh": "true\n"}
    assert read_texts(tree / "nowhere") == {}
    assert listing({"a": "x\n", "b": "y"}) == "--- a\nx\n\n--- b\ny"


def test_a_diff_shows_what_was_changed_added_and_removed() -> None:
    shown = diff({"same": "1\n", "a": "old\n", "gone": "x\n"}, {"same": "1\n", "a": "new\n", "more": "y\n"})
    assert shown.splitlines() == [
        *("--- a/a", "+++ b/a", "@@ -1 +1 @@", "-old", "+new"),
        *("--- a/gone", "+++ /dev/null", "@@ -1 +0,0 @@", "-x"),
        *("--- /dev/null", "+++ b/more", "@@ -0,0 +1 @@", "+y"),
    ]
    assert diff({"a": "1"}, {"a": "1"}) == ""


def test_files_that_would_take_long_to_compare_are_shown_as_they_are(tmp_path: Path) -> None:
    old, new = "\n".join(str(n % 7) for n in range(60_000)), "\n".join(str(n % 11) for n in range(60_000))
    assert diff({"a": old}, {"a": new}) == f"--- a/a\n+++ b/a\n(too long to be compared)\n{new}"
