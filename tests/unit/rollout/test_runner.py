"""Every way a harness can end has an outcome."""

from __future__ import annotations

import pytest

from services.rollout.runner import outcome_of
from services.rollout.sandbox_command import ExitReason, SandboxExit
from services.trajectory.outcome import Outcome


@pytest.mark.parametrize(
    ("reason", "exit_code", "outcome"),
    [
        (ExitReason.EXITED, 0, Outcome.FINISHED),
        (ExitReason.EXITED, 1, Outcome.HARNESS_CRASH),
        (ExitReason.EXITED, 137, Outcome.HARNESS_CRASH),
        (ExitReason.TIMEOUT, None, Outcome.HARNESS_TIMEOUT),
        (ExitReason.TOTAL_TIMEOUT, None, Outcome.WALL_TIMEOUT),
        (ExitReason.DIED, None, Outcome.SANDBOX_DEATH),
        (ExitReason.MEMORY, None, Outcome.OUT_OF_MEMORY),
        (ExitReason.PROCESSES, None, Outcome.OUT_OF_MEMORY),
        (ExitReason.DISK, None, Outcome.OUT_OF_MEMORY),
        (ExitReason.CANCELLED, None, Outcome.CANCELLED),
        (ExitReason.NOT_STARTED, None, Outcome.SETUP_FAILURE),
    ],
)
def test_an_end_has_its_outcome(reason: ExitReason, exit_code: int | None, outcome: Outcome) -> None:
    assert outcome_of(SandboxExit(reason, exit_code, 1.0, 0, "", b"", b"")) is outcome


def test_no_end_is_left_out() -> None:
    for reason in ExitReason:
        assert outcome_of(SandboxExit(reason, 0, 1.0, 0, "", b"", b"")) in Outcome
