"""What a scorer is given and what it gives back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.rollout.scoring.config import HarborScoring, ScoringConfig
from services.rollout.types import Task
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

REASON = "reason"
"""Key of ``Score.details`` that says in one line why there is no value."""
MAX_DETAILS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ScoredRunView:
    """What a scorer knows of a run, besides its workspace."""

    task: Task
    run_id: str
    attempt: int
    outcome: Outcome
    """How the harness ended, as its runner saw it."""
    logs_dir: str
    """harness.stdout, harness.stderr (the last 256 KiB each), agent/ (what the harness wrote). Not to be changed."""
    answer: str
    """The harness's standard output, at most its last 64 KiB."""
    transcript: str
    """Path of the harness's own transcript (the largest JSON or JSONL file below ``logs_dir``), or empty."""
    workspace_ref: str
    """Digest of the workspace tree that is scored; see ``Score.evaluated_ref``."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer said. A score that is not valid is no zero: the run has no reward."""

    value: float | None
    """The reward; None unless ``valid``."""
    valid: bool
    evaluated_ref: str = ""
    """What was evaluated: the digest of the workspace tree, so that one can tell which work a reward belongs to. The
    runner fills it in."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON-ready, at most ``MAX_DETAILS_BYTES``. ``reason`` says why there is no value."""
    failure: Outcome | None = None
    """Of an invalid score: VERIFIER_FAILURE, VERIFIER_TIMEOUT or CANCELLED."""
    is_final: bool = False
    """To evaluate again would end the same way: a wrong key, a spent budget."""

    def __post_init__(self) -> None:
        if self.valid and (self.value is None or not math.isfinite(self.value)):
            raise ValueError(f"a valid score needs a finite number, not {self.value}")

    @property
    def reason(self) -> str:
        return str(self.details.get(REASON, ""))


class Scorer(Protocol):
    """Scores the work of runs. It may change the workspace: that is a copy, and its own."""

    def score(self, run: ScoredRunView, workspace: Path) -> Score: ...


def invalid(
    reason: str,
    failure: Outcome = Outcome.VERIFIER_FAILURE,
    *,
    details: Mapping[str, Any] | None = None,
    is_final: bool = False,
) -> Score:
    """A score without a value."""
    return Score(None, False, details={**(details or {}), REASON: reason}, failure=failure, is_final=is_final)


def as_score(answer: object) -> Score:
    """What a scoring function returned, as a score: a ``Score``, or a number. Anything else is an invalid score."""
    value, details = answer, {}
    if isinstance(answer, Score):
        value, details = answer.value, json_ready(answer.details)
        if not answer.valid:
            return invalid(answer.reason or "it returned a score that is not valid", details=details)
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return invalid(f"it returned no finite number but {value!r:.80}", details=details)
    return Score(number, True, details=details)


def json_ready(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details as they can be stored; what is no JSON or too large is replaced by a word about it."""
    try:
        text = json.dumps(details, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"details_dropped": f"not JSON: {error}"[:200]}
    if len(text) > MAX_DETAILS_BYTES:
        return {"details_dropped": f"{len(text)} bytes, at most {MAX_DETAILS_BYTES} are kept"}
    kept: dict[str, Any] = json.loads(text)
    return kept


def evaluation_timeout_s(config: ScoringConfig, task: Task) -> float:
    """The time limit of one evaluation."""
    if not isinstance(config, HarborScoring):
        return config.timeout_s
    return min(task.verifier_timeout_s, math.inf if config.timeout_s is None else config.timeout_s)


def longest_scoring_s(config: ScoringConfig, task: Task) -> float:
    """The longest that the evaluations of one attempt can take together."""
    retries = max(OUTCOME_TABLE[one].max_retries for one in (Outcome.VERIFIER_FAILURE, Outcome.VERIFIER_TIMEOUT))
    return (1 + retries) * evaluation_timeout_s(config, task)
