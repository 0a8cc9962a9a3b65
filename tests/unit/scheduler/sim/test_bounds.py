from __future__ import annotations

import pytest

from services.scheduler.sim.bounds import lower_bound, work_bound_s


def test_work_fills_every_cell() -> None:
    # 800 slot-seconds of runs on cells of 4 slots are 200 cell-seconds; with 100 of training: 300 over 3 cells
    assert work_bound_s(800.0, 100.0, [4, 4, 4], 0) == pytest.approx(100.0)


def test_standalone_cells_do_not_train() -> None:
    # all training is on the one cell that can
    assert work_bound_s(0.0, 90.0, [4, 4, 4], 2) == pytest.approx(90.0)


def test_training_takes_the_cell_with_the_fewest_slots() -> None:
    # H = 10: the small cell trains for 10 s, the large one serves 8 * 10 slot-seconds
    assert work_bound_s(80.0, 10.0, [2, 8], 0) == pytest.approx(10.0)


def bound(slowest: list[float], bursts: list[int], **changes: object):
    numbers: dict = {
        "run_s": 0.0,
        "train_cell_s": 0.0,
        "slots": [4],
        "num_standalone": 0,
        "max_outstanding": 2,
        "has_carry_over": True,
    }
    return lower_bound(slowest, bursts, **(numbers | changes))


def test_at_most_q_groups_are_outstanding() -> None:
    found = bound([7200.0] * 6, [0, 0, 1, 1, 2, 2])
    assert (found.binding, found.hours) == ("staleness", 6.0)


def test_no_group_is_faster_than_its_slowest_run() -> None:
    found = bound([36000.0], [0], max_outstanding=8)
    assert (found.binding, found.hours) == ("slowest_group", 10.0)


def test_without_carry_over_bursts_come_one_after_the_other() -> None:
    found = bound([3600.0, 7200.0, 10800.0, 60.0], [0, 0, 1, 1], has_carry_over=False)
    assert (found.binding, found.hours) == ("bursts", 5.0)


def test_runners_bind_where_they_are_few() -> None:
    found = bound([10.0], [0], run_s=36000.0, slots=[100], max_concurrent_runs=5)
    assert (found.binding, found.hours) == ("runners", 2.0)
