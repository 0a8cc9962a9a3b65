"""Each row of the outcome table, with a real harness in a real sandbox that calls a real proxy and shard."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from services.rollout.processes import pids_with_mark
from services.rollout.types import RunResult
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from tests.integration.outcome_world import ASKS, RUN, SANDBOX, World, outcome_world
from tests.waiting import until, wait_until

_Test = TypeVar("_Test", bound=Callable[..., Any])
ROWS: set[Outcome] = set()


def row(outcome: Outcome) -> Callable[[_Test], _Test]:
    """Marks the test of a row of the outcome table."""
    ROWS.add(outcome)
    return lambda test: test


def test_every_row_of_the_table_has_its_test() -> None:
    assert set(OUTCOME_TABLE) == ROWS


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with outcome_world(tmp_path) as made:
        yield made


def set_when(condition: Callable[[], bool]) -> threading.Event:
    """An event that is set as soon as a condition holds."""
    event = threading.Event()

    def watch() -> None:
        wait_until(condition, 30, poll_s=0.01)
        event.set()

    threading.Thread(target=watch, daemon=True).start()
    return event


# -- the harness ends or is stopped -----------------------------------------------------------------------------------


@row(Outcome.FINISHED)
async def test_a_harness_that_ends_by_itself(world: World) -> None:
    result = await world.attempt(ASKS)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.FINISHED, 0.5, 0), result.detail
    assert result.evaluated_ref.startswith("sha256:")
    await world.hold_to_the_table(result)


@row(Outcome.HARNESS_TIMEOUT)
async def test_a_harness_that_reaches_its_own_limit(world: World) -> None:
    result = await world.attempt(f"{ASKS} echo begun; sleep 600", timeout_s=4)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.HARNESS_TIMEOUT, 0.5, None), result.detail
    assert result.wall_s < 15
    assert (world.run_dir / "logs" / "harness.stdout").read_text() == "begun\n"
    await world.hold_to_the_table(result)


@row(Outcome.WALL_TIMEOUT)
async def test_an_attempt_that_reaches_the_limit_of_all_that_comes_before_scoring(world: World) -> None:
    result = await world.attempt(f"{ASKS} sleep 600", timeout_s=60, run_timeout_s=5)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.WALL_TIMEOUT, 0.5, None), result.detail
    assert "after it was asked for" in result.detail
    await world.hold_to_the_table(result)


@row(Outcome.HARNESS_CRASH)
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("echo broken >&2; exit 3", 3),
        ("kill -9 $$", 137),
        ("kill -9 1; kill -9 -1; kill -9 $$", 137),  # all that it can reach, and it tries the sandbox's own process
        ("ulimit -c 0; kill -SEGV $$", 139),
    ],
)
async def test_a_harness_that_crashes_or_kills_itself(world: World, end: str, exit_code: int) -> None:
    result = await world.attempt(ASKS + end)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.HARNESS_CRASH, 0.5, exit_code), result.detail
    await world.hold_to_the_table(result)


@row(Outcome.OUT_OF_MEMORY)
async def test_a_harness_that_fills_its_memory(world: World) -> None:
    hog = "python3 -c 'import time; x = b\"x\" * (500 << 20); time.sleep(60)'"
    result = await world.attempt(ASKS + hog)
    assert (result.outcome, result.reward) == (Outcome.OUT_OF_MEMORY, 0.5), result.detail
    assert "256 MiB allowed" in result.detail
    assert result.peak_rss_bytes > SANDBOX.memory_bytes
    await world.hold_to_the_table(result)


@row(Outcome.CANCELLED)
async def test_a_run_that_is_cancelled(world: World) -> None:
    cancel = set_when((world.workspace / "begun").exists)
    result = await world.attempt(f"{ASKS} echo begun; touch begun; sleep 600", cancel=cancel)
    assert (result.outcome, result.reward, result.verifier_s) == (Outcome.CANCELLED, None, 0.0), result.detail
    assert result.wall_s < 20
    assert (world.run_dir / "logs" / "harness.stdout").read_text() == "begun\n"
    assert json.loads((world.run_dir / "harness.json").read_text())["outcome"] == "cancelled"
    await world.hold_to_the_table(result)


# -- infrastructure ---------------------------------------------------------------------------------------------------


def bwrap_of(world: World) -> psutil.Process:
    for pid in pids_with_mark("RUN", str(world.folder)):
        if Path(psutil.Process(pid).cmdline()[0]).name == "bwrap" and psutil.Process(pid).ppid() == os.getpid():
            return psutil.Process(pid)
    raise AssertionError("no bwrap")


def forwarder_of(world: World) -> psutil.Process:
    scratch = str(world.run_dir / "scratch")
    return next(child for child in psutil.Process().children() if child.cwd() == scratch and child.name() == "socat")


@row(Outcome.SANDBOX_DEATH)
@pytest.mark.parametrize(
    "victim",
    [bwrap_of, lambda world: bwrap_of(world).children()[0], forwarder_of],
    ids=["bwrap", "first process", "way to the proxy"],
)
async def test_a_sandbox_that_is_killed_from_outside(world: World, victim: Callable[[World], psutil.Process]) -> None:
    running = asyncio.create_task(world.attempt(f"{ASKS} echo begun; touch begun; sleep 600"))
    await until((world.workspace / "begun").exists)
    victim(world).kill()
    result = await running
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.SANDBOX_DEATH, None, None), result.detail
    assert not pids_with_mark("RUN", str(world.folder))
    assert OUTCOME_TABLE[result.outcome].is_retried(0)
    await world.hold_to_the_table(result)


async def test_a_run_whose_sandbox_died_counts_by_its_next_attempt(world: World) -> None:
    running = asyncio.create_task(world.attempt(f"{ASKS} touch begun; sleep 600"))
    await until((world.workspace / "begun").exists)
    bwrap_of(world).kill()
    assert (await running).outcome is Outcome.SANDBOX_DEATH
    result = await world.attempt(ASKS, attempt=1)
    assert (result.outcome, result.reward, result.attempt) == (Outcome.FINISHED, 0.5, 1)
    await world.hold_to_the_table(result)


@row(Outcome.SETUP_FAILURE)
@pytest.mark.parametrize("setup_failure", ["drop", "placeholder"])
async def test_a_harness_that_cannot_be_started(tmp_path: Path, setup_failure: Any) -> None:
    async with outcome_world(tmp_path, config=TrajectoryConfig(setup_failure=setup_failure)) as world:
        result = await world.attempt(("no-such-agent",))
        assert (result.outcome, result.reward, result.exit_code) == (Outcome.SETUP_FAILURE, None, None)
        assert "no-such-agent" in result.detail
        assert OUTCOME_TABLE[result.outcome].is_retried(0)
        await world.hold_to_the_table(result, counts=setup_failure == "placeholder")


async def test_a_harness_that_was_not_up_in_time_is_none_of_the_policys_doing(world: World) -> None:
    result = await world.attempt(ASKS, run_timeout_s=0.001)
    assert result.outcome is Outcome.SETUP_FAILURE, result.detail


@row(Outcome.ENGINE_LOSS)
@pytest.mark.parametrize(
    ("then", "exit_code"), [("exit 18", 18), ("exit 0", 0), ("sleep 600", None)], ids=["crash", "end", "timeout"]
)
async def test_a_call_that_no_cell_can_finish(tmp_path: Path, then: str, exit_code: int | None) -> None:
    """The harness sees a broken answer, never a short one; however it takes that, the run is not the policy's."""
    async with outcome_world(tmp_path, call_timeout_s=1) as world:
        ask = f"{ASKS} touch begun; until [ -e broken ]; do sleep 0.01; done; "
        ask += f"python3 /config/ask.py 'say more' stream > more.txt; echo $? > code; {then}"
        running = asyncio.create_task(world.attempt(ask, timeout_s=6))
        await until((world.workspace / "begun").exists)
        world.cell.dies_after = 2
        (world.workspace / "broken").touch()
        await until(lambda: (world.workspace / "code").exists() and (world.workspace / "code").read_text() != "")
        assert (world.workspace / "code").read_text() == "18\n"
        assert (world.workspace / "more.txt").read_text() == ""
        result = await running
        assert (result.outcome, result.exit_code) == (Outcome.ENGINE_LOSS, exit_code), result.detail
        told = (world.run_dir / "logs" / "harness.stderr").read_text()
        assert told.startswith("cut: IncompleteRead")
        assert '"content":"h"' in told.replace(" ", "")
        assert "[DONE]" not in told
        assert OUTCOME_TABLE[result.outcome].is_retried(0)
        await world.hold_to_the_table(result)


