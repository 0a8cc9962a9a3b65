"""What can be known of a store before a job starts. Nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

from services.common.errors import ConfigError
from services.trajectory.store.config import StoreConfig
from services.trajectory.store.dialect import connect, postgres_engine, postgres_url
from services.trajectory.store.migrate import schema_version
from services.trajectory.store.objects import ObjectStore
from services.trajectory.store.writer import folder_of


def check_store(config: StoreConfig) -> None:
    """Raise unless the database answers and the objects' place is there; they must be reachable from this machine.

    ``ConfigError`` for a newer schema, a folder that cannot be written or a bucket that does not exist,
    ``MachineError`` where a server is away or refuses.
    """
    if config.url.startswith("sqlite:"):
        _check_folder(folder_of(config.url, Path()), "trajectory.store.url")
    elif config.url:
        url = postgres_url(config.url)
        engine = postgres_engine(url, read_only=True)
        with connect(engine, timeout_s=0) as connection, connection.begin():
            schema_version(connection, url.render_as_string())
    if config.blob_url.startswith("file:"):
        _check_folder(Path(unquote(urlsplit(config.blob_url).path)), "trajectory.store.blob_url")
    elif config.blob_url:
        ObjectStore(config.blob_url, None).check()


def describe_store(config: StoreConfig) -> str:
    """Where runs and objects go, in a line for people."""
    database = "SQLite in the job's folder"
    if config.url.startswith("sqlite:"):
        database = f"SQLite in {folder_of(config.url, Path())}"
    elif config.url:
        url = sa.make_url(config.url)
        database = f"PostgreSQL {url.database} at {url.host or url.query.get('host') or 'this machine'}"
    objects = urlsplit(config.blob_url)._replace(query="").geturl()
    return f"{database}, objects in {objects}" if objects else database


def _check_folder(folder: Path, key: str) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {folder} cannot be written.", "Name a folder that you may write to.")
