"""What is read of a store, by its writer and by any other process. Each function reads inside one transaction."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from services.common.errors import NotFoundError
from services.trajectory.encoding import CallRow, Payload, call_row, group_result, payload_of, run_result, run_selection
from services.trajectory.outcome import CallTrouble, Outcome
from services.trajectory.store.objects import ObjectStore, payloads_of
from services.trajectory.store.schema import attempts, calls, groups, runs
from services.trajectory.store.types import GroupState, RunFilter, Scope, StoredAttempt, StoredGroup
from services.trajectory.types import GroupResult, GroupSpec, RunSummary

_SUMMARY_COLUMNS = (
    runs.c.run_id,
    runs.c.group_id,
    groups.c.task_name,
    runs.c.newest_attempt,
    attempts.c.outcome,
    attempts.c.reward,
    runs.c.advantage,
    attempts.c.num_calls,
    attempts.c.num_prompt_tokens,
    attempts.c.num_output_tokens,
    attempts.c.version_min,
    attempts.c.version_max,
    attempts.c.wall_s,
    groups.c.is_eval,
    attempts.c.detail,
    runs.c.selection,
    groups.c.opened_at_s,
    groups.c.seq,
    runs.c.position,
)

_NEWEST = (
    (attempts.c.job_id == runs.c.job_id)
    & (attempts.c.run_id == runs.c.run_id)
    & (attempts.c.attempt == runs.c.newest_attempt)
)
_OF_GROUP = (groups.c.job_id == runs.c.job_id) & (groups.c.group_id == runs.c.group_id)


def within(scope: Scope, table: sa.Table) -> list[sa.ColumnElement[bool]]:
    """The conditions that keep rows to a scope."""
    conditions: list[sa.ColumnElement[bool]] = []
    if scope.job_id is not None:
        conditions.append(table.c.job_id == scope.job_id)
    if scope.shard_index is not None and "shard_index" in table.c:
        conditions.append(table.c.shard_index == scope.shard_index)
    return conditions


def summaries(
    db: sa.Connection, scope: Scope, filters: RunFilter, run_id: str | None = None
) -> list[tuple[float, RunSummary]]:
    """Runs in order of dispatch, with the time at which their groups were dispatched."""
    wanted = [*within(scope, groups)]
    if run_id is not None:
        wanted.append(runs.c.run_id == run_id)
    if filters.group_id is not None:
        wanted.append(groups.c.group_id == filters.group_id)
    if filters.task_name is not None:
        wanted.append(groups.c.task_name == filters.task_name)
    if filters.outcome is not None:
        wanted.append(attempts.c.outcome == str(filters.outcome))
    if filters.is_eval is not None:
        wanted.append(groups.c.is_eval == filters.is_eval)
    if filters.unfinished is not None:
        wanted.append(attempts.c.outcome.is_(None) if filters.unfinished else attempts.c.outcome.is_not(None))
    last_first = (groups.c.opened_at_s.desc(), groups.c.seq.desc(), runs.c.position.desc())
    query = (
        sa.select(*_SUMMARY_COLUMNS)
        .select_from(runs.join(groups, _OF_GROUP).outerjoin(attempts, _NEWEST))
        .where(*wanted)
        .order_by(*last_first)
    )
    if filters.limit is not None:
        query = query.limit(max(0, filters.limit))
    found = [(row["opened_at_s"], _summary(row)) for row in db.execute(query).mappings()]
    found.reverse()
    return found


def _summary(data: Mapping[Any, Any]) -> RunSummary:
    return RunSummary(
        run_id=data["run_id"],
        group_id=data["group_id"],
        task_name=data["task_name"],
        attempt=data["newest_attempt"] or 0,
        outcome=None if data["outcome"] is None else Outcome(data["outcome"]),
        reward=data["reward"],
        advantage=data["advantage"],
        num_calls=data["num_calls"] or 0,
        num_prompt_tokens=data["num_prompt_tokens"] or 0,
        num_output_tokens=data["num_output_tokens"] or 0,
        version_min=data["version_min"],
        version_max=data["version_max"],
        wall_s=data["wall_s"],
        is_eval=data["is_eval"],
        detail=data["detail"] or "",
        selection=None if data["selection"] is None else run_selection(data["selection"]),
    )


def attempt_result(db: sa.Connection, scope: Scope, run_id: str, attempt: int) -> str | None:
    """The result of an attempt, in JSON."""
    query = sa.select(attempts.c.result).where(
        *within(scope, attempts), attempts.c.run_id == run_id, attempts.c.attempt == attempt
    )
    return db.scalar(query)


def calls_of(db: sa.Connection, scope: Scope, objects: ObjectStore, run_id: str, attempt: int) -> list[CallRow]:
    """The calls of an attempt as they were stored, parents before their children.

    ``NotFoundError`` if retention deleted them.
    """
    check_kept(db, scope, run_id)
    found = db.execute(
        sa.select(calls)
        .where(*within(scope, calls), calls.c.run_id == run_id, calls.c.attempt == attempt)
        .order_by(calls.c.seq)
    )
    rows = found.mappings().all()
    moved: Mapping[str, Payload] = {}
    if any(row["output"] is None for row in rows):
        query = sa.select(attempts.c.object_ref).where(
            *within(scope, attempts), attempts.c.run_id == run_id, attempts.c.attempt == attempt
        )
        moved = payloads_of(objects.read(str(db.scalar(query))))
    known: dict[str, CallRow] = {}
    for row in rows:
        payload = moved[row["call_id"]] if row["output"] is None else payload_of(row)
        known[row["call_id"]] = call_row(row, payload, known.get(row["parent_call_id"]))
    return list(known.values())


def check_kept(db: sa.Connection, scope: Scope, run_id: str) -> None:
    """Raise ``NotFoundError`` if retention deleted the calls of a run."""
    query = sa.select(groups.c.pruned_at_s).select_from(runs.join(groups, _OF_GROUP))
    pruned_at_s = db.scalar(query.where(*within(scope, groups), runs.c.run_id == run_id))
    if pruned_at_s is not None:
        day = datetime.datetime.fromtimestamp(pruned_at_s, datetime.UTC).date().isoformat()
        raise NotFoundError(
            f"the calls of run {run_id} were deleted on {day}; its outcome and counts are kept.",
            "See `tidegate runs list`; trajectory.store.retention says how long calls are kept.",
        )


def stored_groups(db: sa.Connection, scope: Scope, *conditions: sa.ColumnElement[bool]) -> list[StoredGroup]:
    """Groups in order of dispatch."""
    query = sa.select(groups).where(*within(scope, groups), *conditions).order_by(groups.c.seq)
    found = []
    for row in db.execute(query).mappings().all():
        newest = newest_attempts(db, Scope(row["job_id"]), row["group_id"])
        spec = GroupSpec(row["group_id"], row["task_name"], tuple(newest), row["version"], is_eval=row["is_eval"])
        found.append(
            StoredGroup(
                spec=spec,
                state=GroupState(row["state"]),
                result=None if row["result"] is None else group_result(row["result"]),
                attempts=newest,
                reason=row["reason"],
                opened_at_s=row["opened_at_s"],
                trained_step=row["trained_step"],
                pruned_at_s=row["pruned_at_s"],
            )
        )
    return found


def live_groups(db: sa.Connection, scope: Scope) -> list[StoredGroup]:
    """Groups that may still be trained or are unfinished."""
    is_live = groups.c.state.in_([GroupState.OPEN, GroupState.READY]) & groups.c.trained_step.is_(None)
    return stored_groups(db, scope, is_live)


def trained_group(db: sa.Connection, scope: Scope, group_id: str) -> StoredGroup | None:
    """A group that was trained; None if it was not, or is unknown."""
    is_it = (groups.c.group_id == group_id) & groups.c.trained_step.is_not(None) & groups.c.result.is_not(None)
    found = stored_groups(db, scope, is_it)
    return found[0] if found else None


def result_of_group(db: sa.Connection, scope: Scope, group_id: str) -> GroupResult | None:
    data = db.scalar(sa.select(groups.c.result).where(*within(scope, groups), groups.c.group_id == group_id))
    return None if data is None else group_result(data)


def newest_attempts(db: sa.Connection, scope: Scope, group_id: str) -> dict[str, StoredAttempt | None]:
    """The newest attempt of each run of a group, in the order of its runs."""
    query = (
        sa.select(runs.c.run_id, attempts.c.attempt, attempts.c.key_hash, attempts.c.trouble, attempts.c.result)
        .select_from(runs.outerjoin(attempts, _NEWEST))
        .where(*within(scope, runs), runs.c.group_id == group_id)
        .order_by(runs.c.position)
    )
    return {row["run_id"]: _stored_attempt(row) for row in db.execute(query).mappings()}


def _stored_attempt(data: Mapping[Any, Any]) -> StoredAttempt | None:
    if data["attempt"] is None:
        return None
    result = None if data["result"] is None else run_result(data["result"])
    trouble = None if data["trouble"] is None else CallTrouble(data["trouble"])
    return StoredAttempt(data["attempt"], data["key_hash"], trouble, result)


def refs_in_use(db: sa.Connection, scope: Scope) -> set[str]:
    """The objects that attempts refer to."""
    query = sa.select(attempts.c.object_ref).where(*within(scope, attempts), attempts.c.object_ref.is_not(None))
    return set(_strings(db.scalars(query)))


def unsealed_attempts(db: sa.Connection, scope: Scope) -> list[tuple[str, int]]:
    """Attempts that have ended and whose calls are still in their rows, oldest first."""
    query = (
        sa.select(attempts.c.run_id, attempts.c.attempt)
        .select_from(
            attempts.join(runs, (runs.c.job_id == attempts.c.job_id) & (runs.c.run_id == attempts.c.run_id)).join(
                groups, _OF_GROUP
            )
        )
        .where(
            *within(scope, groups),
            groups.c.pruned_at_s.is_(None),
            attempts.c.result.is_not(None),
            attempts.c.object_ref.is_(None),
            attempts.c.num_calls > 0,
        )
        .order_by(groups.c.seq)
    )
    return [(row.run_id, row.attempt) for row in db.execute(query)]


def _strings(values: Iterable[str | None]) -> list[str]:
    return [value for value in values if value is not None]
