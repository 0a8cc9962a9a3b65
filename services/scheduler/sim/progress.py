"""How long the runs of a real job would have taken at full speed.

The journal tells when runs started and ended. In between a run may have stood still, without a cell, and may have
shared one with more runs than it has slots. The records are replayed through the core, which knows who was where.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from services.scheduler.recovery import JOB_STARTED, Replay
from services.scheduler.types import LoggedEvent

_MOVES_RUNS = ("CellLost", "CellStale", "CellServing", "CellAdmitted", "CellDrained", "PublicationEnded")
_ANYWHERE = ""
"""Where runs are if the replay does not tell: they go on at full speed."""


@dataclass(slots=True, eq=False)
class _Cell:
    """``progress_s``: full-speed seconds that a run made which was here all the time, until ``since_s``."""

    progress_s: float = 0.0
    since_s: float = 0.0
    num_runs: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    attempt: int
    cell_id: str | None = None
    entered_s: float = 0.0
    """The cell's progress when the run came."""
    done_s: float = 0.0
    """Progress at the cells before."""


class RunProgress:
    """Feed it with all records of a job, in order; then read ``duration_s``."""

    def __init__(self) -> None:
        self.duration_s: dict[str, float] = {}
        """By run id, of its last attempt that ended."""
        self._replay: Replay | None = Replay()
        self._cells: dict[str, _Cell] = defaultdict(_Cell)
        self._runs: dict[str, _Run] = {}

    def take(self, record: LoggedEvent) -> None:
        if record.kind == JOB_STARTED:
            self._runs.clear()
        if self._replay is not None and self._replay.take(record):
            self._replay = None  # the journal of another version: it decides otherwise by now
            self._follow(record.at_s)
        if record.kind == "RunStarted":
            run = self._runs[record.payload["run_id"]] = _Run(record.payload["attempt"])
            self._enter(run, self._cell_of(record.payload["run_id"]), record.at_s)
        elif record.kind == "RunEnded":
            self._end(record.payload["run_id"], record.payload["attempt"], record.at_s)
        elif record.kind in _MOVES_RUNS or any(decision.action == "SwitchCell" for decision in record.decisions):
            self._follow(record.at_s)

    def _end(self, run_id: str, attempt: int, at_s: float) -> None:
        run = self._runs.get(run_id)
        if run is None or run.attempt != attempt:
            return
        del self._runs[run_id]
        self._leave(run, at_s)
        self.duration_s[run_id] = run.done_s

    def _follow(self, at_s: float) -> None:
        for run_id, run in self._runs.items():
            cell_id = self._cell_of(run_id)
            if cell_id != run.cell_id:
                self._leave(run, at_s)
                self._enter(run, cell_id, at_s)

    def _cell_of(self, run_id: str) -> str | None:
        return _ANYWHERE if self._replay is None else self._replay.state.cells.cell_of(run_id)

    def _enter(self, run: _Run, cell_id: str | None, at_s: float) -> None:
        run.cell_id = cell_id
        if cell_id is not None:
            cell = self._advance(cell_id, at_s)
            run.entered_s = cell.progress_s
            cell.num_runs += 1

    def _leave(self, run: _Run, at_s: float) -> None:
        if run.cell_id is not None:
            cell = self._advance(run.cell_id, at_s)
            run.done_s += cell.progress_s - run.entered_s
            cell.num_runs -= 1

    def _advance(self, cell_id: str, at_s: float) -> _Cell:
        cell = self._cells[cell_id]
        cell.progress_s += (at_s - cell.since_s) * self._speed(cell_id, cell.num_runs)
        cell.since_s = at_s
        return cell

    def _speed(self, cell_id: str, num_runs: int) -> float:
        if cell_id == _ANYWHERE or self._replay is None:
            return 1.0
        slots = self._replay.state.cells.get(cell_id).slots
        return 1.0 if num_runs <= slots else slots / num_runs
