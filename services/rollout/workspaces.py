"""Folders that a policy has written to: copied and removed whatever it left in them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path


def copy_tree(source: Path, target: Path) -> None:
    """Copy files, folders, links (as links) and modes. Sockets, pipes and devices are left out.

    What its owner may not read is made readable in ``source`` first: closing a file must not keep work from being
    scored. Raises ``OSError``, also for folders that are nested too deeply.
    """
    open_tree(source)
    try:
        shutil.copytree(source, target, symlinks=True, ignore=_special_files)
    except RecursionError as error:
        raise _too_deep(source) from error


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as its owner can; one that is not there is no error."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():  # closed folders, or deeper ones than Python's recursion
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def open_tree(root: Path) -> None:
    """Make all that its owner closed readable. Raises ``OSError``, also for folders that are nested too deeply."""
    _add_mode(root, stat.S_IRWXU)
    try:
        for folder, folders, files in os.walk(root):
            for name in folders:
                _add_mode(Path(folder, name), stat.S_IRWXU)
            for name in files:
                _add_mode(Path(folder, name), stat.S_IRUSR)
    except RecursionError as error:
        raise _too_deep(root) from error


def sync(path: Path) -> None:
    """A file's content, or a folder's entries, on disk. Links are not followed; pipes and devices have nothing to sync.

    Raises ``OSError``.
    """
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _too_deep(root: Path) -> OSError:
    return OSError(f"the folders in {root} are nested too deeply")


def _add_mode(path: Path, wanted: int) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode) and mode & wanted != wanted:
        path.chmod(stat.S_IMODE(mode) | wanted)


def _special_files(folder: str, names: list[str]) -> list[str]:
    def is_special(name: str) -> bool:
        mode = os.lstat(Path(folder, name)).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))

    return [name for name in names if is_special(name)]
