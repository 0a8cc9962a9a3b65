"""Types of the trajectory service: call records, groups, scored runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.types import VersionSpan
from services.rollout.types import Sampling
from services.trajectory.outcome import Outcome

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CallTicket:
    """The shard's answer to MatchCall: what the proxy needs to have a call served."""

    call_id: str
    run_id: str
    attempt: int
    prompt_ref: Any
    """Ray object ref of an int32 array ``[num_prompt_tokens]``; a plain array outside Ray."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Prompt tokens that had to be tokenised for this call; the rest came from stored ids."""
    parent_call_id: str | None
    sampling: Sampling
    """The sampling parameters that hold: the job's, with the harness's stop strings and smaller limits."""
    trainable: bool
    """False when the tokens may not become targets (greedy or forced)."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One completed call, as it is stored. Never changed afterwards.

    ``output_ids``, ``logprobs`` and the spans' sum have equal length (checked when stored).
    """

    call_id: str
    run_id: str
    attempt: int
    parent_call_id: str | None
    request: dict[str, Any]
    """The canonical request (see ``services.proxy.types``) as JSON-ready data."""
    prompt_ids: TokenIds
    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    output_text: str
    finish_reason: str
    """'stop', 'length' or 'abort'."""
    trainable: bool
    cells: tuple[str, ...]
    """The cells that served it, in order; more than one when it moved."""
    started_at_s: float
    """Unix time, seconds."""
    ended_at_s: float
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """What the harness asked for; the job's parameters win over it."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group as it is dispatched."""

    group_id: str
    task_name: str
    run_ids: tuple[str, ...]
    version: int
    """Version of the published weights when it was dispatched (its scheduling staleness counts from there)."""
    is_eval: bool = False


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run for lists and reports."""

    run_id: str
    group_id: str
    task_name: str
    attempt: int
    outcome: Outcome | None
    """None while it is unfinished."""
    reward: float | None
    advantage: float | None
    num_calls: int
    num_prompt_tokens: int
    num_output_tokens: int
    version_min: int | None
    version_max: int | None
    wall_s: float | None
    is_eval: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of a group once all its runs were final."""

    group_id: str
    ready: bool
    """False: the group is lost for training; ``reason`` says why."""
    reason: str
    num_runs: int
    num_counted: int
    """Runs that count in the baseline."""
    num_targets: int
    num_tokens: int
    """Unique tokens of the group's forest: what one pass over it costs."""
    reward_mean: float | None
    rewards: tuple[float, ...]
    version_min: int | None
