"""Configuration of the scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SchedulerConfig(BaseModel):
    """How runs are dispatched and cells are moved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups_per_step: int = Field(default=4, ge=1)
    """B: groups that one optimizer step trains."""
    group_size: int = Field(default=8, ge=2)
    """Runs of a group. Advantages are relative to the group, so it needs at least 2."""
    steps_per_burst: int = Field(default=1, ge=1)
    """mu: optimizer steps of a burst; weights are published after it."""
    carry_over_steps: float = Field(default=1.0, ge=0)
    """phi: steps' worth of groups that are outstanding beyond the next burst."""
    max_staleness_steps: int = Field(default=8, ge=0)
    """A group whose version is older than this when it would be trained is dropped and replaced."""
    max_lost_groups: int = Field(default=200, ge=1)
    """The job fails when more groups than this were lost in a row (dropped, invalid, equal rewards), with none ready
    in between: something is wrong, or there is nothing left to learn."""
    run_start_timeout_s: float = Field(default=60, gt=0)
    """A run whose key is not open this long after a cell had a slot for it is lost and retried."""
    drain_timeout_s: float = Field(default=120, gt=0)
    """A cell that leaves rollout waits this long for its calls; then they are aborted and go on elsewhere."""
    grpc_host: str = "127.0.0.1"
    """Address of the gRPC server."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """Port of the gRPC server; 0 takes a free one (written to the job's folder, ``grpc-address``)."""
    grpc_token: str = ""
    """Token that every gRPC call must carry; empty: a random one, written to the job's folder (mode 0600)."""
    on_equal_rewards: Literal["drop", "keep"] = "drop"
    """A group whose rewards are all equal has no advantage: drop and replace it, or train it (a step of zeros)."""
