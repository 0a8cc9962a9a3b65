"""What differs between SQLite and PostgreSQL: connections, the lock of the one writer, upserts. All else is shared."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from services.common.errors import ConfigError, MachineError

_BUSY_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.05


def upsert(connection: sa.Connection, table: sa.Table) -> Any:
    """An insert that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


# -- SQLite --


def sqlite_engine(path: Path, *, read_only: bool) -> sa.Engine:
    """Connections to a file. What a writer commits is on the disk; a reader has one view for each transaction."""
    if not read_only:
        mode = "rwc"
    elif os.access(path.parent, os.W_OK) or path.with_name(f"{path.name}-wal").exists():
        mode = "ro"
    else:  # SQLite cannot make its index of the log here, and there is no log
        mode = "ro&immutable=1"
    engine = sa.create_engine(
        f"sqlite+pysqlite:///{path.absolute().as_uri()}?mode={mode}&uri=true",
        poolclass=sa.NullPool,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: object) -> None:
        connection.isolation_level = None  # else the driver's own implicit transactions come between savepoints
        if not read_only:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def lock_file(path: Path) -> Any:
    """Hold a file lock for as long as the process lives. ``MachineError`` if another has it.

    It is waited for shortly: a killed writer may be about to go.
    """
    file = path.open("w")
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            if time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                continue
            file.close()
            raise MachineError(
                f"another process writes the store {path.with_suffix('.sqlite3')}.", "End the other job first."
            ) from error


def sqlite_version(connection: sa.Connection) -> int:
    """The schema version that the file's header names."""
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def set_sqlite_version(connection: sa.Connection, version: int) -> None:
    """Name the schema version in the file's header, where Tidegates that know no alembic look for it."""
    connection.exec_driver_sql(f"PRAGMA user_version={version:d}")


# -- PostgreSQL --


def postgres_url(url: str) -> sa.URL:
    """The URL with the driver that Tidegate uses. ``ConfigError`` if it cannot be understood."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise ConfigError("the store's URL cannot be understood.", _URL_HINT) from error
    if parsed.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ConfigError(f"the store's URL names the database {parsed.drivername!r}.", _URL_HINT)
    return parsed.set(drivername="postgresql+psycopg")


_URL_HINT = "Give sqlite:////FULL/PATH or postgresql://USER@HOST/DATABASE as trajectory.store.url."


def postgres_engine(url: sa.URL, *, read_only: bool) -> sa.Engine:
    """Connections to a database. What a writer commits is on the server's disk."""
    try:
        engine = sa.create_engine(
            url,
            poolclass=sa.NullPool,
            connect_args={"connect_timeout": 10, "application_name": "tidegate"},
            isolation_level="REPEATABLE READ" if read_only else "READ COMMITTED",
        )
    except ImportError as error:
        raise MachineError("the driver for PostgreSQL is not installed.", "pip install 'tidegate[postgres]'") from error

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: object) -> None:
        settings = ["default_transaction_read_only=on"] if read_only else ["synchronous_commit=on", *_KEEPALIVES]
        with connection.cursor() as cursor:
            for setting in settings:
                cursor.execute(f"SET {setting}")
        connection.commit()

    return engine


_KEEPALIVES = ("tcp_keepalives_idle=10", "tcp_keepalives_interval=5", "tcp_keepalives_count=3")
"""A writer whose machine died without a word holds its lock no longer than this."""


def lock_session(connection: sa.Connection, job_id: str, shard_index: int) -> None:
    """Hold a lock for as long as the connection lives. ``MachineError`` if another has it.

    It is waited for shortly: the server needs a moment to notice that a killed writer is gone.
    """
    statement = sa.select(sa.func.pg_try_advisory_lock(_lock_key(f"tidegate/{job_id}/{shard_index}")))
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with connection.begin():
            if connection.execute(statement).scalar_one():
                return
        if time.monotonic() > deadline_s:
            raise MachineError(
                f"another process writes shard {shard_index} of job {job_id} in the database.",
                "End the other job first.",
            )
        time.sleep(_POLL_S)


def lock_schema(connection: sa.Connection) -> None:
    """Let nobody else migrate until the transaction ends. (SQLite's writers have the file to themselves.)"""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_lock_key("tidegate/schema"))))


def _lock_key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


def transaction_name(connection: sa.Connection) -> str | None:
    """What ``is_committed`` knows the transaction by; None if it wrote nothing, and in SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    name = connection.execute(sa.text("SELECT pg_current_xact_id_if_assigned()")).scalar()
    return None if name is None else str(name)


def is_committed(connection: sa.Connection, transaction: str) -> bool | None:
    """Whether a transaction of a connection that was lost was committed; None if the database does not know."""
    query = sa.text("SELECT pg_xact_status(CAST(:name AS xid8))")
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with connection.begin():
            status = connection.execute(query, {"name": transaction}).scalar()
        if status != "in progress" or time.monotonic() > deadline_s:
            return {"committed": True, "aborted": False}.get(status or "")
        time.sleep(_POLL_S)


# -- connections that went away --


def connect(engine: sa.Engine, timeout_s: float) -> sa.Connection:
    """A new connection; a database that is away is waited for. ``MachineError`` if it does not come."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return engine.connect()
        except sa.exc.OperationalError as error:
            if time.monotonic() > deadline_s:
                raise MachineError(
                    f"the store's database cannot be reached ({first_line(error)}).",
                    "See that it runs and that trajectory.store.url is right.",
                ) from error
        time.sleep(4 * _POLL_S)


def ends_transaction(connection: sa.Connection, error: BaseException) -> bool:
    """Whether an error ended the whole transaction and not only the statement that met it."""
    if connection.invalidated or connection.closed:
        return True
    if connection.dialect.name == "sqlite":  # it rolls back by itself when the disk is full or fails
        in_transaction: Callable[[], bool] = lambda: connection.connection.dbapi_connection.in_transaction  # type: ignore[union-attr] # noqa: E731
        return isinstance(error, sa.exc.DBAPIError) and not in_transaction()
    return isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated


def first_line(error: BaseException) -> str:
    """What a database said, without the statement and its values."""
    said = str(error.orig) if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else str(error)
    return said.strip().partition("\n")[0]
