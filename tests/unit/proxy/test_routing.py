from __future__ import annotations

import pytest

from services.common.types import CellRoute, CellState, RouteTable
from services.proxy.routing import EMPTY_TABLE, accept, choose_cell

SERVING, UPDATING, STALE = CellState.SERVING, CellState.UPDATING, CellState.STALE


def cell(name: str, state: CellState = SERVING, version: int = 1, free_slots: int = 4) -> CellRoute:
    return CellRoute(name, f"job/{name}", state, version, free_slots)


def table(*cells: CellRoute, epoch: int = 1, **affinity: str) -> RouteTable:
    return RouteTable(epoch, cells, tuple(affinity.items()))


@pytest.mark.parametrize(
    ("routes", "excluded", "expected"),
    [
        (table(cell("a"), cell("b", free_slots=9)), (), "b"),
        (table(cell("a"), cell("b", version=2)), (), "b"),
        (table(cell("b"), cell("a")), (), "a"),
        (table(cell("a"), cell("b", free_slots=9), run="a"), (), "a"),
        (table(cell("a", free_slots=-3), cell("b", free_slots=9), run="a"), (), "a"),
        (table(cell("a", free_slots=-3), cell("b", free_slots=-1)), (), "b"),
        (table(cell("a", UPDATING), cell("b"), run="a"), (), "b"),
        (table(cell("a", STALE, version=9), cell("b")), (), "b"),
        (table(cell("a"), cell("b"), run="a"), ("a",), "b"),
        (table(cell("a"), cell("b"), other="b"), (), "a"),
    ],
)
def test_choice(routes: RouteTable, excluded: tuple[str, ...], expected: str) -> None:
    choice = choose_cell(routes, "run", excluded)
    assert choice.route is not None
    assert choice.route.cell_id == expected


@pytest.mark.parametrize("state", [UPDATING, STALE])
def test_stale_or_updating_cell_gets_no_traffic(state: CellState) -> None:
    choice = choose_cell(table(cell("a", state), run="a"), "run")
    assert choice.route is None
    assert "no cell is serving" in choice.reason


def test_reason_tells_failed_cells_from_none() -> None:
    assert "failed this call" in choose_cell(table(cell("a")), "run", {"a"}).reason
    assert choose_cell(EMPTY_TABLE, "run").route is None


def test_only_a_newer_epoch_replaces_a_table() -> None:
    old, new = table(epoch=3), table(cell("a"), epoch=4)
    assert accept(old, new) is new
    assert accept(new, old) is new
    assert accept(old, table(cell("b"), epoch=3)) is old
