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
    WALL_TIMEOUT = "wall_timeout"
    """The attempt as a whole (all that comes before its scoring) reached its limit while the harness ran."""
    CONTEXT_LIMIT = "context_limit"
    """The last call no longer fitted the model's context; the work is kept and scored."""
    TURN_LIMIT = "turn_limit"
    """The last call was refused, for the run had made as many as the job allows; the work is kept and scored."""
    HARNESS_CRASH = "harness_crash"
    """The harness ended with another exit code or a signal."""
    OUT_OF_MEMORY = "out_of_memory"
    """The sandbox reached its memory or process limit and was killed."""
    SANDBOX_DEATH = "sandbox_death"
    """The sandbox's own processes were killed from outside: infrastructure, never the policy's fault."""
    SETUP_FAILURE = "setup_failure"
    """Workspace, sandbox or harness could not be started."""
    ENGINE_LOSS = "engine_loss"
    """No cell could finish a call of the run: infrastructure, never the policy's fault."""
    RUNNER_LOSS = "runner_loss"
    """The process that drove the harness, or its node, died."""
    VERIFIER_FAILURE = "verifier_failure"
    """The scorer ended without a valid reward; the work stays unscored, which is not a zero."""
    VERIFIER_TIMEOUT = "verifier_timeout"
    """The scorer reached its own time limit."""
    CANCELLED = "cancelled"
    """The job was cancelled, or no longer needed the run."""


class CallTrouble(StrEnum):
    """Why an attempt's last call was not completed, where a harness's end may come of it."""

    CONTEXT_OVERFLOWED = "context_overflowed"
    """It no longer fitted the model's context."""
    TURN_LIMITED = "turn_limited"
    """It was one more than the job allows."""
    ENGINE_LOST = "engine_lost"
    """No cell could complete it."""


@dataclass(frozen=True, slots=True)
class OutcomeRule:
    """What follows from an outcome."""

    salvaged: bool
    """Transcript, logs and how it ended are on disk, the workspace is whole, before anything is scored or cleaned."""
    scored: bool
    """The scorer runs on the salvaged workspace (for verifier outcomes: it ran, without a valid reward)."""
    trained: bool
    """Its tokens may become targets, given a valid reward."""
    max_retries: int
    """Further attempts of the same run after this outcome; they change none of the counters d, p, f."""
    counted: bool
    """Its reward counts in the group's baseline, given a valid reward."""
    meaning: str

    def is_retried(self, attempt: int) -> bool:
        """Whether a run has a further attempt behind this one. (A scored outcome was retried where it was scored.)"""
        return not self.scored and attempt < self.max_retries


_KEPT = "work kept, scored and trained"
_LOST = "infrastructure: retried, then dropped"
_UNSCORED = "evaluated again on the kept workspace, then dropped: never a zero"
_YES, _NO = True, False

OUTCOME_TABLE: dict[Outcome, OutcomeRule] = {
    # salvaged, scored, trained, retries, counted, meaning
    Outcome.FINISHED: OutcomeRule(_YES, _YES, _YES, 0, _YES, "scored and trained"),
    Outcome.HARNESS_TIMEOUT: OutcomeRule(_YES, _YES, _YES, 0, _YES, _KEPT),
    Outcome.WALL_TIMEOUT: OutcomeRule(_YES, _YES, _YES, 0, _YES, _KEPT),
    Outcome.CONTEXT_LIMIT: OutcomeRule(_YES, _YES, _YES, 0, _YES, _KEPT),
    Outcome.TURN_LIMIT: OutcomeRule(_YES, _YES, _YES, 0, _YES, _KEPT),
    Outcome.HARNESS_CRASH: OutcomeRule(_YES, _YES, _YES, 0, _YES, _KEPT),
    Outcome.OUT_OF_MEMORY: OutcomeRule(
        _YES, _YES, _YES, 0, _YES, "the policy's commands filled it: work kept, scored and trained"
    ),
    Outcome.SANDBOX_DEATH: OutcomeRule(_YES, _NO, _NO, 2, _NO, _LOST),
    Outcome.SETUP_FAILURE: OutcomeRule(
        _NO, _NO, _NO, 2, _NO, "retried, then as `trajectory.setup_failure` says: dropped, or a placeholder of reward 0"
    ),
    Outcome.ENGINE_LOSS: OutcomeRule(_YES, _NO, _NO, 2, _NO, _LOST),
    Outcome.RUNNER_LOSS: OutcomeRule(_NO, _NO, _NO, 2, _NO, _LOST),
    Outcome.VERIFIER_FAILURE: OutcomeRule(_YES, _YES, _NO, 1, _NO, _UNSCORED),
    Outcome.VERIFIER_TIMEOUT: OutcomeRule(_YES, _YES, _NO, 1, _NO, _UNSCORED),
    Outcome.CANCELLED: OutcomeRule(_YES, _NO, _NO, 0, _NO, "ended at once and dropped"),
}
"""For the verifier outcomes the retry repeats the evaluation inside the runner, not the run."""
