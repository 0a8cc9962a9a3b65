"""What performs the scheduler's actions: on real cells in a cluster, on modelled ones in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.scheduler.actions import Action
from services.scheduler.events import Event


class Performer(Protocol):
    """Performs actions: on real cells in a cluster, on modelled ones in tests."""

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        """Perform one action. ``emit`` may be called any number of times, during the call or later, from any thread.

        Actions are performed concurrently, except that those on a group wait for its ``OpenGroup``. An exception
        becomes ``ActionFailed``.
        """

    async def attend(self, emit: Callable[[Event], None]) -> None:
        """Emit what happens without an action: cells that join, die and come back. Cancelled with the scheduler."""
