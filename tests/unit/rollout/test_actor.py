"""The runner: an attempt is executed once, whoever asks for it and however often."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from services.rollout import actor as actor_module
from services.rollout.actor import Runner
from services.rollout.config import HarnessConfig, SandboxConfig
from services.rollout.types import RunResult, RunSpec, Task
from services.trajectory.outcome import Outcome
from tests.waiting import until

TASK = Task("t", "/t", "do it", 10, 10, 1 << 30)


def spec(run_id: str, attempt: int = 0) -> RunSpec:
    return RunSpec(run_id, attempt, TASK, "http://127.0.0.1:1", "key", "policy", "/run")


class Attempts:
    """Stands for the harness: each attempt lasts until it is let go or cancelled."""

    def __init__(self) -> None:
        self.num_executed: Counter[tuple[str, int]] = Counter()
        self.go = threading.Event()

    def execute(
        self, one: RunSpec, *, cancel: threading.Event, harness_ended: Callable[[], None] = lambda: None
    ) -> RunResult:
        self.num_executed[(one.run_id, one.attempt)] += 1
        while not self.go.wait(0.002) and not cancel.is_set():
            pass
        outcome = Outcome.CANCELLED if cancel.is_set() else Outcome.FINISHED
        return RunResult(one.run_id, one.attempt, outcome, 1.0, 1.0, 1.0, 0.0, 0)


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


@pytest.fixture
def runner(attempts: Attempts) -> Runner:
    runner = Runner(HarnessConfig(), SandboxConfig(), keep_workspaces=False)
    runner._execute = attempts.execute  # type: ignore[assignment]
    return runner


async def test_an_attempt_is_executed_once_and_every_caller_gets_its_result(runner: Runner, attempts: Attempts) -> None:
    first = asyncio.create_task(runner.run(spec("g000000-r0")))
    await until(lambda: attempts.num_executed.total() == 1)
    first.cancel()  # its scheduler died
    await asyncio.wait([first])
    second, third = (asyncio.create_task(runner.run(spec("g000000-r0"))) for _ in range(2))
    await asyncio.sleep(0)
    attempts.go.set()
    assert await second == await third
    assert await runner.run(spec("g000000-r0")) == second.result()
    assert attempts.num_executed == {("g000000-r0", 0): 1}
    await runner.run(spec("g000000-r0", 1))
    assert attempts.num_executed[("g000000-r0", 1)] == 1


async def test_a_result_is_kept_until_it_is_forgotten(runner: Runner, attempts: Attempts) -> None:
    running = asyncio.create_task(runner.run(spec("g000000-r0")))
    await until(lambda: attempts.num_executed.total() == 1)
    await runner.forget([("g000000-r0", 0), ("unknown-r0", 3)])  # it runs: nothing is forgotten
    assert await runner.keep_only([("g000000-r0", 0)]) == [("g000000-r0", 0)]
    attempts.go.set()
    await running
    assert await runner.keep_only([("g000000-r0", 0)]) == [("g000000-r0", 0)]
    await runner.forget([("g000000-r0", 0)])
    assert await runner.keep_only([("g000000-r0", 0)]) == []


async def test_attempts_that_are_nobodys_are_ended_and_dropped(runner: Runner, attempts: Attempts) -> None:
    mine = asyncio.create_task(runner.run(spec("g000000-r0")))
    orphan = asyncio.create_task(runner.run(spec("g000001-r0")))
    await until(lambda: attempts.num_executed.total() == 2)
    assert await runner.keep_only([("g000000-r0", 0), ("g000002-r0", 0)]) == [("g000000-r0", 0)]
    assert (await orphan).outcome is Outcome.CANCELLED
    attempts.go.set()
    assert (await mine).outcome is Outcome.FINISHED
    assert list(runner._attempts) == [("g000000-r0", 0)]


async def test_results_that_nobody_asks_for_are_bounded(
    runner: Runner, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "NUM_RESULTS_KEPT", 3)
    attempts.go.set()
    for index in range(10):
        await runner.run(spec(f"g{index:06d}-r0"))
    assert list(runner._attempts) == [(f"g{index:06d}-r0", 0) for index in (7, 8, 9)]
