"""Several jobs in one database, calls in objects, counters of attempts, what was selected of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_FORMER = ("calls", "attempts", "group_results", "trained_marks", "runs", "groups")


def upgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    if is_sqlite:
        for table in _FORMER:
            op.rename_table(table, f"former_{table}")
    _create_tables()
    if is_sqlite:
        for statement in _COPY:
            op.execute(statement)
        for table in _FORMER:
            op.drop_table(f"former_{table}")


def _create_tables() -> None:
    op.create_table(
        "groups",
        sa.Column("seq", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("shard_index", sa.Integer, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("task_name", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("is_eval", sa.Boolean, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("opened_at_s", sa.Double, nullable=False),
        sa.Column("ended_at_s", sa.Double),
        sa.Column("result", sa.Text),
        sa.Column("trained_step", sa.Integer),
        sa.Column("pruned_at_s", sa.Double),
        sa.UniqueConstraint("job_id", "group_id", name="groups_by_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("groups_by_state", "groups", ["job_id", "shard_index", "state"])
    op.create_index("groups_by_time", "groups", ["job_id", "opened_at_s", "seq"])
    op.create_table(
        "runs",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("newest_attempt", sa.Integer),
        sa.Column("advantage", sa.Double),
        sa.Column("selection", sa.Text),
        sa.ForeignKeyConstraint(
            ["job_id", "group_id"], ["groups.job_id", "groups.group_id"], name="runs_to_groups", ondelete="CASCADE"
        ),
    )
    op.create_index("runs_by_group", "runs", ["job_id", "group_id", "position"])
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("key_hash", sa.LargeBinary),
        sa.Column("trouble", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("outcome", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("wall_s", sa.Double),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("num_calls", sa.Integer, nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("version_min", sa.Integer),
        sa.Column("version_max", sa.Integer),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("object_ref", sa.Text),
        sa.ForeignKeyConstraint(
            ["job_id", "run_id"], ["runs.job_id", "runs.run_id"], name="attempts_to_runs", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "calls",
        sa.Column("seq", _SEQUENCE, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("parent_call_id", sa.Text),
        sa.Column("num_prompt_tokens", sa.Integer, nullable=False),
        sa.Column("num_output_tokens", sa.Integer, nullable=False),
        sa.Column("version_min", sa.Integer),
        sa.Column("version_max", sa.Integer),
        sa.Column("prompt", sa.LargeBinary),
        sa.Column("output", sa.LargeBinary),
        sa.Column("logprobs", sa.LargeBinary),
        sa.Column("request", sa.LargeBinary),
        sa.Column("rest", sa.Text),
        sa.UniqueConstraint("job_id", "call_id", name="calls_by_id"),
        sa.ForeignKeyConstraint(
            ["job_id", "run_id"], ["runs.job_id", "runs.run_id"], name="calls_to_runs", ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("calls_by_attempt", "calls", ["job_id", "run_id", "attempt", "seq"])


_COPY = (
    # a file of the first schema held one shard, whose number only its name has; nothing asks for it in SQLite
    """INSERT INTO groups (job_id, shard_index, group_id, task_name, version, is_eval, state, reason, opened_at_s,
                           ended_at_s, result, trained_step)
       SELECT '', 0, g.group_id, task_name, version, is_eval, state, reason, opened_at_s,
              CASE state WHEN 'open' THEN NULL ELSE opened_at_s END, r.result, m.step
       FROM former_groups g LEFT JOIN former_group_results r USING (group_id)
       LEFT JOIN former_trained_marks m USING (group_id) ORDER BY g.rowid""",
    """INSERT INTO runs (job_id, run_id, group_id, position, newest_attempt, advantage)
       SELECT '', run_id, group_id, position,
              (SELECT MAX(attempt) FROM former_attempts a WHERE a.run_id = r.run_id), advantage
       FROM former_runs r""",
    """INSERT INTO attempts (job_id, run_id, attempt, key_hash, trouble, result, outcome, reward, wall_s,
                             detail, num_calls, num_prompt_tokens, num_output_tokens, version_min, version_max,
                             size_bytes)
       SELECT '', a.run_id, a.attempt, a.key_hash,
              CASE WHEN a.context_overflowed THEN 'context_overflowed' END, a.result,
              json_extract(a.result, '$.outcome'), json_extract(a.result, '$.reward'),
              json_extract(a.result, '$.wall_s'), COALESCE(json_extract(a.result, '$.detail'), ''),
              COUNT(c.call_id), COALESCE(SUM(c.num_prompt_tokens), 0), COALESCE(SUM(c.num_output_tokens), 0),
              MIN(c.version_min), MAX(c.version_max),
              COALESCE(SUM(LENGTH(prompt) + LENGTH(output) + LENGTH(logprobs) + LENGTH(request) + LENGTH(rest)), 0)
       FROM former_attempts a LEFT JOIN former_calls c USING (run_id, attempt) GROUP BY a.run_id, a.attempt""",
    """INSERT INTO calls (job_id, call_id, run_id, attempt, ordinal, parent_call_id, num_prompt_tokens,
                          num_output_tokens, version_min, version_max, prompt, output, logprobs, request, rest)
       SELECT '', call_id, run_id, attempt, ordinal, parent_call_id, num_prompt_tokens,
              num_output_tokens, version_min, version_max, prompt, output, logprobs, request, rest
       FROM former_calls ORDER BY rowid""",
)
