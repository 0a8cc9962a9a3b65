"""The error tree. Each error says what happened and, in ``hint``, what the user can do next.

TidegateError
├── ConfigError      the configuration or an input file is wrong; nothing was started     (exit code 2)
├── MachineError     this machine lacks something: a package, a sandbox, a port, memory   (exit code 3)
├── JobError         a started job could not go on                                        (exit code 1)
│   ├── EngineError      a rollout engine failed or ran out of memory
│   ├── WeightsError     published weights did not arrive as they were sent
│   ├── TrainingError    a training rank failed
│   └── HarnessError     the harness or its sandbox could not be started at all
├── AccessError      a missing, wrong or expired token or run key
├── NotFoundError    no such job, cell, run or call
└── InvariantError   a state machine met a transition that must not exist; carries its recent history

A failed *run* is not an error: it is data (``services.trajectory.outcome``).
"""

from __future__ import annotations


class TidegateError(Exception):
    """Base of all errors that Tidegate raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both in args, so that the error survives pickling between actors
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class ConfigError(TidegateError):
    """The configuration or an input file is wrong; nothing was started."""

    exit_code = 2


class MachineError(TidegateError):
    """This machine lacks something that the job needs."""

    exit_code = 3


class JobError(TidegateError):
    """A started job could not go on."""


class EngineError(JobError):
    """A rollout engine failed or ran out of memory."""


class WeightsError(JobError):
    """Published weights did not arrive as they were sent."""


class TrainingError(JobError):
    """A training rank failed."""


class HarnessError(JobError):
    """The harness or its sandbox could not be started at all."""


class AccessError(TidegateError):
    """A missing, wrong or expired token or run key."""


class NotFoundError(TidegateError):
    """No such job, cell, run or call."""


class InvariantError(TidegateError):
    """A transition that must not exist; ``hint`` holds the recent history of the state machine."""
