"""The writer of one shard's store."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from services.common.errors import MachineError
from services.rollout.types import RunResult
from services.trajectory.encoding import CallRow, columns_of
from services.trajectory.outcome import CallTrouble
from services.trajectory.store import operations, reading, retention
from services.trajectory.store.config import StoreConfig
from services.trajectory.store.dialect import (
    connect,
    first_line,
    lock_file,
    lock_session,
    postgres_engine,
    postgres_url,
    sqlite_engine,
)
from services.trajectory.store.group_commit import GroupCommit
from services.trajectory.store.migrate import migrate, migrate_file
from services.trajectory.store.objects import FOLDER, ObjectStore
from services.trajectory.store.sealing import Sealer
from services.trajectory.store.types import GroupState, PruneReport, RunFilter, Scope, StoredGroup
from services.trajectory.types import GroupResult, GroupSpec, RunSelection, RunSummary

_P = ParamSpec("_P")
_T = TypeVar("_T")
LOCATION_FILE = "store.json"


def _committed(
    method: Callable[Concatenate[Store, _P], _T],
) -> Callable[Concatenate[Store, _P], _T]:
    """A writing method. From outside of ``submit`` it returns once its commit is durable."""

    @functools.wraps(method)
    def call(self: Store, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if self.commits.is_inside:
            return method(self, *args, **kwargs)
        return self.submit(method, self, *args, **kwargs).result()

    return call


class Store:
    """The writer of one shard's store. Its methods may be called from any thread.

    A method's effect is durable when it returns. ``submit`` does not wait: many operations share one commit. Reading
    methods see all that was committed; inside ``submit`` they see the transaction, and hold up who else writes.
    """

    def __init__(self, config: StoreConfig, job_id: str, shard_index: int, default_dir: str | Path) -> None:
        """Open or create the store; ``default_dir`` is the job's own store folder.

        ``ConfigError`` for a newer schema or what is no store, ``MachineError`` while another writes it or where its
        database is away. An older schema is migrated.
        """
        folder = Path(default_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._job_id = job_id
        self._shard_index = shard_index
        self._file_lock: Any = None
        if config.url and not config.url.startswith("sqlite:"):
            self.scope = Scope(job_id, shard_index)
            self._engine, self._reader = self._open_database()
            blob_url = config.blob_url or (folder / FOLDER).absolute().as_uri()
        else:
            self.scope = Scope("")
            folder = folder_of(config.url, folder)
            self._engine, self._reader = self._open_file(folder)
            blob_url = config.blob_url
        prefix = f"{job_id}/shard-{shard_index}/" if blob_url else f"shard-{shard_index}/"
        self.objects = ObjectStore(blob_url, folder / FOLDER, prefix)
        self.commits = GroupCommit(
            self._connect, config.commit_interval_ms / 1000, f"shard-{shard_index}-store", self._note_commit
        )
        try:
            self.commits.submit(lambda: None).result()
            _write_location(Path(default_dir), config, job_id)
        except BaseException:
            self.commits.close()
            self._unlock()
            raise
        self._sealer = Sealer(
            self.commits, self._reading, self.scope, self.objects, f"shard-{shard_index}-sealer", self._count
        )

    def submit(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a method of this store, or a function that calls some, in a commit.

        The future is resolved when that commit is durable. An error of the method undoes what it did, and nothing else.
        """
        return self.commits.submit(functools.partial(method, *args, **kwargs))

    def close(self) -> None:
        """Finish what was submitted and close. Closing twice changes nothing."""
        self._sealer.close()
        self.commits.close()
        self._unlock()

    # -- groups and runs --

    @_committed
    def open_group(self, spec: GroupSpec) -> None:
        """Record a group and its runs. What an earlier group of the same id left is deleted."""
        self._discard(operations.open_group(self._db, self.scope, self._shard_index, spec, time.time()))

    @_committed
    def open_attempt(self, run_id: str, attempt: int, key_hash: bytes) -> None:
        """Record an attempt with its key; the keys of the run's earlier attempts are dead."""
        operations.open_attempt(self._db, self.scope, run_id, attempt, key_hash)

    @_committed
    def close_attempt(self, run_id: str, attempt: int) -> None:
        """Forget the key of an attempt."""
        operations.close_attempt(self._db, self.scope, run_id, attempt)

    @_committed
    def note_trouble(self, run_id: str, attempt: int, trouble: CallTrouble | None) -> None:
        """Record why the last call of an attempt was not completed; None: it was, or another one began."""
        operations.note_trouble(self._db, self.scope, run_id, attempt, trouble)

    @_committed
    def finish_run(self, result: RunResult) -> None:
        """Record how an attempt ended; ``NotFoundError`` for a run of no known group."""
        operations.finish_run(self._db, self.scope, result)

    @_committed
    def finish_group(self, result: GroupResult, settled: Mapping[str, tuple[float, RunSelection | None]]) -> None:
        """Record what became of a group: for each counted run its advantage and what was selected of it."""
        operations.finish_group(self._db, self.scope, result, settled, time.time())

    @_committed
    def end_group(self, group_id: str, state: GroupState, reason: str) -> None:
        """Give a group up (``DROPPED``, ``CANCELLED``); its unfinished runs are recorded as cancelled.

        A group that was lost before stays so.
        """
        operations.end_group(self._db, self.scope, group_id, state, reason, time.time())

    @_committed
    def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Note that groups were trained by a step."""
        operations.mark_trained(self._db, self.scope, group_ids, step)

    @_committed
    def clear_marks_above(self, step: int) -> None:
        """Forget marks of steps that no checkpoint holds."""
        operations.clear_marks_above(self._db, self.scope, step)

    def group_result(self, group_id: str) -> GroupResult | None:
        """What became of a group; None while it is not settled."""
        with self._reading() as db:
            return reading.result_of_group(db, self.scope, group_id)

    def live_groups(self) -> list[StoredGroup]:
        """Groups that may still be trained or are unfinished, in order of dispatch."""
        with self._reading() as db:
            return reading.live_groups(db, self.scope)

    def trained_group(self, group_id: str) -> StoredGroup | None:
        """A group that was trained; None if it was not, or is unknown."""
        with self._reading() as db:
            return reading.trained_group(db, self.scope, group_id)

    def summaries(self, filters: RunFilter) -> list[RunSummary]:
        """This shard's runs, in order of dispatch."""
        with self._reading() as db:
            return [summary for _, summary in reading.summaries(db, self.scope, filters)]

    # -- calls --

    @_committed
    def append_call(self, row: CallRow) -> bool:
        """Store a call. False, and nothing changed, if a call of this id is stored already."""
        return operations.append_call(self._db, self.scope, columns_of(row))

    @_committed
    def append_encoded(self, columns: Mapping[str, Any]) -> bool:
        """As ``append_call``, given the call's columns: what compressing a long call takes holds up no other call."""
        return operations.append_call(self._db, self.scope, columns)

    def calls(self, run_id: str, attempt: int) -> list[CallRow]:
        """The calls of an attempt as they were stored, parents before their children.

        ``NotFoundError`` if retention deleted them, ``MachineError`` if their object cannot be reached.
        """
        with self._reading() as db:
            return reading.calls_of(db, self.scope, self.objects, run_id, attempt)

    def seal_run(self, run_id: str, attempt: int) -> Future[bool]:
        """Have the calls of an ended attempt moved into one compressed object; does not wait for it.

        The future tells whether there was something to move. While the object store is away it stays open: sealing is
        tried again, and once more when the store is next opened. A closed store cancels it.
        """
        return self._sealer.seal(run_id, attempt)

    def prune(self, now_s: float, durable_step: int, *, is_dry: bool = False) -> PruneReport:
        """Delete calls by ``trajectory.store.retention``. ``durable_step``: the newest step that a checkpoint holds.

        Only groups that were given up, lost, or trained by a durable step are touched; the summaries of their runs
        stay. ``is_dry``: only say what would be deleted. Each group is deleted in a transaction of its own.
        """
        with self._reading() as db:
            held = retention.held_groups(db, self.scope, durable_step)
        chosen = retention.groups_to_prune(held, self._config.retention, now_s)
        if not is_dry:
            chosen = [one for one in chosen if self._prune_group(one.group_id, durable_step, now_s)]
            self._count("tidegate_store_pruned_groups_total", len(chosen))
        freed_bytes = sum(one.size_bytes for one in chosen)
        return PruneReport(
            group_ids=tuple(one.group_id for one in chosen),
            num_calls=sum(one.num_calls for one in chosen),
            num_objects=sum(one.num_objects for one in chosen),
            freed_bytes=freed_bytes,
            kept_bytes=sum(one.size_bytes for one in held) - freed_bytes,
            is_dry=is_dry,
        )

    @_committed
    def _prune_group(self, group_id: str, durable_step: int, now_s: float) -> bool:
        refs = retention.prune_group(self._db, self.scope, group_id, durable_step, now_s)
        self._discard(refs or [])
        return refs is not None

    # -- inside --

    @property
    def _db(self) -> sa.Connection:
        return self.commits.connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        """One consistent view: the writer's own inside an operation, else that of a connection of its own.

        ``MachineError`` if it cannot be read.
        """
        if self.commits.is_inside:
            yield self._db
        else:
            try:
                with contextlib.closing(connect(self._reader, self._config.reconnect_timeout_s)) as db, db.begin():
                    yield db
            except sa.exc.DBAPIError as error:
                raise MachineError(
                    f"the store could not be read ({first_line(error)}).",
                    "See that its disk and its database answer.",
                ) from error

    def _discard(self, refs: list[str]) -> None:
        if refs:
            self.commits.after_commit(lambda: self._sealer.delete(refs))

    def _open_file(self, folder: Path) -> tuple[sa.Engine, sa.Engine]:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"shard-{self._shard_index}.sqlite3"
        self._file_lock = lock_file(path.with_suffix(".lock"))
        try:
            migrate_file(path)
        except BaseException:
            self._unlock()
            raise
        return sqlite_engine(path, read_only=False), sqlite_engine(path, read_only=True)

    def _open_database(self) -> tuple[sa.Engine, sa.Engine]:
        url = postgres_url(self._config.url)
        engine = postgres_engine(url, read_only=False)
        connect(engine, self._config.reconnect_timeout_s).close()  # wait for it
        migrate(engine, url.render_as_string())
        return engine, postgres_engine(url, read_only=True)

    def _connect(self) -> sa.Connection:
        connection = connect(self._engine, self._config.reconnect_timeout_s)
        if connection.dialect.name == "postgresql":
            try:
                lock_session(connection, self._job_id, self._shard_index)
            except BaseException:
                connection.close()
                raise
        return connection

    def _unlock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.close()

    def _note_commit(self, seconds: float, num_operations: int) -> None:
        self._count("tidegate_store_commit_seconds", seconds)
        self._count("tidegate_store_operations_total", num_operations)

    def _count(self, series: str, value: float) -> None:
        from services.common.metrics import SERIES, metric  # it loads Ray, which readers do without

        counted = metric(series)
        if SERIES[series].kind == "histogram":
            counted.observe(value, job=self._job_id)
        else:
            counted.inc(value, job=self._job_id)


def folder_of(url: str, default_dir: Path) -> Path:
    """The folder of a store of SQLite files."""
    return Path(url.removeprefix("sqlite:///")) if url else default_dir


def _write_location(folder: Path, config: StoreConfig, job_id: str) -> None:
    """Let readers of the job's folder find its store."""
    text = json.dumps({"url": config.url, "job_id": job_id})
    path = folder / LOCATION_FILE
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    partial = folder / f"{LOCATION_FILE}.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
