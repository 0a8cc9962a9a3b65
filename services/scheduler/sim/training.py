"""Modelled training: cells claim the micro-steps of the step in flight, one at a time, in the order of the groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.scheduler.actions import TrainStep
from services.scheduler.events import Event, StepTrained, TrainingProgressed
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.pool import CellMode, MicroStep, SimCell


@dataclass(slots=True, eq=False)
class _Step:
    """The step in flight."""

    number: int
    unclaimed: deque[MicroStep] = field(default_factory=deque)
    num_claimed: int = 0
    work_s: float = 0.0
    """Cell-seconds of all its micro-steps."""
    is_complete: bool = False
    """All its groups came."""
    is_closing: bool = False
    """All its work is done; the optimizer steps."""


class SimTraining:
    """The queue of micro-steps and the cells that claim from it."""

    def __init__(self, agenda: Agenda, optimizer_s: float, emit: Callable[[Event], None]) -> None:
        self._agenda = agenda
        self._optimizer_s = optimizer_s
        self._emit = emit
        self._cells: list[SimCell] = []
        self._step: _Step | None = None
        self._reported = 0
        """Unclaimed micro-steps that were last told of."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return self._step is not None

    def join(self, cell: SimCell) -> None:
        """From now on the cell claims work."""
        if cell not in self._cells:
            self._cells.append(cell)
            self._claim_for(cell)
            self._report()

    def leave(self, cell: SimCell) -> None:
        """The cell claims no more, and gives its unfinished claim back."""
        if cell not in self._cells:
            return
        self._cells.remove(cell)
        claim, cell.micro_step = cell.micro_step, None
        if claim is not None and self._step is not None:
            claim.is_void = True
            self._step.num_claimed -= 1
            self._step.unclaimed.appendleft(MicroStep(claim.cost_s))
            self._claim()
            self._report()

    def add(self, action: TrainStep, costs_s: Iterable[float]) -> None:
        """Groups come to the step; ``costs_s`` are cell-seconds, one for each run."""
        if self._step is None:
            self._step = _Step(action.step)
        step = self._step
        for cost_s in costs_s:
            step.unclaimed.append(MicroStep(cost_s))
            step.work_s += cost_s
        step.is_complete = action.num_missing == 0
        self._claim()
        self._report(always=True)
        self._close_if_done()

    # -- claims --

    def _claim(self) -> None:
        for cell in self._cells:
            self._claim_for(cell)

    def _claim_for(self, cell: SimCell) -> None:
        if cell.micro_step is not None or self._step is None or not self._step.unclaimed:
            return
        claim = cell.micro_step = self._step.unclaimed.popleft()
        self._step.num_claimed += 1
        cell.set_mode(CellMode.TRAINING)
        self._agenda.after(claim.cost_s, self._on_claim_done, (cell, claim))

    def _on_claim_done(self, done: tuple[SimCell, MicroStep]) -> None:
        cell, claim = done
        if claim.is_void or self._step is None:
            return
        cell.micro_step = None
        self._step.num_claimed -= 1
        self._claim_for(cell)
        if cell.micro_step is None:
            cell.set_mode(CellMode.WAITING)
        self._report()
        self._close_if_done()

    def _report(self, *, always: bool = False) -> None:
        """Tell of claims: when nothing is unclaimed any more, and when something is again."""
        if self._step is None:
            return
        number = len(self._step.unclaimed)
        if always or number > self._reported or (number == 0 and self._reported > 0):
            self._reported = number
            self._emit(TrainingProgressed(self._step.number, number))

    # -- the end of a step --

    def _close_if_done(self) -> None:
        step = self._step
        if step is None or step.is_closing or not step.is_complete or step.num_claimed or step.unclaimed:
            return
        step.is_closing = True
        core = next((cell for cell in self._cells if cell.is_core), None)
        if core is not None and self._optimizer_s > 0:
            core.set_mode(CellMode.TRAINING)
        self._agenda.after(self._optimizer_s, self._on_step_done, core)

    def _on_step_done(self, core: SimCell | None) -> None:
        step, self._step, self._reported = self._step, None, 0
        assert step is not None
        if core is not None and core.mode is CellMode.TRAINING:
            core.set_mode(CellMode.WAITING)
        self._emit(StepTrained(step.number, seconds=step.work_s))
