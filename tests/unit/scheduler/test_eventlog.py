"""The event log: numbering, watchers, continuation after a restart."""

from __future__ import annotations

import asyncio
import json

from services.scheduler.actions import Decision, FinishJob
from services.scheduler.eventlog import EVENTS_SKIPPED, EventLog
from services.scheduler.events import CancelRequested, Tick
from services.scheduler.types import JobStatus


async def test_a_slow_watcher_is_told_what_it_missed() -> None:
    log = EventLog(None, num_kept=3)
    for index in range(10):
        log.append(float(index), CancelRequested(str(index)), [])
    await log.close()
    seen = [record async for record in log.watch(2)]
    assert seen[0].kind == EVENTS_SKIPPED
    assert seen[0].payload == {"first_sequence": 3, "last_sequence": 7}
    assert [record.sequence for record in seen[1:]] == [8, 9, 10]


async def test_a_watcher_waits_for_new_records_and_ends_with_the_log() -> None:
    log = EventLog(None)

    async def collect() -> list[int]:
        return [record.sequence async for record in log.watch(0)]

    watcher = asyncio.create_task(collect())
    for index in range(500):
        log.append(float(index), Tick(), [])
        await log.wake_watchers()
    await log.close()
    async with asyncio.timeout(10):
        assert await watcher == list(range(1, 501))


async def test_a_continued_file_goes_on_with_its_numbers(tmp_path) -> None:
    path = tmp_path / "job" / "events.jsonl"
    decision = Decision(FinishJob(JobStatus.CANCELLED, "enough"), "enough")
    for start in range(2):
        log = EventLog(path)
        log.append(1.0, CancelRequested("enough"), [decision])
        log.append(2.0, Tick(), [])
        assert [made.sequence for made in log.decisions(0)] == [2 * start + 1]
        await log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["sequence"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["decisions"][0]["reason"] == "enough"


async def test_a_torn_last_line_is_cut_off(tmp_path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"sequence": 7}\n{"sequ')
    log = EventLog(path)
    log.append(1.0, Tick(), [])
    await log.close()
    records = [record async for record in log.watch(7)]
    assert [record.sequence for record in records] == [8]
    assert [json.loads(line)["sequence"] for line in path.read_text().splitlines()] == [7, 8]
