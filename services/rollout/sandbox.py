"""Runs commands in sandboxes, watches them, and leaves nothing behind; checks that this machine can do so.

Harnesses and verifiers run what a policy wrote, so both run here. See ``sandbox_command`` for what they see.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import MachineError
from services.rollout.config import SandboxConfig
from services.rollout.processes import (
    Tail,
    folder_bytes,
    kill_group,
    kill_pids,
    measure_tree,
    no_orphans,
    pids_with_mark,
)
from services.rollout.sandbox_command import (
    EXIT_WORD,
    ExitReason,
    Limits,
    Mount,
    SandboxExit,
    SandboxKind,
    SandboxRequest,
    bubblewrap_command,
    forwarder_command,
    request_env,
)

_MARK = "TIDEGATE_SANDBOX"
_LOG_TAIL_BYTES = 256 << 10
_SETUP_TIMEOUT_S = 30.0
_KILLED = 128 + signal.SIGKILL
_TICK_S = 0.05
_SAMPLE_S = 0.2
_DISK_SAMPLE_S = 1.0
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_ETC = {
    "passwd": "agent:x:1000:1000:agent:/home/agent:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "agent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}


def run_sandboxed(
    request: SandboxRequest, kind: SandboxKind = "bubblewrap", cancel: threading.Event | None = None
) -> SandboxExit:
    """Run the command to its end or to its limits. Blocks; nothing of it runs any more when this returns."""
    mark, start_s = secrets.token_hex(16), time.monotonic()
    try:
        _write_scratch(request)
        with no_orphans(_MARK, mark), _forwarder(request, kind, mark) as forwarder:
            return _Watch(request, kind, cancel or threading.Event(), mark, forwarder).run(start_s)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
        return SandboxExit(ExitReason.NOT_STARTED, None, 0.0, 0, f"cannot start: {error}", b"", b"")


class _Watch:
    """One sandboxed process from its start to its end; a single loop reads, samples and decides."""

    def __init__(
        self,
        request: SandboxRequest,
        kind: SandboxKind,
        cancel: threading.Event,
        mark: str,
        forwarder: subprocess.Popen[bytes] | None,
    ) -> None:
        self._request = request
        self._kind = kind
        self._cancel = cancel
        self._mark = mark
        self._forwarder = forwarder
        self._stdout, self._stderr = Tail(_LOG_TAIL_BYTES), Tail(_LOG_TAIL_BYTES)
        self._told, self._info = Tail(1 << 10), Tail(1 << 16)
        self._selector = selectors.DefaultSelector()
        self._peak_rss_bytes = 0
        self._overhead = 0 if kind == "none" else (3 if request.proxy else 2)  # bwrap, the shell in it, one socat
        self._disk = [request.workspace, *(mount.source for mount in request.mounts if mount.writable)]

    def run(self, start_s: float) -> SandboxExit:
        """``start_s``: when it was asked for, monotonic."""
        self._spawn()
        try:
            reason, detail, ready_s = self._loop(start_s)
        finally:
            self._end()
        exit_code: int | None = None
        if reason is ExitReason.EXITED:
            exit_code = self._process.returncode
            exit_code = 128 - exit_code if exit_code < 0 else exit_code
            detail = f"exit code {exit_code}"
            if ready_s is None:
                reason, exit_code = ExitReason.NOT_STARTED, None
                detail = self._stderr.last_line() or "the sandbox ended before its command started"
            elif killed := self._killed_from_outside():
                reason, exit_code, detail = ExitReason.DIED, None, killed
        wall_s = time.monotonic() - (start_s if ready_s is None else ready_s)
        out, err = self._stdout.content(), self._stderr.content()
        return SandboxExit(reason, exit_code, wall_s, self._peak_rss_bytes, detail, out, err)

    def _spawn(self) -> None:
        env = {**request_env(self._request, self._kind), _MARK: self._mark}
        readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
        out, err, info = writers
        self._line, line = socket.socketpair()
        try:
            if self._kind == "bubblewrap":
                # RLIMIT_AS breaks node and RLIMIT_NPROC counts the user's other processes: the loop watches those
                limits = ["--core=0", f"--fsize={self._request.limits.workspace_bytes}", "--"]
                programs = [shutil.which(name) or name for name in ("prlimit", "bwrap")]  # PATH will be the harness's
                command = [programs[0], *limits, programs[1]]
                command += bubblewrap_command(self._request, host_system(), info)[1:]
            else:
                command = list(self._request.command)
            self._process = subprocess.Popen(
                command,
                stdin=line.fileno() if self._kind == "bubblewrap" else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                cwd=self._request.workspace,
                pass_fds=(info,),
                start_new_session=True,
            )
        except (OSError, ValueError):
            for reader in readers:
                os.close(reader)
            self._line.close()
            self._selector.close()
            raise
        finally:
            line.close()
            for writer in writers:
                os.close(writer)
        for reader, tail in zip(readers, (self._stdout, self._stderr, self._info), strict=True):
            os.set_blocking(reader, False)
            self._selector.register(reader, selectors.EVENT_READ, tail)
        self._line.setblocking(False)
        self._selector.register(self._line.fileno(), selectors.EVENT_READ, self._told)

    def _loop(self, start_s: float) -> tuple[ExitReason, str, float | None]:
        """Until the command ends or has to be ended: (reason, detail, when the command itself started)."""
        limits = self._request.limits
        ready_s = start_s if self._kind == "none" else None
        next_sample_s = next_disk_s = start_s
        while True:
            self._read(_TICK_S)
            ended = self._process.poll() is not None
            now_s = time.monotonic()
            if ended:
                self._read(0)
            if ready_s is None and self._told.last_line() == "ready":
                ready_s = now_s
                self._tell_go()
            if ended:
                return ExitReason.EXITED, "", ready_s
            if self._cancel.is_set():
                return ExitReason.CANCELLED, "cancelled", ready_s
            if ready_s is None and now_s - start_s > _SETUP_TIMEOUT_S:
                return ExitReason.NOT_STARTED, f"the sandbox was not up after {_SETUP_TIMEOUT_S:g} s", None
            if ready_s is not None and now_s - ready_s > limits.timeout_s:
                return ExitReason.TIMEOUT, f"stopped after {limits.timeout_s:g} s", ready_s
            if now_s - start_s > limits.total_timeout_s:
                late = ExitReason.NOT_STARTED if ready_s is None else ExitReason.TOTAL_TIMEOUT
                return late, f"stopped {limits.total_timeout_s:g} s after it was asked for", ready_s
            if self._forwarder is not None and (code := self._forwarder.poll()) is not None and code < 0:
                return ExitReason.DIED, f"its way to the proxy was ended by signal {-code}", ready_s
            if now_s >= next_sample_s:
                next_sample_s = now_s + _SAMPLE_S
                if over := self._over_limits(check_disk=now_s >= next_disk_s):
                    return *over, ready_s
                next_disk_s = now_s + _DISK_SAMPLE_S if now_s >= next_disk_s else next_disk_s

    def _killed_from_outside(self) -> str:
        """Why the end of the sandbox is none of its command's doing; empty if it is."""
        if self._kind == "none":
            return ""
        code = self._process.returncode
        if code < 0:
            return f"bwrap was ended by signal {-code}"
        if code == _KILLED and not self._told.last_line().startswith(f"{EXIT_WORD} "):
            return "the sandbox's first process was killed"
        return ""

    def _over_limits(self, *, check_disk: bool) -> tuple[ExitReason, str] | None:
        limits = self._request.limits
        usage = measure_tree(self._process.pid)
        self._peak_rss_bytes = max(self._peak_rss_bytes, usage.rss_bytes)
        if (num_processes := len(usage.pids) - self._overhead) > limits.max_processes:
            return ExitReason.PROCESSES, f"killed: {num_processes} processes, {limits.max_processes} allowed"
        if usage.rss_bytes > limits.memory_bytes:
            used = f"{usage.rss_bytes >> 20} MiB of memory"
            return ExitReason.MEMORY, f"killed: {used}, {limits.memory_bytes >> 20} MiB allowed"
        if check_disk and folder_bytes(self._disk, limits.workspace_bytes) > limits.workspace_bytes:
            return ExitReason.DISK, f"killed: more than {limits.workspace_bytes >> 20} MiB of files"
        return None

    def _read(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            try:
                chunk = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                chunk = b""
            if chunk:
                key.data.add(chunk)
            else:
                self._drop(key.fd)

    def _drop(self, fd: int) -> None:
        self._selector.unregister(fd)
        if fd == self._line.fileno():
            self._line.close()
        else:
            os.close(fd)

    def _tell_go(self) -> None:
        with contextlib.suppress(OSError):  # it ended meanwhile
            self._line.sendall(b"go\n")

    def _end(self) -> None:
        """End every process, wait until they are gone, keep what they had written."""
        pids = list(measure_tree(self._process.pid).pids)
        if self._kind == "bubblewrap" and (inner_pid := _inner_pid(self._info.content())):
            pids.append(inner_pid)  # init of the process namespace: once it is gone, all in it are gone
        kill_group(self._process.pid)
        kill_pids(pids)
        if self._kind == "none":
            while stray := pids_with_mark(_MARK, self._mark):
                if not kill_pids(stray):
                    break
        self._process.wait()
        give_up_s = time.monotonic() + 1
        while self._selector.get_map() and time.monotonic() < give_up_s:
            self._read(_TICK_S)
        for key in list(self._selector.get_map().values()):
            self._drop(key.fd)
        self._selector.close()


def _inner_pid(info: bytes) -> int | None:
    try:
        return int(json.loads(info)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None


# ---- what surrounds it ----------------------------------------------------------------------------------------------


def host_system() -> list[Mount | tuple[str, str]]:
    """What of the host a sandbox shows: programs and libraries, and the few files of /etc that they need."""
    system: list[Mount | tuple[str, str]] = []
    for folder in map(Path, _SYSTEM_FOLDERS):
        if folder.is_symlink():
            system.append((str(folder.readlink()), str(folder)))
        elif folder.is_dir():
            system.append(Mount(str(folder), str(folder)))
    system += [Mount(path, path) for path in _SYSTEM_FILES if Path(path).exists()]
    return system


def _write_scratch(request: SandboxRequest) -> None:
    etc = Path(request.scratch, "etc")
    etc.mkdir(parents=True, exist_ok=True)
    for name, text in _ETC.items():
        (etc / name).write_text(text)
    Path(request.scratch, "home").mkdir(exist_ok=True)
    Path(request.scratch, "proxy.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def _forwarder(request: SandboxRequest, kind: SandboxKind, mark: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """While it is open, the scratch folder's socket leads to the proxy; the process that does it, if one is needed."""
    if kind == "none" or request.proxy is None:
        yield None
        return
    process = subprocess.Popen(
        forwarder_command(request.proxy),
        cwd=request.scratch,
        env={"PATH": os.environ.get("PATH", os.defpath), _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        give_up_s = time.monotonic() + _SETUP_TIMEOUT_S
        while not Path(request.scratch, "proxy.sock").exists():
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise OSError("the forwarder to the proxy did not start")
            time.sleep(0.005)
        yield process
    finally:
        kill_pids([*measure_tree(process.pid).pids])
        kill_group(process.pid)
        process.wait()
        Path(request.scratch, "proxy.sock").unlink(missing_ok=True)


def check_sandbox(config: SandboxConfig) -> list[str]:
    """What keeps this machine from running the configured sandbox, each with what to do; empty if nothing does."""
    if config.kind == "none":
        return []
    packages = {"bwrap": "bubblewrap", "socat": "socat", "prlimit": "util-linux"}
    missing = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if missing:
        return [f"not installed: {', '.join(missing)}. Run: apt-get install -y {' '.join(missing)}"]
    with tempfile.TemporaryDirectory(prefix="tidegate-probe-") as folder:
        workspace = Path(folder, "workspace")
        workspace.mkdir()
        limits = Limits(timeout_s=20, memory_bytes=256 << 20, max_processes=16, workspace_bytes=1 << 20)
        result = run_sandboxed(SandboxRequest(("/bin/sh", "-c", "echo ok > probe"), str(workspace), folder, limits))
        if result.exit_code == 0 and (workspace / "probe").is_file():
            return []
    return [
        f"bubblewrap cannot make a sandbox here: {result.detail}. Allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in Docker "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    ]


def require_sandbox(config: SandboxConfig) -> None:
    """Raises MachineError if the configured sandbox cannot be used on this machine."""
    if problems := check_sandbox(config):
        raise MachineError(
            f"the sandbox does not work: {'; '.join(problems)}.",
            "Or write `sandbox.kind: none` to give harnesses the whole machine (only for harnesses that you trust).",
        )
