"""Reading a store from any process, while its job goes on and after it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from services.common.errors import ConfigError, NotFoundError
from services.rollout.types import RunResult
from services.trajectory.encoding import CallRow, run_result, with_prompts
from services.trajectory.store import reading
from services.trajectory.store.dialect import connect, postgres_engine, postgres_url, sqlite_engine
from services.trajectory.store.migrate import check_readable
from services.trajectory.store.objects import FOLDER, ObjectGoneError, ObjectStore
from services.trajectory.store.schema import groups
from services.trajectory.store.types import GroupState, RunFilter, Scope, StoredGroup
from services.trajectory.store.writer import LOCATION_FILE, folder_of
from services.trajectory.types import CallRecord, RunSummary

_T = TypeVar("_T")
_CONNECT_TIMEOUT_S = 2.0
ALL_RUNS = RunFilter()


@dataclass(slots=True)
class _Part:
    """A database that holds a part of the store: a shard's file, or all of it."""

    name: str
    engine: sa.Engine
    is_checked: bool = False
    """It was seen to have this code's schema."""


class StoreReader:
    """Reads the runs of one job. Each method sees one consistent view of each shard's file, or of the database."""

    def __init__(self, parts: list[_Part], scope: Scope, objects: ObjectStore) -> None:
        self._parts = parts
        self._scope = scope
        self._objects = objects

    def list_runs(self, filters: RunFilter = ALL_RUNS) -> list[RunSummary]:
        """Runs in order of dispatch."""
        found: list[tuple[float, RunSummary]] = []
        for part in self._parts:
            with _view(part) as db:
                found += reading.summaries(db, self._scope, filters)
        found.sort(key=lambda one: one[0])  # stable: the runs of a group stay in order
        listed = [summary for _, summary in found]
        return listed if filters.limit is None else listed[max(0, len(listed) - filters.limit) :]

    def read_run(self, run_id: str, attempt: int | None = None) -> tuple[RunSummary, list[CallRecord]]:
        """A run and the calls of one attempt (the last one by default), with their whole prompts.

        ``NotFoundError`` if there is no such run, or retention deleted its calls; ``MachineError`` if their object
        cannot be reached.
        """
        summary, rows = self.read_calls(run_id, attempt)
        return summary, with_prompts(rows)

    def read_calls(self, run_id: str, attempt: int | None = None) -> tuple[RunSummary, list[CallRow]]:
        """As ``read_run``, but of each call's prompt only what is new in it: O(unique tokens) of memory."""
        try:
            return self._rows(run_id, attempt)
        except ObjectGoneError:  # retention may have deleted it behind this view's back: the next one knows
            return self._rows(run_id, attempt)

    def _rows(self, run_id: str, attempt: int | None) -> tuple[RunSummary, list[CallRow]]:
        with self._view_of(run_id) as (db, summary):
            wanted = summary.attempt if attempt is None else attempt
            return summary, reading.calls_of(db, self._scope, self._objects, run_id, wanted)

    def run_result(self, run_id: str, attempt: int | None = None) -> RunResult | None:
        """How an attempt ended (the last one by default); None while it goes on. ``NotFoundError`` for no such run."""
        with self._view_of(run_id) as (db, summary):
            data = reading.attempt_result(db, self._scope, run_id, summary.attempt if attempt is None else attempt)
        return None if data is None else run_result(data)

    def group(self, group_id: str) -> StoredGroup:
        """A group with the newest attempts of its runs. ``NotFoundError`` if there is none of this id."""
        for part in self._parts:
            with _view(part) as db:
                found = reading.stored_groups(db, self._scope, groups.c.group_id == group_id)
            if found:
                return found[0]
        raise NotFoundError(f"no group {group_id} in {self._name}.", "See `tidegate runs list`.")

    def groups(self, state: GroupState | None = None) -> list[StoredGroup]:
        """The groups, or those in a state, in order of dispatch."""
        wanted = [] if state is None else [groups.c.state == state]
        found: list[StoredGroup] = []
        for part in self._parts:
            with _view(part) as db:
                found += reading.stored_groups(db, self._scope, *wanted)
        return sorted(found, key=lambda one: one.opened_at_s)

    @property
    def _name(self) -> str:
        return ", ".join(part.name for part in self._parts)

    @contextlib.contextmanager
    def _view_of(self, run_id: str) -> Iterator[tuple[sa.Connection, RunSummary]]:
        """The view that has a run, and the run's summary."""
        for part in self._parts:
            with _view(part) as db:
                found = reading.summaries(db, self._scope, RunFilter(), run_id)
                if found:
                    yield db, found[0][1]
                    return
        raise NotFoundError(f"no run {run_id} in {self._name}.", "See `tidegate runs list`.")


