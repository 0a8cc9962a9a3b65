"""How each harness is started: its command, its environment and the files that it reads.

Each has a home of its own, talks to the proxy as its users would have it do (a base URL and an API key), asks nobody
and looks for no updates. Nothing but loopback is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.install_harnesses import NPM_HARNESSES

MODEL = "policy"
_REPO = Path(__file__).parents[3]
_GRACE_S = 5.0


@dataclass(frozen=True)
class Client:
    """A harness, ready to be started on a task."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below its home -> content."""


@dataclass(frozen=True)
class Ended:
    """How a harness ended."""

    exit_code: int
    output: str
    errors: str
    workspace: Path

    def file(self, name: str) -> str:
        """A file that the agent made."""
        path = self.workspace / name
        assert path.is_file(), f"no {name}\n{self}"
        return path.read_text()

    def __str__(self) -> str:
        return f"exit code {self.exit_code}\n--- output\n{self.output[-6000:]}\n--- errors\n{self.errors[-3000:]}"


def harness_dir() -> Path:
    """Where harnesses are installed."""
    return Path(os.environ.get("TIDEGATE_HARNESS_DIR") or _REPO / ".harness").absolute()


def executable(name: str) -> str:
    """The command of an installed harness."""
    command = "python" if name == "mini" else NPM_HARNESSES[name].command
    path = harness_dir() / name / "bin" / command
    if not path.exists():
        pytest.fail(f"{name} is not installed; run: python scripts/install_harnesses.py {name}")
    return str(path)


async def start(client: Client, folder: Path, *, timeout_s: float) -> Ended:
    """Run a harness to its end, in a workspace and a home of its own below ``folder``.

    All that it started ends with it. Raises ``AssertionError`` with what it wrote if it does not end in time.
    """
    workspace, home, scratch = folder / "workspace", folder / "home", folder / "tmp"
    for made in (workspace, home, scratch):
        made.mkdir(exist_ok=True)
    for name, content in client.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content)
    env = {
        "PATH": f"{harness_dir() / 'node' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(scratch),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        **client.env,
    }
    out, err = folder / "stdout", folder / "stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *client.command,
            cwd=workspace,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        is_late = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: also what it left running
            await process.wait()
    output, errors = (path.read_text(errors="replace") for path in (out, err))
    ended = Ended(process.returncode or 0, output, errors, workspace)
    assert not is_late, f"{client.name} did not end within {timeout_s:g} s\n{ended}"
    return ended


def pi(
    url: str, key: str, task: str, dialect: str, name: str = "pi", settings: Mapping[str, Any] | None = None
) -> Client:
    """pi, over ``openai-completions``, ``openai-responses`` or ``anthropic-messages``."""
    models = [{"id": MODEL, "reasoning": True, "contextWindow": 128_000, "maxTokens": 8192}]
    base_url = url if dialect == "anthropic-messages" else f"{url}/v1"
    provider = {"baseUrl": base_url, "api": dialect, "apiKey": key, "models": models}
    return Client(
        name,
        (executable(name), "-p", "--mode", "json", "--provider", "tidegate", "--model", MODEL, task),
        env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        files={
            ".pi/agent/models.json": json.dumps({"providers": {"tidegate": provider}}),
            ".pi/agent/settings.json": json.dumps(settings or {}),
        },
    )


def mini(url: str, key: str, task: str, model: str, model_class: str = "litellm") -> Client:
    """mini-swe-agent over LiteLLM; ``model`` names the provider, ``litellm_response`` the Responses API."""
    start = (executable("mini"), "-m", "minisweagent.run.mini", "--exit-immediately", "-y")
    encodings = next((harness_dir() / "mini" / "lib").glob("*/site-packages/litellm/litellm_core_utils/tokenizers"))
    env = {
        "TIKTOKEN_CACHE_DIR": str(encodings),  # else LiteLLM fetches them, where it answers in Anthropic's form
        "OPENAI_API_KEY": key,
        "OPENAI_API_BASE": f"{url}/v1",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_API_BASE": url,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    options = (
        "-m",
        model,
        "--model-class",
        model_class,
        "-t",
        task,
        "-y",
        "--exit-immediately",
        "-o",
        "trajectory.json",
    )
    return Client("mini", (*start, *options), env=env)


def claude_code(url: str, key: str, task: str, *options: str, env: Mapping[str, str] | None = None) -> Client:
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",  # it may then run as root without asking
        **(env or {}),
    }
    flags = ("--output-format", "json", "--dangerously-skip-permissions", "--model", "claude-sonnet-4-5", *options)
    return Client("claude-code", (executable("claude-code"), "-p", task, *flags), env=settings)


_CODEX_CONFIG = """\
model = "gpt-5-codex"
model_provider = "tidegate"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
{extra}
[analytics]
enabled = false
[model_providers.tidegate]
name = "tidegate"
base_url = "{url}/v1"
env_key = "TIDEGATE_KEY"
wire_api = "responses"
[features]
plugins = false
remote_plugin = false
plugin_sharing = false
apps = false
"""


def codex(url: str, key: str, task: str, extra: str = "") -> Client:
    return Client(
        "codex",
        (executable("codex"), "exec", "--json", "--skip-git-repo-check", task),
        env={"TIDEGATE_KEY": key},
        files={".codex/config.toml": _CODEX_CONFIG.format(url=url, extra=extra)},
    )


def qwen_code(url: str, key: str, task: str, auth_type: str = "openai") -> Client:
    """Qwen Code over Chat (``openai``), Responses (``openai-responses``) or Messages (``anthropic``)."""
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    }
    vendor, base_url = ("ANTHROPIC", url) if auth_type == "anthropic" else ("OPENAI", f"{url}/v1")
    return Client(
        "qwen-code",
        (executable("qwen-code"), "--auth-type", auth_type, "--yolo", "-p", task, "--output-format", "json"),
        env={f"{vendor}_API_KEY": key, f"{vendor}_BASE_URL": base_url, f"{vendor}_MODEL": MODEL},
        files={".qwen/settings.json": json.dumps(settings)},
    )


def opencode(
    url: str, key: str, task: str, package: str = "@ai-sdk/openai-compatible", context: int = 128_000
) -> Client:
    """opencode over one of the AI SDK's packages: Chat, ``@ai-sdk/openai`` (Responses), ``@ai-sdk/anthropic``."""
    model = {"name": "Tidegate", "limit": {"context": context, "output": 8192}}
    provider = {"npm": package, "options": {"baseURL": f"{url}/v1", "apiKey": key}, "models": {MODEL: model}}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"tidegate/{MODEL}",
        "small_model": f"tidegate/{MODEL}",
        "provider": {"tidegate": provider},
    }
    switches = ("AUTOUPDATE", "MODELS_FETCH", "SHARE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return Client(
        "opencode",
        (executable("opencode"), "run", "--format", "json", "--model", f"tidegate/{MODEL}", task),
        env={f"OPENCODE_DISABLE_{switch}": "1" for switch in switches},
        files={".config/opencode/opencode.json": json.dumps(config)},
    )
