"""What performs the scheduler's actions: on real cells in a cluster, on modelled ones in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.scheduler.actions import Action
from services.scheduler.events import Event
from services.trajectory.types import GroupResult, GroupSpec


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a job stands that goes on with a new performer: the scheduler's process died."""

    groups: tuple[GroupSpec, ...]
    """Unfinished, ready or in training; held-out ones included."""
    scored: tuple[GroupResult, ...]
    """Training groups that were scored since the step trained last."""
    attempts: tuple[tuple[str, int], ...]
    """(run id, attempt) of all that were not over. Others that still run are nobody's any more."""
    started: tuple[tuple[str, int], ...]
    """Those of them that were under way (``RunStarted``): a runner has them, or died too."""
    cells: tuple[str, ...]
    """Cells that were up."""
    training: tuple[str, ...]
    """Those of them that were in training."""


class Performer(Protocol):
    """Performs actions: on real cells in a cluster, on modelled ones in tests."""

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        """Perform one action. ``emit`` may be called any number of times, during the call or later, from any thread.

        Actions are performed concurrently, except that those on a group wait for its ``OpenGroup``. An exception
        becomes ``ActionFailed``. An action may be performed again, by a performer that was made anew, when the
        scheduler's process died before this call had returned; what is emitted after it returned can be lost so.
        """

    async def attend(self, emit: Callable[[Event], None]) -> None:
        """Emit what happens without an action: cells that join, die and come back. Cancelled with the scheduler."""

    async def recover(self, recovered: Recovered) -> None:
        """Called once, before anything else, on a performer of a job that goes on."""
