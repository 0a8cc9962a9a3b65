"""Types of the trajectory service: call records, groups, scored runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.packed import Packed
from services.common.types import VersionSpan
from services.proxy.types import CallPurpose, ParsedAnswer
from services.rollout.types import Sampling
from services.trajectory.outcome import Outcome

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class CallRole(StrEnum):
    """What a call was made for. Selection takes roles in this order."""

    MAIN = "main"
    """The conversation that the run began with, and what went on from its compactions."""
    MAIN_SUMMARY = "main_summary"
    """A summary of the main conversation, from which the harness went on."""
    SUBAGENT = "subagent"
    """Another agent's conversation than the main one."""
    SUBAGENT_SUMMARY = "subagent_summary"
    SIDE = "side"
    """A title, a memory, a check: beside the work. It is kept, and never trained."""


class LossReason(StrEnum):
    """Why a settled group is not trained."""

    HELD_OUT = "held_out"
    TOO_FEW_COUNTED = "too_few_counted"
    EQUAL_REWARDS = "equal_rewards"
    """All counted rewards are equal: there is no advantage to learn from."""
    NOTHING_TO_TRAIN = "nothing_to_train"
    """No counted run has a token that may be a target."""


@dataclass(frozen=True, slots=True)
class RunSelection:
    """What was selected of a run when its group was settled, in terms of its calls. Tokens are sampled ones."""

    max_trajectories: int | None
    """J_max; None: no limit."""
    seed: int
    leaf_call_ids: tuple[str, ...]
    """The last sampled call of each selected path, in the order of the draw."""
    leaf_roles: tuple[CallRole, ...]
    target_call_ids: tuple[str, ...]
    """Calls whose sampled tokens are targets."""
    num_targets: int
    num_left_out: int
    """Trainable tokens on paths that were not selected."""
    num_not_trainable: int
    """Tokens made greedily or under a forced choice, or of answers that were cut."""
    num_superseded: int
    """Trainable tokens of answers that a retry left behind."""
    left_out: Mapping[CallRole, int] = field(default_factory=dict)
    """``num_left_out`` by the role of the calls that sampled them."""


@dataclass(frozen=True, slots=True)
class CallTicket(Packed):
    """The shard's answer to MatchCall: what the proxy needs to have a call served."""

    call_id: str
    run_id: str
    attempt: int
    prompt_ref: Any
    """int32 array ``[num_prompt_tokens]``, or a Ray object ref of it if it is long."""
    num_prompt_tokens: int
    num_new_tokens: int
    """Prompt tokens that had to be tokenised for this call; the rest came from stored ids."""
    parent_call_id: str | None
    sampling: Sampling
    """The sampling parameters that hold: the job's, with the harness's stop strings and smaller limits."""
    trainable: bool
    """False when the tokens may not become targets (greedy or forced)."""
    is_shared: bool = False
    """Another request made the same call: it is being generated, or its answer did not reach its harness. Its answer
    is to be asked for (``shared_answer``), not generated."""
    partial: PartialAnswer | None = None
    """What the call had produced when its harness went away; generation goes on behind it."""


@dataclass(frozen=True, slots=True)
class PartialAnswer(Packed):
    """The beginning of an answer whose harness went away before its end. Arrays and the spans' sum: equal length."""

    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    text: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallRecord(Packed):
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
    sampling: Sampling | None = None
    """What held. None in records of stores that did not keep it."""
    agent_id: str = ""
    """Which of the harness's agents made the call, where the harness names it."""
    parent_agent_id: str = ""
    """The agent that made that one, where the harness names it."""
    purpose: CallPurpose = CallPurpose.TURN
    """What the call was for, as far as the harness tells."""
    answer: ParsedAnswer | None = None
    """The output told apart as the harness saw it. None: ``output_text`` is all text."""
    stop_string: str = ""
    """The stop string that ended it; empty: an end-of-turn token, or no stop."""


@dataclass(frozen=True, slots=True)
class SharedAnswer(Packed):
    """A completed call, for another request that made the same one."""

    record: CallRecord
    """Its ``prompt_ids`` and its ``request`` are empty: the other request has its own."""
    num_prompt_tokens: int


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
    selection: RunSelection | None = None
    """None while its group is not settled, and for runs that do not count."""


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
    loss_reason: LossReason | None = None
    """None for a ready group; ``reason`` in a form to count by."""
    num_left_out: int = 0
    """Trainable tokens that selection left out."""
