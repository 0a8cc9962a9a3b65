"""Real sandboxes: what a hostile harness tries and cannot do, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from services.common.errors import MachineError
from services.rollout.config import SandboxConfig
from services.rollout.processes import pids_with_mark
from services.rollout.sandbox import check_sandbox, require_sandbox, run_sandboxed
from services.rollout.sandbox_command import ExitReason, Limits, Mount, SandboxExit, SandboxKind, SandboxRequest
from tests.waiting import wait_until

LIMITS = Limits(timeout_s=20, memory_bytes=256 << 20, max_processes=32, workspace_bytes=8 << 20)
Run = Callable[..., SandboxExit]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script in a sandbox whose workspace is tmp_path/app."""
    (tmp_path / "app").mkdir()

    def run_script(
        script: str,
        *,
        interpreter: tuple[str, ...] = ("/usr/bin/python3", "-c"),
        kind: SandboxKind = "bubblewrap",
        limits: Limits = LIMITS,
        cancel: threading.Event | None = None,
        **changes: object,
    ) -> SandboxExit:
        request = SandboxRequest(
            command=(*interpreter, script),
            workspace=str(tmp_path / "app"),
            scratch=str(tmp_path),
            limits=limits,
            **changes,  # type: ignore[arg-type]
        )
        return run_sandboxed(request, kind, cancel)

    return run_script


@pytest.fixture
def proxy() -> Iterator[tuple[str, int]]:
    """A server that answers with the path it was asked for."""

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.path)))
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield "127.0.0.1", server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def nap() -> str:
    """A number of seconds to sleep that no other process of this machine has in its command line."""
    return str(10_000_000 + secrets.randbelow(10_000_000))


