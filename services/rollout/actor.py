"""The runner: drives harness processes off the accelerators. One Ray actor a node."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.runner import run_attempt
from services.rollout.scoring.evaluate import BY_TASKS, ScoringSetup
from services.rollout.types import RunResult, RunSpec

NUM_RESULTS_KEPT = 10_000
"""Results that nobody asked to forget; the oldest go first."""


@dataclass(eq=False)
class _Attempt:
    """An attempt that runs, or has ended and was not forgotten."""

    cancel: threading.Event = field(default_factory=threading.Event)
    scoring: asyncio.Event = field(default_factory=asyncio.Event)
    """Its harness has ended, and what it left is being scored."""
    task: asyncio.Task[RunResult] | None = None


class Runner:
    """Executes attempts of runs, each in a thread that waits for its sandbox and then for its scorer.

    Both have their own time limits. As many attempts may be scored at once as harnesses run: slow scoring holds up no
    harness.

    An attempt belongs to the runner, not to whoever asked for it: a scheduler that dies and asks again finds the
    attempt still running, or its result.
    """

    def __init__(
        self,
        harness: HarnessConfig,
        sandbox: SandboxConfig,
        *,
        keep_workspaces: bool,
        scoring: ScoringSetup = BY_TASKS,
        run_timeout_s: float | None = None,
    ) -> None:
        self._execute = functools.partial(
            run_attempt,
            harness=harness,
            sandbox=sandbox,
            keep_workspace=keep_workspaces,
            scoring=scoring,
            run_timeout_s=run_timeout_s,
        )
        self._threads = ThreadPoolExecutor(2 * harness.max_concurrent_runs, thread_name_prefix="run")
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        """In the order in which they came."""

    async def run(self, spec: RunSpec) -> RunResult:
        """Execute one attempt from its workspace to its score.

        An attempt that runs already, or has ended, is not executed again: every caller gets its one result. It goes
        on when a caller goes away; ``cancel`` ends it.
        """
        key = (spec.run_id, spec.attempt)
        attempt = self._attempts.get(key)
        if attempt is None:
            attempt = self._attempts[key] = _Attempt()
            attempt.task = asyncio.create_task(self._run(spec, attempt))
            self._forget_the_oldest()
        assert attempt.task is not None
        return await asyncio.shield(attempt.task)

    async def harness_ended(self, run_id: str, attempt: int) -> bool:
        """Wait for the end of an attempt's harness. False if nothing is scored then, or no such attempt is here."""
        found = self._attempts.get((run_id, attempt))
        if found is None or found.task is None:
            return False
        scoring = asyncio.create_task(found.scoring.wait())
        await asyncio.wait({scoring, found.task}, return_when=asyncio.FIRST_COMPLETED)
        scoring.cancel()
        return not found.task.done()

    async def _run(self, spec: RunSpec, attempt: _Attempt) -> RunResult:
        loop = asyncio.get_running_loop()
        execute = functools.partial(
            self._execute,
            spec,
            cancel=attempt.cancel,
            harness_ended=lambda: loop.call_soon_threadsafe(attempt.scoring.set),
        )
        return await loop.run_in_executor(self._threads, execute)

    async def cancel(self, attempts: list[tuple[str, int]]) -> None:
        """End these attempts now, if they run here."""
        for key in attempts:
            if attempt := self._attempts.get(key):
                attempt.cancel.set()

    async def forget(self, attempts: list[tuple[str, int]]) -> None:
        """The results of these attempts are recorded elsewhere. Attempts that run are not forgotten."""
        self._drop(attempts)

    async def keep_only(self, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """All other attempts are nobody's any more: those that run are ended, results are dropped.

        Returns those that stay: they run here, or have a result.
        """
        wanted = set(attempts)
        others = [key for key in self._attempts if key not in wanted]
        await self.cancel(others)
        self._drop(others)
        for key in others:
            if attempt := self._attempts.get(key):
                assert attempt.task is not None
                attempt.task.add_done_callback(functools.partial(self._drop_ended, key))
        return [key for key in self._attempts if key in wanted]

    def _drop_ended(self, key: tuple[str, int], _task: asyncio.Task[RunResult]) -> None:
        self._drop([key])

    def _drop(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in keys:
            attempt = self._attempts.get(key)
            if attempt is not None and attempt.task is not None and attempt.task.done():
                del self._attempts[key]

    def _forget_the_oldest(self) -> None:
        surplus = len(self._attempts) - NUM_RESULTS_KEPT
        if surplus > 0:
            ended = [key for key, attempt in self._attempts.items() if attempt.task is not None and attempt.task.done()]
            self._drop(ended[:surplus])
