"""A simulated job is written to a journal as a real one would be, then measured and simulated again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError, NotFoundError
from services.scheduler.actions import Decision
from services.scheduler.eventlog import EventLog
from services.scheduler.events import Event
from services.scheduler.journal import Journal
from services.scheduler.sim.config import MeasuredWorkload, SimConfig
from services.scheduler.sim.engine import Simulation, make_options, simulate
from services.scheduler.sim.measured import measure_job
from services.scheduler.sim.result import SimResult
from tests.unit.scheduler.sim.helpers import config

_EPOCH_S = 1_700_000_000.0


def write_job(folder: Path, sim_config: SimConfig) -> SimResult:
    """A job's folder, with the journal of a simulated job."""
    journal = Journal(folder)
    log = EventLog(journal)
    log.start(_EPOCH_S, "start", make_options(sim_config, 64), None)

    def listen(now_s: float, event: Event, decisions: list[Decision]) -> None:
        log.append(_EPOCH_S + now_s, event, decisions)

    try:
        return Simulation(sim_config, listener=listen).run()
    finally:
        journal.close()


COSTS = {
    "switch_to_train_s": 8.0,
    "switch_to_rollout_s": 3.0,
    "publish_s": 20.0,
    "train_per_rollout": 0.05,
    "optimizer_s": 5.0,
    "score_s": 2.0,
    "checkpoint_s": 4.0,
    "checkpoint_every": 2,
}


@pytest.mark.parametrize(
    "policy",
    [
        {"mode": "elastic", "streaming": False},
        {"mode": "elastic", "streaming": True},
        {"mode": "async", "streaming": True, "train_cells": 1},
        {"mode": "colocate", "streaming": False},
    ],
)
def test_a_measured_job_is_predicted(tmp_path: Path, policy: dict[str, Any]) -> None:
    real = write_job(tmp_path, config(steps=8, cells=3, phi=1.0, sigma=0.5, policy=policy, **COSTS))
    measured = measure_job(tmp_path)
    assert measured.hours == pytest.approx(real.hours)
    assert simulate(measured.config).hours == pytest.approx(real.hours, rel=0.05)


def test_costs_are_those_of_the_job(tmp_path: Path) -> None:
    write_job(tmp_path, config(steps=8, cells=1, slots=8, sigma=0.3, **COSTS))
    found = measure_job(tmp_path).config
    system = found.system
    for name in ("switch_to_train_s", "switch_to_rollout_s", "publish_s", "optimizer_s", "score_s", "checkpoint_s"):
        assert getattr(system, name) == pytest.approx(COSTS[name], abs=1e-3), name
    assert system.train_per_rollout == pytest.approx(0.05, rel=0.02)
    assert system.checkpoint_every == 2
    assert found.steps == 8
    assert found.pool.slots_by_cell == (8,)


@pytest.mark.parametrize("policy", [{"mode": "elastic", "streaming": True}, {"mode": "colocate", "streaming": False}])
def test_a_duration_counts_neither_standing_still_nor_sharing_slots(tmp_path: Path, policy: dict[str, Any]) -> None:
    # cells that fail and come back leave runs without one, or with too many beside them
    failures = {"cell_mtbf_s": 900.0, "cell_repair_s": 60.0}
    sim_config = config(steps=8, cells=3, phi=1.0, sigma=0.5, policy=policy, **COSTS, **failures)
    real = write_job(tmp_path, sim_config)
    found = measure_job(tmp_path).config.workload
    assert isinstance(found, MeasuredWorkload)
    assert real.counts.moved_runs > 0
    for group in real.groups:
        assert sorted(found.groups_s[group.group_id]) == pytest.approx(sorted(group.durations_s), abs=1e-3)


def test_lost_groups_are_lost_again(tmp_path: Path) -> None:
    real = write_job(tmp_path, config(steps=8, cells=2, phi=1.0, sigma=0.5, group_loss_probability=0.3, **COSTS))
    found = measure_job(tmp_path).config
    assert isinstance(found.workload, MeasuredWorkload)
    assert len(found.workload.lost_groups) == real.counts.lost_groups > 0
    again = simulate(found)
    assert again.counts.lost_groups == real.counts.lost_groups
    assert again.hours == pytest.approx(real.hours, rel=0.1)


def test_cells_keep_their_kinds_and_slots(tmp_path: Path) -> None:
    write_job(tmp_path, config(steps=2, cells=3, slots=[2, 3, 5], standalone=1, phi=1.0))
    pool = measure_job(tmp_path).config.pool
    assert (pool.num_cells, pool.standalone_cells, pool.slots) == (3, 1, (2, 3, 5))


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no journal"):
        measure_job(tmp_path)


def test_a_job_without_a_trained_step_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    EventLog(journal).start(_EPOCH_S, "start", make_options(config(), 64), None)
    journal.close()
    with pytest.raises(ConfigError, match="no step ended"):
        measure_job(tmp_path)
