"""Evaluates the kept work of a run: each evaluation on a fresh copy, repeated as the outcome table says."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.rollout.config import SandboxConfig
from services.rollout.scoring.base import Score, ScoredRunView, Scorer, invalid
from services.rollout.scoring.budget import BUDGET_FILE, Budget
from services.rollout.scoring.config import FunctionScoring, HarborScoring, JudgeScoring, ScoringConfig
from services.rollout.scoring.harbor import HarborScorer
from services.rollout.scoring.process import ProcessScorer, check_function
from services.rollout.workspaces import copy_tree, remove_tree
from services.trajectory.outcome import OUTCOME_TABLE, Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoringSetup:
    """What a runner needs to score."""

    config: ScoringConfig = field(default_factory=HarborScoring)
    job_dir: str = ""
    """Folder of what the job's runners share: the judge's budget."""
    api_key: str = field(default="", repr=False)
    """The judge's key."""


BY_TASKS = ScoringSetup()
"""Each task's own verifier."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the scorer said at last, or why it said nothing."""

    score: Score
    wall_s: float
    """All evaluations together."""
    num_evaluations: int

    @property
    def detail(self) -> str:
        """One line for people."""
        if self.score.valid:
            return f"reward {self.score.value:g}"
        return f"{self.score.reason} (evaluations: {self.num_evaluations})"


def evaluate(
    run: ScoredRunView,
    workspace: Path,
    run_dir: Path,
    sandbox: SandboxConfig,
    setup: ScoringSetup,
    cancel: threading.Event | None = None,
) -> Verdict:
    """Evaluate the kept workspace. A failed evaluation is repeated as the outcome table says, each on a fresh copy.

    Evaluation N keeps what it said in ``run_dir/verifier-N``. Blocks for at most the scorer's limit an evaluation.
    """
    start_s = time.monotonic()
    evaluation = 0
    while True:
        evaluation += 1
        folder = run_dir / f"verifier-{evaluation}"
        scorer = make_scorer(setup, sandbox, folder, cancel or threading.Event())
        score = _evaluate_copy(scorer, run, workspace, folder)
        failure = score.failure or Outcome.VERIFIER_FAILURE
        if score.valid or score.is_final or evaluation > OUTCOME_TABLE[failure].max_retries:
            break
    if score.is_final:
        logger.error("scoring of run %s failed, and others will meet the same: %s", run.run_id, score.reason)
    return Verdict(score, time.monotonic() - start_s, evaluation)


def make_scorer(setup: ScoringSetup, sandbox: SandboxConfig, folder: Path, cancel: threading.Event) -> Scorer:
    """The configured scorer, for one evaluation that writes to ``folder`` and ends when ``cancel`` is set."""
    if isinstance(setup.config, HarborScoring):
        return HarborScorer(setup.config, sandbox, folder, cancel)
    return ProcessScorer(setup.config, folder, cancel, job_dir=setup.job_dir, api_key=setup.api_key)


def _evaluate_copy(scorer: Scorer, run: ScoredRunView, workspace: Path, folder: Path) -> Score:
    app = folder / "app"
    try:
        remove_tree(folder)
        folder.mkdir(parents=True)
        copy_tree(workspace, app)
        return replace(scorer.score(run, app), evaluated_ref=run.workspace_ref)
    except OSError as error:
        return replace(invalid(f"scorer: {error}"), evaluated_ref=run.workspace_ref)
    finally:
        for part in (app, folder / "scratch"):
            remove_tree(part)


def check_scoring(config: ScoringConfig) -> None:
    """Raises ``ConfigError`` for a scorer that cannot work, before anything is started."""
    if isinstance(config, FunctionScoring):
        check_function(config)
    elif isinstance(config, JudgeScoring) and config.api_key_env and not judge_key(config):
        raise ConfigError(
            f"rollout.scoring.api_key_env: the environment variable {config.api_key_env} is not set.",
            "Set it to the judge's key where the job is started; leave api_key_env empty for a server without keys.",
        )


def judge_key(config: ScoringConfig) -> str:
    """The judge's key, from the environment of this process; empty if there is none."""
    return os.environ.get(config.api_key_env, "") if isinstance(config, JudgeScoring) and config.api_key_env else ""


def judge_spending(config: ScoringConfig, job_dir: Path) -> dict[str, Any] | None:
    """What a job has spent on its judge, US dollars, and how many calls it could not pay; None without a judge."""
    if not isinstance(config, JudgeScoring):
        return None
    try:
        ledger = Budget(job_dir / BUDGET_FILE, config.max_cost_usd).read()
    except (OSError, ValueError, TypeError):  # the scorers say so too
        return None
    return {
        "spent_usd": ledger.total_usd,
        "max_cost_usd": config.max_cost_usd,
        "num_calls": ledger.num_calls,
        "num_refused": ledger.num_refused,
    }


def describe(config: ScoringConfig) -> str:
    """The scorer in a few words, for people."""
    match config:
        case HarborScoring():
            return "tests/test.sh of each task"
        case FunctionScoring():
            return f"function {config.path}"
        case JudgeScoring():
            return f"judge {config.model} at {config.base_url}, at most ${config.max_cost_usd:g}"
