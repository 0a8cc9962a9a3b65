"""Identifiers. A run's id names its group, so that all runs of a group live on one trajectory shard."""

from __future__ import annotations

import re
import zlib
from typing import NewType

JobId = NewType("JobId", str)
GroupId = NewType("GroupId", str)
RunId = NewType("RunId", str)
CellId = NewType("CellId", str)
CallId = NewType("CallId", str)

_JOB_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


def is_job_name(name: str) -> bool:
    """Whether a name can stand in actor names, paths, URLs and metric labels."""
    return _JOB_NAME.fullmatch(name) is not None


def make_job_id(name: str, started_at_utc: str, suffix: str) -> JobId:
    """``name-YYYYMMDD-HHMMSS-suffix``; ``suffix`` tells two jobs of one second apart."""
    return JobId(f"{name}-{started_at_utc}-{suffix}")


def make_group_id(index: int, *, is_eval: bool = False) -> GroupId:
    return GroupId(f"{'e' if is_eval else 'g'}{index:06d}")


def make_run_id(group_id: GroupId, index: int) -> RunId:
    return RunId(f"{group_id}-r{index}")


def group_of(run_id: RunId) -> GroupId:
    """The group that a run belongs to."""
    group, separator, _ = run_id.rpartition("-r")
    if not separator:
        raise ValueError(f"not a run id: {run_id!r}")
    return GroupId(group)


def make_call_id(run_id: RunId, attempt: int, index: int) -> CallId:
    return CallId(f"{run_id}-a{attempt}-c{index}")


def run_of(call_id: str) -> str:
    """The run that a call belongs to; empty for what is no id of a call."""
    return call_id.rpartition("-a")[0]


def make_cell_id(index: int) -> CellId:
    """Cell 0 is the core."""
    return CellId(f"cell-{index}")


def spread_of(run_id: RunId, attempt: int, num_places: int) -> int:
    """A place for an attempt, always the same one: runs of a group lie on neighbouring places, attempts on others."""
    group_id = group_of(run_id)
    index = int(run_id[len(group_id) + len("-r") :])
    return (zlib.crc32(group_id.encode()) + index + attempt) % num_places


def shard_of(run_id: RunId, num_shards: int) -> int:
    """The trajectory shard of a run: a stable hash of its group (the unit of advantage)."""
    return zlib.crc32(group_of(run_id).encode()) % num_shards
