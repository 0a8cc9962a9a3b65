"""What the rollout side of a cell may do: a pure state machine over SERVING, UPDATING, STALE.

```
          UpdateStarted            UpdateVerified(version)
 STALE ----------------> UPDATING -----------------------> SERVING(version)
   ^  <-- UpdateFailed --   |  ^                               |  |
   |                        |  +--------- UpdateStarted -------+  |
   +----- EngineDied -------+------------- EngineDied ------------+
```

A cell starts STALE and serves only weights that were verified. STALE and UPDATING never generate: calls that are in
flight wait while it is UPDATING and end when it becomes STALE. ``admitting`` is apart from the state: a drained
cell may hold current weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.errors import InvariantError
from services.common.types import CellState

CONTEXT_QUANTILE = 0.9
"""Slots are what the KV pool holds at this quantile of the context lengths seen."""
MIN_CONTEXTS_SEEN = 16
"""Before this many contexts were seen, the configured number of slots holds."""


@dataclass(frozen=True, slots=True)
class UpdateStarted:
    """Weights of ``version`` are about to be pulled."""

    version: int


@dataclass(frozen=True, slots=True)
class UpdateVerified:
    """The weights were loaded, read back and answered the canary."""

    version: int


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    """The weights in the engine are not what was published."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's process is gone. Nothing leads out of this."""

    reason: str


@dataclass(frozen=True, slots=True)
class AdmissionOpened:
    """New calls are welcome."""


@dataclass(frozen=True, slots=True)
class AdmissionClosed:
    """No new calls: the cell is draining or drained."""


Event = UpdateStarted | UpdateVerified | UpdateFailed | EngineDied | AdmissionOpened | AdmissionClosed


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a cell stands."""

    state: CellState = CellState.STALE
    version: int = -1
    """Version of the weights verified last; -1 before the first."""
    updating_to: int | None = None
    """Version of the update in progress."""
    admitting: bool = True
    dead: bool = False
    reason: str = "no weights were published to this cell yet"
    """Why the cell is STALE, empty otherwise."""
    story: tuple[str, ...] = ()
    """The last few events, for the error of an impossible transition."""

    @property
    def may_generate(self) -> bool:
        return self.state is CellState.SERVING

    @property
    def takes_calls(self) -> bool:
        """Whether a new call may come in; while UPDATING it waits inside."""
        return self.admitting and self.state is not CellState.STALE

    @property
    def calls_wait(self) -> bool:
        """Whether a call that cannot generate now should wait (else it ends here and goes on elsewhere)."""
        return self.state is CellState.UPDATING


def advance(standing: Standing, event: Event) -> Standing:
    """The standing after an event. Raises ``InvariantError`` for an event that cannot happen there."""
    story = (*standing.story[-7:], f"{standing.state.value}: {event}")
    if standing.dead and not isinstance(event, EngineDied | AdmissionOpened | AdmissionClosed):
        raise InvariantError(f"{type(event).__name__} on a dead engine", " | ".join(story))
    after = replace(standing, story=story)
    match event:
        case UpdateStarted(version=version) if standing.state is not CellState.UPDATING:
            return replace(after, state=CellState.UPDATING, updating_to=version, reason="")
        case UpdateVerified(version=version) if standing.updating_to == version:
            return replace(after, state=CellState.SERVING, version=version, updating_to=None, reason="")
        case UpdateFailed(reason=reason) if standing.state is CellState.UPDATING:
            return replace(after, state=CellState.STALE, updating_to=None, reason=reason)
        case EngineDied(reason=reason):
            first_reason = standing.reason if standing.dead else reason
            return replace(after, state=CellState.STALE, updating_to=None, dead=True, reason=first_reason)
        case AdmissionOpened():
            return replace(after, admitting=True)
        case AdmissionClosed():
            return replace(after, admitting=False)
    raise InvariantError(f"{type(event).__name__} while {standing.state.value}", " | ".join(story))


def count_slots(num_configured: int, num_kv_tokens: int, context_lengths: Sequence[int]) -> int:
    """Runs that a cell can serve at once: the configured number, or what its KV pool holds if that is less.

    ``context_lengths``: tokens (prompt and answer) of recent calls. An estimate that is too high costs preemptions
    in the engine, one that is too low leaves it idle; so little evidence counts for the configured number.
    """
    if len(context_lengths) < MIN_CONTEXTS_SEEN:
        return num_configured
    ordered = sorted(context_lengths)
    typical = max(ordered[min(int(len(ordered) * CONTEXT_QUANTILE), len(ordered) - 1)], 1)
    return max(1, min(num_configured, num_kv_tokens // typical))
