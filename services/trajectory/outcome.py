"""How a run can end, and what each ending means for scoring and training. One table, in code and in docs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Every way a run can end."""

    FINISHED = "finished"
    """The harness ended by itself with exit code 0."""
    HARNESS_TIMEOUT = "harness_timeout"
    """The harness reached its own time limit and was stopped; its work is kept and scored."""
    CONTEXT_LIMIT = "context_limit"
    """The last call no longer fitted the model's context; the work is kept and scored."""
    HARNESS_CRASH = "harness_crash"
    """The harness ended with another exit code or a signal."""
    OUT_OF_MEMORY = "out_of_memory"
    """The sandbox reached its memory or process limit and was killed."""
    SETUP_FAILURE = "setup_failure"
    """Workspace, sandbox or harness could not be started."""
    ENGINE_LOSS = "engine_loss"
    """No cell could finish a call of the run: infrastructure, never the policy's fault."""
    RUNNER_LOSS = "runner_loss"
    """The process that drove the harness, or its node, died."""
    VERIFIER_FAILURE = "verifier_failure"
    """The verifier ended without a valid reward; the work stays unscored, which is not a zero."""
    VERIFIER_TIMEOUT = "verifier_timeout"
    """The verifier reached its own time limit."""
    CANCELLED = "cancelled"
    """The job was cancelled, or no longer needed the run."""


@dataclass(frozen=True, slots=True)
class OutcomeRule:
    """What follows from an outcome."""

    scored: bool
    """The verifier runs on the salvaged workspace (for verifier outcomes: it ran, without a valid reward)."""
    trained: bool
    """Its tokens may become targets, given a valid reward."""
    counted: bool
    """Its reward counts in the group's baseline, given a valid reward."""
    max_retries: int
    """Further attempts of the same run after this outcome; they change none of the counters d, p, f."""
    meaning: str

    def is_retried(self, attempt: int) -> bool:
        """Whether a run has a further attempt behind this one. (A scored outcome was retried where it was scored.)"""
        return not self.scored and attempt < self.max_retries


OUTCOME_TABLE: dict[Outcome, OutcomeRule] = {
    Outcome.FINISHED: OutcomeRule(True, True, True, 0, "scored and trained"),
    Outcome.HARNESS_TIMEOUT: OutcomeRule(True, True, True, 0, "work kept, scored and trained"),
    Outcome.CONTEXT_LIMIT: OutcomeRule(True, True, True, 0, "work kept, scored and trained"),
    Outcome.HARNESS_CRASH: OutcomeRule(True, True, True, 0, "work kept, scored and trained"),
    Outcome.OUT_OF_MEMORY: OutcomeRule(True, True, True, 0, "the policy's commands filled it: scored and trained"),
    Outcome.SETUP_FAILURE: OutcomeRule(False, False, False, 2, "retried, then dropped"),
    Outcome.ENGINE_LOSS: OutcomeRule(False, False, False, 2, "retried, then dropped"),
    Outcome.RUNNER_LOSS: OutcomeRule(False, False, False, 2, "retried, then dropped"),
    Outcome.VERIFIER_FAILURE: OutcomeRule(True, False, False, 1, "evaluated again on the kept workspace, then dropped"),
    Outcome.VERIFIER_TIMEOUT: OutcomeRule(True, False, False, 1, "evaluated again on the kept workspace, then dropped"),
    Outcome.CANCELLED: OutcomeRule(False, False, False, 0, "dropped"),
}
"""For the verifier outcomes the retry repeats the evaluation inside the runner, not the run."""
