"""Small simulated jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.scheduler.actions import Decision
from services.scheduler.events import Event
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.engine import Simulation
from services.scheduler.sim.result import SimResult

FREE = {"switch_to_train_s": 0.0, "switch_to_rollout_s": 0.0, "train_per_rollout": 0.0}
"""A system in which nothing but the runs takes time."""

Listener = Callable[[float, Event, list[Decision]], None]


def config(
    *,
    steps: int = 4,
    cells: int = 2,
    slots: int | list[int] = 4,
    groups: int = 2,
    size: int = 4,
    phi: float = 0.0,
    mu: int = 1,
    policy: dict[str, Any] | None = None,
    duration_s: float = 100.0,
    sigma: float = 0.0,
    seed: int = 0,
    standalone: int = 0,
    timeout_s: float | None = None,
    **system: Any,
) -> SimConfig:
    """A job with lognormal durations; ``sigma`` 0 makes them all equal. Costs that are not given are 0."""
    return SimConfig.model_validate(
        {
            "steps": steps,
            "seed": seed,
            "pool": {"num_cells": cells, "slots": slots, "standalone_cells": standalone},
            "scheduler": {
                "groups_per_step": groups,
                "group_size": size,
                "carry_over_steps": phi,
                "steps_per_burst": mu,
                "policy": policy or {"mode": "elastic", "streaming": False},
            },
            "workload": {
                "kind": "lognormal",
                "mean_s": duration_s,
                "task_sigma": sigma,
                "run_sigma": sigma,
                "timeout_s": timeout_s,
            },
            "system": FREE | system,
        }
    )


def play(sim_config: SimConfig, listener: Listener | None = None, *, is_recorded: bool = False) -> SimResult:
    return Simulation(sim_config, listener=listener, is_recorded=is_recorded).run()


def seconds(result: SimResult) -> float:
    return result.hours * 3600
