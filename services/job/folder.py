"""The folder of a job: one running job holds it, and it says what the job is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import ConfigError
from services.job.config import public_config
from services.job.plan import Plan
from services.job.report import write_json


@contextlib.contextmanager
def job_folder(plan: Plan) -> Iterator[None]:
    """The job's folder, held by a lock for as long as the job runs; ``latest`` links to it."""
    with _held(plan.folder):
        try:
            write_json(
                plan.folder / "job.json",
                {
                    "job_id": plan.job_id,
                    "name": plan.config.name,
                    "created_at_s": time.time(),
                    "config": public_config(plan.config),
                },
            )
            scratch = plan.folder.parent / f".latest-{os.getpid()}"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(plan.folder.name)
            scratch.replace(plan.folder.parent / "latest")
        except OSError as error:
            raise _unwritable(plan.folder, error) from None
        yield


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{folder} belongs to a job that is running.",
                "Wait for its end or cancel it (Ctrl-C where it runs); without --resume a new job starts beside it.",
            ) from None
        yield


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {folder} ({error.strerror}).", "Set output.dir elsewhere.")
