"""Bring a store's schema up to date. Revisions are in ``migrations/versions``; alembic runs them in one transaction."""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy as sa

from services.common.errors import ConfigError, NotFoundError
from services.trajectory.store.dialect import (
    first_line,
    lock_file,
    lock_schema,
    postgres_engine,
    postgres_url,
    set_sqlite_version,
    sqlite_engine,
    sqlite_version,
)
from services.trajectory.store.schema import SCHEMA_VERSION

_alembic_lock = threading.Lock()  # alembic hands the connection to the revisions through a global


def schema_version(connection: sa.Connection, name: str) -> int:
    """The schema version of a store, 0 if it is new. ``name`` is for errors.

    Raises ``ConfigError`` if it is newer than this code, or no store.
    """
    try:
        tables = set(sa.inspect(connection).get_table_names())
        found = sqlite_version(connection) if connection.dialect.name == "sqlite" else 0
        if "alembic_version" in tables:
            revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
            found = max(found, int(revision or 0))
    except (sa.exc.DatabaseError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read as a run store ({first_line(error)}).", "Move it away, or restore it."
        ) from error
    if found == 0 and connection.dialect.name == "sqlite" and tables - {"alembic_version"}:
        raise ConfigError(f"{name} is a SQLite file, but no run store.", "Move it away, or name another folder.")
    if found > SCHEMA_VERSION:
        raise ConfigError(
            f"{name} has the schema version {found}; this Tidegate reads version {SCHEMA_VERSION}.",
            "Read it with the Tidegate that wrote it, or use another folder.",
        )
    return found


def check_readable(connection: sa.Connection, name: str) -> bool:
    """Whether a store has been created. ``ConfigError`` if it has another schema than this code."""
    found = schema_version(connection, name)
    if 0 < found < SCHEMA_VERSION:
        raise ConfigError(
            f"{name} has the schema version {found}; this Tidegate reads version {SCHEMA_VERSION}.",
            "Bring it up to date: python -m services.trajectory.store migrate FOLDER_OR_URL",
        )
    return found == SCHEMA_VERSION


def migrate(engine: sa.Engine, name: str) -> None:
    """Create the store's tables or bring them up to date: wholly, or not at all. ``ConfigError`` if it fails."""
    try:
        with _alembic_lock, engine.begin() as connection:
            lock_schema(connection)
            found = schema_version(connection, name)
            if found < SCHEMA_VERSION:
                _run_revisions(connection, found)
    except sa.exc.DBAPIError as error:
        raise ConfigError(
            f"{name} could not be brought up to schema version {SCHEMA_VERSION} ({first_line(error)}).",
            "Nothing was changed. See that there is room and the right to create tables, or use another store.",
        ) from error


def _run_revisions(connection: sa.Connection, found: int) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    if found and not sa.inspect(connection).has_table("alembic_version"):
        command.stamp(config, f"{found:04d}")  # it was made before alembic was there
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        set_sqlite_version(connection, SCHEMA_VERSION)


def migrate_store(folder_or_url: str) -> list[str]:
    """Migrate all shards of a store that no job writes; the names of what was looked at.

    ``NotFoundError`` for a folder that holds none.
    """
    if "://" in folder_or_url and not folder_or_url.startswith("sqlite:"):
        url = postgres_url(folder_or_url)
        migrate(postgres_engine(url, read_only=False), url.render_as_string())
        return [url.render_as_string()]
    files = sorted(Path(folder_or_url.removeprefix("sqlite:///")).glob("shard-*.sqlite3"))
    if not files:
        raise NotFoundError(
            f"no store is in {folder_or_url}.", "Name the folder of the shards, as runs/JOB/trajectory."
        )
    for path in files:
        with lock_file(path.with_suffix(".lock")):
            migrate_file(path)
    return [str(path) for path in files]


def migrate_file(path: Path) -> None:
    """Migrate one file, which the caller has locked. A file that is refused is left as it is."""
    if path.exists():
        with sqlite_engine(path, read_only=True).connect() as connection:
            if schema_version(connection, str(path)) == SCHEMA_VERSION:
                return
    migrate(sqlite_engine(path, read_only=False), str(path))