RUNNER = """
import pickle, sys
from services.rollout.runner import run_attempt
with open(sys.argv[1], "rb") as file:
    run_attempt(*pickle.load(file))
"""


@row(Outcome.RUNNER_LOSS)
async def test_a_runner_that_dies_leaves_nothing_running_and_its_run_goes_on_elsewhere(world: World) -> None:
    harness = world.harness_of(f"{ASKS} touch begun; sleep 600")
    arguments = world.folder / "arguments"
    arguments.write_bytes(pickle.dumps((await world.spec(), harness, SANDBOX)))
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", RUNNER, str(arguments))
    await until((world.workspace / "begun").exists)
    runner.kill()
    await runner.wait()
    await until(lambda: not pids_with_mark("RUN", str(world.folder)))
    lost = RunResult(RUN, 0, Outcome.RUNNER_LOSS, None, 1.0, 0.0, 0.0, None, "the runner died")
    assert (await world.recorded(lost)).outcome is Outcome.RUNNER_LOSS
    assert OUTCOME_TABLE[Outcome.RUNNER_LOSS].is_retried(0)
    result = await world.attempt(ASKS, attempt=1)
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.5), result.detail
    await world.hold_to_the_table(result)


# -- limits that the shard knows --------------------------------------------------------------------------------------


