from __future__ import annotations

import pytest

from services.common.types import CellKind
from services.scheduler.sim.agenda import Agenda
from services.scheduler.sim.pool import CellMode, SimCell, SimRun
from services.trajectory.outcome import Outcome


class Bench:
    """A cell whose runs end when they are due."""

    def __init__(self, slots: int = 2) -> None:
        self.agenda = Agenda()
        self.ended_s: dict[str, float] = {}
        self.cell = SimCell("cell-0", slots, CellKind.CORE, self.agenda, self._on_due, is_recorded=True)

    def _on_due(self, due: tuple[SimRun, int]) -> None:
        run, timing = due
        if run.timing == timing and run.cell is not None:
            self.ended_s[run.run_id] = self.agenda.now_s
            run.cell.detach(run)

    def start(self, *durations_s: float) -> list[SimRun]:
        runs = [SimRun(f"g-r{index}", 0, duration_s, Outcome.FINISHED) for index, duration_s in enumerate(durations_s)]
        for run in runs:
            run.since_s = self.agenda.now_s
            self.cell.attach(run)
        return runs

    def finish(self) -> list[float]:
        while self.agenda.advance():
            pass
        return [self.ended_s[name] for name in sorted(self.ended_s)]


def test_runs_that_fit_go_at_full_speed() -> None:
    bench = Bench()
    bench.start(3.0, 5.0)
    assert bench.finish() == [3.0, 5.0]


def test_more_runs_than_slots_share_them() -> None:
    bench = Bench(slots=2)
    bench.start(6.0, 6.0, 6.0)
    assert bench.finish() == pytest.approx([9.0, 9.0, 9.0])


def test_a_run_that_ends_gives_its_share_to_the_others() -> None:
    bench = Bench(slots=2)
    bench.start(2.0, 6.0, 6.0)
    # at speed 2/3 the first ends at 3 s; 4 s are left of the others, now at full speed
    assert bench.finish() == pytest.approx([3.0, 7.0, 7.0])


def test_a_run_that_comes_later_slows_the_others_down_from_then_on() -> None:
    bench = Bench(slots=1)
    bench.start(4.0)
    late = SimRun("g-r1", 0, 1.0, Outcome.FINISHED)

    def come(run: SimRun) -> None:
        run.since_s = bench.agenda.now_s
        bench.cell.attach(run)

    bench.agenda.after(2.0, come, late)
    # 2 s alone, then both at half speed until the late one ends at 4 s, then 1 s alone
    assert bench.finish() == pytest.approx([5.0, 4.0])


def test_runs_of_a_paused_cell_stand_still() -> None:
    bench = Bench()
    bench.start(5.0)
    bench.agenda.after(2.0, bench.cell.pause, True)
    bench.agenda.after(4.5, bench.cell.pause, False)
    assert bench.finish() == pytest.approx([7.5])


def test_a_delay_is_added_to_what_is_left() -> None:
    bench = Bench()
    bench.start(5.0)
    bench.agenda.after(1.0, bench.cell.delay_runs, 3.0)
    assert bench.finish() == pytest.approx([8.0])


def test_no_run_is_timed_again_without_need() -> None:
    bench = Bench(slots=3)
    runs = bench.start(5.0, 6.0, 7.0)
    bench.cell.detach(runs[2])
    assert [run.timing for run in runs[:2]] == [1, 1]


def test_time_is_accounted_by_mode_and_slot() -> None:
    bench = Bench(slots=4)
    bench.start(10.0, 20.0)
    bench.agenda.after(15.0, bench.cell.set_mode, CellMode.SWITCHING)
    bench.agenda.after(30.0, bench.cell.set_mode, CellMode.DOWN)
    bench.finish()
    accounts = bench.cell.accounts()
    assert accounts["seconds_in"][CellMode.SERVING] == 15.0
    assert accounts["seconds_in"][CellMode.SWITCHING] == 15.0
    assert accounts["busy_slot_s"] == pytest.approx(30.0)


def test_ties_are_broken_by_the_order_of_entry() -> None:
    agenda, seen = Agenda(), []
    for name in "cab":
        agenda.after(1.0, seen.append, name)
    while agenda.advance():
        pass
    assert seen == ["c", "a", "b"]
