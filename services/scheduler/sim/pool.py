"""Modelled cells and the runs on them.

A cell serves up to ``slots`` runs at full speed; more share it (processor sharing), and while it is paused none goes
on. Runs are timed again only when their speed changes; what is due by an earlier timing then means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.common.types import CellKind
from services.scheduler.sim.agenda import Agenda
from services.trajectory.outcome import Outcome


class CellMode(StrEnum):
    """What a cell's time is spent on."""

    SERVING = "serving"
    """In rollout, whether or not runs are there."""
    TRAINING = "training"
    """It has a micro-step, or the optimizer steps on it."""
    SWITCHING = "switching"
    WAITING = "waiting"
    """In training, without work."""
    DOWN = "down"


@dataclass(slots=True, eq=False)
class SimRun:
    """An attempt that is under way."""

    run_id: str
    attempt: int
    remaining_s: float
    """At ``since_s``, at full speed."""
    outcome: Outcome
    """How it will end."""
    speed: float = 0.0
    since_s: float = 0.0
    timing: int = 0
    """Number of its newest timing."""
    cell: SimCell | None = None


@dataclass(slots=True, eq=False)
class MicroStep:
    """A run's training. ``is_void``: its cell gave it back."""

    cost_s: float
    is_void: bool = False


@dataclass(slots=True, eq=False)
class Interval:
    """A stretch of a cell's time."""

    mode: CellMode
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class SimCell:
    """A modelled cell."""

    cell_id: str
    slots: int
    kind: CellKind
    agenda: Agenda
    on_run_due: Callable[[tuple[SimRun, int]], None]
    """Called with a run and its timing when its end is due; a timing that is not the newest is void."""
    is_recorded: bool = False
    runs: dict[str, SimRun] = field(default_factory=dict)
    speed: float = 1.0
    is_paused: bool = False
    version: int = -1
    num_losses: int = 0
    micro_step: MicroStep | None = None
    mode: CellMode = CellMode.SERVING
    mode_since_s: float = 0.0
    seconds_in: dict[CellMode, float] = field(default_factory=lambda: dict.fromkeys(CellMode, 0.0))
    busy_slot_s: float = 0.0
    busy_since_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)

    @property
    def is_core(self) -> bool:
        return self.kind is CellKind.CORE

    # -- runs --

    def attach(self, run: SimRun) -> None:
        self.count_busy_slots()
        self.runs[run.run_id] = run
        run.cell = self
        speed = self._target_speed()
        if speed != self.speed:
            self._set_speed(speed)
        else:
            self._time(run, speed)

    def detach(self, run: SimRun) -> None:
        """Take a run off; it stands still."""
        self.count_busy_slots()
        del self.runs[run.run_id]
        run.cell = None
        self._time(run, 0.0)
        speed = self._target_speed()
        if speed != self.speed:
            self._set_speed(speed)

    def pause(self, is_paused: bool) -> None:
        """Stop all its runs, or let them go on."""
        self.is_paused = is_paused
        self._set_speed(self._target_speed())

    def delay_runs(self, seconds: float) -> None:
        """All its runs have that much more to do."""
        if seconds > 0:
            for run in self.runs.values():
                self._time(run, self.speed, seconds)

    def _target_speed(self) -> float:
        if self.is_paused:
            return 0.0
        num_runs = len(self.runs)
        return 1.0 if num_runs <= self.slots else self.slots / num_runs

    def _set_speed(self, speed: float) -> None:
        self.speed = speed
        for run in self.runs.values():
            if run.speed != speed:
                self._time(run, speed)

    def _time(self, run: SimRun, speed: float, more_s: float = 0.0) -> None:
        now_s = self.agenda.now_s
        run.remaining_s = max(0.0, run.remaining_s - (now_s - run.since_s) * run.speed) + more_s
        run.since_s, run.speed = now_s, speed
        run.timing += 1
        if speed > 0:
            self.agenda.after(run.remaining_s / speed, self.on_run_due, (run, run.timing))

    # -- accounts --

    def count_busy_slots(self) -> None:
        now_s = self.agenda.now_s
        self.busy_slot_s += min(len(self.runs), self.slots) * (now_s - self.busy_since_s)
        self.busy_since_s = now_s

    def set_mode(self, mode: CellMode) -> None:
        if mode is not self.mode:
            self.close_interval()
            self.mode = mode

    def close_interval(self) -> None:
        now_s = self.agenda.now_s
        self.seconds_in[self.mode] += now_s - self.mode_since_s
        if self.is_recorded and now_s > self.mode_since_s:
            self.intervals.append(Interval(self.mode, self.mode_since_s, now_s))
        self.mode_since_s = now_s

    def open_accounts(self) -> None:
        """What was before does not count."""
        self.close_interval()
        self.seconds_in = dict.fromkeys(CellMode, 0.0)
        self.count_busy_slots()
        self.busy_slot_s = 0.0

    def accounts(self) -> dict[str, Any]:
        """Seconds in each mode and busy slot-seconds, until now."""
        self.close_interval()
        self.count_busy_slots()
        return {"seconds_in": dict(self.seconds_in), "busy_slot_s": self.busy_slot_s}