def open_reader(store: str, job_id: str | None = None) -> StoreReader:
    """Read a store: a folder (a job's own one names its database), or a URL as in ``trajectory.store.url``.

    ``job_id`` says whose runs, in a database with several jobs. ``NotFoundError`` if there is no store, ``ConfigError``
    for another schema or if the job must be named.
    """
    if "://" in store and not store.startswith("sqlite:"):
        return _database_reader(store, job_id)
    folder = folder_of(store if "://" in store else "", Path(store))
    location = folder / LOCATION_FILE
    if location.exists():
        given = json.loads(location.read_text(encoding="utf-8"))
        if given["url"].startswith("postgres"):
            return _database_reader(given["url"], given["job_id"])
        folder = folder_of(given["url"], folder)
    return _folder_reader(folder)


def reader_of_job(job_dir: Path) -> StoreReader:
    """Read the store of the job with this folder."""
    return open_reader(str(job_dir / "trajectory"))


def list_runs(store_dir: str, filters: RunFilter = ALL_RUNS) -> list[RunSummary]:
    """The runs in a store, in order of dispatch. ``NotFoundError`` if there is no store."""
    return open_reader(store_dir).list_runs(filters)


def read_run(store_dir: str, run_id: str, attempt: int | None = None) -> tuple[RunSummary, list[CallRecord]]:
    """A run and the calls of one attempt (the last one by default). See ``StoreReader.read_run``."""
    return open_reader(store_dir).read_run(run_id, attempt)


def _folder_reader(folder: Path) -> StoreReader:
    files = sorted(folder.glob("shard-*.sqlite3"))
    if not files:
        raise NotFoundError(f"no runs are stored in {folder}.", "Give the folder of a job that was started.")
    parts = [_Part(str(path), sqlite_engine(path, read_only=True)) for path in files]
    return StoreReader(parts, Scope(), ObjectStore("", folder / FOLDER))


def _database_reader(store: str, job_id: str | None) -> StoreReader:
    url = postgres_url(store)
    part = _Part(url.render_as_string(), postgres_engine(url, read_only=True))
    with _view(part) as db:
        job_ids = sorted(db.scalars(sa.select(groups.c.job_id).distinct()))
    if job_id is None and len(job_ids) > 1:
        raise ConfigError(f"{part.name} holds the jobs {', '.join(job_ids)}.", "Say whose runs are to be read.")
    if job_id is None and not job_ids:
        raise NotFoundError(f"no runs are stored in {part.name}.", "Give the database of a job that was started.")
    return StoreReader([part], Scope(job_id or job_ids[0]), ObjectStore("", None))


@contextlib.contextmanager
def _view(part: _Part) -> Iterator[sa.Connection]:
    with contextlib.closing(connect(part.engine, _CONNECT_TIMEOUT_S)) as db, _errors_of(part), db.begin():
        part.is_checked = part.is_checked or check_readable(db, part.name)
        if not part.is_checked:
            raise NotFoundError(f"{part.name} is being created.", "Try again in a moment.")
        yield db


@contextlib.contextmanager
def _errors_of(part: _Part) -> Iterator[None]:
    try:
        yield
    except sa.exc.DatabaseError as error:
        raise ConfigError(
            f"{part.name} cannot be read as a run store ({error.orig}).", "Move it away, or restore it."
        ) from error
