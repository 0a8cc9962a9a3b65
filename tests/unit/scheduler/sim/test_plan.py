from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.engine import simulate
from services.scheduler.sim.plan import (
    PlanAnswer,
    PlanQuestion,
    candidates,
    cell_counts,
    conclude,
    staleness_pairs,
    train_splits,
)


def question(cells: int = 4, slots: int = 4, staleness: float = 1.0, **changes: Any) -> PlanQuestion:
    data: dict[str, Any] = {
        "steps": 4,
        "pool": {"num_cells": cells, "slots": slots},
        "scheduler": {"groups_per_step": 4, "group_size": 4},
        "workload": {"kind": "csv", "path": "durations.csv", "task_column": "task"},
        "system": {"train_per_rollout": 0.08, "switch_to_train_s": 1.0, "switch_to_rollout_s": 1.0},
    }
    return PlanQuestion(SimConfig.model_validate(data | changes), staleness)


def answer(asked: PlanQuestion, rows: list[list[float]]) -> PlanAnswer:
    simulated = [(candidate, simulate(candidate.config, rows)) for candidate in candidates(asked)]
    return conclude(asked, simulated, [seconds for row in rows for seconds in row])


def long_tailed(num_tasks: int = 20) -> list[list[float]]:
    rng = random.Random(1)
    return [[rng.lognormvariate(6.0, 0.9) for _ in range(8)] for _ in range(num_tasks)]


@pytest.mark.parametrize(
    ("staleness", "pairs"),
    [
        (0.0, [(0.0, 1)]),
        (1.0, [(1.0, 1), (0.5, 2), (0.0, 3)]),
        (1.5, [(1.5, 1), (1.0, 2), (0.5, 3), (0.0, 4)]),
        (0.25, [(0.25, 1)]),
    ],
)
def test_pairs_have_the_mean_staleness(staleness: float, pairs: list[tuple[float, int]]) -> None:
    assert staleness_pairs(staleness) == pairs
    assert all(phi + (mu - 1) / 2 == staleness for phi, mu in pairs)


@pytest.mark.parametrize(
    ("cells", "slots", "counts"),
    [
        (8, 4, [(4, 8), (8, 4), (16, 2)]),
        (3, 4, [(1, 12), (3, 4), (6, 2)]),
        (4, 1, [(2, 2), (4, 1)]),
        (1, 4, [(1, 4), (2, 2)]),
    ],
)
def test_cell_counts_keep_the_total_of_slots(cells: int, slots: int, counts: list[tuple[int, int]]) -> None:
    assert cell_counts(cells, slots) == counts


def test_splits_lie_around_the_balance_of_training_and_rollout() -> None:
    # a cell-second of rollout makes 4 slot-seconds, which cost 1/3 of a cell-second: a quarter of 8 cells trains
    assert train_splits(8, 4, 1 / 12 + 1e-9) == [2, 3, 4]
    assert train_splits(2, 4, 10.0) == [1]
    assert train_splits(1, 4, 0.1) == []


def test_a_plan_compares_all_policies_at_the_staleness_asked_for() -> None:
    found = answer(question(), long_tailed())
    assert {row.policy for row in found.rows} == {"async", "colocate", "elastic (paper)", "elastic (sorted)"}
    assert [row.hours for row in found.rows] == sorted(row.hours for row in found.rows)
    assert found.recommended == found.rows[0]
    assert {row.num_cells * row.slots for row in found.rows} == {16}
    assert found.lower_bound_hours <= found.recommended.hours
    elastic = min(row.hours for row in found.rows if row.is_elastic)
    other = min(row.hours for row in found.rows if not row.is_elastic)
    assert found.gain_over_others == pytest.approx(1 - elastic / other)


def test_equal_durations_leave_no_tail_to_harvest() -> None:
    found = answer(question(), [[600.0] * 4 for _ in range(8)])
    assert found.tail_ratio == pytest.approx(1.0)
    assert any("little tail" in warning for warning in found.warnings)
    assert any("100% of the runs end at the longest duration" in warning for warning in found.warnings)


def test_few_cells_and_empty_slots_are_warned_of() -> None:
    found = answer(question(cells=2, slots=40), long_tailed())
    assert any("2 cells are few" in warning for warning in found.warnings)
    assert any("slots stay empty" in warning for warning in found.warnings)


def test_a_small_gain_is_warned_of() -> None:
    asked = question()
    simulated = [(candidate, simulate(candidate.config, [[600.0]])) for candidate in candidates(asked)]
    found = conclude(asked, simulated, [600.0])
    assert any("it does not pay here" in warning for warning in found.warnings) is (found.gain_over_others < 0.05)
    assert found.gain_over_others < 0.05


def test_a_long_tail_gets_no_warning_of_the_tail() -> None:
    found = answer(question(), long_tailed())
    assert found.tail_ratio > 1.5
    assert not any("tail" in warning for warning in found.warnings)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        question(staleness=-1.0)
    with pytest.raises(ConfigError, match="varies the number of cells"):
        question(pool={"num_cells": 3, "slots": [1, 2, 3]})


def test_durations_without_tasks_are_warned_of() -> None:
    asked = question(workload={"kind": "csv", "path": str(Path("durations.csv"))})
    found = answer(asked, [[seconds for row in long_tailed() for seconds in row]])
    assert any("name no task" in warning for warning in found.warnings)


def test_a_plan_of_more_staleness_than_it_can_try_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than a plan tries"):
        question(staleness=100.0)
