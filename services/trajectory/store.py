"""The durable store of one shard: SQLite in WAL mode, one writer, readers in other processes at any time.

Calls are kept as what is new in them: the prompt tokens behind their parent's prompt and answer, and the messages
behind those that they share with their parent's request. Token arrays are compressed blobs. What a writing method
wrote is on the disk when it returns (``synchronous=FULL``). All SQL of the service is in this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.rollout.types import RunResult
from services.trajectory.encoding import (
    CallRow,
    call_row,
    columns_of,
    group_result,
    result_json,
    run_result,
    with_prompts,
)
from services.trajectory.outcome import Outcome
from services.trajectory.types import CallRecord, GroupResult, GroupSpec, RunSummary

SCHEMA_VERSION = 1
_BUSY_TIMEOUT_S = 30.0

_SCHEMA = """
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY, task_name TEXT NOT NULL, version INTEGER NOT NULL, is_eval INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, opened_at_s REAL NOT NULL
);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups ON DELETE CASCADE,
    position INTEGER NOT NULL, advantage REAL
);
CREATE INDEX runs_of_group ON runs (group_id, position);
CREATE TABLE attempts (
    run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
    key_hash BLOB, context_overflowed INTEGER NOT NULL DEFAULT 0, result TEXT,
    PRIMARY KEY (run_id, attempt)
);
CREATE TABLE calls (
    call_id TEXT PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
    ordinal INTEGER NOT NULL, parent_call_id TEXT, num_prompt_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL, version_min INTEGER, version_max INTEGER,
    prompt BLOB NOT NULL, output BLOB NOT NULL, logprobs BLOB NOT NULL, request BLOB NOT NULL, rest TEXT NOT NULL
);
CREATE INDEX calls_of_attempt ON calls (run_id, attempt);
CREATE TABLE group_results (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, result TEXT NOT NULL);
CREATE TABLE trained_marks (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, step INTEGER NOT NULL);
"""


class GroupState(StrEnum):
    """Where a group stands."""

    OPEN = "open"
    READY = "ready"
    LOST = "lost"
    """Settled, and not to be trained (held-out groups too)."""
    DROPPED = "dropped"
    """The scheduler gave it up."""
    CANCELLED = "cancelled"
    """The job ended before it was complete."""


@dataclass(frozen=True, slots=True)
class StoredAttempt:
    """The newest attempt of a run, without its calls."""

    attempt: int
    key_hash: bytes | None
    """None: closed."""
    context_overflowed: bool
    result: RunResult | None


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group and the newest attempt of each of its runs (None: not started)."""

    spec: GroupSpec
    state: GroupState
    result: GroupResult | None
    attempts: dict[str, StoredAttempt | None]


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs to list. Fields that are None do not filter."""

    group_id: str | None = None
    task_name: str | None = None
    outcome: Outcome | None = None
    is_eval: bool | None = None
    unfinished: bool | None = None
    """True: only runs without an outcome; False: only those with one."""
    limit: int | None = None
    """The last so many runs, in order of dispatch."""


class Store:
    """The writer of one shard's store. Not thread-safe: its owner calls it from one thread at a time."""

    def __init__(self, store_dir: str, index: int) -> None:
        """Open or create the store. ``ConfigError`` for another schema, ``MachineError`` while another writes it."""
        folder = Path(store_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"shard-{index}.sqlite3"
        self._lock = _lock(folder / f"shard-{index}.lock")
        self._db = _connect(self.path, read_only=False)
        version = _schema_version(self._db, self.path)
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;")
        if version == 0:
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    # -- groups and runs --

    def open_group(self, spec: GroupSpec) -> None:
        """Record a group and its runs. What an earlier group of the same id left is deleted."""
        with self._transaction():
            self._db.execute("DELETE FROM groups WHERE group_id = ?", (spec.group_id,))
            self._db.execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, '', ?)",
                (spec.group_id, spec.task_name, spec.version, spec.is_eval, GroupState.OPEN, time.time()),
            )
            self._db.executemany(
                "INSERT INTO runs VALUES (?, ?, ?, NULL)",
                [(run_id, spec.group_id, position) for position, run_id in enumerate(spec.run_ids)],
            )

    def open_attempt(self, run_id: str, attempt: int, key_hash: bytes) -> None:
        """Record an attempt with its key; the keys of the run's earlier attempts are dead."""
        with self._transaction():
            self._db.execute("UPDATE attempts SET key_hash = NULL WHERE run_id = ?", (run_id,))
            self._db.execute(
                "INSERT INTO attempts (run_id, attempt, key_hash) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET key_hash = excluded.key_hash",
                (run_id, attempt, key_hash),
            )

    def close_attempt(self, run_id: str, attempt: int, *, context_overflowed: bool) -> None:
        self._db.execute(
            "UPDATE attempts SET key_hash = NULL, context_overflowed = ? WHERE run_id = ? AND attempt = ?",
            (context_overflowed, run_id, attempt),
        )

    def finish_run(self, result: RunResult) -> None:
        """Record how an attempt ended; ``NotFoundError`` for a run of no known group."""
        try:
            self._db.execute(
                "INSERT INTO attempts (run_id, attempt, result) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET key_hash = NULL, result = excluded.result",
                (result.run_id, result.attempt, result_json(result)),
            )
        except sqlite3.IntegrityError as error:
            raise NotFoundError(f"no run {result.run_id} in {self.path}.", "Open its group first.") from error

    def finish_group(self, result: GroupResult, advantages: dict[str, float]) -> None:
        """Record what became of a group."""
        state = GroupState.READY if result.ready else GroupState.LOST
        with self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", (state, result.reason, result.group_id)
            )
            self._db.execute(
                "INSERT OR REPLACE INTO group_results VALUES (?, ?)", (result.group_id, result_json(result))
            )
            self._db.executemany(
                "UPDATE runs SET advantage = ? WHERE run_id = ?",
                [(advantage, run_id) for run_id, advantage in advantages.items()],
            )

    def end_group(self, group_id: str, state: GroupState, reason: str) -> None:
        """Give a group up (``DROPPED``, ``CANCELLED``); its unfinished runs are recorded as cancelled.

        A group that was lost before stays so.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE group_id = ? AND state IN (?, ?)",
                (state, reason, group_id, GroupState.OPEN, GroupState.READY),
            )
            for run_id, newest in _newest_attempts(self._db, group_id).items():
                if newest is None or newest.result is None:
                    attempt = 0 if newest is None else newest.attempt
                    self.finish_run(RunResult(run_id, attempt, Outcome.CANCELLED, None, 0.0, 0.0, 0.0, None, reason))

    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Note that groups were trained by a step."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO trained_marks SELECT group_id, ? FROM groups WHERE group_id = ?",
                [(step, group_id) for group_id in group_ids],
            )

    def clear_marks_above(self, step: int) -> None:
        """Forget marks of steps that no checkpoint holds."""
        self._db.execute("DELETE FROM trained_marks WHERE step > ?", (step,))

    def group_result(self, group_id: str) -> GroupResult | None:
        row = self._db.execute("SELECT result FROM group_results WHERE group_id = ?", (group_id,)).fetchone()
        return None if row is None else group_result(row["result"])

    def live_groups(self) -> list[StoredGroup]:
        """Groups that may still be trained or are unfinished, in order of dispatch."""
        rows = self._db.execute(
            "SELECT g.*, result FROM groups g LEFT JOIN group_results USING (group_id)"
            " WHERE state IN (?, ?) AND group_id NOT IN (SELECT group_id FROM trained_marks) ORDER BY g.rowid",
            (GroupState.OPEN, GroupState.READY),
        ).fetchall()
        return [self._stored_group(row) for row in rows]

    def trained_group(self, group_id: str) -> StoredGroup | None:
        """A group that was trained; None if it was not, or is unknown."""
        row = self._db.execute(
            "SELECT g.*, result FROM groups g JOIN group_results USING (group_id) JOIN trained_marks USING (group_id)"
            " WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        return None if row is None else self._stored_group(row)

    # -- calls --

    def append_call(self, row: CallRow) -> bool:
        """Store a call. False, and nothing changed, if a call of this id is stored already."""
        columns = columns_of(row)
        places = ", ".join(f":{name}" for name in columns)
        stored = self._db.execute(f"INSERT INTO calls VALUES ({places}) ON CONFLICT (call_id) DO NOTHING", columns)
        return stored.rowcount == 1

    def summaries(self, filters: RunFilter) -> list[RunSummary]:
        """This shard's runs, in order of dispatch. May be called from any thread: it reads on its own."""
        with _reading(self.path) as db:
            found = [summary for _, summary in _summaries(db, filters)]
        return found if filters.limit is None else found[max(0, len(found) - filters.limit) :]

    def calls(self, run_id: str, attempt: int) -> list[CallRow]:
        """The calls of an attempt as they were stored, parents before their children."""
        return _calls(self._db, run_id, attempt)

    def _stored_group(self, row: sqlite3.Row) -> StoredGroup:
        attempts = _newest_attempts(self._db, row["group_id"])
        return StoredGroup(
            spec=GroupSpec(
                row["group_id"], row["task_name"], tuple(attempts), row["version"], is_eval=bool(row["is_eval"])
            ),
            state=GroupState(row["state"]),
            result=group_result(row["result"]) if row["result"] else None,
            attempts=attempts,
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


# -- reading, from any process --


def list_runs(store_dir: str, filters: RunFilter = RunFilter()) -> list[RunSummary]:
    """The runs in a job's store, in order of dispatch; works while the job goes on and after it.

    ``NotFoundError`` if there is no store.
    """
    found: list[tuple[float, RunSummary]] = []
    for path in _store_files(store_dir):
        with _reading(path) as db:
            found += _summaries(db, filters)
    found.sort(key=lambda one: one[0])  # stable: the runs of a group stay in order
    summaries = [summary for _, summary in found]
    return summaries if filters.limit is None else summaries[max(0, len(summaries) - filters.limit) :]


def read_run(store_dir: str, run_id: str, attempt: int | None = None) -> tuple[RunSummary, list[CallRecord]]:
    """A run and the calls of one attempt (the last one by default). ``NotFoundError`` if it is in no store."""
    for path in _store_files(store_dir):
        with _reading(path) as db:
            found = _summaries(db, RunFilter(), run_id)
            if found:
                _, summary = found[0]
                rows = _calls(db, run_id, summary.attempt if attempt is None else attempt)
                return summary, with_prompts(rows)
    raise NotFoundError(f"no run {run_id} in {store_dir}.", "See `tidegate runs list`.")


def _summaries(db: sqlite3.Connection, filters: RunFilter, run_id: str | None = None) -> list[tuple[float, RunSummary]]:
    """Runs with the time at which their groups were dispatched."""
    given = {
        "r.run_id = ?": run_id,
        "r.group_id = ?": filters.group_id,
        "g.task_name = ?": filters.task_name,
        "json_extract(a.result, '$.outcome') = ?": filters.outcome,
        "g.is_eval = ?": filters.is_eval,
        "(a.result IS NULL) = ?": filters.unfinished,
    }
    wanted = {condition: value for condition, value in given.items() if value is not None}
    rows = db.execute(
        "SELECT r.run_id, r.group_id, g.task_name, COALESCE(a.attempt, 0) AS attempt, a.result, r.advantage,"
        " g.is_eval, g.opened_at_s,"
        " COUNT(c.call_id) AS num_calls, COALESCE(SUM(c.num_prompt_tokens), 0) AS num_prompt_tokens,"
        " COALESCE(SUM(c.num_output_tokens), 0) AS num_output_tokens,"
        " MIN(c.version_min) AS version_min, MAX(c.version_max) AS version_max"
        " FROM runs r JOIN groups g USING (group_id) LEFT JOIN attempts a"
        " ON a.run_id = r.run_id AND a.attempt = (SELECT MAX(attempt) FROM attempts WHERE run_id = r.run_id)"
        " LEFT JOIN calls c ON c.run_id = r.run_id AND c.attempt = a.attempt"
        + (f" WHERE {' AND '.join(wanted)}" if wanted else "")
        + " GROUP BY r.run_id ORDER BY g.rowid, r.position",
        tuple(wanted.values()),
    )
    return [(row["opened_at_s"], _summary(row)) for row in rows]


def _summary(row: sqlite3.Row) -> RunSummary:
    result = None if row["result"] is None else run_result(row["result"])
    return RunSummary(
        run_id=row["run_id"],
        group_id=row["group_id"],
        task_name=row["task_name"],
        attempt=row["attempt"],
        outcome=result.outcome if result else None,
        reward=result.reward if result else None,
        advantage=row["advantage"],
        num_calls=row["num_calls"],
        num_prompt_tokens=row["num_prompt_tokens"],
        num_output_tokens=row["num_output_tokens"],
        version_min=row["version_min"],
        version_max=row["version_max"],
        wall_s=result.wall_s if result else None,
        is_eval=bool(row["is_eval"]),
        detail=result.detail if result else "",
    )


def _calls(db: sqlite3.Connection, run_id: str, attempt: int) -> list[CallRow]:
    rows = db.execute("SELECT * FROM calls WHERE run_id = ? AND attempt = ? ORDER BY rowid", (run_id, attempt))
    known: dict[str, CallRow] = {}
    for row in rows:
        known[row["call_id"]] = call_row(row, known.get(row["parent_call_id"]))
    return list(known.values())


def _newest_attempts(db: sqlite3.Connection, group_id: str) -> dict[str, StoredAttempt | None]:
    rows = db.execute(
        "SELECT r.run_id, a.* FROM runs r LEFT JOIN attempts a ON a.run_id = r.run_id"
        " AND a.attempt = (SELECT MAX(attempt) FROM attempts WHERE run_id = r.run_id)"
        " WHERE r.group_id = ? ORDER BY r.position",
        (group_id,),
    )
    return {row[0]: _stored_attempt(row) for row in rows}


def _stored_attempt(row: sqlite3.Row) -> StoredAttempt | None:
    if row["attempt"] is None:
        return None
    result = None if row["result"] is None else run_result(row["result"])
    return StoredAttempt(row["attempt"], row["key_hash"], bool(row["context_overflowed"]), result)


def _store_files(store_dir: str) -> list[Path]:
    files = sorted(Path(store_dir).glob("shard-*.sqlite3"))
    if not files:
        raise NotFoundError(f"no runs are stored in {store_dir}.", "Give the folder of a job that was started.")
    return files


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One consistent view of a store."""
    with contextlib.closing(_connect(path, read_only=True)) as db:
        if _schema_version(db, path) == 0:
            raise NotFoundError(f"{path} is being created.", "Try again in a moment.")
        db.execute("BEGIN")
        yield db


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    db.row_factory = sqlite3.Row
    return db


def _schema_version(db: sqlite3.Connection, path: Path) -> int:
    """The store's schema version, 0 if it is new. ``ConfigError`` if it is another one than this code's."""
    try:
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        is_new = found == 0 and db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read as a run store ({error}).", "Move it away, or restore it.") from error
    if found != SCHEMA_VERSION and not is_new:
        raise ConfigError(
            f"{path} has the schema version {found}; this Tidegate reads version {SCHEMA_VERSION}.",
            "Read it with the Tidegate that wrote it, or use another folder.",
        )
    return found


def _lock(path: Path) -> Any:
    """Hold a file lock for as long as the process lives: a second writer would corrupt the order of things."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise MachineError(
            f"another process writes the store {path.with_suffix('.sqlite3')}.", "End the other job first."
        ) from error
    return file
