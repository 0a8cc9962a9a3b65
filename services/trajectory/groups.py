"""The groups that a shard has in hand: their runs, and the calls of those that something is asked of."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import AccessError, InvariantError, NotFoundError
from services.common.ids import RunId, group_of
from services.rollout.types import RunResult
from services.trajectory.encoding import CallRow
from services.trajectory.keys import is_hash_of
from services.trajectory.live import AttemptLog
from services.trajectory.microstep import ScoredRun
from services.trajectory.settle import FinalRun
from services.trajectory.store import StoredAttempt, StoredGroup
from services.trajectory.tree import TrajectoryTree
from services.trajectory.types import GroupResult, GroupSpec


@dataclass
class LiveRun:
    """A run of a group in hand."""

    run_id: str
    log: AttemptLog | None = None
    """Of the newest attempt; None before the first."""
    is_loaded: bool = True
    """False: the store has calls of the newest attempt that ``log`` does not have yet."""
    result: RunResult | None = None
    """Of the newest attempt; None while it is unfinished."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of a run are matched and stored one after the other."""

    @property
    def final(self) -> FinalRun | None:
        """The run as it is settled, None while it is unfinished. Its calls must be loaded."""
        if self.result is None:
            return None
        if self.log is None:
            return FinalRun(self.result, TrajectoryTree())
        return FinalRun(self.result, self.log.tree, self.log.roles)

    def load(self, rows: Sequence[CallRow], tag: str) -> None:
        """Take the stored calls of the newest attempt; it was in hand of a shard that is gone. ``tag``: of this one."""
        assert self.log is not None
        for row in rows:
            self.log.complete(row)
        self.log.restarted(tag)
        self.is_loaded = True


@dataclass
class LiveGroup:
    """A group that is unfinished, or ready and untrained."""

    spec: GroupSpec
    runs: dict[str, LiveRun]
    result: GroupResult | None = None
    """None while it is not settled."""
    scored: tuple[ScoredRun, ...] | None = None
    """What a ready group is trained with. None: not settled, or settled by a shard that is gone."""
    pieces: Sequence[Sequence[ScoredRun]] = ()
    """Of a ready group: the runs of each of its micro-steps. Empty: not cut yet."""
    given: dict[int, Any] = field(default_factory=dict)
    """The micro-steps that were asked for, as they were given."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_complete(self) -> bool:
        """All its runs have ended."""
        return all(run.result is not None for run in self.runs.values())

    def final_runs(self) -> list[FinalRun]:
        """Its runs as they are settled; ``InvariantError`` while one is unfinished."""
        final = {run_id: run.final for run_id, run in self.runs.items()}
        unfinished = [run_id for run_id, run in final.items() if run is None]
        if unfinished:
            raise InvariantError(f"group {self.spec.group_id} is not complete", f"unfinished: {', '.join(unfinished)}")
        return [run for run in final.values() if run is not None]


class LiveGroups(dict[str, LiveGroup]):
    """The groups in hand, by id."""

    def find_run(self, run_id: str) -> LiveRun | None:
        """A run of them; None for any other."""
        try:
            group = self.get(group_of(RunId(run_id)))
        except ValueError:
            return None
        return None if group is None else group.runs.get(run_id)

    def is_settled(self, run_id: str) -> bool:
        """Whether the group of a run in hand is settled."""
        return self[group_of(RunId(run_id))].result is not None

    def open_run(self, run_id: str) -> LiveRun:
        """A run that may have a further attempt.

        Raises ``NotFoundError`` for a run that is not in hand, ``InvariantError`` if its group is settled.
        """
        run = self.find_run(run_id)
        if run is None:
            raise NotFoundError(f"no live run {run_id} on this shard.", "Open its group first.")
        if self.is_settled(run_id):
            raise InvariantError(f"run {run_id} cannot have a further attempt", "its group is settled")
        return run

    def authorise(self, run_id: str, key: str) -> tuple[LiveRun, AttemptLog]:
        """The run and the attempt that a key opens. Raises ``AccessError`` for a key that is not valid now."""
        run = self.find_run(run_id)
        log = run.log if run is not None else None
        if run is not None and log is not None and log.key_hash and is_hash_of(log.key_hash, key):
            return run, log
        raise AccessError("this key is unknown or no longer valid.", "A key is valid while its attempt runs.")


def new_group(spec: GroupSpec) -> LiveGroup:
    """A group as it is dispatched."""
    return LiveGroup(spec, {run_id: LiveRun(run_id) for run_id in spec.run_ids})


def stored_group(stored: StoredGroup) -> LiveGroup:
    """A group as the store has it, its calls not loaded."""
    return LiveGroup(stored.spec, _stored_runs(stored.attempts), stored.result)


def _stored_runs(attempts: Mapping[str, StoredAttempt | None]) -> dict[str, LiveRun]:
    runs = {}
    for run_id, attempt in attempts.items():
        runs[run_id] = run = LiveRun(run_id)
        if attempt is None:
            continue
        run.log, run.result = AttemptLog(run_id, attempt.attempt, attempt.key_hash), attempt.result
        run.log.trouble = attempt.trouble
        run.is_loaded = False
    return runs
