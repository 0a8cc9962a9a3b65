"""The commit record: the one file that says where a job stands. It wins over the journal and the store."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.errors import ConfigError
from services.job.report import write_json
from services.scheduler.codec import decode, encode
from services.scheduler.types import ResumeState
from services.trainer.checkpoint import best_of


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint with the scheduler's state at the same step."""

    checkpoint: str
    """Name of the trainer's checkpoint folder."""
    resume: ResumeState


def write_commit(folder: Path, commit: Commit) -> None:
    """Make ``commit`` the state that a resumed job starts from. The checkpoint must be complete on disk."""
    write_json(folder / "commit.json", {"checkpoint": commit.checkpoint, "resume": encode(commit.resume)})


def read_commit(folder: Path) -> Commit | None:
    """The job's last commit; None if it made none. Raises ``ConfigError`` if the file cannot be understood."""
    path = folder / "commit.json"
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Commit(str(record["checkpoint"]), decode(record["resume"], ResumeState))
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"{path} cannot be understood ({error}).",
            "It was written by another version of Tidegate; start a new job.",
        ) from None


def with_best(resume: ResumeState, checkpoints: Path) -> ResumeState:
    """``resume`` with the best checkpoint as it is marked on disk: that can have happened after the commit."""
    best = best_of(checkpoints)
    return resume if best is None else replace(resume, best_eval_step=best.step, best_eval_reward=best.reward_mean)
