"""The first schema: SQLite only, before the store kept several jobs, objects and counters."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

FORMER_TABLES = (
    """CREATE TABLE groups (
        group_id TEXT PRIMARY KEY, task_name TEXT NOT NULL, version INTEGER NOT NULL, is_eval INTEGER NOT NULL,
        state TEXT NOT NULL, reason TEXT NOT NULL, opened_at_s REAL NOT NULL
    )""",
    """CREATE TABLE runs (
        run_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups ON DELETE CASCADE,
        position INTEGER NOT NULL, advantage REAL
    )""",
    "CREATE INDEX runs_of_group ON runs (group_id, position)",
    """CREATE TABLE attempts (
        run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
        key_hash BLOB, context_overflowed INTEGER NOT NULL DEFAULT 0, result TEXT,
        PRIMARY KEY (run_id, attempt)
    )""",
    """CREATE TABLE calls (
        call_id TEXT PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
        ordinal INTEGER NOT NULL, parent_call_id TEXT, num_prompt_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL, version_min INTEGER, version_max INTEGER,
        prompt BLOB NOT NULL, output BLOB NOT NULL, logprobs BLOB NOT NULL, request BLOB NOT NULL, rest TEXT NOT NULL
    )""",
    "CREATE INDEX calls_of_attempt ON calls (run_id, attempt)",
    "CREATE TABLE group_results (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, result TEXT NOT NULL)",
    "CREATE TABLE trained_marks (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, step INTEGER NOT NULL)",
)


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for statement in FORMER_TABLES:
            op.execute(statement)
