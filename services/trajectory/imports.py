"""Exported runs taken into a store, for offline work: all of a file or nothing.

The file is read twice: once to check every row, once to write a new shard of the store beside it, which is renamed
into place when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.trajectory.export import GroupFacts, TrajectoryRow
from services.trajectory.files import read_rows, wrong
from services.trajectory.rebuild import RebuiltRun, RunBuilder
from services.trajectory.rows import RunCheck
from services.trajectory.source import StoreSource
from services.trajectory.store import GroupState, RunFilter, Store, StoreConfig
from services.trajectory.store.writer import LOCATION_FILE
from services.trajectory.types import GroupResult, GroupSpec, LossReason, RunSelection

_STORE = "trajectory"
_MAX_IN_FLIGHT = 64


@dataclass
class _Group:
    """What a file says of a group, and what its runs add up to."""

    facts: GroupFacts
    task_name: str
    is_eval: bool
    run_ids: list[str] = field(default_factory=list)
    settled: dict[str, tuple[float, RunSelection | None]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    num_tokens: int = 0
    versions: list[int] = field(default_factory=list)


@dataclass
class ImportReport:
    """What was imported."""

    num_groups: int = 0
    num_runs: int = 0
    num_calls: int = 0
    num_trajectories: int = 0
    job_ids: list[str] = field(default_factory=list)


def import_file(
    file: Path, into: Path, *, on_progress: Callable[[str, int], None] = lambda phase, num_runs: None
) -> ImportReport:
    """Take the runs of an export into the job folder ``into``, which is made if it is not there.

    ``ConfigError`` with file, line and reason for what cannot be imported; runs that the folder has already are refused
    too. Nothing is changed then. ``on_progress`` hears how many runs are checked, then written.
    """
    report = ImportReport()
    groups = _check(file, report, on_progress)
    if not groups:
        raise ConfigError(f"{file} holds no rows.", "Nothing was imported.")
    _refuse_known(file, into, groups)
    with _new_shard(into) as (folder, index):
        store = Store(StoreConfig(), "", index, folder)
        try:
            _write(store, file, groups, report, on_progress)
        finally:
            store.close()
    _write_job(into, report.job_ids)
    return report


def _check(file: Path, report: ImportReport, on_progress: Callable[[str, int], None]) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    job_ids: dict[str, None] = {}
    seen: set[str] = set()
    check = RunCheck()
    place = ""
    for next_place, row in read_rows(file):
        if check.first is None or check.first.run_id != row.run_id:
            with _at(place):
                check.end()
            with _at(next_place):
                _add_run(groups, row, seen)
            check = RunCheck()
            job_ids[row.job_id] = None
            report.num_runs += 1
            on_progress("checked", report.num_runs)
        place = next_place
        with _at(place):
            check.take(row)
        report.num_trajectories += bool(row.calls)
    with _at(place):
        check.end()
    report.num_groups, report.job_ids = len(groups), list(job_ids)
    return groups


def _add_run(groups: dict[str, _Group], row: TrajectoryRow, seen: set[str]) -> None:
    if row.run_id in seen:
        raise ConfigError(f"run {row.run_id} stands apart from its other rows.")
    seen.add(row.run_id)
    group = groups.setdefault(row.group_id, _Group(row.group, row.task_name, row.is_eval))
    if (row.group, row.task_name, row.is_eval) != (group.facts, group.task_name, group.is_eval):
        raise ConfigError(f"group {row.group_id} is described in another way than before.")
    group.run_ids.append(row.run_id)


def _runs(file: Path) -> Iterator[tuple[TrajectoryRow, RebuiltRun]]:
    """Each run with its first row. Of its rows only what is new in each is in memory."""
    first: TrajectoryRow | None = None
    builder: RunBuilder | None = None
    for _, row in read_rows(file):
        if first is None or builder is None or first.run_id != row.run_id:
            if first is not None and builder is not None:
                yield first, builder.run()
            first, builder = row, RunBuilder(row)
        builder.take(row)
    if first is not None and builder is not None:
        yield first, builder.run()


@contextlib.contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise wrong(place, error.message.rstrip(".")) from None


def _refuse_known(file: Path, into: Path, groups: dict[str, _Group]) -> None:
    """A group that is stored already would be replaced by one of the same id, its other runs lost."""
    if into.exists() and not into.is_dir():
        raise ConfigError(f"{into} is no folder.", "Name a folder, or one that is to be made.")
    location = into / _STORE / LOCATION_FILE
    if location.exists() and json.loads(location.read_text(encoding="utf-8"))["url"]:
        raise ConfigError(f"the runs of {into} are stored elsewhere, see {location}.", "Import into another folder.")
    try:
        stored = {run.group_id for run in StoreSource(into).list_runs(RunFilter())}
    except NotFoundError:
        return
    known = [group_id for group_id in groups if group_id in stored]
    if known:
        raise ConfigError(
            f"{file}: {into} has the group {known[0]} already"
            + (f", and {len(known) - 1} more." if known[1:] else "."),
            "Nothing was imported. Import it into another folder.",
        )


@contextlib.contextmanager
def _new_shard(into: Path) -> Iterator[tuple[Path, int]]:
    """A folder for a shard's store, and its index; what was written there is moved into the store at the end.

    Its objects are moved before the file that names them, so the shard is there as a whole or not at all.
    """
    target = into / _STORE
    try:
        target.mkdir(parents=True, exist_ok=True)
        index = 1 + max((int(path.stem.rpartition("-")[2]) for path in target.glob("shard-*.sqlite3")), default=-1)
        scratch = target / f".import-{os.getpid()}"
        scratch.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}.", "Name a folder of yours with --into.") from None
    name = f"shard-{index}"
    try:
        yield scratch, index
        if (scratch / "blobs" / name).is_dir():
            (target / "blobs").mkdir(exist_ok=True)
            (scratch / "blobs" / name).replace(target / "blobs" / name)
        if (scratch / f"{name}.sqlite3-wal").exists():
            raise MachineError(f"the new shard of {into} was not closed in good order.", "Nothing was imported.")
        os.link(scratch / f"{name}.sqlite3", target / f"{name}.sqlite3")  # never over what another import made
    except FileExistsError:
        raise MachineError(f"another import into {into} was faster.", "Nothing was imported; try again.") from None
    except OSError as error:
        raise MachineError(f"cannot write {target}: {error.strerror or error}.", "Nothing was imported.") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Window:
    """Waits for the oldest of many commits, so that many share one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._futures: deque[Future[Any]] = deque()

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._futures.append(self._store.submit(method, *args, **kwargs))
        while len(self._futures) > _MAX_IN_FLIGHT:
            self._futures.popleft().result()

    def wait(self) -> None:
        while self._futures:
            self._futures.popleft().result()


