"""The journal of a job: every event that its scheduler took in with what was decided, and what of that was performed.

One SQLite file in the job's folder, in WAL mode with ``synchronous=NORMAL``: what was committed survives the death of
the process at any moment, and a reader in another process sees a consistent prefix at any time. (After a power
failure the newest commits may be missing; but then the whole job is gone, and it is resumed from its checkpoint.)
All SQL of the scheduler is in this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.scheduler.types import LoggedDecision, LoggedEvent

JOURNAL_NAME = "journal.sqlite"
SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 20.0
_LOCK_POLL_S = 0.1
_BATCH_SIZE = 500
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL, decisions TEXT NOT NULL
);
CREATE INDEX starts ON events (sequence) WHERE kind = 'JobStarted';
CREATE TABLE performed (
    sequence INTEGER NOT NULL, position INTEGER NOT NULL, PRIMARY KEY (sequence, position)
) WITHOUT ROWID;
"""
_COLUMNS = "sequence, at_s, kind, payload, decisions"


class Journal:
    """The one writer of a job's journal. Not thread-safe: its owner calls it from one thread.

    Raises ``MachineError`` where the disk refuses, ``ConfigError`` for a file that is no journal of this version.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the journal of a job's folder. Waits for a writer that is being killed to be gone."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / JOURNAL_NAME
        self._marks: list[tuple[int, int]] = []
        self._lock = _lock(self.path)
        try:
            with _told(self.path):
                self._db = _connect(self.path, read_only=False)
                self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
                if _schema_version(self._db, self.path) == 0:
                    self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
                self.last_sequence = int(self._db.execute("SELECT MAX(sequence) FROM events").fetchone()[0] or 0)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    # -- writing --

    def append(self, record: LoggedEvent) -> None:
        """Commit a record, and with it the marks that were made since the last one."""
        decisions = [
            {"action": decision.action, "payload": decision.payload, "reason": decision.reason}
            for decision in record.decisions
        ]
        row = (record.sequence, record.at_s, record.kind, _json(record.payload), _json(decisions))
        with _told(self.path), self._transaction():
            self._db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", row)
            self._write_marks()
        self._marks.clear()
        self.last_sequence = record.sequence

    def mark_performed(self, sequence: int, position: int) -> None:
        """Note that a decision was performed, after all events that came of it were appended.

        It is committed with the next record, or by ``flush``: a lost mark means that the decision is performed twice.
        """
        self._marks.append((sequence, position))

    def flush(self) -> None:
        """Commit the marks."""
        if not self._marks:
            return
        with _told(self.path), self._transaction():
            self._write_marks()
        self._marks.clear()

    def _write_marks(self) -> None:
        if self._marks:
            self._db.executemany("INSERT OR IGNORE INTO performed VALUES (?, ?)", self._marks)

    def write_meta(self, name: str, value: str) -> None:
        """Keep a short fact about the newest start."""
        with _told(self.path):
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- reading --

    def read_meta(self, name: str) -> str:
        """Empty if it was never written."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return "" if row is None else str(row[0])

    def newest_start(self) -> LoggedEvent | None:
        """The record with which the job was started last; None for a new journal."""
        with _told(self.path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM events WHERE kind = 'JobStarted' ORDER BY sequence DESC LIMIT 1"
            ).fetchall()
        return _record(rows[0]) if rows else None

    def records(self, after_sequence: int = 0) -> Iterator[LoggedEvent]:
        """The records behind ``after_sequence``, in order."""
        while batch := self.batch(after_sequence):
            yield from batch
            after_sequence = batch[-1].sequence

    def batch(self, after_sequence: int, limit: int = _BATCH_SIZE) -> list[LoggedEvent]:
        """The first records behind ``after_sequence``, at most ``limit``."""
        with _told(self.path):
            return _batch(self._db, after_sequence, limit)

    def performed(self, after_sequence: int) -> set[tuple[int, int]]:
        """(sequence, position) of the decisions behind a record that were performed to their end."""
        with _told(self.path):
            return set(self._db.execute("SELECT * FROM performed WHERE sequence > ?", (after_sequence,)))


# -- reading, from any process --


def read_journal(folder: Path, after_sequence: int = 0) -> Iterator[LoggedEvent]:
    """The records of a job's journal behind ``after_sequence``, in order; while the job runs and afterwards.

    Ends with the newest record; call it again for later ones. ``NotFoundError`` if the folder has no journal,
    ``ConfigError`` if it cannot be read.
    """
    path = folder / JOURNAL_NAME
    if not path.exists():
        raise NotFoundError(f"{folder} has no {JOURNAL_NAME}.", "Name the folder of a job that was started.")
    with _told(path), contextlib.closing(_connect(path, read_only=True)) as db:
        if _schema_version(db, path) == 0:
            return
        while batch := _batch(db, after_sequence, _BATCH_SIZE):
            yield from batch
            after_sequence = batch[-1].sequence


def _batch(db: sqlite3.Connection, after_sequence: int, limit: int) -> list[LoggedEvent]:
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM events WHERE sequence > ? ORDER BY sequence LIMIT ?", (after_sequence, limit)
    )
    return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> LoggedEvent:
    sequence, at_s, kind, payload, decisions = row
    return LoggedEvent(
        sequence=sequence,
        at_s=at_s,
        kind=kind,
        payload=json.loads(payload),
        decisions=tuple(
            LoggedDecision(sequence, at_s, made["action"], made["payload"], made["reason"])
            for made in json.loads(decisions)
        ),
    )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)


def _schema_version(db: sqlite3.Connection, path: Path) -> int:
    """0 for a new file. Raises ``ConfigError`` for another version than this code's."""
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    is_new = found == 0 and db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
    if found != SCHEMA_VERSION and not is_new:
        raise ConfigError(
            f"{path} has the schema version {found}; this Tidegate reads version {SCHEMA_VERSION}.",
            "Read it with the Tidegate that wrote it.",
        )
    return found


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.OperationalError as error:  # the disk is full, the folder is gone, permissions
        raise MachineError(
            f"the journal {path} refuses ({error}).", "See that its disk has space and the folder can be written."
        ) from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{path} cannot be read as a journal ({error}).", "Move it away; --resume goes on from the last checkpoint."
        ) from error


def _lock(path: Path) -> Any:
    """Hold a lock beside the journal for as long as the process lives: two schedulers would not agree on the story."""
    file = path.with_suffix(".lock").open("w")
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if time.monotonic() < deadline_s:  # the one before is being killed
                time.sleep(_LOCK_POLL_S)
                continue
            file.close()
            raise MachineError(f"another process writes {path}.", "End the other job first.") from error
