"""What went wrong in another process, freed of Ray's wrapping."""

from __future__ import annotations

import re

from ray.exceptions import RayActorError

from services.common.errors import TidegateError

_OWN_ERROR = re.compile(r"^services\.common\.errors\.\w+: ")


def cause_of(error: BaseException) -> BaseException:
    """What a remote method raised. An error that is not of another process is its own cause."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def one_line(error: BaseException) -> str:
    """An error for people: one line, without a traceback.

    Ray puts the traceback of a constructor that failed before the error itself, and explanations behind its own.
    """
    cause = cause_of(error)
    if isinstance(cause, TidegateError):
        return " ".join(str(cause).split())
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    if isinstance(cause, RayActorError):
        return _OWN_ERROR.sub("", lines[-1]) if cause.actor_init_failed else lines[0]
    return f"{type(cause).__name__}: {lines[0]}"
