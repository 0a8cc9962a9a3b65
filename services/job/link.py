"""The driver's line to its scheduler, which may die and come back: Ray makes the actor again, ``start`` goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from services.common.errors import JobError, RefusedError
from services.common.remote import one_line
from services.scheduler.events import Event

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 120.0
START_TIMEOUT_S = 600.0
RECOVERY_TIMEOUT_S = 180.0
"""How long Ray may take to make the scheduler's actor again."""
_POLL_S = 0.5
_RESUME_HINT = "`tidegate train CONFIG --resume` goes on from the job's last checkpoint."


def answer(reference: Any, who: str, timeout_s: float) -> Any:
    """What an actor answers. Raises ``JobError`` if it does not in time, and what it raised."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise JobError(
            f"{who} gave no answer within {timeout_s:g} s.", "See its log in Ray's session folder."
        ) from None


class SchedulerLink:
    """Asks the scheduler; one that died is started again as soon as Ray has made it again.

    Raises ``JobError`` when it does not come back, or cannot go on from its journal.
    """

    def __init__(
        self,
        actor: Any,
        note: Callable[[str], None],
        get: Callable[[Any, str, float], Any] = answer,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``note`` tells people; ``get`` and ``sleep`` are those of Ray and the clock."""
        self._actor = actor
        self._note = note
        self._get = get
        self._sleep = sleep
        self._cancel_reason = ""

    def start(self) -> str:
        """Start the scheduler; returns the address of its gRPC server."""
        address: str = self._get(self._actor.start.remote(), "the scheduler", START_TIMEOUT_S)
        return address

    def wait_done(self, timeout_s: float) -> dict[str, Any]:
        """The job's snapshot with ``done``, at the latest after ``timeout_s`` (later if the scheduler dies)."""
        while True:
            try:
                reference = self._actor.wait_done.remote(timeout_s)
                snapshot: dict[str, Any] = self._get(reference, "the scheduler", timeout_s + ANSWER_TIMEOUT_S)
                return snapshot
            except (RayActorError, RefusedError) as error:  # it died; or it died, and is there again
                self._recover(error)

    def cancel(self, reason: str) -> None:
        """End the job in good order; said again to a scheduler that comes back."""
        self._cancel_reason = reason
        self._actor.cancel.remote(reason)

    def post(self, event: Event) -> None:
        """Hand an event over; it is lost if the scheduler is away."""
        self._actor.post.remote(event)

    def _recover(self, error: Exception) -> None:
        logger.info("the scheduler died: %s", one_line(error))
        self._note("the scheduler died; runs go on meanwhile")
        deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            try:
                self.start()
                break
            except RayActorError as away:
                if isinstance(away, ActorDiedError) or time.monotonic() >= deadline_s:
                    raise JobError(
                        f"the scheduler died and does not come back: {one_line(away)}.", _RESUME_HINT
                    ) from away
                self._sleep(_POLL_S)
        self._note("the scheduler goes on from its journal")
        if self._cancel_reason:
            self._actor.cancel.remote(self._cancel_reason)
