"""The bubblewrap command line: what a sandboxed process sees, and what it does not."""

from __future__ import annotations

import pytest

from services.rollout.sandbox_command import (
    PROXY_PORT,
    Limits,
    Mount,
    SandboxRequest,
    bubblewrap_command,
    forwarder_command,
    inside_url,
    proxy_address,
    request_env,
)

SYSTEM = [Mount("/usr", "/usr"), ("usr/bin", "/bin")]
LIMITS = Limits(timeout_s=5, memory_bytes=400 << 20, max_processes=8, workspace_bytes=1 << 20)


def make_request(**changes: object) -> SandboxRequest:
    values: dict[str, object] = {
        "command": ("agent", "--task", "it's {a} task"),
        "workspace": "/runs/r0/workspace",
        "scratch": "/runs/r0/scratch",
        "limits": LIMITS,
        "env": {"API_KEY": "secret"},
        **changes,
    }
    return SandboxRequest(**values)  # type: ignore[arg-type]


def binds(command: list[str], option: str) -> list[tuple[str, str]]:
    command = command[: command.index("--")]
    return [(command[i + 1], command[i + 2]) for i, word in enumerate(command) if word == option]


def test_only_the_workspace_and_writable_mounts_are_writable() -> None:
    mounts = (Mount("/host/config", "/config"), Mount("/host/logs", "/logs/agent", writable=True))
    command = bubblewrap_command(make_request(mounts=mounts), SYSTEM, info_fd=9)
    assert binds(command, "--bind") == [("/host/logs", "/logs/agent"), ("/runs/r0/workspace", "/app")]
    assert ("/host/config", "/config") in binds(command, "--ro-bind")
    assert ("/usr", "/usr") in binds(command, "--ro-bind")
    assert binds(command, "--symlink")[0] == ("usr/bin", "/bin")


def test_the_root_is_sealed_after_everything_is_mounted() -> None:
    command = bubblewrap_command(make_request(mounts=(Mount("/a", "/b", writable=True),)), SYSTEM, info_fd=9)
    seal = max(i for i, word in enumerate(command) if word == "--remount-ro")
    assert command[seal + 1] == "/"
    assert not any(word in ("--bind", "--ro-bind", "--tmpfs") for word in command[seal : command.index("--")])


def test_isolation_is_complete() -> None:
    command = bubblewrap_command(make_request(), SYSTEM, info_fd=9)
    for option in ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"):
        assert option in command
    assert command[command.index("--cap-drop") + 1] == "ALL"
    assert "--share-net" not in command
    assert ("/proc/sys", "/proc/sys") in binds(command, "--ro-bind")


def test_memory_file_systems_are_bounded() -> None:
    command = bubblewrap_command(make_request(), SYSTEM, info_fd=9)
    places = [i for i, word in enumerate(command) if word == "--tmpfs"]
    assert sorted(command[i + 1] for i in places) == ["/dev/shm", "/home/agent", "/tmp"]
    assert all(command[i - 2 : i] == ["--size", str(100 << 20)] for i in places)


def test_secrets_stay_out_of_the_command_line() -> None:
    request = make_request(proxy=("127.0.0.1", 9000))
    assert not any("secret" in word for word in bubblewrap_command(request, SYSTEM, info_fd=9))
    env = request_env(request, "bubblewrap")
    assert env["API_KEY"] == "secret"
    assert env["HOME"] == "/home/agent"


def test_the_environment_inherits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "host")
    assert set(request_env(make_request(), "none")) == {"PATH", "LANG", "TERM", "USER", "HOME", "API_KEY"}


def test_the_proxy_is_reached_through_a_socket_or_not_at_all() -> None:
    without = bubblewrap_command(make_request(), SYSTEM, info_fd=9)
    assert not any("proxy.sock" in source for source, _ in binds(without, "--ro-bind"))
    assert without[without.index("sandbox", without.index("--")) + 1] == "0"
    with_proxy = bubblewrap_command(make_request(proxy=("127.0.0.1", 9000)), SYSTEM, info_fd=9)
    assert ("/runs/r0/scratch/proxy.sock", "/run/tidegate/proxy.sock") in binds(with_proxy, "--ro-bind")
    assert with_proxy[with_proxy.index("sandbox", with_proxy.index("--")) + 1] == str(PROXY_PORT)
    assert not any("9000" in word for word in with_proxy)


def test_the_command_is_passed_word_by_word() -> None:
    command = bubblewrap_command(make_request(), SYSTEM, info_fd=9)
    assert command[-3:] == ["agent", "--task", "it's {a} task"]


def test_the_forwarder_listens_on_a_socket_only_its_owner_may_use() -> None:
    command = forwarder_command(("::1", 9000))
    assert "UNIX-LISTEN:proxy.sock,fork,mode=600,backlog=128" in command
    assert command[-1].startswith("TCP:[::1]:9000")


def test_urls_are_rewritten_for_the_inside() -> None:
    url = "http://10.0.0.5:8000/job/run/g1-r0.ab"
    assert proxy_address(url) == ("10.0.0.5", 8000)
    assert proxy_address("http://host/x") == ("host", 80)
    assert inside_url(url, "bubblewrap") == f"http://127.0.0.1:{PROXY_PORT}/job/run/g1-r0.ab"
    assert inside_url(url, "none") == url
    assert proxy_address("https://host/x") == ("host", 443)
    assert inside_url("https://host/x", "bubblewrap") == f"https://127.0.0.1:{PROXY_PORT}/x"
    with pytest.raises(ValueError, match="http and https only"):
        inside_url("ftp://host/x", "bubblewrap")
