"""The cells of a job: roles, states, who occupies which slot, and the route table made of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from services.common.errors import InvariantError
from services.common.ids import CellId, JobId
from services.common.names import rollout_actor
from services.common.types import CellKind, CellRole, CellRoute, CellState, RouteTable
from services.scheduler import policy
from services.scheduler.options import JobOptions
from services.scheduler.types import CellView

ROLE_TRANSITIONS: dict[CellRole, frozenset[CellRole]] = {
    CellRole.ROLLOUT: frozenset({CellRole.TO_TRAIN, CellRole.DOWN}),
    # back to rollout: the switch failed; the cell is stale until it was updated again
    CellRole.TO_TRAIN: frozenset({CellRole.TRAIN, CellRole.ROLLOUT, CellRole.DOWN}),
    CellRole.TRAIN: frozenset({CellRole.TO_ROLLOUT, CellRole.DOWN}),
    CellRole.TO_ROLLOUT: frozenset({CellRole.ROLLOUT, CellRole.DOWN}),
    # to train: the core's rollout side came back in the middle of a burst
    CellRole.DOWN: frozenset({CellRole.ROLLOUT, CellRole.TRAIN}),
}
"""Every change of role that may happen. (For the core, DOWN means that its rollout side is gone; it can train.)"""

_STALE_ENTRIES_PER_CELL = 8


@dataclass(slots=True, eq=False)
class Cell:
    """One cell. ``runs`` are those whose calls go there. Its state changes through its methods only."""

    table: CellTable
    cell_id: str
    index: int
    """Position in the switching order; the core's is -1."""
    slots: int
    kind: CellKind
    role: CellRole = CellRole.ROLLOUT
    state: CellState = CellState.STALE
    version: int = -1
    reason: str = "no weights yet"
    runs: dict[str, None] = field(default_factory=dict)
    is_draining: bool = False
    """A user wants it quiet."""
    is_held: bool = False
    """It came (back) to rollout inside a burst: it stays there until the burst ends."""
    may_return: bool = False
    """While it is down: whether it is being restarted."""
    num_update_attempts: int = 0
    """Weight updates since it last served."""
    num_switch_failures: int = 0
    num_late_answers: int = 0
    """Switches that were under way when the cell was lost: an answer to them may still come."""

    @property
    def is_core(self) -> bool:
        return self.kind is CellKind.CORE

    @property
    def is_live(self) -> bool:
        return self.role is not CellRole.DOWN

    @property
    def in_transition(self) -> bool:
        return self.role in (CellRole.TO_TRAIN, CellRole.TO_ROLLOUT)

    @property
    def is_serving(self) -> bool:
        """It may take runs."""
        return self.role is CellRole.ROLLOUT and self.state is CellState.SERVING and not self.is_draining

    @property
    def rollout_slots(self) -> int:
        """Its part of C_R: an update is short and keeps its calls, a stale or draining cell serves nobody."""
        serves = self.role is CellRole.ROLLOUT and self.state is not CellState.STALE and not self.is_draining
        return self.slots if serves else 0

    @property
    def is_repairable(self) -> bool:
        """A weight update may make it serve (again)."""
        return self.is_live and not self.is_draining and self.num_update_attempts < JobOptions.MAX_UPDATE_ATTEMPTS

    @property
    def can_serve(self) -> bool:
        """It serves, or will without anything being done for it but a switch or an update."""
        return self.is_live and not self.is_draining and (self.state is not CellState.STALE or self.is_repairable)

    @property
    def can_train(self) -> bool:
        """It belongs to the switching order now: core first, then satellites."""
        return self.is_live and not self.is_draining and self.kind is not CellKind.STANDALONE

    def move_to(self, role: CellRole) -> None:
        """Change the role, along ``ROLE_TRANSITIONS``."""
        if role not in ROLE_TRANSITIONS[self.role]:
            raise InvariantError(f"{self.cell_id} cannot go from {self.role} to {role}.")
        self.role = role
        self.table.changed()

    def mark_stale(self, reason: str) -> None:
        self.state, self.reason = CellState.STALE, reason
        self.table.changed()

    def mark_updating(self, version: int) -> None:
        self.state, self.reason = CellState.UPDATING, f"updating to version {version}"
        self.table.changed()

    def mark_serving(self, version: int) -> None:
        self.state, self.version, self.reason, self.num_update_attempts = CellState.SERVING, version, "", 0
        self.table.changed()

    def note_update_attempts(self, number: int) -> None:
        self.num_update_attempts = number
        self.table.changed()

    def set_slots(self, slots: int) -> None:
        self.slots = slots
        self.table.changed()

    def set_draining(self, is_draining: bool) -> None:
        self.is_draining = is_draining
        self.table.changed()

    def view(self) -> CellView:
        return CellView(
            self.cell_id,
            self.role,
            self.state,
            self.version,
            self.slots,
            len(self.runs),
            self.kind,
            self.is_draining,
            self.reason,
        )


