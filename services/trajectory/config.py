"""Configuration of the trajectory service."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from services.trajectory.store.config import StoreConfig


class TrajectoryConfig(BaseModel):
    """Call logs, trees, selection and advantages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_shards: int = Field(default=1, ge=1)
    """Actors among which runs are spread."""
    max_trajectories: int | None = Field(default=5, ge=1)
    """J_max: at most so many root-to-leaf paths of one run are trained; None: all."""
    max_calls: int | None = Field(default=None, ge=1)
    """Most model calls of one attempt of a run; further ones are refused, and the run ends by `turn_limit`. None: no
    limit."""
    setup_failure: Literal["placeholder", "drop"] = "drop"
    """What a run that could not be set up, retries included, is to its group: reward 0 in the baseline and nothing to
    train (as QwenGyre does), or no part of it."""
    advantage: Literal["grpo", "grpo_no_std", "rloo"] = "grpo"
    """Baseline of a run: the group's mean (divided by its standard deviation, or not), or the mean of the others."""
    min_counted_runs: int = Field(default=2, ge=2)
    """A group with fewer counted runs is lost."""
    micro_step_tokens: int = Field(default=65_536, ge=16)
    """Most unique tokens of one micro-step. A group with more is cut between its runs; a single run never is."""
    store: StoreConfig = StoreConfig()
    """Where runs are kept, and for how long."""
