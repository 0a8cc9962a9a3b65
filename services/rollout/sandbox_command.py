"""What a sandboxed process sees: types of a sandbox, and its bubblewrap command line. Nothing here is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

SandboxKind = Literal["bubblewrap", "none"]

WORKSPACE = "/app"
HOME = "/home/agent"
PROXY_PORT = 7070
"""Port on the sandbox's own loopback behind which the proxy is; nothing else of the network is there."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
}

_RUNTIME = "/run/tidegate"
_UID = "1000"
EXIT_WORD = "exit"
"""Before the exit code of the command, on the line to the runner."""

# Standard input is a socket to the runner: the command starts when the port answers and the runner has seen it. The
# shell is process 1 of the sandbox, which no process in it can kill, and tells how the command ended: a sandbox that
# is killed without that word was killed from outside.
_START_SCRIPT = """\
path=$PATH PATH=/usr/local/bin:/usr/bin:/bin
if [ "$1" != 0 ]; then
  socat -t 600 "TCP-LISTEN:$1,bind=127.0.0.1,fork,reuseaddr,backlog=128,nodelay" UNIX-CONNECT:{socket} \\
    </dev/null >/dev/null 2>&1 &
  until grep -q "$2 00000000:0000 0A" /proc/net/tcp; do sleep 0.01; done
fi
shift 2
PATH=$path
command -v -- "$1" >/dev/null || {{ echo "cannot run '$1': not found in the sandbox" >&2; exit 127; }}
echo ready >&0
read -r go <&0 || {{ kill -KILL -1; exit 1; }}
(exec "$@") </dev/null
code=$?
echo "{exit_word} $code" >&0
exit $code
"""


class ExitReason(StrEnum):
    """Why a sandbox ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    """The command's own limit."""
    TOTAL_TIMEOUT = "total_timeout"
    """The limit of everything together, the set-up included."""
    DIED = "died"
    """The sandbox's own processes were killed from outside, not by the command."""
    MEMORY = "memory"
    PROCESSES = "processes"
    DISK = "disk"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path and where it appears in the sandbox."""

    source: str
    target: str
    writable: bool = False

    def seen(self, kind: SandboxKind) -> str:
        """The path under which a process of this kind of sandbox finds it."""
        return self.target if kind == "bubblewrap" else self.source


@dataclass(frozen=True, slots=True)
class Limits:
    """When a sandbox is ended from outside."""

    timeout_s: float
    """Wall time, counted from the moment the command itself starts."""
    memory_bytes: int
    """Resident memory of the whole process tree; each of its memory file systems is bounded by a quarter of it."""
    max_processes: int
    workspace_bytes: int
    """Disk below the writable folders; also the largest file."""
    total_timeout_s: float = math.inf
    """Wall time, counted from the request on."""


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """One command to run in a sandbox."""

    command: tuple[str, ...]
    workspace: str
    """Host folder that is the working directory, writable, at /app."""
    scratch: str
    """Existing host folder for the sandbox's own small files; not visible inside."""
    limits: Limits
    env: dict[str, str] = field(default_factory=dict)
    """Everything beyond ``BASE_ENV`` and HOME; nothing is inherited from the runner."""
    mounts: tuple[Mount, ...] = ()
    proxy: tuple[str, int] | None = None
    """Host and port that the sandbox may reach; None: no network at all."""


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How a sandboxed command ended."""

    reason: ExitReason
    exit_code: int | None
    """As a shell reports it: 128 + N after signal N. None if it was ended from outside or never started."""
    wall_s: float
    """From the command's start to the end of its last process."""
    peak_rss_bytes: int
    detail: str
    stdout: bytes
    """The last 256 KiB."""
    stderr: bytes

    @property
    def signalled(self) -> bool:
        return self.exit_code is not None and self.exit_code > 128


def proxy_address(base_url: str) -> tuple[str, int]:
    """Host and port of a base URL. Raises ValueError for anything but http and https."""
    parts = urlsplit(base_url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"the sandbox forwards http and https only, not {base_url!r}")
    return parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme]


def inside_url(base_url: str, kind: SandboxKind) -> str:
    """The base URL as a sandboxed process must use it. With https the certificate has to name 127.0.0.1 too."""
    if kind == "none":
        return base_url
    proxy_address(base_url)
    return urlsplit(base_url)._replace(netloc=f"127.0.0.1:{PROXY_PORT}").geturl()


def bubblewrap_command(request: SandboxRequest, system: Sequence[Mount | tuple[str, str]], info_fd: int) -> list[str]:
    """The bwrap command for a request.

    ``system`` lists what shows the host's programs: read-only mounts, or pairs (link target, path). Everything else
    of the host is absent. The root is a read-only memory file system; /tmp, /dev/shm and the home are bounded ones.
    """
    tmpfs_bytes = str(request.limits.memory_bytes // 4)
    command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", _UID, "--gid", _UID]
    command += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    command += ["--info-fd", str(info_fd), "--as-pid-1"]
    for folder in ("/etc", "/run", "/var"):
        command += ["--perms", "0755", "--dir", folder]
    for entry in system:
        if isinstance(entry, Mount):
            command += ["--ro-bind", entry.source, entry.target]
        else:
            command += ["--symlink", *entry]
    # a sandbox that root starts is, for the kernel's settings, root: it could write them
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp", HOME):
        command += ["--size", tmpfs_bytes, "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--symlink", "/run", "/var/run"]
    for name in ("passwd", "group", "hosts"):
        command += ["--ro-bind", f"{request.scratch}/etc/{name}", f"/etc/{name}"]
    if request.proxy:
        command += ["--ro-bind", f"{request.scratch}/proxy.sock", f"{_RUNTIME}/proxy.sock"]
    for mount in request.mounts:
        command += ["--bind" if mount.writable else "--ro-bind", mount.source, mount.target]
    command += ["--bind", request.workspace, WORKSPACE, "--remount-ro", "/", "--chdir", WORKSPACE]
    port = PROXY_PORT if request.proxy else 0
    script = _START_SCRIPT.format(socket=f"{_RUNTIME}/proxy.sock", exit_word=EXIT_WORD)
    return [*command, "--", "/bin/sh", "-c", script, "sandbox", str(port), f"0100007F:{port:04X}", *request.command]


def forwarder_command(proxy: tuple[str, int]) -> list[str]:
    """The host's side of the proxy's way into a sandbox: a unix socket, relative to the scratch folder."""
    host, port = proxy
    host = f"[{host}]" if ":" in host else host
    listen = "UNIX-LISTEN:proxy.sock,fork,mode=600,backlog=128"
    return ["socat", "-t", "600", listen, f"TCP:{host}:{port},nodelay"]


def request_env(request: SandboxRequest, kind: SandboxKind) -> dict[str, str]:
    """The whole environment of the command."""
    home = HOME if kind == "bubblewrap" else f"{request.scratch}/home"
    return {**BASE_ENV, "HOME": home, **request.env}
