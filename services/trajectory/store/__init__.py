"""The durable store of runs: SQLite files or a PostgreSQL database, and objects with the calls of ended attempts."""

from services.trajectory.store.config import RetentionConfig, StoreConfig
from services.trajectory.store.reader import StoreReader, list_runs, open_reader, read_run, reader_of_job
from services.trajectory.store.schema import SCHEMA_VERSION
from services.trajectory.store.types import (
    GroupState,
    PruneReport,
    RunFilter,
    StoredAttempt,
    StoredGroup,
)
from services.trajectory.store.writer import Store

__all__ = [
    "SCHEMA_VERSION",
    "GroupState",
    "PruneReport",
    "RetentionConfig",
    "RunFilter",
    "Store",
    "StoreConfig",
    "StoreReader",
    "StoredAttempt",
    "StoredGroup",
    "list_runs",
    "open_reader",
    "read_run",
    "reader_of_job",
]
