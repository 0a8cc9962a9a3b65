"""The journal: what is committed stays, whoever dies; marks; readers beside the writer; damage is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.scheduler import journal as journal_module
from services.scheduler.journal import JOURNAL_NAME, Journal, read_journal
from services.scheduler.types import LoggedDecision, LoggedEvent
from tests.waiting import wait_until


def record(sequence: int, kind: str = "Tick") -> LoggedEvent:
    decisions = (LoggedDecision(sequence, 0.1 * sequence, "FinishJob", {"reason": "x"}, "w=1 <= 2"),)
    return LoggedEvent(sequence, 0.1 * sequence, kind, {"type": kind, "n": [sequence, None, 0.1]}, decisions)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    written = [record(sequence) for sequence in range(1, 1200)]
    journal = Journal(tmp_path)
    for one in written:
        journal.append(one)
    assert list(read_journal(tmp_path)) == written
    assert list(read_journal(tmp_path, after_sequence=1190)) == written[1190:]
    assert journal.batch(3, 2) == written[3:5]
    journal.close()
    again = Journal(tmp_path)
    assert again.last_sequence == 1199
    assert list(again.records(1000)) == written[1000:]
    again.close()


def test_a_mark_is_committed_with_the_next_record_or_a_flush(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(record(1))
    journal.mark_performed(1, 0)
    assert journal.performed(0) == set()
    journal.append(record(2))
    assert journal.performed(0) == {(1, 0)}
    journal.mark_performed(2, 0)
    journal.mark_performed(2, 0)
    journal.flush()
    assert journal.performed(0) == {(1, 0), (2, 0)}
    assert journal.performed(1) == {(2, 0)}
    journal.close()


def test_the_newest_start_is_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.newest_start() is None
    for sequence, kind in enumerate(["JobStarted", "Tick", "JobStarted", "Tick"], start=1):
        journal.append(record(sequence, kind))
    found = journal.newest_start()
    assert found is not None
    assert found.sequence == 3
    assert journal.read_meta("grpc_port") == ""
    journal.write_meta("grpc_port", "1")
    journal.write_meta("grpc_port", "2")
    assert journal.read_meta("grpc_port") == "2"
    journal.close()


WRITER = """
import sys
from pathlib import Path
from services.scheduler.journal import Journal
from services.scheduler.types import LoggedEvent
journal = Journal(Path(sys.argv[1]))
sequence = journal.last_sequence
while True:
    sequence += 1
    journal.append(LoggedEvent(sequence, float(sequence), "Tick", {"n": sequence}, ()))
    print(sequence, flush=True)
"""


def test_a_killed_writer_leaves_all_that_it_had_committed(tmp_path: Path) -> None:
    """kill -9 in the middle of writing, twice; each time a reader looks while it writes, and after."""
    num_seen = 0
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        wait_until(lambda: (tmp_path / JOURNAL_NAME).exists())
        for _ in range(200):
            said = int(writer.stdout.readline())
        assert [one.sequence for one in read_journal(tmp_path)][:said] == list(range(1, said + 1))
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().splitlines()
        writer.wait()
        writer.stdout.close()
        said = max([said, *(int(line) for line in rest if line.isdigit())])
        found = [one.sequence for one in read_journal(tmp_path)]
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= said > num_seen
        num_seen = said


def test_a_torn_log_gives_the_records_before_the_tear(tmp_path: Path) -> None:
    """The tail of the write-ahead log is cut off: what a power failure can leave."""
    journal = Journal(tmp_path)
    for sequence in range(1, 51):
        journal.append(record(sequence))
    wal = tmp_path / f"{JOURNAL_NAME}-wal"
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / JOURNAL_NAME).write_bytes((tmp_path / JOURNAL_NAME).read_bytes())
    content = wal.read_bytes()
    journal.close()
    for kept in (0.9, 0.5, 0.3):
        (copy / f"{JOURNAL_NAME}-wal").write_bytes(content[: int(len(content) * kept)])
        (copy / f"{JOURNAL_NAME}-shm").unlink(missing_ok=True)
        found = [one.sequence for one in read_journal(copy)]
        assert found == list(range(1, len(found) + 1))
        assert len(found) < 50
    again = Journal(copy)
    again.append(record(again.last_sequence + 1))
    again.close()
    assert len(list(read_journal(copy))) == len(found) + 1


def test_what_is_no_journal_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no journal"):
        list(read_journal(tmp_path))
    (tmp_path / JOURNAL_NAME).write_bytes(b"not a database" * 1000)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_journal(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        Journal(tmp_path)


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(tmp_path).close()
    monkeypatch.setattr(journal_module, "SCHEMA_VERSION", 2)
    with pytest.raises(ConfigError, match="version 1"):
        list(read_journal(tmp_path))


def test_a_second_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_LOCK_TIMEOUT_S", 0.0)
    journal = Journal(tmp_path)
    with pytest.raises(MachineError, match="another process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()
