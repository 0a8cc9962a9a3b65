"""An elastic job with three cells: satellites leave rollout by Eq. 5, train their share and go back. Its scheduler is
killed in the midst of a shared step; the job goes on as if nothing had been, and its journal proves it."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.scheduler.journal import JOURNAL_NAME, read_journal
from services.scheduler.types import LoggedEvent
from tests.e2e import jobs
from tests.waiting import wait_until

ELASTIC = jobs.ROOT / "examples" / "configs" / "elastic.yaml"
STEPS, GROUPS_PER_STEP, GROUP_SIZE = 8, 4, 8
KILLED_AFTER_STEP = 4
EQ_5 = re.compile(r"^(?P<cell>cell-\d+) leaves rollout: w=(?P<w>\d+) <= C_R - C_e = (?P<slots>\d+) and (?P<work>\d+) ")


def records_of(job: jobs.Job, after_sequence: int = 0) -> list[LoggedEvent]:
    has_journal = (job.folder / JOURNAL_NAME).exists()
    return list(read_journal(job.folder, after_sequence)) if has_journal else []


def tidegate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True, timeout=60, check=False)


def last_sequence(records: list[LoggedEvent], kind: str, before: int) -> int:
    return max(record.sequence for record in records if record.kind == kind and record.sequence < before)


def a_satellite_trains(job: jobs.Job) -> bool:
    """Whether one does now, in a burst behind step ``KILLED_AFTER_STEP``, whose weights are out."""
    trains, published = False, 0
    for record in records_of(job):
        if record.kind == "StepTrained":
            trains = False
        elif record.kind == "CellDrained" and record.payload["cell_id"] != "cell-0":
            trains = True
        elif record.kind == "PublicationEnded":
            published = record.payload["version"]
    return trains and published >= KILLED_AFTER_STEP


def kill_scheduler(job: jobs.Job) -> None:
    """kill -9 of the process that holds this job's scheduler, and of no other job's."""
    found = []
    for process in job.descendants():
        with contextlib.suppress(psutil.Error):
            if any("ray::JobScheduler" in text for text in process.cmdline()):
                found.append(process)
    [scheduler] = found
    scheduler.kill()


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_an_elastic_job_outlives_its_scheduler_and_is_predicted(
    start_job: Callable[..., jobs.Job], tmp_path: Path
) -> None:
    job = start_job(config=ELASTIC)
    wait_until(lambda: job.process.poll() is not None or a_satellite_trains(job), 600, "a step that satellites share")
    kill_scheduler(job)
    code, text = job.wait(300)
    assert code == 0, text
    assert text.count("the scheduler goes on from its journal") == 1, text

    records = records_of(job)
    all_steps_are_trained_and_all_runs_counted_once(job, records)
    satellites_left_by_eq_5_one_by_one(records)
    assert any(line["satellite_share"] > 0 for line in job.metrics("step"))
    replayed = tidegate("replay", str(job.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    the_part_before_the_kill_is_predicted(job, records, tmp_path)
    wait_until(lambda: not job.descendants(), 20, "all processes of the job gone")


def all_steps_are_trained_and_all_runs_counted_once(job: jobs.Job, records: list[LoggedEvent]) -> None:
    assert sum(record.kind == "SchedulerRecovered" for record in records) == 1
    assert [record.payload["step"] for record in records if record.kind == "StepTrained"] == list(range(1, STEPS + 1))
    decisions = [decision for record in records for decision in record.decisions]
    opened = [decision.payload["spec"] for decision in decisions if decision.action == "OpenGroup"]
    scored = Counter(record.payload["result"]["group_id"] for record in records if record.kind == "GroupScored")
    lost = {
        record.payload["result"]["group_id"]
        for record in records
        if record.kind == "GroupScored" and not record.payload["result"]["ready"]
    }
    assert Counter(spec["group_id"] for spec in opened) == scored, "every group ended once"
    trained = Counter(
        group_id
        for decision in decisions
        if decision.action == "TrainStep"
        for group_id in decision.payload["group_ids"]
    )
    assert set(trained) == set(scored) - lost
    assert set(trained.values()) == {1}
    assert trained.total() == STEPS * GROUPS_PER_STEP
    ended = Counter(
        (record.payload["run_id"], record.payload["attempt"]) for record in records if record.kind == "RunEnded"
    )
    assert set(ended.values()) == {1}
    assert {run_id for run_id, _ in ended} == {run_id for spec in opened for run_id in spec["run_ids"]}

    summary = job.summary()
    assert (summary["status"], summary["steps_completed"], summary["policy_version"]) == ("finished", STEPS, STEPS)
    assert summary["groups_lost"] == len(lost)
    assert summary["runs_finished"] + summary["runs_failed"] == len(ended)
    assert len({run_id for run_id, _ in ended}) == len(opened) * GROUP_SIZE, "w = d - f = 0 at the end"


def satellites_left_by_eq_5_one_by_one(records: list[LoggedEvent]) -> None:
    """The numbers of each reason are those that the journal gives up to there, counted here once more."""
    num_runs, ended, num_left, on_their_way = 0, set(), 0, set()
    for record in records:
        if record.kind == "RunEnded":
            ended.add(record.payload["run_id"])
        elif record.kind == "CellDrained":
            on_their_way.discard(record.payload["cell_id"])
        for decision in record.decisions:
            said: dict[str, Any] = decision.payload
            if decision.action == "OpenGroup":
                num_runs += len(said["spec"]["run_ids"])
            elif decision.action == "SwitchCell" and said["role"] == "train":
                assert not on_their_way, "one at a time"
                on_their_way.add(said["cell_id"])
                if said["cell_id"] == "cell-0":
                    continue
                reason = EQ_5.match(decision.reason)
                assert reason is not None, decision.reason
                assert reason["cell"] == said["cell_id"]
                assert int(reason["w"]) == num_runs - len(ended) <= int(reason["slots"])
                assert int(reason["work"]) > 0
                num_left += 1
    returned = sum(
        decision.action == "SwitchCell" and decision.payload["role"] == "rollout" and "returns" in decision.reason
        for record in records
        for decision in record.decisions
        if decision.payload.get("cell_id") != "cell-0"
    )
    assert num_left >= 2
    assert returned == num_left


def the_part_before_the_kill_is_predicted(job: jobs.Job, records: list[LoggedEvent], folder: Path) -> None:
    """The bursts before the kill, whose outage no simulation knows of: a journal that ends with the last of them."""
    [recovered] = [record.sequence for record in records if record.kind == "SchedulerRecovered"]
    end = last_sequence(records, "PublicationEnded", recovered)
    source, target = job.folder / JOURNAL_NAME, folder / JOURNAL_NAME
    with contextlib.closing(sqlite3.connect(source)) as whole, contextlib.closing(sqlite3.connect(target)) as part:
        whole.backup(part)
        for table in ("events", "performed"):
            part.execute(f"DELETE FROM {table} WHERE sequence > ?", (end,))
        part.commit()
    done = tidegate("simulate", "--job", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    predicted = json.loads(done.stdout)
    assert len(predicted["step_end_hours"]) >= KILLED_AFTER_STEP
    assert predicted["hours"] == pytest.approx(predicted["measured_hours"], rel=0.2)
