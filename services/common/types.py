"""Types that several services share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.common.packed import Packed


class CellRole(StrEnum):
    """What a cell does with its accelerators."""

    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"
    DOWN = "down"


class CellKind(StrEnum):
    """What a cell is for."""

    CORE = "core"
    """Holds the authoritative weights and the optimizer state; it is the first to train and cannot be drained."""
    SATELLITE = "satellite"
    """Moves between rollout and training, behind the core."""
    STANDALONE = "standalone"
    """Has no training side: it serves rollout always."""


class CellState(StrEnum):
    """What the rollout side of a cell can do for a call. Only SERVING gets traffic."""

    SERVING = "serving"
    UPDATING = "updating"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class VersionSpan(Packed):
    """``num_tokens`` consecutive sampled tokens that were made by weights of ``version``."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CellRoute:
    """A row of the route table: where a call can go."""

    cell_id: str
    actor_name: str
    state: CellState
    version: int
    free_slots: int
    """May be negative when affinity sent more runs to a cell than it has slots."""


@dataclass(frozen=True, slots=True)
class RouteTable:
    """What a proxy replica knows of the cells. A table with a higher epoch replaces a lower one."""

    epoch: int
    cells: tuple[CellRoute, ...]
    affinity: tuple[tuple[str, str], ...] = ()
    """(run id, cell id): where the KV of a run lies."""
