"""Configuration of the scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _PolicyConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    streaming: bool = True
    """Train groups as they become ready; otherwise a step starts when all of its groups are."""


class AsyncPolicy(_PolicyConfig):
    """A fixed split: some cells only train, the others only serve."""

    mode: Literal["async"]
    train_cells: int = Field(default=1, ge=1)
    """Cells that only train, the core included. At least one more cell has to serve."""


class ColocatePolicy(_PolicyConfig):
    """The whole pool switches to training when a burst's groups are ready, and back after it."""

    mode: Literal["colocate"]


class ElasticPolicy(_PolicyConfig):
    """Cells leave rollout one by one as unfinished runs ebb, and come back after the burst."""

    mode: Literal["elastic"] = "elastic"
    rule: Literal["paper", "sorted"] = "paper"
    """``paper``: QwenGyre's rules. ``sorted``: the same, but tasks that take about as long are dispatched together."""
    window_bursts: int = Field(default=3, ge=1)
    """``sorted``: so many bursts' tasks are rearranged at a time; each comes at most so many bursts early or late."""


PolicyConfig = Annotated[AsyncPolicy | ColocatePolicy | ElasticPolicy, Field(discriminator="mode")]


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
    policy: PolicyConfig = ElasticPolicy()
    """How the pool is shared between rollout and training: ``mode`` is ``async``, ``colocate`` or ``elastic``."""
    max_staleness_steps: int = Field(default=8, ge=0)
    """No group is trained when its version is older than this."""
    at_staleness_bound: Literal["wait", "drop"] = "wait"
    """At the bound: the step that has to train an unfinished group waits for it, or it is dropped and replaced."""
    on_lost_group: Literal["replace", "close_short"] = "replace"
    """A group that is lost inside a burst is replaced at once, or its step closes with a group less."""
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