def strays(marker: str) -> list[int]:
    """Processes of this machine with the marker in their command line or their working directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(marker in word for word in words):
            found.append(process.pid)
    return found


def test_this_machine_can_make_sandboxes() -> None:
    assert check_sandbox(SandboxConfig()) == []
    require_sandbox(SandboxConfig())


def test_a_missing_program_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"apt-get install -y bubblewrap.*sandbox.kind: none"):
        require_sandbox(SandboxConfig())
    require_sandbox(SandboxConfig(kind="none"))


def test_it_cannot_read_the_host(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of another run")
    (tmp_path / "app" / "link").symlink_to(secret)
    paths = [
        str(secret), "/app/link", "/root", "/etc/shadow", "/etc/ssl/private", "/var/log", "/sys",
        str(Path(__file__).parent), "/proc/1/root/root",
        f"/proc/{os.getpid()}/environ", "/dev/vda", "/run/docker.sock", str(Path.home()),
    ]  # fmt: skip
    result = run(
        "import os, sys\n"
        f"for path in {paths!r}:\n"
        "    try: print('read', path, os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(9))\n"
        "    except OSError: pass\n"
        "print(sorted(os.listdir('/')), open('/etc/passwd').read())"
    )
    assert result.exit_code == 0, result.stderr
    assert b"read" not in result.stdout
    assert b"'app', 'bin', 'dev', 'etc', 'home'" in result.stdout
    assert b"root:" not in result.stdout


def test_it_cannot_write_outside_its_workspace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "settings").write_text("kept")
    result = run(
        "import os\n"
        "for path in ['/x', '/usr/x', '/etc/x', '/etc/passwd', '/dev/x', '/run/x', '/config/x', '/config/settings',\n"
        "             '/proc/sys/kernel/core_pattern', '/proc/sys/kernel/hostname', '/proc/sysrq-trigger']:\n"
        "    try: open(path, 'a').close(); print('opened', path)\n"
        "    except OSError: pass\n"
        "for path in ['/app/x', '/tmp/x', os.environ['HOME'] + '/x']: open(path, 'w').write('mine')",
        mounts=(Mount(str(tmp_path / "config"), "/config"),),
    )
    assert (result.exit_code, result.stdout) == (0, b""), result.stderr
    assert (tmp_path / "app" / "x").read_text() == "mine"
    assert (tmp_path / "config" / "settings").read_text() == "kept"
    assert not Path("/tmp/x").exists()


def test_it_has_no_powers(run: Run) -> None:
    result = run(
        "import os, subprocess\n"
        "print([line for line in open('/proc/self/status') if line.startswith('CapEff')], os.getuid())\n"
        "print(subprocess.run(['unshare', '--user', 'true'], stderr=subprocess.DEVNULL).returncode)\n"
        "print(subprocess.run(['mount', '-o', 'remount,rw', '/usr'], stderr=subprocess.DEVNULL).returncode)"
    )
    lines = result.stdout.decode().splitlines()
    assert lines[0] == "['CapEff:\\t0000000000000000\\n'] 1000"
    assert "0" not in lines[1:]


def test_it_reaches_the_proxy_and_nothing_else(run: Run, proxy: tuple[str, int], tmp_path: Path) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    port = other.getsockname()[1]
    script = (
        "import socket, urllib.request\n"
        "print(urllib.request.urlopen('http://127.0.0.1:7070/job/run/key').read())\n"
        f"for address in [('127.0.0.1', {port}), ('127.0.0.1', {proxy[1]}), ('10.0.0.1', 80), ('1.1.1.1', 53)]:\n"
        "    try: socket.create_connection(address, 2); print('connected', address)\n"
        "    except OSError: pass\n"
    )
    result = run(script, proxy=proxy)
    assert (result.exit_code, result.stdout) == (0, b"b'/job/run/key'\n"), result.stderr
    assert strays(str(tmp_path)) == []
    other.close()


def test_without_a_proxy_there_is_no_network(run: Run, proxy: tuple[str, int]) -> None:
    result = run(
        "import socket\n"
        f"for port in (7070, {proxy[1]}):\n"
        "    try: socket.create_connection(('127.0.0.1', port), 2); print('connected')\n"
        "    except OSError: pass\n"
    )
    assert (result.exit_code, result.stdout) == (0, b"")


def test_it_sees_and_signals_only_its_own_processes(run: Run) -> None:
    result = run(
        "import os, signal\n"
        "print(len([name for name in os.listdir('/proc') if name.isdigit()]))\n"
        f"try: os.kill({os.getpid()}, signal.SIGTERM); print('signalled')\n"
        "except OSError: pass\n"
    )
    assert result.stdout == b"2\n"


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_nothing_survives_its_end(run: Run, kind: SandboxKind, nap: str) -> None:
    """Daemons that left the session and the process group go too, at a normal end and at the time limit."""
    daemon = f"setsid -f sh -c 'sleep {nap} & setsid -f sleep {nap}; exec sleep {nap}'"
    shell = ("/bin/bash", "-c")
    result = run(f"{daemon}; exit 3", interpreter=shell, kind=kind)
    assert (result.reason, result.exit_code) == (ExitReason.EXITED, 3)
    assert strays(nap) == []
    limits = Limits(timeout_s=0.5, memory_bytes=1 << 30, max_processes=64, workspace_bytes=1 << 20)
    result = run(f"trap '' TERM INT HUP; {daemon}; sleep {nap}", interpreter=shell, kind=kind, limits=limits)
    assert (result.reason, result.exit_code) == (ExitReason.TIMEOUT, None)
    assert result.wall_s < 3
    assert strays(nap) == []


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_too_much_memory_ends_it(run: Run, kind: SandboxKind) -> None:
    result = run("import time; hold = b'x' * (600 << 20); time.sleep(60)", kind=kind)
    assert result.reason is ExitReason.MEMORY
    assert "256 MiB allowed" in result.detail
    assert result.peak_rss_bytes > 256 << 20


def test_memory_file_systems_are_small(run: Run) -> None:
    result = run("open('/tmp/x', 'wb').write(b'x' * (100 << 20))")
    assert result.exit_code == 1
    assert b"No space left" in result.stderr or b"File too large" in result.stderr


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_too_many_processes_end_it(run: Run, kind: SandboxKind, nap: str) -> None:
    result = run(f"while :; do sleep {nap} & done", interpreter=("/bin/bash", "-c"), kind=kind)
    assert result.reason is ExitReason.PROCESSES
    assert strays(nap) == []


def test_too_many_files_end_it(run: Run) -> None:
    result = run("import time\nfor i in range(40): open(f'f{i}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(60)")
    assert result.reason is ExitReason.DISK


def test_one_huge_file_is_refused(run: Run) -> None:
    result = run("open('huge', 'wb').write(b'x' * (9 << 20))")
    assert result.exit_code not in (0, None)


def test_only_the_end_of_a_long_output_is_kept(run: Run) -> None:
    result = run("import sys\nfor i in range(20000): print('line', i, 'x' * 80)\nprint('end', file=sys.stderr)")
    assert result.exit_code == 0
    assert len(result.stdout) < (256 << 10) + 100
    assert result.stdout.startswith(b"[")
    assert b"line 19999 " in result.stdout
    assert result.stderr == b"end\n"


def test_cancelling_is_quick(run: Run, tmp_path: Path) -> None:
    cancel = threading.Event()

    def watch() -> None:
        wait_until((tmp_path / "app" / "begun").exists)
        cancel.set()

    threading.Thread(target=watch, daemon=True).start()
    result = run("import time; open('begun', 'w').close(); time.sleep(60)", cancel=cancel)
    assert result.reason is ExitReason.CANCELLED
    assert result.wall_s < 3


def test_a_signal_is_told_from_an_exit(run: Run) -> None:
    result = run("import os; os.kill(os.getpid(), 9)")
    assert (result.reason, result.exit_code, result.signalled) == (ExitReason.EXITED, 137, True)
    result = run("import os; os.kill(os.getpid(), 9)", kind="none")
    assert (result.reason, result.exit_code, result.signalled) == (ExitReason.EXITED, 137, True)


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_a_command_that_is_not_there_was_never_started(run: Run, kind: SandboxKind) -> None:
    result = run("", interpreter=("no-such-program",), kind=kind)
    assert (result.reason, result.exit_code) == (ExitReason.NOT_STARTED, None)
    assert "no-such-program" in result.detail


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_a_killed_runner_takes_its_sandbox_with_it(
    tmp_path: Path, proxy: tuple[str, int], num_processes: int, nap: str
) -> None:
    """Whenever it is killed: while the sandbox is being made, or when the harness runs."""
    (tmp_path / "app").mkdir()
    pid = os.fork()
    if pid == 0:
        request = SandboxRequest(
            ("/bin/sleep", nap), str(tmp_path / "app"), str(tmp_path), LIMITS, env={"RUNNER": nap}, proxy=proxy
        )
        run_sandboxed(request)
        os._exit(0)
    wait_until(lambda: len(pids_with_mark("RUNNER", nap)) >= num_processes, poll_s=0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    wait_until(lambda: not pids_with_mark("RUNNER", nap) and not strays(str(tmp_path)))


def test_a_harness_may_have_a_search_path_of_its_own(run: Run, proxy: tuple[str, int]) -> None:
    result = run("echo $PATH", interpreter=("/bin/sh", "-c"), env={"PATH": "/opt/agent"}, proxy=proxy)
    assert (result.exit_code, result.stdout) == (0, b"/opt/agent\n"), result.detail


def test_the_kept_environment_is_what_was_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "1")
    result = run("import json, os; print(json.dumps(dict(os.environ)))", env={"API_KEY": "k"})
    env = json.loads(result.stdout)
    assert env["API_KEY"] == "k"
    assert "HOST_SECRET" not in env
    assert env["HOME"] == "/home/agent"
