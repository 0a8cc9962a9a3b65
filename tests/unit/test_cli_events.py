from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services import cli, cli_events
from services.scheduler.journal import JOURNAL_NAME, Journal
from services.scheduler.types import LoggedDecision, LoggedEvent
from tests.unit.scheduler.lasting import LastingWorld, Lives
from tests.unit.scheduler.world import options


@pytest.fixture
async def job(tmp_path: Path) -> Path:
    """The folder of a job whose scheduler died once."""
    lives = Lives(LastingWorld(options(steps=2), 1), tmp_path)
    await lives.live(20)
    await lives.live()
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``tidegate ARGUMENTS``."""
    monkeypatch.setattr("sys.argv", ["tidegate", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_every_record_is_printed_with_its_decisions_and_reasons(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "events", job) == 0
    text = capsys.readouterr().out
    assert "CellJoined cell_id=cell-0" in text
    assert "SchedulerRecovered" in text
    assert "-> StartRun run_id=g000000-r0 attempt=0" in text
    assert "has most free slots" in text
    assert "-> FinishJob status=finished" in text


def test_records_as_json_are_one_object_a_line(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "events", job, "--json", "--after", 3) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["sequence"] for record in records] == list(range(4, 4 + len(records)))
    assert records[-1]["decisions"][-1]["action"] == "FinishJob"
    assert records[-1]["decisions"][-1]["payload"]["status"] == "finished"


def test_following_goes_on_until_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_events, "_POLL_S", 0.01)
    opened = threading.Event()

    def write() -> None:
        journal = Journal(tmp_path)
        opened.set()
        for sequence in range(1, 200):
            decided = (LoggedDecision(sequence, 1.0, "FinishJob", {}, "over"),) if sequence == 199 else ()
            journal.append(LoggedEvent(sequence, 1.0, "Tick", {"type": "Tick"}, decided))
        journal.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert opened.wait(20)
    assert run(monkeypatch, "events", tmp_path, "--follow", "--json") == 0
    writer.join()
    printed = [json.loads(line)["sequence"] for line in capsys.readouterr().out.splitlines()]
    assert printed == list(range(1, 200))


def test_a_journal_replays_to_the_same_decisions(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "replay", job) == 0
    assert "all of them alike" in capsys.readouterr().out


def test_another_process_decides_the_same(job: Path) -> None:
    """Nothing hangs on the order of a set, which differs from process to process."""
    command = [sys.executable, "-m", "services.cli", "replay", str(job)]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_decision_that_differs_is_told(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(job / JOURNAL_NAME) as db:
        db.execute(
            "UPDATE events SET payload = replace(payload, '\"slots\":4', '\"slots\":1') WHERE kind = 'CellJoined'"
        )
    db.close()
    assert run(monkeypatch, "replay", job) == 1
    text = capsys.readouterr().out
    assert "the decisions differ at record" in text
    assert "the core now decides" in text


def test_a_folder_without_a_journal_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("events", "replay"):
        assert run(monkeypatch, command, tmp_path) == 1
        assert f"{tmp_path} has no {JOURNAL_NAME}" in capsys.readouterr().err.replace("\n", "")
