"""Which cell serves a call. Pure: a route table in, a choice and its reason out."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from services.common.types import CellRoute, CellState, RouteTable

EMPTY_TABLE = RouteTable(epoch=-1, cells=())
"""What a proxy knows before the scheduler's first table."""


class Choice(NamedTuple):
    """A cell, or None, and why."""

    route: CellRoute | None
    reason: str


def choose_cell(table: RouteTable, run_id: str, excluded: Collection[str] = ()) -> Choice:
    """The cell for a run's call. ``excluded``: cells that already failed this call.

    Only SERVING cells get traffic. The cell that holds the run's KV comes first; then the most free slots, ties
    by the higher version, then by cell id. A cell without free slots is still chosen if there is no better one:
    its engine queues.
    """
    serving = {cell.cell_id: cell for cell in table.cells if cell.state is CellState.SERVING}
    usable = [cell for cell in serving.values() if cell.cell_id not in excluded]
    if not usable:
        reason = "every serving cell failed this call" if serving else "no cell is serving"
        return Choice(None, f"{reason} (epoch {table.epoch}, {len(table.cells)} cells)")
    home = next((cell_id for run, cell_id in table.affinity if run == run_id), None)
    for cell in usable:
        if cell.cell_id == home:
            return Choice(cell, "holds the run's KV")
    best = min(usable, key=lambda cell: (-cell.free_slots, -cell.version, cell.cell_id))
    return Choice(best, "most free slots" if home is None else f"most free slots; {home} is not usable")


def accept(current: RouteTable, offered: RouteTable) -> RouteTable:
    """The table to keep: a higher epoch replaces a lower one, anything else is late news."""
    return offered if offered.epoch > current.epoch else current
