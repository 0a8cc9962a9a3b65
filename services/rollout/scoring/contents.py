"""What a workspace holds: its digest, its text files, what changed. Links are not followed: a policy wrote it."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from services.rollout.scoring.harbor import read_untrusted

_MAX_TEXT_BYTES = 256 << 10
_MAX_FILES_SHOWN = 200
_MAX_LINES_COMPARED = 2000
_CHUNK_BYTES = 1 << 20


def tree_digest(root: Path) -> str:
    """``sha256:...`` of names, contents, links and the owner's right to execute of all that lies below ``root``.

    Equal trees have equal digests, wherever and whenever they were written. Raises ``OSError`` for what cannot be read.
    """
    digest = hashlib.sha256()
    for name, path in walk(root):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entry, content = "link", os.fsencode(path.readlink())
        elif stat.S_ISREG(mode):
            entry, content = ("program" if mode & stat.S_IXUSR else "file"), _digest_of(path)
        else:
            entry, content = ("folder" if stat.S_ISDIR(mode) else "special"), b""
        for part in (entry.encode(), os.fsencode(name), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return f"sha256:{digest.hexdigest()}"


def read_texts(root: Path) -> dict[str, str]:
    """The UTF-8 text files below ``root`` by name, at most ``_MAX_FILES_SHOWN`` of at most 256 KiB each."""
    texts: dict[str, str] = {}
    if not root.is_dir():
        return texts
    for name, path in walk(root):
        if len(texts) == _MAX_FILES_SHOWN:
            break
        try:
            texts[name] = read_untrusted(path, _MAX_TEXT_BYTES)
        except (OSError, UnicodeDecodeError):
            continue
    return texts


def listing(texts: dict[str, str]) -> str:
    """Files with their names, for a reader."""
    return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())


def diff(before: dict[str, str], after: dict[str, str]) -> str:
    """What changed, as a unified diff. Of files with more than ``_MAX_LINES_COMPARED`` lines, the new text: comparing
    takes time quadratic in them."""
    pieces: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        names = (f"a/{name}" if old is not None else "/dev/null", f"b/{name}" if new is not None else "/dev/null")
        lines = ((old or "").splitlines(), (new or "").splitlines())
        if min(map(len, lines)) > 0 and max(map(len, lines)) > _MAX_LINES_COMPARED:
            pieces += [f"--- {names[0]}", f"+++ {names[1]}", "(too long to be compared)", *lines[1]]
        else:
            pieces += difflib.unified_diff(*lines, *names, lineterm="")
    return "\n".join(pieces)


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """All entries below a folder with their relative names, sorted; a folder before what it holds."""
    waiting = [""]
    while waiting:
        name = waiting.pop()
        folder = root / name
        if name:
            yield name, folder
        if not name or stat.S_ISDIR(folder.lstat().st_mode):
            below = sorted((one.name for one in folder.iterdir()), reverse=True)
            waiting += [f"{name}/{one}" if name else one for one in below]


def _digest_of(path: Path) -> bytes:
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
