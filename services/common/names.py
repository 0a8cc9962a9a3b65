"""Names of actors and files. Every name carries the job id: two jobs on one host never meet."""

from __future__ import annotations

from services.common.ids import CellId, JobId

RAY_NAMESPACE = "tidegate"
SERVE_PREFIX = "tidegate-"
"""Of the Serve applications that are jobs' proxies."""


def scheduler_actor(job_id: JobId) -> str:
    return f"{job_id}/scheduler"


def shard_actor(job_id: JobId, index: int) -> str:
    return f"{job_id}/shard-{index}"


def rollout_actor(job_id: JobId, cell_id: CellId) -> str:
    """The rollout side of a cell."""
    return f"{job_id}/{cell_id}/rollout"


def mailbox_actor(job_id: JobId, cell_id: CellId) -> str:
    """The mailbox through which the training side of a cell takes its commands."""
    return f"{job_id}/{cell_id}/train"


def serve_application(job_id: JobId) -> str:
    return f"{SERVE_PREFIX}{job_id}"


def runner_actor(job_id: JobId, index: int) -> str:
    """A runner: drives harness processes, off the accelerators."""
    return f"{job_id}/runner-{index}"
