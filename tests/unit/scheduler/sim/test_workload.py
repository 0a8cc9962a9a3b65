from __future__ import annotations

import math
from statistics import fmean, pvariance
from typing import Any

import pytest
from pydantic import TypeAdapter

from services.common.errors import ConfigError
from services.scheduler.sim.config import WorkloadConfig
from services.scheduler.sim.workload import Workload, make_workload

CONFIG: TypeAdapter[Any] = TypeAdapter(WorkloadConfig)


def workload(seed: int = 1, rows: list[list[float]] | None = None, **numbers: Any) -> Workload:
    return make_workload(CONFIG.validate_python(numbers), seed, rows or ())


def draw(source: Workload, num_groups: int = 2000, size: int = 4) -> list[list[float]]:
    return [source.durations(index % source.num_tasks, f"g{index:06d}", size) for index in range(num_groups)]


def test_the_mean_before_the_cut_is_the_one_that_was_asked_for() -> None:
    source = workload(kind="lognormal", mean_s=500.0, task_sigma=0.4, run_sigma=0.5, num_tasks=2000)
    assert fmean(seconds for row in draw(source) for seconds in row) == pytest.approx(500.0, rel=0.05)


def test_runs_of_a_task_share_its_effect() -> None:
    source = workload(kind="lognormal", mean_s=500.0, task_sigma=0.6, run_sigma=0.3, num_tasks=2000)
    logs = [[math.log(seconds) for seconds in row] for row in draw(source, size=8)]
    within = fmean(pvariance(row) * 8 / 7 for row in logs)
    between = pvariance([fmean(row) for row in logs]) - within / 8
    assert within == pytest.approx(0.3**2, rel=0.1)
    assert between == pytest.approx(0.6**2, rel=0.1)


def test_no_run_is_longer_than_the_timeout() -> None:
    source = workload(kind="lognormal", mean_s=500.0, timeout_s=700.0)
    durations = [seconds for row in draw(source, 200) for seconds in row]
    assert max(durations) == 700.0
    assert min(durations) < 700.0


def test_a_duration_depends_on_seed_task_group_and_run_only() -> None:
    numbers: dict[str, Any] = {"kind": "lognormal", "mean_s": 500.0}
    first, again, other = workload(1, **numbers), workload(1, **numbers), workload(2, **numbers)
    expected = first.durations(3, "g000007", 4)
    assert draw(again, 5) == draw(first, 5)
    assert again.durations(3, "g000007", 6)[:4] == expected
    assert other.durations(3, "g000007", 4) != expected
    assert first.durations(3, "g000008", 4) != expected


def test_a_task_of_a_mixture_belongs_to_one_part() -> None:
    parts = [
        {"weight": 3, "mean_s": 10.0, "task_sigma": 0, "run_sigma": 0},
        {"weight": 1, "mean_s": 1000.0, "task_sigma": 0, "run_sigma": 0},
    ]
    rows = draw(workload(kind="mixture", parts=parts, num_tasks=2000))
    assert all(len(set(row)) == 1 for row in rows)
    assert fmean(row[0] > 100 for row in rows) == pytest.approx(0.25, abs=0.03)


def test_durations_of_a_file_are_drawn_from_the_task() -> None:
    source = workload(rows=[[1.0, 2.0], [30.0]], kind="csv", path="x.csv", task_column="task")
    assert source.num_tasks == 2
    assert set(source.durations(0, "g000000", 50)) == {1.0, 2.0}
    assert source.durations(1, "g000001", 3) == [30.0, 30.0, 30.0]


def test_a_file_that_was_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="were not read"):
        workload(kind="csv", path="x.csv")


def test_groups_of_a_real_job_take_what_they_took() -> None:
    groups_s = {"g000000": (1.0, 2.0), "g000001": (3.0, 4.0), "e000000": (9.0, 9.0)}
    source = workload(kind="measured", groups_s=groups_s, lost_groups=["g000001"])
    assert source.durations(0, "g000001", 2) == [3.0, 4.0]
    assert source.durations(0, "g000017", 2) in ([1.0, 2.0], [3.0, 4.0])
    assert source.durations(0, "e000005", 2) == [9.0, 9.0]
    assert source.lost_groups == {"g000001"}
