"""What the writer does to groups, runs and calls, each inside a transaction. A scope says whose rows are meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from services.common.errors import NotFoundError
from services.rollout.types import RunResult
from services.trajectory.encoding import plain_text, result_json, selection_json
from services.trajectory.outcome import CallTrouble, Outcome
from services.trajectory.store.dialect import upsert
from services.trajectory.store.reading import newest_attempts
from services.trajectory.store.schema import attempts, calls, groups, runs
from services.trajectory.store.types import GroupState, Scope
from services.trajectory.types import GroupResult, GroupSpec, RunSelection

_NEW_ATTEMPT = {
    "detail": "",
    "num_calls": 0,
    "num_prompt_tokens": 0,
    "num_output_tokens": 0,
    "size_bytes": 0,
}

_COUNT_CALL = (
    sa.update(attempts)
    .where(
        attempts.c.job_id == sa.bindparam("of_job"),
        attempts.c.run_id == sa.bindparam("of_run"),
        attempts.c.attempt == sa.bindparam("of_attempt"),
    )
    .values(
        num_calls=attempts.c.num_calls + 1,
        num_prompt_tokens=attempts.c.num_prompt_tokens + sa.bindparam("prompt_tokens", type_=sa.BigInteger),
        num_output_tokens=attempts.c.num_output_tokens + sa.bindparam("output_tokens", type_=sa.BigInteger),
        size_bytes=attempts.c.size_bytes + sa.bindparam("bytes_added", type_=sa.BigInteger),
        version_min=sa.case(
            (attempts.c.version_min <= sa.bindparam("lowest", type_=sa.Integer), attempts.c.version_min),
            else_=sa.func.coalesce(sa.bindparam("lowest", type_=sa.Integer), attempts.c.version_min),
        ),
        version_max=sa.case(
            (attempts.c.version_max >= sa.bindparam("highest", type_=sa.Integer), attempts.c.version_max),
            else_=sa.func.coalesce(sa.bindparam("highest", type_=sa.Integer), attempts.c.version_max),
        ),
    )
)


def open_group(db: sa.Connection, scope: Scope, shard_index: int, spec: GroupSpec, now_s: float) -> list[str]:
    """Record a group and its runs. What an earlier group of the same id left is deleted.

    Returns the objects that nothing refers to any more.
    """
    of_group = (runs.c.job_id == scope.job_id) & (runs.c.group_id == spec.group_id)
    in_runs = (runs.c.job_id == attempts.c.job_id) & (runs.c.run_id == attempts.c.run_id)
    refs = db.scalars(sa.select(attempts.c.object_ref).join(runs, in_runs).where(of_group)).all()
    db.execute(sa.delete(groups).where(groups.c.job_id == scope.job_id, groups.c.group_id == spec.group_id))
    db.execute(
        sa.insert(groups).values(
            job_id=scope.job_id,
            shard_index=shard_index,
            group_id=spec.group_id,
            task_name=plain_text(spec.task_name),
            version=spec.version,
            is_eval=spec.is_eval,
            state=GroupState.OPEN,
            reason="",
            opened_at_s=now_s,
        )
    )
    group = {"job_id": scope.job_id, "group_id": spec.group_id}
    rows = [{**group, "run_id": run_id, "position": position} for position, run_id in enumerate(spec.run_ids)]
    if rows:
        db.execute(sa.insert(runs), rows)
    return [ref for ref in refs if ref is not None]


def open_attempt(db: sa.Connection, scope: Scope, run_id: str, attempt: int, key_hash: bytes) -> None:
    """Record an attempt with its key; the keys of the run's earlier attempts are dead."""
    of_run = (attempts.c.job_id == scope.job_id) & (attempts.c.run_id == run_id)
    db.execute(sa.update(attempts).where(of_run).values(key_hash=None))
    _put_attempt(db, scope, run_id, attempt, {"key_hash": key_hash})


def close_attempt(db: sa.Connection, scope: Scope, run_id: str, attempt: int) -> None:
    _change_attempt(db, scope, run_id, attempt, {"key_hash": None})


def note_trouble(db: sa.Connection, scope: Scope, run_id: str, attempt: int, trouble: CallTrouble | None) -> None:
    _change_attempt(db, scope, run_id, attempt, {"trouble": None if trouble is None else str(trouble)})


def finish_run(db: sa.Connection, scope: Scope, result: RunResult) -> None:
    """Record how an attempt ended; ``NotFoundError`` for a run of no known group."""
    values = {
        "key_hash": None,
        "result": result_json(result),
        "outcome": str(result.outcome),
        "reward": result.reward,
        "wall_s": result.wall_s,
        "detail": plain_text(result.detail),
    }
    _put_attempt(db, scope, result.run_id, result.attempt, values)


