"""A scheduler is killed at any moment: the next one goes on from the journal, and the job ends as it would have."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError, JobError
from services.scheduler.actor import JobScheduler
from services.scheduler.codec import encode
from services.scheduler.events import CellDrained
from services.scheduler.journal import JOURNAL_NAME, read_journal
from services.scheduler.options import ElasticRule, JobOptions, Policy, PolicyMode
from services.scheduler.recovery import Replay
from services.scheduler.types import LoggedEvent
from services.trajectory.outcome import OUTCOME_TABLE
from tests.unit.scheduler.lasting import LastingPerformer, LastingWorld, Lives, kill
from tests.unit.scheduler.live import IdealPerformer
from tests.unit.scheduler.world import options

COUNTS = ("status", "step", "version", "dispatched", "started", "ended", "water_level", "trained_groups", "lost_groups")


def job(seed: int) -> JobOptions:
    rng = random.Random(seed)
    return options(
        steps=4,
        steps_per_burst=rng.choice((1, 2)),
        carry_over_steps=float(rng.choice((0, 1))),
        max_staleness_steps=20,
        checkpoint_every=2,
        eval_task_names=("e0", "e1") if rng.random() < 0.5 else (),
        eval_every=2,
        eval_at_end=True,
        max_concurrent_runs=rng.choice((3, 100)),
        policy=Policy(rng.choice(list(PolicyMode)), streaming=rng.random() < 0.5, rule=rng.choice(list(ElasticRule))),
        num_cells=rng.choice((2, 3)),
    )


def check_end(world: LastingWorld, status: dict[str, Any]) -> None:
    """The counts of the core are those of what really happened."""
    assert status["status"] == "finished", status["reason"]
    assert world.finish is not None
    assert sorted(world.trained) == [1, 2, 3, 4]
    trained = [group for groups in world.trained.values() for group in groups]
    assert len(trained) == len(set(trained)) == 4 * world.job.groups_per_step, "a group was trained twice"
    assert set(world.num_executed.values()) == {1}, "an attempt was executed twice"
    retries = sum(OUTCOME_TABLE[task.result()].max_retries > 0 for task in world.attempts.values() if task.done())
    assert sum(status["retries"].values()) <= retries
    assert sum(status["outcomes"].values()) == status["ended"]
    assert max(world.versions.values()) == 4
    assert world.saved >= {2, 4}


@pytest.mark.parametrize("seed", range(20))
async def test_a_job_ends_the_same_however_often_its_scheduler_is_killed(seed: int, tmp_path: Path) -> None:
    fault_rate = 0.2 if seed % 3 == 0 else 0.0
    undisturbed = LastingWorld(job(seed), seed, fault_rate)
    expected = await Lives(undisturbed, tmp_path / "undisturbed").live()
    check_end(undisturbed, expected)

    world = LastingWorld(job(seed), seed, fault_rate)
    lives = Lives(world, tmp_path / "killed")
    rng = random.Random(seed)
    status = await lives.live(rng.randrange(12))
    while not status["done"] and lives.num_lives < 8:
        status = await lives.live(rng.randrange(1, 25))
    while not status["done"]:
        status = await lives.live()
    check_end(world, status)
    assert len(lives.addresses) == 1, "it listens where it listened before"
    if fault_rate == 0.0:
        assert {name: status[name] for name in COUNTS} == {name: expected[name] for name in COUNTS}
        assert world.marked == undisturbed.marked
        assert world.versions == undisturbed.versions
        assert {key: value.reward_mean for key, value in world.evaluations.items()} == {
            key: value.reward_mean for key, value in undisturbed.evaluations.items()
        }
    check_journal(tmp_path / "killed", lives.num_lives)


def check_journal(folder: Path, num_lives: int) -> None:
    """One story without a gap, which replays to itself."""
    records = list(read_journal(folder))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    kinds = [record.kind for record in records]
    assert kinds.count("JobStarted") == 1
    assert kinds.count("SchedulerRecovered") == num_lives - 1
    replay = Replay()
    assert [difference for record in records if (difference := replay.take(record))] == []
    assert replay.state.status == "finished"


async def test_a_job_that_was_over_when_its_scheduler_died_is_over(tmp_path: Path) -> None:
    world = LastingWorld(options(steps=1), 0)
    lives = Lives(world, tmp_path)
    await lives.live()
    scheduler = await lives.begin()
    assert (await scheduler.wait_done(10))["status"] == "finished"
    async with asyncio.timeout(10):  # watchers are told all of it, and end
        kinds = [record.kind async for record in scheduler.watch_events(0)]
        assert [table.epoch async for table in scheduler.watch_routes()]
    assert kinds == [record.kind for record in read_journal(tmp_path)]
    await scheduler.close()


async def test_a_job_that_failed_when_its_scheduler_died_still_says_why(tmp_path: Path) -> None:
    world = LastingWorld(options(steps=100), 0)
    lives = Lives(world, tmp_path)
    scheduler = await lives.begin()
    await scheduler.post(CellDrained("cell-0"))  # impossible now: the core cannot take it in
    await kill(scheduler)
    again = await lives.begin()
    status = await again.wait_done(10)
    assert (status["done"], status["status"]) == (True, "failed")
    assert "CellDrained" in status["reason"]
    await again.close()


async def test_another_start_begins_anew_in_the_same_journal(tmp_path: Path) -> None:
    await Lives(LastingWorld(options(steps=1), 0), tmp_path).live(3)
    performer = IdealPerformer()
    scheduler = JobScheduler(options(steps=1), performer, job_dir=str(tmp_path), start_id="another", grpc_token="t")
    await scheduler.start()
    assert performer.recovered == []
    assert (await scheduler.progress())["dispatched"] == 0
    await scheduler.close()
    assert [record.kind for record in read_journal(tmp_path)].count("JobStarted") == 2


async def test_a_decision_that_differs_from_the_journal_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    world = LastingWorld(options(), 0)
    lives = Lives(world, tmp_path)
    scheduler = await lives.begin()
    while not any(record.kind == "RunEnded" for record in read_journal(tmp_path)):
        await scheduler.wait_done(0.01)
    journal = scheduler._journal
    assert journal is not None
    changed = journal._db.execute(
        "UPDATE events SET decisions = replace(decisions, 'most free slots', 'fewest free slots') WHERE sequence ="
        " (SELECT MIN(sequence) FROM events WHERE decisions LIKE '%most free slots%')"
    )
    assert changed.rowcount == 1
    await kill(scheduler)
    num_performed = world.num_performed
    with pytest.raises(JobError, match="most free slots") as caught:
        await lives.begin()
    assert "the journal has StartRun" in caught.value.message
    assert "--resume" in caught.value.hint
    assert world.num_performed == num_performed


async def test_a_damaged_journal_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    lives = Lives(LastingWorld(options(), 0), tmp_path)
    await lives.live(10)
    for name in ("", "-wal", "-shm"):
        (tmp_path / f"{JOURNAL_NAME}{name}").unlink(missing_ok=True)
    (tmp_path / JOURNAL_NAME).write_bytes(b"\0" * 10_000)
    with pytest.raises(ConfigError, match="--resume"):
        await lives.begin()


async def test_a_torn_journal_goes_on_from_what_is_left(tmp_path: Path) -> None:
    """The newest commits are gone, as after a power failure: what they told happens again."""
    world = LastingWorld(options(steps=4, max_staleness_steps=20), 3)
    lives = Lives(world, tmp_path)
    await lives.live(40)
    path = tmp_path / f"{JOURNAL_NAME}-wal"
    content = path.read_bytes() if path.exists() else b""
    before = len(list(read_journal(tmp_path)))
    if content:
        path.write_bytes(content[: len(content) - 5000])
        (tmp_path / f"{JOURNAL_NAME}-shm").unlink(missing_ok=True)
        assert len(list(read_journal(tmp_path))) <= before
    status = await lives.live()
    assert status["status"] == "finished"
    assert set(world.num_executed.values()) == {1}


@pytest.mark.parametrize("seed", [3, 102, 118, 139])
async def test_lost_marks_cost_work_and_nothing_else(seed: int, tmp_path: Path) -> None:
    """Each time all marks are gone; a decision that the core does not await is not taken for a later equal one."""
    world = LastingWorld(job(seed), seed)
    lives = Lives(world, tmp_path)
    status = await lives.live(20)
    while not status["done"]:
        with contextlib.closing(sqlite3.connect(tmp_path / JOURNAL_NAME)) as db, db:
            db.execute("DELETE FROM performed")
        status = await lives.live(20 if lives.num_lives < 8 else None)
    check_end(world, status)
    check_journal(tmp_path, lives.num_lives)


async def test_the_performer_learns_where_the_job_stands(tmp_path: Path) -> None:
    world = LastingWorld(options(steps=10, max_staleness_steps=20), 1)
    lives = Lives(world, tmp_path)
    await lives.live(60)
    scheduler = await lives.begin()
    performer = scheduler._performer
    assert isinstance(performer, LastingPerformer)
    recovered = performer.recovered
    assert recovered is not None
    assert recovered.cells == ("cell-0", "cell-1")
    assert {spec.group_id for spec in recovered.groups} <= set(world.specs)
    assert set(recovered.started) <= set(recovered.attempts)
    await scheduler.close()


def test_records_without_a_start_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="JobStarted"):
        Replay().take(LoggedEvent(1, 0.0, "Tick", encode(CellDrained("cell-0")), ()))
