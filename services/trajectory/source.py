"""Where runs are read from: one face for a job's store and for a running job over gRPC."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.common.errors import NotFoundError
from services.trajectory.encoding import CallRow
from services.trajectory.export import UNFINISHED, GroupFacts, ScoreFacts, check_outcome
from services.trajectory.outcome import Outcome
from services.trajectory.store import GroupState, RunFilter, StoredGroup, reader_of_job
from services.trajectory.types import RunSummary


class RunSource(Protocol):
    """Something that runs can be read from. ``NotFoundError`` for what it does not have."""

    @property
    def job_id(self) -> str: ...

    def list_runs(self, filters: RunFilter) -> list[RunSummary]:
        """Runs in order of dispatch."""
        ...

    def read_calls(self, run_id: str, attempt: int | None = None) -> tuple[RunSummary, Sequence[CallRow]]:
        """A run and the calls of an attempt (None: the newest), parents before their children."""
        ...

    def group(self, group_id: str) -> GroupFacts: ...

    def score(self, run: RunSummary) -> ScoreFacts:
        """How the newest attempt of a run was scored."""
        ...


class StoreSource:
    """The store of a job's folder, while the job goes on and afterwards."""

    def __init__(self, job_dir: Path, job_id: str = "") -> None:
        """``NotFoundError`` if the folder holds no runs. ``job_id`` where the folder does not tell it."""
        if not job_dir.is_dir():
            raise NotFoundError(f"there is no folder {job_dir}.", "Name a job's folder, as runs/NAME-DATE-TIME-ID.")
        self._reader = reader_of_job(job_dir)
        self._group: StoredGroup | None = None
        self._job_id = job_id or job_id_of(job_dir)

    @property
    def job_id(self) -> str:
        return self._job_id

    def list_runs(self, filters: RunFilter) -> list[RunSummary]:
        return self._reader.list_runs(filters)

    def read_calls(self, run_id: str, attempt: int | None = None) -> tuple[RunSummary, Sequence[CallRow]]:
        summary, rows = self._reader.read_calls(run_id, attempt)
        if self._group is not None and self._group.spec.group_id == summary.group_id and not _is_settled(self._group):
            self._group = None  # it may have moved on
        if attempt is not None and attempt > summary.attempt:
            raise NotFoundError(f"run {run_id} has no attempt {attempt}.", f"Its newest is {summary.attempt}.")
        return summary, rows

    def score(self, run: RunSummary) -> ScoreFacts:
        attempt = self._stored_group(run.group_id).attempts.get(run.run_id)
        if attempt is None or attempt.result is None:
            return ScoreFacts()
        return ScoreFacts(attempt.result.evaluated_ref, dict(attempt.result.score_details))

    def group(self, group_id: str) -> GroupFacts:
        return facts_of(self._stored_group(group_id))

    def _stored_group(self, group_id: str) -> StoredGroup:
        """The group that was asked for last is kept: its runs are read one after the other."""
        if self._group is None or self._group.spec.group_id != group_id:
            self._group = self._reader.group(group_id)
        return self._group


def _is_settled(group: StoredGroup) -> bool:
    return group.state != GroupState.OPEN


def filter_of(*, group_id: str = "", task_name: str = "", outcome: str = "", is_eval: bool | None = None) -> RunFilter:
    """What a store is asked for. Empty texts do not filter; ``ConfigError`` for an unknown outcome."""
    check_outcome(outcome)
    return RunFilter(
        group_id=group_id or None,
        task_name=task_name or None,
        outcome=Outcome(outcome) if outcome and outcome != UNFINISHED else None,
        is_eval=is_eval,
        unfinished=True if outcome == UNFINISHED else None,
    )


def facts_of(group: StoredGroup) -> GroupFacts:
    """A stored group as exports and readers tell of it."""
    loss_reason = None if group.result is None else group.result.loss_reason
    return GroupFacts(
        version=group.spec.version,
        state=str(group.state),
        reason=group.reason,
        loss_reason="" if loss_reason is None else str(loss_reason),
        trained_step=group.trained_step,
    )


def job_id_of(job_dir: Path) -> str:
    """The id in ``job.json``; the folder's name where there is none."""
    try:
        return str(json.loads((job_dir / "job.json").read_text(encoding="utf-8"))["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return job_dir.resolve().name
