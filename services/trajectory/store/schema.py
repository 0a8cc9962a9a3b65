"""The tables of the store, the same ones in SQLite and PostgreSQL.

A SQLite file belongs to one shard of one job, and its ``job_id`` is empty: the job's folder may be renamed. In
PostgreSQL several jobs share the tables.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 2
"""Number of the newest revision in ``migrations/versions``."""

metadata = MetaData()

SEQUENCE = BigInteger().with_variant(Integer, "sqlite")
"""A key that grows in the order of writing. SQLite counts in ``INTEGER`` keys only."""

groups = Table(
    "groups",
    metadata,
    Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False),
    Column("shard_index", Integer, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("is_eval", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("opened_at_s", Double, nullable=False),
    Column("ended_at_s", Double),
    Column("result", Text),
    Column("trained_step", Integer),
    Column("pruned_at_s", Double),
    UniqueConstraint("job_id", "group_id", name="groups_by_id"),
    Index("groups_by_state", "job_id", "shard_index", "state"),
    Index("groups_by_time", "job_id", "opened_at_s", "seq"),
    sqlite_autoincrement=True,
)

runs = Table(
    "runs",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("run_id", Text, primary_key=True),
    Column("group_id", Text, nullable=False),
    Column("position", Integer, nullable=False),
    Column("newest_attempt", Integer),
    Column("advantage", Double),
    Column("selection", Text),
    ForeignKeyConstraint(
        ["job_id", "group_id"], ["groups.job_id", "groups.group_id"], name="runs_to_groups", ondelete="CASCADE"
    ),
    Index("runs_by_group", "job_id", "group_id", "position"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("run_id", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("key_hash", LargeBinary),
    Column("trouble", Text),
    Column("result", Text),
    # what lists and filters need of the result, so that they need not read it
    Column("outcome", Text),
    Column("reward", Double),
    Column("wall_s", Double),
    Column("detail", Text, nullable=False),
    # kept up to date with every call, so that lists need not count
    Column("num_calls", Integer, nullable=False),
    Column("num_prompt_tokens", BigInteger, nullable=False),
    Column("num_output_tokens", BigInteger, nullable=False),
    Column("version_min", Integer),
    Column("version_max", Integer),
    Column("size_bytes", BigInteger, nullable=False),
    Column("object_ref", Text),
    ForeignKeyConstraint(
        ["job_id", "run_id"], ["runs.job_id", "runs.run_id"], name="attempts_to_runs", ondelete="CASCADE"
    ),
)
"""``object_ref``: where the calls' arrays are once the attempt is sealed. ``size_bytes``: of its calls, wherever."""

calls = Table(
    "calls",
    metadata,
    Column("seq", SEQUENCE, primary_key=True, autoincrement=True),
    Column("job_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("parent_call_id", Text),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("num_output_tokens", Integer, nullable=False),
    Column("version_min", Integer),
    Column("version_max", Integer),
    Column("prompt", LargeBinary),
    Column("output", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("request", LargeBinary),
    Column("rest", Text),
    UniqueConstraint("job_id", "call_id", name="calls_by_id"),
    ForeignKeyConstraint(
        ["job_id", "run_id"], ["runs.job_id", "runs.run_id"], name="calls_to_runs", ondelete="CASCADE"
    ),
    Index("calls_by_attempt", "job_id", "run_id", "attempt", "seq"),
    sqlite_autoincrement=True,
)
"""The last five columns are the call's payload; null once the attempt is sealed."""