def finish_group(
    db: sa.Connection,
    scope: Scope,
    result: GroupResult,
    settled: Mapping[str, tuple[float, RunSelection | None]],
    now_s: float,
) -> None:
    """Record what became of an open group: its result, the advantage of each counted run and what was selected of it.

    One that was given up meanwhile stays so.
    """
    state = GroupState.READY if result.ready else GroupState.LOST
    changed = db.execute(
        sa.update(groups)
        .where(
            groups.c.job_id == scope.job_id,
            groups.c.group_id == result.group_id,
            groups.c.state == GroupState.OPEN,
        )
        .values(state=state, reason=plain_text(result.reason), result=result_json(result), ended_at_s=now_s)
    )
    if changed.rowcount == 0:
        return
    for run_id, (advantage, selection) in settled.items():
        chosen = None if selection is None else selection_json(selection)
        db.execute(
            sa.update(runs)
            .where(runs.c.job_id == scope.job_id, runs.c.run_id == run_id)
            .values(advantage=advantage, selection=chosen)
        )


def end_group(db: sa.Connection, scope: Scope, group_id: str, state: GroupState, reason: str, now_s: float) -> None:
    """Give a group up; its unfinished runs are recorded as cancelled. A group that was lost before stays so."""
    db.execute(
        sa.update(groups)
        .where(
            groups.c.job_id == scope.job_id,
            groups.c.group_id == group_id,
            groups.c.state.in_([GroupState.OPEN, GroupState.READY]),
        )
        .values(state=state, reason=plain_text(reason), ended_at_s=now_s)
    )
    for run_id, newest in newest_attempts(db, scope, group_id).items():
        if newest is None or newest.result is None:
            attempt = 0 if newest is None else newest.attempt
            finish_run(db, scope, RunResult(run_id, attempt, Outcome.CANCELLED, None, 0.0, 0.0, 0.0, None, reason))


def mark_trained(db: sa.Connection, scope: Scope, group_ids: Sequence[str], step: int) -> None:
    of_groups = (groups.c.job_id == scope.job_id) & groups.c.group_id.in_(group_ids)
    db.execute(sa.update(groups).where(of_groups).values(trained_step=step))


def clear_marks_above(db: sa.Connection, scope: Scope, step: int) -> None:
    of_shard = [groups.c.job_id == scope.job_id]
    if scope.shard_index is not None:
        of_shard.append(groups.c.shard_index == scope.shard_index)
    db.execute(sa.update(groups).where(*of_shard, groups.c.trained_step > step).values(trained_step=None))


def append_call(db: sa.Connection, scope: Scope, call: Mapping[str, Any]) -> bool:
    """Store a call, given its columns. False, and nothing changed, if a call of this id is stored already.

    ``NotFoundError`` for a run of no known group.
    """
    columns = {"job_id": scope.job_id, **call}
    insert = upsert(db, calls).on_conflict_do_nothing(index_elements=["job_id", "call_id"]).returning(calls.c.seq)
    try:
        if db.scalar(insert, columns) is None:
            return False
    except sa.exc.IntegrityError as error:
        raise NotFoundError(f"no run {columns['run_id']} in the store.", "Open its group first.") from error
    count = {
        "of_job": scope.job_id,
        "of_run": columns["run_id"],
        "of_attempt": columns["attempt"],
        "prompt_tokens": columns["num_prompt_tokens"],
        "output_tokens": columns["num_output_tokens"],
        "bytes_added": payload_bytes(columns),
        "lowest": columns["version_min"],
        "highest": columns["version_max"],
    }
    if db.execute(_COUNT_CALL, count).rowcount == 0:  # it was never opened
        _put_attempt(db, scope, columns["run_id"], columns["attempt"], {})
        db.execute(_COUNT_CALL, count)
    return True


def payload_bytes(columns: Mapping[str, bytes | str]) -> int:
    """Bytes of a call's payload in its row."""
    return sum(len(columns[name]) for name in ("prompt", "output", "logprobs", "request", "rest"))


def _change_attempt(db: sa.Connection, scope: Scope, run_id: str, attempt: int, values: Mapping[str, object]) -> None:
    """Change an attempt, if it is there."""
    of_attempt = (attempts.c.job_id == scope.job_id, attempts.c.run_id == run_id, attempts.c.attempt == attempt)
    db.execute(sa.update(attempts).where(*of_attempt).values(dict(values)))


def _put_attempt(db: sa.Connection, scope: Scope, run_id: str, attempt: int, values: Mapping[str, object]) -> None:
    """Change an attempt; make it if there is none. ``NotFoundError`` for a run of no known group."""
    key = {"job_id": scope.job_id, "run_id": run_id, "attempt": attempt}
    of_run = (runs.c.job_id == scope.job_id) & (runs.c.run_id == run_id)
    newest = sa.case((runs.c.newest_attempt > attempt, runs.c.newest_attempt), else_=attempt)
    if db.execute(sa.update(runs).where(of_run).values(newest_attempt=newest)).rowcount == 0:
        raise NotFoundError(f"no run {run_id} in the store.", "Open its group first.")
    insert = upsert(db, attempts)
    if values:
        insert = insert.on_conflict_do_update(index_elements=list(key), set_=dict(values))
    else:
        insert = insert.on_conflict_do_nothing(index_elements=list(key))
    db.execute(insert.values({**_NEW_ATTEMPT, **key, **values}))
