"""The cells of a job: roles, states, who occupies which slot, and the route table made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.errors import InvariantError
from services.common.ids import CellId, JobId
from services.common.names import rollout_actor
from services.common.types import CellKind, CellRole, CellRoute, CellState, RouteTable
from services.scheduler.options import JobOptions
from services.scheduler.policy import CellLoad, choose_cell_for_run
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


@dataclass(slots=True, eq=False)
class Cell:
    """One cell. ``runs`` are those whose calls go there."""

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
        return self.role is CellRole.ROLLOUT and self.state is CellState.SERVING

    @property
    def rollout_slots(self) -> int:
        """Its part of C_R: an update is short and keeps its calls, a stale cell serves nobody."""
        return self.slots if self.role is CellRole.ROLLOUT and self.state is not CellState.STALE else 0

    @property
    def is_repairable(self) -> bool:
        return self.is_live and self.num_update_attempts < JobOptions.MAX_UPDATE_ATTEMPTS

    def move_to(self, role: CellRole) -> None:
        """Change the role, along ``ROLE_TRANSITIONS``."""
        if role not in ROLE_TRANSITIONS[self.role]:
            raise InvariantError(f"{self.cell_id} cannot go from {self.role} to {role}.")
        self.role = role

    def mark_stale(self, reason: str) -> None:
        self.state, self.reason = CellState.STALE, reason

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
    """All cells that were ever known, and the placement of running runs on them."""

    def __init__(self, job_id: JobId) -> None:
        self._job_id = job_id
        self._cells: dict[str, Cell] = {}
        self._cell_of_run: dict[str, Cell] = {}
        self._homeless: dict[str, None] = {}
        """Running runs without a cell; their calls wait at the proxy."""
        self._epoch = 1
        self._table: RouteTable | None = None

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def core(self) -> Cell | None:
        return next((cell for cell in self if cell.is_core), None)

    @property
    def live(self) -> list[Cell]:
        """In the order of publication: satellites first, the core last."""
        return sorted((cell for cell in self if cell.is_live), key=lambda cell: (cell.is_core, cell.index))

    @property
    def rollout_slots(self) -> int:
        """C_R."""
        return sum(cell.rollout_slots for cell in self)

    def get(self, cell_id: str) -> Cell:
        if cell_id not in self._cells:
            raise InvariantError(f"{cell_id} never joined.")
        return self._cells[cell_id]

    def join(self, cell_id: str, slots: int, kind: CellKind, role: CellRole) -> Cell:
        """Add a cell, or take a lost one back; it is stale either way."""
        cell = self._cells.get(cell_id)
        if cell is None:
            index = -1 if kind is CellKind.CORE else sum(not known.is_core for known in self)
            cell = self._cells[cell_id] = Cell(cell_id, index, slots, kind, role)
        else:
            cell.move_to(role)
            if kind is CellKind.CORE:
                cell.kind, cell.index = kind, -1
            cell.slots, cell.version, cell.num_update_attempts, cell.may_return = slots, -1, 0, False
            cell.mark_stale("joined again, no weights yet")
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

    def choose(self) -> tuple[str | None, str]:
        """The cell for a run that is about to start."""
        return choose_cell_for_run(self._loads())

    def place(self, run_id: str, cell_id: str) -> None:
        cell = self._cells[cell_id]
        cell.runs[run_id] = None
        self._cell_of_run[run_id] = cell
        self.changed()

    def release(self, run_id: str) -> None:
        """Free the slot of a run."""
        self._homeless.pop(run_id, None)
        cell = self._cell_of_run.pop(run_id, None)
        if cell is not None:
            del cell.runs[run_id]
            self.changed()

    def move_runs_off(self, cell: Cell) -> None:
        """Route the runs of a cell to others, which may overfill them."""
        for run_id in cell.runs:
            del self._cell_of_run[run_id]
            self._homeless[run_id] = None
        cell.runs.clear()
        self.changed()
        self.house_runs()

    def house_runs(self) -> None:
        """Give runs without a cell one, as soon as one serves."""
        for run_id in list(self._homeless):
            cell_id, _ = choose_cell_for_run(self._loads(), needs_free_slot=False)
            if cell_id is None:
                return
            del self._homeless[run_id]
            self.place(run_id, cell_id)

    def _loads(self) -> Iterator[CellLoad]:
        return (CellLoad(cell.cell_id, cell.index, cell.slots, len(cell.runs)) for cell in self if cell.is_serving)

    # -- routes --

    def changed(self) -> None:
        """A new epoch of the route table."""
        self._epoch += 1
        self._table = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def routes(self) -> RouteTable:
        """Cells that are in rollout, and where each running run belongs."""
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
                if cell.role is CellRole.ROLLOUT
            )
            affinity = tuple((run_id, cell.cell_id) for run_id, cell in self._cell_of_run.items())
            self._table = RouteTable(self._epoch, rows, affinity)
        return self._table

    def describe(self) -> str:
        """One line for reasons: each cell with its role and, where it does not serve, why."""
        return "; ".join(
            f"{cell.cell_id} {cell.role} {cell.state}" + ("" if cell.is_serving else f" ({cell.reason})")
            for cell in self
        )
