from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from services.common.errors import EngineError
from services.common.remote import cause_of, one_line


def wrapped(error: Exception) -> RayTaskError:
    """As ``ray.get`` raises it."""
    return RayTaskError("start", "Traceback:\n  ...\nEngineError: no memory", error).as_instanceof_cause()


def test_a_remote_error_is_its_cause_without_the_traceback() -> None:
    error = wrapped(EngineError("no memory.", "Lower kv_cache_bytes."))
    assert isinstance(cause_of(error), EngineError)
    assert one_line(error) == "no memory. Lower kv_cache_bytes."
    assert one_line(wrapped(OSError("disk is full\nreally"))) == "OSError: disk is full"


def test_a_constructor_that_failed_tells_its_own_error() -> None:
    text = "ray::Shard.__init__()\n  File ...\nservices.common.errors.ConfigError: no chat template."
    cause = RayTaskError("__init__", text, ValueError("no chat template."))
    cause._actor_id = "a" * 32
    assert one_line(ActorDiedError(cause)) == "no chat template."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineError("it fell\nover.", "Lift it."), "it fell over. Lift it."),
        (TimeoutError(), "TimeoutError"),
        (ActorUnavailableError("it restarts", b"x" * 16), "is unavailable: it restarts"),
    ],
)
def test_every_error_fits_one_line(error: Exception, expected: str) -> None:
    assert expected in one_line(error)
    assert "\n" not in one_line(error)
