"""Which calls are deleted, and how. A run's outcome, reward and counts stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from services.trajectory.store.config import RetentionConfig
from services.trajectory.store.reading import within
from services.trajectory.store.schema import attempts, calls, groups, runs
from services.trajectory.store.types import GroupState, Scope

_S_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """A group whose calls are stored."""

    group_id: str
    ended_at_s: float
    size_bytes: int
    num_calls: int
    num_objects: int
    is_final: bool
    """No resumed job can need its calls."""


def groups_to_prune(held: Sequence[HeldGroup], config: RetentionConfig, now_s: float) -> list[HeldGroup]:
    """The groups to delete calls of, given all in order of dispatch: by age, then the oldest until the rest fits."""
    size_bytes = sum(one.size_bytes for one in held)
    chosen = []
    for one in held:
        if not one.is_final:
            continue
        too_old = config.max_age_days is not None and now_s - one.ended_at_s > config.max_age_days * _S_PER_DAY
        too_much = config.max_size_bytes is not None and size_bytes > config.max_size_bytes and one.size_bytes > 0
        if too_old or too_much:
            chosen.append(one)
            size_bytes -= one.size_bytes
    return chosen


def held_groups(db: sa.Connection, scope: Scope, durable_step: int) -> list[HeldGroup]:
    """The groups whose calls are stored, in order of dispatch. ``durable_step``: the newest one in a checkpoint."""
    in_runs = (runs.c.job_id == groups.c.job_id) & (runs.c.group_id == groups.c.group_id)
    in_attempts = (attempts.c.job_id == runs.c.job_id) & (attempts.c.run_id == runs.c.run_id)
    query = (
        sa.select(
            groups.c.group_id,
            sa.func.coalesce(groups.c.ended_at_s, groups.c.opened_at_s),
            sa.func.coalesce(sa.func.sum(attempts.c.size_bytes), 0),
            sa.func.coalesce(sa.func.sum(attempts.c.num_calls), 0),
            sa.func.count(attempts.c.object_ref),
            sa.case((_is_final(durable_step), 1), else_=0),
        )
        .select_from(groups.join(runs, in_runs).outerjoin(attempts, in_attempts))
        .where(*within(scope, groups), groups.c.pruned_at_s.is_(None))
        .group_by(groups.c.seq)
        .order_by(groups.c.seq)
    )
    found = db.execute(query).tuples()
    return [
        HeldGroup(group_id, ended_at_s, int(size_bytes), int(num_calls), num_objects, bool(is_final))
        for group_id, ended_at_s, size_bytes, num_calls, num_objects, is_final in found
    ]


def prune_group(db: sa.Connection, scope: Scope, group_id: str, durable_step: int, now_s: float) -> list[str] | None:
    """Delete a group's calls; the objects that are to be deleted then. None: it is not final any more."""
    is_it = (*within(scope, groups), groups.c.group_id == group_id, groups.c.pruned_at_s.is_(None))
    mark = sa.update(groups).where(*is_it, _is_final(durable_step)).values(pruned_at_s=now_s)
    if db.execute(mark).rowcount == 0:
        return None
    of_group = sa.select(runs.c.run_id).where(runs.c.job_id == scope.job_id, runs.c.group_id == group_id)
    in_group = (attempts.c.job_id == scope.job_id) & attempts.c.run_id.in_(of_group)
    refs = db.scalars(sa.select(attempts.c.object_ref).where(in_group)).all()
    db.execute(sa.delete(calls).where(calls.c.job_id == scope.job_id, calls.c.run_id.in_(of_group)))
    db.execute(sa.update(attempts).where(in_group).values(object_ref=None, size_bytes=0))
    return [ref for ref in refs if ref is not None]


def _is_final(durable_step: int) -> sa.ColumnElement[bool]:
    is_over = groups.c.state.in_([GroupState.LOST, GroupState.DROPPED, GroupState.CANCELLED])
    return is_over | (groups.c.trained_step <= durable_step)
