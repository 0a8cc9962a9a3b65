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
├── RequestError     a harness's request cannot be served as it is
│   ├── ContextLengthError   the prompt leaves no room for an answer
│   ├── TurnLimitError       the run has made the most model calls that the job allows
│   └── TemplateError        the model's chat template refuses the messages
├── RefusedError     a user's request would break an invariant of the scheduler; nothing was changed
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


class RequestError(TidegateError):
    """A harness's request cannot be served as it is; the harness gets its dialect's error."""


class ContextLengthError(RequestError):
    """The prompt leaves no room for one token of an answer."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, the model's context holds {max_model_len}.",
            "Raise rollout.engine.max_model_len, or let the harness keep its history shorter.",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int]]:
        return type(self), (self.num_prompt_tokens, self.max_model_len)


class TurnLimitError(RequestError):
    """The run has made the most model calls that the job allows."""

    def __init__(self, max_calls: int) -> None:
        super().__init__(
            f"this run has made {max_calls} model calls, the most that the job allows.",
            "Raise trajectory.max_calls, or let the harness end earlier.",
        )
        self.max_calls = max_calls

    def __reduce__(self) -> tuple[type[TurnLimitError], tuple[int]]:
        return type(self), (self.max_calls,)


class TemplateError(RequestError):
    """The model's chat template refuses the messages (their roles or their order)."""


class RefusedError(TidegateError):
    """A user's request would break an invariant of the scheduler; nothing was changed."""


class InvariantError(TidegateError):
    """A transition that must not exist; ``hint`` holds the recent history of the state machine."""
