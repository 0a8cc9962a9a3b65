"""The event log: numbering, watchers, continuation after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.scheduler.actions import Decision, FinishJob
from services.scheduler.eventlog import EVENTS_SKIPPED, EventLog
from services.scheduler.events import CancelRequested, Tick
from services.scheduler.journal import Journal, read_journal
from services.scheduler.types import JobStatus


async def test_a_slow_watcher_is_told_what_it_missed() -> None:
    log = EventLog(num_kept=3)
    for index in range(10):
        log.append(float(index), CancelRequested(str(index)), [])
    await log.close()
    seen = [record async for record in log.watch(2)]
    assert seen[0].kind == EVENTS_SKIPPED
    assert seen[0].payload == {"first_sequence": 3, "last_sequence": 7}
    assert [record.sequence for record in seen[1:]] == [8, 9, 10]


async def test_a_slow_watcher_misses_nothing_where_there_is_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    log = EventLog(journal, num_kept=3)
    for index in range(500):
        log.append(float(index), CancelRequested(str(index)), [])
    await log.close()
    seen = [record async for record in log.watch(2)]
    assert [record.sequence for record in seen] == list(range(3, 501))
    assert [record.payload["reason"] for record in seen] == [str(index) for index in range(2, 500)]
    journal.close()


async def test_a_watcher_waits_for_new_records_and_ends_with_the_log() -> None:
    log = EventLog()

    async def collect() -> list[int]:
        return [record.sequence async for record in log.watch(0)]

    watcher = asyncio.create_task(collect())
    for index in range(500):
        log.append(float(index), Tick(), [])
        await log.wake_watchers()
    await log.close()
    async with asyncio.timeout(10):
        assert await watcher == list(range(1, 501))


async def test_a_continued_log_goes_on_with_its_numbers_and_remembers_decisions(tmp_path: Path) -> None:
    decision = Decision(FinishJob(JobStatus.CANCELLED, "enough"), "enough")
    for start in range(2):
        journal = Journal(tmp_path / "job")
        log = EventLog(journal)
        log.append(1.0, CancelRequested("enough"), [decision])
        log.append(2.0, Tick(), [])
        assert [made.sequence for made in log.decisions(0)] == [1, 3][: start + 1]
        await log.close()
        journal.close()
    records = list(read_journal(tmp_path / "job"))
    assert [record.sequence for record in records] == [1, 2, 3, 4]
    assert records[0].decisions[0].reason == "enough"