def _write(
    store: Store,
    file: Path,
    groups: dict[str, _Group],
    report: ImportReport,
    on_progress: Callable[[str, int], None],
) -> None:
    window = _Window(store)
    for group_id, group in groups.items():
        version = group.facts.version or 0
        spec = GroupSpec(group_id, group.task_name, tuple(group.run_ids), version, is_eval=group.is_eval)
        window.submit(store.open_group, spec)
    for done, (row, run) in enumerate(_runs(file), 1):
        _write_run(store, window, run)
        _count(groups[row.group_id], row, run)
        report.num_calls += len(run.calls)
        on_progress("written", done)
    for group_id, group in groups.items():
        _end_group(store, window, group_id, group)
    window.wait()


def _write_run(store: Store, window: _Window, run: RebuiltRun) -> None:
    if run.calls or run.attempt:
        window.submit(store.open_attempt, run.run_id, run.attempt, b"")
    for call in run.calls:
        window.submit(store.append_call, call)
    if run.result is not None:
        window.submit(store.finish_run, run.result)
    elif run.calls or run.attempt:
        window.submit(store.close_attempt, run.run_id, run.attempt)


def _count(group: _Group, row: TrajectoryRow, run: RebuiltRun) -> None:
    if row.advantage is None:
        return
    group.settled[run.run_id] = (row.advantage, run.selection)
    if row.reward is not None:
        group.rewards.append(row.reward)
    targets = set() if run.selection is None else set(run.selection.target_call_ids)
    for call in run.calls:
        if call.record.call_id in targets:
            group.num_tokens += len(call.new_prompt_ids) + len(call.record.output_ids)
            group.versions += [span.version for span in call.record.version_spans]


def _end_group(store: Store, window: _Window, group_id: str, group: _Group) -> None:
    facts = group.facts
    if facts.state in (GroupState.READY, GroupState.LOST):
        selections = [selection for _, selection in group.settled.values() if selection is not None]
        result = GroupResult(
            group_id=group_id,
            ready=facts.state == GroupState.READY,
            reason=facts.reason,
            num_runs=len(group.run_ids),
            num_counted=len(group.settled),
            num_targets=sum(selection.num_targets for selection in selections),
            num_tokens=group.num_tokens,
            reward_mean=sum(group.rewards) / len(group.rewards) if group.rewards else None,
            rewards=tuple(group.rewards),
            version_min=min(group.versions, default=None),
            loss_reason=LossReason(facts.loss_reason) if facts.loss_reason else None,
            num_left_out=sum(selection.num_left_out for selection in selections),
        )
        window.submit(store.finish_group, result, group.settled)
    elif facts.state in (GroupState.DROPPED, GroupState.CANCELLED):
        window.submit(store.end_group, group_id, GroupState(facts.state), facts.reason)
    if facts.trained_step is not None:
        window.submit(store.mark_trained, [group_id], facts.trained_step)


def _write_job(into: Path, job_ids: list[str]) -> None:
    """A new folder becomes one that ``--job`` takes: of the file's job, if it is of one."""
    path = into / "job.json"
    if path.exists():
        return
    job_id = job_ids[0] if len(job_ids) == 1 else into.resolve().name
    data = {"job_id": job_id, "name": job_id, "created_at_s": time.time(), "imported_from": job_ids}
    scratch = path.with_name(f".job.json.{os.getpid()}")
    scratch.write_text(json.dumps(data, indent=2), encoding="utf-8")
    scratch.replace(path)
