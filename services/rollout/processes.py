"""Small tools around process trees: what they use, how they end, how much of their output is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What a process tree uses at one moment."""

    pids: tuple[int, ...]
    rss_bytes: int
    """Sum of the resident sets; pages shared by two processes count twice."""


def measure_tree(root_pid: int) -> TreeUsage:
    """The process and all its descendants. Processes that end meanwhile are left out."""
    pids: list[int] = []
    rss_bytes = 0
    queue = deque([root_pid])
    while queue:
        pid = queue.popleft()
        try:
            rss_bytes += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
            queue.extend(_children_of(pid))
        except (OSError, IndexError, psutil.Error):
            continue
        pids.append(pid)
    return TreeUsage(tuple(pids), rss_bytes)


def _children_of(pid: int) -> list[int]:
    # The kernel's own list costs one read a thread; psutil looks at every process of the machine.
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        path = task / "children"
        if not path.exists():  # a kernel without CONFIG_PROC_CHILDREN
            return [child.pid for child in psutil.Process(pid).children()]
        children.extend(int(child) for child in path.read_text().split())
    return children


def kill_pids(pids: Iterable[int], timeout_s: float = 5.0) -> bool:
    """SIGKILL each process and wait until none is left; zombies count as gone. False if some stay."""
    waiting = [process for pid in pids if (process := _find(pid)) is not None]
    for process in waiting:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    give_up_s = time.monotonic() + timeout_s
    while waiting := [process for process in waiting if _is_alive(process)]:
        if time.monotonic() > give_up_s:
            return False
        time.sleep(_POLL_S)
    return True


def pids_with_mark(name: str, value: str) -> list[int]:
    """Processes that have the variable in the environment they were started with (readable ones only)."""
    mark = f"{name}={value}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process.pid)
        except OSError:
            continue
    return found


# A runner that is killed cannot clean up, and the parent-death signals of Linux come too late for a child that is still
# being set up. So a shell waits for the runner's word; without one it kills whatever carries the mark, until ten looks
# in a row find nothing.
_KEEPER = """\
read -r word && exit 0
looks=0 empty=0
while [ $empty -lt 10 ] && [ $looks -lt 300 ]; do
  looks=$((looks + 1)) empty=$((empty + 1))
  for file in $(grep -lazs -- "^$1\\$" /proc/[0-9]*/environ); do
    empty=0 pid=${file#/proc/}
    kill -KILL "${pid%/environ}"
  done
  sleep 0.1
done 2>/dev/null
"""


@contextmanager
def no_orphans(name: str, value: str) -> Iterator[None]:
    """While it is open, the death of this process ends every process started with the variable in its environment."""
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "keeper", f"{name}={value}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath},
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        with suppress(OSError):
            keeper.stdin.write(b"done\n")
            keeper.stdin.close()
        keeper.wait()


def kill_group(group_id: int) -> None:
    """SIGKILL a process group that may be gone already."""
    try:
        os.killpg(group_id, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _find(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def folder_bytes(folders: Iterable[str], limit_bytes: int) -> int:
    """Bytes on disk below the folders, links not followed; stops counting above ``limit_bytes``."""
    total = 0
    stack = list(folders)
    while stack and total <= limit_bytes:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


class Tail:
    """The last ``limit_bytes`` of a stream."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._data = bytearray()
        self._dropped_bytes = 0

    def add(self, chunk: bytes) -> None:
        self._data += chunk
        surplus = len(self._data) - self._limit_bytes
        if surplus > 0:
            del self._data[:surplus]
            self._dropped_bytes += surplus

    def content(self) -> bytes:
        """What was kept, below a line that tells how much was not."""
        if not self._dropped_bytes:
            return bytes(self._data)
        return f"[{self._dropped_bytes} bytes before this were not kept]\n".encode() + bytes(self._data)

    def last_line(self) -> str:
        lines = [line for line in self._data.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else ""
