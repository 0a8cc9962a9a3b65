"""The driver's line to a scheduler that dies: start it again, cancel it again, or end with a clear reason."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from services.common.errors import JobError, RefusedError
from services.common.remote import one_line
from services.job import link as link_module
from services.job.link import SchedulerLink


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("it restarts", b"x" * 16)


def not_started() -> RayTaskError:
    return RayTaskError("wait_done", "Traceback ...", RefusedError("not started yet.")).as_instanceof_cause()


class Method:
    def __init__(self, name: str, said: list[Any]) -> None:
        self._name, self._said = name, said

    def remote(self, *arguments: Any) -> str:
        self._said.append((self._name, *arguments))
        return self._name


class Scheduler:
    """Each ``get`` takes the next of ``answers``, as (method, answer)."""

    def __init__(self, *answers: tuple[str, Any]) -> None:
        self.answers = list(answers)
        self.said: list[Any] = []
        self.notes: list[str] = []
        self.link = SchedulerLink(self, self.notes.append, self.get, lambda seconds: None)

    def __getattr__(self, name: str) -> Method:
        return Method(name, self.said)

    def get(self, reference: str, who: str, timeout_s: float) -> Any:
        expected, value = self.answers.pop(0)
        assert reference == expected
        if isinstance(value, BaseException):
            raise value
        return value

    def calls(self) -> list[str]:
        return [name for name, *_ in self.said]


def test_a_scheduler_that_died_is_started_again_and_asked_again() -> None:
    scheduler = Scheduler(
        ("wait_done", unavailable()),
        ("start", unavailable()),
        ("start", unavailable()),
        ("start", "127.0.0.1:1"),
        ("wait_done", {"step": 3, "done": True}),
    )
    assert scheduler.link.wait_done(1.0) == {"step": 3, "done": True}
    assert scheduler.answers == []
    assert "goes on" in scheduler.notes[-1]
    assert "cancel" not in scheduler.calls()


def test_a_scheduler_that_was_made_again_unnoticed_is_started() -> None:
    scheduler = Scheduler(("wait_done", not_started()), ("start", "127.0.0.1:1"), ("wait_done", {"done": False}))
    assert scheduler.link.wait_done(1.0) == {"done": False}


def test_a_scheduler_may_die_again_while_it_starts() -> None:
    scheduler = Scheduler(
        ("wait_done", unavailable()),
        ("start", "127.0.0.1:1"),
        ("wait_done", unavailable()),
        ("start", "127.0.0.1:1"),
        ("wait_done", {"done": False}),
    )
    assert scheduler.link.wait_done(1.0) == {"done": False}


def test_a_job_that_is_being_cancelled_is_cancelled_again() -> None:
    scheduler = Scheduler(("wait_done", unavailable()), ("start", "127.0.0.1:1"), ("wait_done", {"done": True}))
    scheduler.link.cancel("enough")
    scheduler.link.wait_done(1.0)
    assert [one for one in scheduler.said if one[0] == "cancel"] == [("cancel", "enough")] * 2


def test_a_scheduler_that_does_not_come_back_ends_the_job_and_says_how_to_go_on() -> None:
    scheduler = Scheduler(("wait_done", unavailable()), ("start", ActorDiedError()))
    with pytest.raises(JobError, match="--resume"):
        scheduler.link.wait_done(1.0)


def test_a_scheduler_that_is_away_for_too_long_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "RECOVERY_TIMEOUT_S", 0.0)
    scheduler = Scheduler(("wait_done", unavailable()), ("start", unavailable()))
    with pytest.raises(JobError, match="does not come back"):
        scheduler.link.wait_done(1.0)


def test_a_journal_that_cannot_be_gone_on_from_ends_the_job_with_that_reason() -> None:
    why = RayTaskError("start", "Traceback ...", JobError("record 7 differs.")).as_instanceof_cause()
    scheduler = Scheduler(("wait_done", unavailable()), ("start", why))
    with pytest.raises(JobError) as caught:
        scheduler.link.wait_done(1.0)
    assert one_line(caught.value) == "record 7 differs."
