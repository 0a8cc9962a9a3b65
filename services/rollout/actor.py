"""The runner: drives harness processes off the accelerators. One Ray actor a node."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.runner import run_attempt
from services.rollout.types import RunResult, RunSpec


class Runner:
    """Executes attempts of runs, each in a thread that waits for its sandbox."""

    def __init__(self, harness: HarnessConfig, sandbox: SandboxConfig, *, keep_workspaces: bool) -> None:
        self._execute = functools.partial(run_attempt, harness=harness, sandbox=sandbox, keep_workspace=keep_workspaces)
        self._threads = ThreadPoolExecutor(harness.max_concurrent_runs, thread_name_prefix="run")
        self._cancels: dict[tuple[str, int], threading.Event] = {}

    async def run(self, spec: RunSpec) -> RunResult:
        """Execute one attempt from its workspace to its score."""
        key = (spec.run_id, spec.attempt)
        cancel = self._cancels[key] = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, functools.partial(self._execute, spec, cancel=cancel)
            )
        finally:
            cancel.set()  # a caller that goes away leaves nothing running
            del self._cancels[key]

    async def cancel(self, attempts: list[tuple[str, int]]) -> None:
        """End these attempts now, if they run here."""
        for key in attempts:
            if cancel := self._cancels.get(key):
                cancel.set()
