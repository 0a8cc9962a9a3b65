from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from services.common.errors import InvariantError
from services.common.types import CellRole
from services.scheduler.actions import Decision, OpenGroup, StartRun, SwitchCell, TrainStep
from services.scheduler.events import (
    CellAdmitted,
    CellLost,
    Event,
    GroupScored,
    RunEnded,
    StepTrained,
    TrainingProgressed,
)
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.engine import Simulation
from tests.unit.scheduler.sim.helpers import config, play, seconds

ASYNC = {"mode": "async", "streaming": False}
STREAMING = {"mode": "elastic", "streaming": True}
COLOCATE = {"mode": "colocate", "streaming": False}


class Log:
    """Everything that a simulation did."""

    def __init__(self) -> None:
        self.records: list[tuple[float, Event, list[Decision]]] = []

    def __call__(self, now_s: float, event: Event, decisions: list[Decision]) -> None:
        self.records.append((now_s, event, decisions))

    def events(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [(now_s, event) for now_s, event, _ in self.records if isinstance(event, kind)]

    def actions(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [
            (now_s, decision.action)
            for now_s, _, decisions in self.records
            for decision in decisions
            if isinstance(decision.action, kind)
        ]


# -- closed forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{"mode": "elastic", "streaming": False}, COLOCATE])
def test_one_cell_does_one_thing_after_the_other(policy: dict[str, Any]) -> None:
    costs = {
        "switch_to_train_s": 8.0,
        "switch_to_rollout_s": 3.0,
        "publish_s": 20.0,
        "train_per_rollout": 0.01,
        "batch_overhead": 1.5,
        "optimizer_s": 7.0,
        "score_s": 2.0,
    }
    result = play(config(steps=5, cells=1, slots=8, groups=2, size=4, duration_s=100.0, policy=policy, **costs))
    train_s = 8 * 100.0 * 0.01 * 1.5 + 7.0
    step_s = 100.0 + 2.0 + 8.0 + train_s
    assert seconds(result) == pytest.approx(5 * step_s + 4 * (20.0 + 3.0))
    assert result.exposed_training_s == pytest.approx(5 * train_s)


def test_streaming_pays_no_overhead_of_batches() -> None:
    shared: dict[str, Any] = {"cells": 1, "slots": 8, "train_per_rollout": 0.01, "batch_overhead": 1.5, "steps": 1}
    plain, streamed = play(config(**shared)), play(config(**shared, policy=STREAMING))
    assert seconds(plain) == pytest.approx(100.0 + 12.0)
    assert seconds(streamed) == pytest.approx(100.0 + 8.0)


def test_with_nothing_else_to_pay_the_throughput_is_slots_over_duration() -> None:
    # one cell trains for nothing, the other serves 8 runs at once
    result = play(config(steps=30, cells=2, slots=8, groups=2, size=4, phi=2.0, policy=ASYNC))
    runs_per_s = result.counts.trained_runs / seconds(result)
    assert runs_per_s == pytest.approx(8 / 100.0)
    assert result.utilisation.slot_occupancy == pytest.approx(1.0)


def test_a_fixed_split_is_bound_by_its_slower_side() -> None:
    # 2 cells serve the 8 runs of a step in 100 s; one cell trains
    def split(train_per_rollout: float) -> float:
        sizes: dict[str, Any] = {"steps": 10, "cells": 3, "slots": 4, "groups": 2, "size": 4, "phi": 1.0}
        return seconds(play(config(**sizes, policy=ASYNC, train_per_rollout=train_per_rollout)))

    assert split(0.05) == pytest.approx(10 * 100.0 + 40.0)  # training of 40 s hides behind rollout
    assert split(0.5) == pytest.approx(100.0 + 10 * 400.0)  # rollout hides behind training of 400 s


def test_all_cells_of_a_colocated_pool_share_the_training() -> None:
    # 8 runs as 8 micro-steps on 4 cells: two rounds of 10 s
    result = play(config(steps=1, cells=4, slots=2, policy=COLOCATE, train_per_rollout=0.1))
    assert seconds(result) == pytest.approx(100.0 + 2 * 10.0)


def test_water_level_and_residence_obey_littles_law() -> None:
    log = Log()
    result = play(
        config(steps=10, cells=3, phi=1.0, sigma=0.6, policy=STREAMING, train_per_rollout=0.05), log, is_recorded=True
    )
    opened_s = {run_id: at_s for at_s, action in log.actions(OpenGroup) for run_id in action.spec.run_ids}
    residence_s = sum(at_s - opened_s[event.run_id] for at_s, event in log.events(RunEnded))
    assert result.timeline is not None
    points = result.timeline.water_level
    area = sum(level * (end_s - start_s) for (start_s, level), (end_s, _) in pairwise(points))
    assert area == pytest.approx(residence_s)


# -- what the core is told ----------------------------------------------------------------------------------------


def test_every_departure_obeys_eq_5() -> None:
    log = Log()
    sim = config(
        steps=8, cells=4, slots=[4, 3, 5, 2], groups=4, phi=1.0, sigma=0.7, policy=STREAMING, train_per_rollout=0.1
    )
    play(sim, log)
    slots = {f"cell-{index}": number for index, number in enumerate((4, 3, 5, 2))}
    in_rollout, water_level, num_departures = set(slots), 0, 0
    for _, event, decisions in log.records:
        water_level -= isinstance(event, RunEnded)
        if isinstance(event, CellAdmitted):
            in_rollout.add(event.cell_id)
        for decision in decisions:
            action = decision.action
            if isinstance(action, OpenGroup):
                water_level += len(action.spec.run_ids)
            elif isinstance(action, SwitchCell) and action.role is CellRole.TRAIN:
                num_departures += 1
                in_rollout.remove(action.cell_id)
                assert water_level <= sum(slots[cell_id] for cell_id in in_rollout)
    assert num_departures >= 8


def test_a_streaming_step_is_told_of_its_claims_until_none_is_left() -> None:
    log = Log()
    play(config(steps=2, cells=2, sigma=0.5, phi=1.0, policy=STREAMING, train_per_rollout=0.1), log)
    for step in (1, 2):
        told = [event.num_unclaimed for _, event in log.events(TrainingProgressed) if event.step == step]
        assert told[-1] == 0
        assert max(told) > 0
    completed = [action.step for _, action in log.actions(TrainStep) if action.num_missing == 0]
    assert completed == [event.step for _, event in log.events(StepTrained)] == [1, 2]


def test_a_run_that_moves_pays_its_prefill() -> None:
    # 2 of 4 runs are short; when they ended the core leaves, and its last run goes on at the other cell
    log = Log()
    sim = config(steps=1, cells=2, slots=2, groups=1, size=2, phi=1.0, prefill_s=30.0, sigma=0.8, seed=3)
    result = play(sim, log)
    started_s = {action.run_id: at_s for at_s, action in log.actions(StartRun)}
    took_s = {event.run_id: at_s - started_s[event.run_id] for at_s, event in log.events(RunEnded)}
    planned = sum(result.groups[0].durations_s)
    trained = [run_id for run_id in took_s if run_id.startswith(result.groups[0].group_id)]
    assert sum(took_s[run_id] for run_id in trained) == pytest.approx(planned + 30.0 * result.counts.moved_runs)


def test_runs_stand_still_while_their_cell_is_updated_and_prefill_after_it() -> None:
    # burst 1 trains the first group while the second one runs; the publication delays it by pause and prefill
    log = Log()
    costs = {"publish_s": 40.0, "update_pause_s": 5.0, "prefill_s": 30.0}
    sizes: dict[str, Any] = {"steps": 4, "cells": 2, "slots": 4, "groups": 1, "size": 2, "phi": 1.0}
    play(config(**sizes, policy=ASYNC, sigma=0.5, **costs), log)
    durations = {}
    simulation = Simulation(config(**sizes, policy=ASYNC, sigma=0.5, **costs))
    for _, action in log.actions(OpenGroup):
        drawn = simulation.workload.durations(action.task_index, action.spec.group_id, 2)
        durations |= dict(zip(action.spec.run_ids, drawn, strict=True))
    started_s = {action.run_id: at_s for at_s, action in log.actions(StartRun)}
    extra = Counter(
        round(at_s - started_s[event.run_id] - durations[event.run_id], 6) for at_s, event in log.events(RunEnded)
    )
    assert set(extra) <= {0.0, 35.0, 70.0, 105.0}
    assert extra[35.0] > 0


# -- counting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ASYNC, COLOCATE, STREAMING])
def test_every_trained_group_has_all_its_runs_ended_once(policy: dict[str, Any]) -> None:
    log = Log()
    result = play(config(steps=8, cells=3, phi=1.0, sigma=0.5, policy=policy, train_per_rollout=0.1), log)
    ended = Counter(event.run_id for _, event in log.events(RunEnded))
    assert max(ended.values()) == 1
    for group in result.groups:
        assert sum(run_id.startswith(group.group_id + "-") for run_id in ended) == 4
    assert len({group.group_id for group in result.groups}) == len(result.groups) == 16
    assert Counter(group.step for group in result.groups) == dict.fromkeys(range(1, 9), 2)
    assert result.counts.trained_runs == 64


def test_lost_attempts_are_tried_again_and_lost_groups_replaced() -> None:
    losses = {"run_loss_probability": 0.2, "group_loss_probability": 0.2}
    result = play(config(steps=12, cells=2, phi=1.0, sigma=0.3, **losses))
    counts = result.counts
    assert result.status == "finished"
    assert counts.lost_attempts > 0
    assert counts.lost_groups > 0
    assert counts.trained_groups == 24
    assert counts.dispatched_groups == 24 + counts.lost_groups


def test_the_runs_of_a_lost_cell_go_on_at_another() -> None:
    log = Log()
    failing = {"cell_mtbf_s": 400.0, "cell_repair_s": 1000.0, "prefill_s": 7.0}
    result = play(
        config(steps=1, cells=2, slots=4, groups=1, size=4, seed=8, policy=ASYNC | {"mode": "colocate"}, **failing), log
    )
    ((lost_s, lost),) = log.events(CellLost)
    assert 0 < lost_s < 100.0
    ends_s = sorted(at_s for at_s, _ in log.events(RunEnded))
    assert lost.cell_id in ("cell-0", "cell-1")
    assert ends_s == pytest.approx([100.0, 100.0, 107.0, 107.0])
    assert result.counts.moved_runs == 2


# -- the same again -----------------------------------------------------------------------------------------------


def noisy(policy: dict[str, Any], seed: int = 5) -> Any:
    faults = {
        "run_loss_probability": 0.05,
        "group_loss_probability": 0.05,
        "cell_mtbf_s": 5000.0,
        "cell_repair_s": 60.0,
    }
    return config(steps=10, cells=4, phi=1.0, sigma=0.6, seed=seed, policy=policy, train_per_rollout=0.1, **faults)


def test_the_same_configuration_gives_the_same_result() -> None:
    first, again = play(noisy(STREAMING)), play(noisy(STREAMING))
    assert json.dumps(first.to_json()) == json.dumps(again.to_json())
    assert first.groups == again.groups
    assert play(noisy(STREAMING, seed=6)).hours != first.hours


def test_policies_with_one_seed_see_the_same_runs() -> None:
    def durations(policy: dict[str, Any]) -> dict[str, list[float]]:
        result = play(config(steps=6, cells=3, phi=1.0, sigma=0.6, policy=policy, train_per_rollout=0.1))
        return {group.group_id: sorted(group.durations_s) for group in result.groups}

    assert durations(ASYNC) == durations(COLOCATE) == durations(STREAMING)


def test_mean_staleness_is_phi_plus_half_of_mu_minus_one() -> None:
    for phi, mu in ((1.0, 1), (0.0, 3), (1.0, 2)):
        result = play(
            config(steps=60, cells=4, groups=4, phi=phi, mu=mu, sigma=0.6, policy=STREAMING, train_per_rollout=0.05)
        )
        assert result.staleness.mean_after_first_burst == pytest.approx(phi + (mu - 1) / 2, abs=0.05)
        assert result.staleness.maximum <= 8


# -- what the result says -----------------------------------------------------------------------------------------


def test_shares_of_time_add_up_and_no_bound_is_beaten() -> None:
    for policy in (ASYNC, COLOCATE, STREAMING):
        result = play(noisy(policy))
        shares = result.utilisation
        total = shares.serving + shares.training + shares.switching + shares.waiting + shares.down
        assert total == pytest.approx(1.0)
        assert 0 < shares.slot_occupancy <= 1
        assert result.hours >= result.lower_bound.hours


def test_the_timeline_covers_the_time_of_every_cell() -> None:
    result = play(noisy(STREAMING), is_recorded=True)
    assert result.timeline is not None
    for cell in result.timeline.cells:
        inside = [span for span in cell.intervals if span[1] >= result.start_s]
        assert sum(end_s - start_s for _, start_s, end_s in inside) >= seconds(result) * (1 - 1e-9)
        assert all(before[2] == after[1] for before, after in pairwise(inside))


def test_held_out_runs_take_slots_too() -> None:
    plain = config(steps=2, cells=1, slots=8)
    watched = plain.model_copy(
        update={"evaluation": plain.evaluation.model_copy(update={"num_tasks": 2, "group_size": 4, "at_start": True})}
    )
    log = Log()
    result = play(watched, log)
    assert seconds(result) == pytest.approx(seconds(play(plain)) + 100.0)
    assert sum(event.result.group_id.startswith("e") for _, event in log.events(GroupScored)) == 2


def test_a_job_that_does_not_end_tells_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(config(steps=2))
    monkeypatch.setattr(simulation, "_max_events", lambda: 10)
    with pytest.raises(InvariantError, match="no end after 10 events") as error:
        simulation.run()
    assert "CellJoined" in error.value.hint


def test_an_async_split_that_leaves_no_cell_to_serve_is_refused() -> None:
    asynchronous = {"policy": {"mode": "async", "train_cells": 4}}
    with pytest.raises(ValueError, match="one has to serve"):
        SimConfig.model_validate({"pool": {"num_cells": 4}, "scheduler": asynchronous})
    SimConfig.model_validate({"pool": {"num_cells": 5, "standalone_cells": 1}, "scheduler": asynchronous})