@row(Outcome.CONTEXT_LIMIT)
@pytest.mark.parametrize("then", ["exit 22", "exit 0"])
async def test_a_call_that_no_longer_fits(tmp_path: Path, then: str) -> None:
    async with outcome_world(tmp_path, max_model_len=200) as world:
        result = await world.attempt(f"{ASKS} python3 /config/ask.py \"$(printf 'x%.0s' {{1..400}})\" || {then}")
        assert (result.outcome, result.reward) == (Outcome.CONTEXT_LIMIT, 0.5), result.detail
        assert "context_length_exceeded" in (world.run_dir / "logs" / "harness.stderr").read_text()
        await world.hold_to_the_table(result)


@row(Outcome.TURN_LIMIT)
@pytest.mark.parametrize("then", ["exit 22", "exit 0"])
async def test_a_call_beyond_what_the_job_allows(world: World, then: str) -> None:
    ask = "python3 /config/ask.py"
    result = await world.attempt(f"{ASKS} {ask} 'say it again'; {ask} 'and again' || {then}")
    assert (result.outcome, result.reward) == (Outcome.TURN_LIMIT, 0.5), result.detail
    assert "refused: 400" in (world.run_dir / "logs" / "harness.stderr").read_text()
    await world.hold_to_the_table(result, num_calls=2)


# -- scoring ----------------------------------------------------------------------------------------------------------


@row(Outcome.VERIFIER_FAILURE)
async def test_a_verifier_without_a_reward(world: World) -> None:
    result = await world.attempt(ASKS, test="exit 9")
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.VERIFIER_FAILURE, None, 0), result.detail
    assert (world.run_dir / "verifier-2").is_dir()
    assert not (world.run_dir / "verifier-3").exists()
    await world.hold_to_the_table(result)


@row(Outcome.VERIFIER_TIMEOUT)
async def test_a_verifier_that_hangs(world: World) -> None:
    result = await world.attempt(ASKS, test="sleep 600", verifier_timeout_s=0.5)
    assert (result.outcome, result.reward, result.exit_code) == (Outcome.VERIFIER_TIMEOUT, None, 0), result.detail
    assert 1.0 <= result.verifier_s < 10
    await world.hold_to_the_table(result)
