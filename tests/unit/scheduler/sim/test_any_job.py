"""Whatever the configuration: the simulated job ends, and its figures agree."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.engine import Simulation

seconds = st.sampled_from([0.0, 0.5, 4.0, 40.0])
probability = st.sampled_from([0.0, 0.1, 0.3])


@st.composite
def configs(draw: st.DrawFn) -> SimConfig:
    num_cells = draw(st.integers(1, 4))
    modes = ["elastic", "colocate"] + ["async"] * (num_cells > 1)
    mode = draw(st.sampled_from(modes))
    policy: dict[str, Any] = {"mode": mode, "streaming": draw(st.booleans())}
    num_standalone = draw(st.integers(0, num_cells - 1))
    if mode == "async":
        policy["train_cells"] = draw(st.integers(1, max(1, num_cells - 1 - num_standalone)))
    elif mode == "elastic":
        policy["rule"] = draw(st.sampled_from(["paper", "sorted"]))
    return SimConfig.model_validate(
        {
            "seed": draw(st.integers(0, 1000)),
            "steps": draw(st.integers(1, 5)),
            "pool": {
                "num_cells": num_cells,
                "standalone_cells": num_standalone,
                "slots": draw(st.lists(st.integers(1, 5), min_size=num_cells, max_size=num_cells)),
                "max_concurrent_runs": draw(st.sampled_from([None, 3])),
            },
            "scheduler": {
                "policy": policy,
                "groups_per_step": draw(st.integers(1, 3)),
                "group_size": draw(st.integers(2, 4)),
                "steps_per_burst": draw(st.integers(1, 3)),
                "carry_over_steps": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
                "on_lost_group": draw(st.sampled_from(["replace", "close_short"])),
                "at_staleness_bound": draw(st.sampled_from(["wait", "drop"])),
            },
            "workload": {
                "kind": "lognormal",
                "mean_s": 100.0,
                "task_sigma": 0.5,
                "run_sigma": draw(st.sampled_from([0.0, 1.0])),
                "timeout_s": draw(st.sampled_from([None, 150.0])),
                "num_tasks": 5,
            },
            "system": {
                "switch_to_train_s": draw(seconds),
                "switch_to_rollout_s": draw(seconds),
                "publish_s": draw(seconds),
                "update_pause_s": draw(seconds),
                "prefill_s": draw(seconds),
                "train_per_rollout": draw(st.sampled_from([0.0, 0.02, 0.5])),
                "batch_overhead": draw(st.sampled_from([1.0, 1.5])),
                "optimizer_s": draw(seconds),
                "score_s": draw(seconds),
                "checkpoint_s": draw(seconds),
                "checkpoint_every": draw(st.integers(0, 2)),
                "group_loss_probability": draw(probability),
                "run_loss_probability": draw(probability),
                "cell_mtbf_s": draw(st.sampled_from([0.0, 0.0, 500.0, 3000.0])),
                "cell_repair_s": draw(seconds),
            },
            "evaluation": {"num_tasks": draw(st.integers(0, 1)), "every": 2, "at_end": draw(st.booleans())},
        }
    )


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs())
def test_every_simulated_job_ends_with_figures_that_agree(sim_config: SimConfig) -> None:
    result = Simulation(sim_config, is_recorded=True).run()
    counts, scheduler = result.counts, sim_config.scheduler
    assert result.status == "finished", result.reason
    assert len(result.step_end_s) == sim_config.steps
    assert list(result.step_end_s) == sorted(result.step_end_s)
    assert len({group.group_id for group in result.groups}) == len(result.groups) == counts.trained_groups
    assert counts.trained_groups <= sim_config.steps * scheduler.groups_per_step
    if scheduler.on_lost_group == "replace":
        assert counts.trained_groups == sim_config.steps * scheduler.groups_per_step
    assert counts.trained_runs <= counts.ended_runs <= counts.dispatched_runs
    assert result.staleness.maximum <= scheduler.max_staleness_steps
    assert result.hours >= result.lower_bound.hours * (1 - 1e-9)
    shares = result.utilisation
    total = shares.serving + shares.training + shares.switching + shares.waiting + shares.down
    assert math.isclose(total, 1.0) or result.hours == 0
    assert 0 <= shares.slot_occupancy <= 1 + 1e-9