class CellTable:
    """All cells that were ever known, and the placement of running runs on them.

    What follows from roles and states is computed once after each change of them (``functools.cached_property``);
    a placement costs O(log cells).
    """

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id
        self._cells: dict[str, Cell] = {}
        self._cell_of_run: dict[str, Cell] = {}
        self._homeless: dict[str, None] = {}
        """Running runs without a cell; their calls wait at the proxy."""
        self._epoch = 1
        self._table: RouteTable | None = None
        self._heap: list[tuple[tuple[int, int], str]] | None = None
        """Serving cells by preference; entries that are out of date are dropped when they are met."""

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    # -- what follows from roles and states --

    @cached_property
    def core(self) -> Cell | None:
        return next((cell for cell in self if cell.is_core), None)

    @cached_property
    def live(self) -> tuple[Cell, ...]:
        """In the order of publication: the core last."""
        return tuple(sorted((cell for cell in self if cell.is_live), key=lambda cell: (cell.is_core, cell.index)))

    @cached_property
    def rollout_slots(self) -> int:
        """C_R."""
        return sum(cell.rollout_slots for cell in self)

    @cached_property
    def switching_order(self) -> tuple[Cell, ...]:
        """Live, undrained cells that have a training side: the core, then satellites by index."""
        return tuple(sorted((cell for cell in self if cell.can_train), key=lambda cell: cell.index))

    @cached_property
    def in_transition(self) -> bool:
        return any(cell.in_transition for cell in self)

    @cached_property
    def leaving(self) -> tuple[Cell, ...]:
        """Cells on their way to training."""
        return tuple(cell for cell in self if cell.role is CellRole.TO_TRAIN)

    @cached_property
    def stale(self) -> tuple[Cell, ...]:
        """Cells in rollout that cannot serve without new weights, in the order of publication."""
        return tuple(cell for cell in self.live if cell.role is CellRole.ROLLOUT and cell.state is CellState.STALE)

    @cached_property
    def to_be_returned(self) -> tuple[Cell, ...]:
        """Drained cells in training."""
        return tuple(cell for cell in self if cell.is_draining and cell.role is CellRole.TRAIN)

    @cached_property
    def any_about_to_serve(self) -> bool:
        """A cell is on its way to rollout, or takes in weights there."""
        return any(
            cell.role is CellRole.TO_ROLLOUT or (cell.role is CellRole.ROLLOUT and not cell.is_serving)
            for cell in self
            if cell.can_serve
        )

    @cached_property
    def any_may_return(self) -> bool:
        return any(cell.may_return for cell in self)

    @cached_property
    def any_can_serve(self) -> bool:
        return any(cell.can_serve for cell in self)

    @property
    def in_training(self) -> tuple[Cell, ...]:
        """Cells in training or on their way there, in switching order."""
        return tuple(cell for cell in self.switching_order if cell.role in (CellRole.TRAIN, CellRole.TO_TRAIN))

    def find(self, cell_id: str) -> Cell | None:
        return self._cells.get(cell_id)

    def get(self, cell_id: str) -> Cell:
        if cell_id not in self._cells:
            raise InvariantError(f"{cell_id} never joined.")
        return self._cells[cell_id]

    def changed(self) -> None:
        """The role or state of a cell changed: a new epoch of the route table, and all that follows from them."""
        for name in _DERIVED:
            self.__dict__.pop(name, None)
        self._heap = None
        self._routes_changed()

    # -- cells that come and go --

    def join(self, cell_id: str, slots: int, kind: CellKind, role: CellRole, *, is_held: bool = False) -> Cell:
        """Add a cell, or take a lost one back; it is stale either way."""
        cell = self._cells.get(cell_id)
        if cell is None:
            index = -1 if kind is CellKind.CORE else sum(not known.is_core for known in self)
            cell = self._cells[cell_id] = Cell(self, cell_id, index, slots, kind, role)
        else:
            cell.move_to(role)
            if cell.kind is not kind:
                cell.kind, cell.index = kind, -1 if kind is CellKind.CORE else max(cell.index, 0)
            cell.slots, cell.version, cell.num_update_attempts, cell.may_return = slots, -1, 0, False
            cell.mark_stale("joined again, no weights yet")
        cell.is_held = is_held
        self.changed()
        return cell

    def lose(self, cell_id: str, reason: str, *, may_return: bool) -> None:
        """A cell is gone; its runs go to others. Also for a cell that never came up."""
        if cell_id not in self._cells:
            self.join(cell_id, slots=0, kind=CellKind.SATELLITE, role=CellRole.ROLLOUT)
        cell = self._cells[cell_id]
        if cell.in_transition:
            cell.num_late_answers += 1
        cell.move_to(CellRole.DOWN)
        cell.may_return = may_return
        cell.mark_stale(reason)
        self.move_runs_off(cell)

    # -- placement of runs --

    def cell_of(self, run_id: str) -> str | None:
        """Where the calls of a running run go; None while it waits for a cell."""
        cell = self._cell_of_run.get(run_id)
        return None if cell is None else cell.cell_id

    def choose(self) -> tuple[str | None, str]:
        """The cell for a run that is about to start: one with a free slot."""
        best = self._best()
        if best is None:
            return None, "no cell serves"
        num_free = best.slots - len(best.runs)
        if num_free <= 0:
            return None, f"no free slot: {best.cell_id} has {len(best.runs)} runs in {best.slots} slots"
        return best.cell_id, f"{best.cell_id} has most free slots: {num_free} of {best.slots}"

    def place(self, run_id: str, cell_id: str) -> None:
        cell = self._cells[cell_id]
        cell.runs[run_id] = None
        self._cell_of_run[run_id] = cell
        self._rank(cell)
        self._routes_changed()

    def release(self, run_id: str) -> None:
        """Free the slot of a run."""
        self._homeless.pop(run_id, None)
        cell = self._cell_of_run.pop(run_id, None)
        if cell is not None:
            del cell.runs[run_id]
            self._rank(cell)
            self._routes_changed()

    def move_runs_off(self, cell: Cell) -> None:
        """Route the runs of a cell to others (``house_runs``)."""
        for run_id in cell.runs:
            del self._cell_of_run[run_id]
            self._homeless[run_id] = None
        cell.runs.clear()
        self.changed()
        self.house_runs()

    def house_runs(self) -> None:
        """Give runs without a cell one. A cell is overfilled only if no other is about to serve."""
        for run_id in list(self._homeless):
            best = self._best()
            if best is None or (len(best.runs) >= best.slots and self.any_about_to_serve):
                return
            del self._homeless[run_id]
            self.place(run_id, best.cell_id)

    def _preference(self, cell: Cell) -> tuple[int, int]:
        """The smallest is taken first."""
        return policy.preference_of_cell(cell.slots - len(cell.runs), cell.index)

    def _rank(self, cell: Cell) -> None:
        if self._heap is not None and cell.is_serving:
            heapq.heappush(self._heap, (self._preference(cell), cell.cell_id))

    def _best(self) -> Cell | None:
        """The serving cell that the next run goes to."""
        if self._heap is None or len(self._heap) > _STALE_ENTRIES_PER_CELL * len(self._cells) + 64:
            self._heap = [(self._preference(cell), cell.cell_id) for cell in self if cell.is_serving]
            heapq.heapify(self._heap)
        while self._heap:
            preference, cell_id = self._heap[0]
            cell = self._cells[cell_id]
            if preference == self._preference(cell):
                return cell
            heapq.heappop(self._heap)
        return None

    # -- routes --

    def _routes_changed(self) -> None:
        self._epoch += 1
        self._table = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def routes(self) -> RouteTable:
        """Cells that take calls, and where each running run belongs."""
        if self._table is None:
            rows = tuple(
                CellRoute(
                    cell.cell_id,
                    rollout_actor(self._job_id, CellId(cell.cell_id)),
                    cell.state,
                    cell.version,
                    cell.slots - len(cell.runs),
                )
                for cell in self
                if cell.role is CellRole.ROLLOUT and not cell.is_draining
            )
            affinity = tuple((run_id, cell.cell_id) for run_id, cell in self._cell_of_run.items())
            self._table = RouteTable(self._epoch, rows, affinity)
        return self._table

    def describe(self) -> str:
        """One line for reasons: each cell with its role and, where it does not serve, why."""
        return "; ".join(
            f"{cell.cell_id} {cell.role} {cell.state}"
            + (" draining" if cell.is_draining else "")
            + ("" if cell.is_serving or not cell.reason else f" ({cell.reason})")
            for cell in self
        )


_DERIVED = tuple(name for name, value in vars(CellTable).items() if isinstance(value, cached_property))
"""What is computed anew after a change of a cell."""
