"""Runs as rows that other trainers read: one row a trajectory, each target masked in exactly one row of its run.

``sum over rows of target_weight * advantage * sum over target_mask of the token's term``, divided by the number of
runs with targets, is the loss that Tidegate trains (``docs/export.md``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ConfigError
from services.trajectory.encoding import CallRow
from services.trajectory.outcome import Outcome
from services.trajectory.paths import RunCalls, Trajectory, trajectories_of
from services.trajectory.records import answer_of
from services.trajectory.types import CallRecord, Logprobs, RunSelection, RunSummary, TokenIds

SCHEMA = "tidegate.trajectory/2"
"""Name and version of the rows; a reader refuses others but ``EARLIER_SCHEMAS``."""
EARLIER_SCHEMAS = ("tidegate.trajectory/1",)
"""Version 1 had the last answer as one text, tool calls and reasoning unparsed, and knew less of each call."""
NOT_SAMPLED = -1
"""The version of a token that no policy sampled."""
UNFINISHED = "unfinished"
"""The outcome to ask for where a run has none yet."""


@dataclass(frozen=True, slots=True)
class ExportFilter:
    """Which runs and trajectories to export. Empty fields do not filter."""

    run_ids: tuple[str, ...] = ()
    group_id: str = ""
    task_name: str = ""
    outcome: str = ""
    min_reward: float | None = None
    selected_only: bool = False
    """Only trajectories that were selected: what the job trained."""
    no_eval: bool = False
    """No held-out runs."""

    def __post_init__(self) -> None:
        check_outcome(self.outcome)
        if self.min_reward is not None and not np.isfinite(self.min_reward):
            raise ConfigError(f"{self.min_reward} is no reward to compare with.", "Give a finite number.")

    def takes(self, run: RunSummary) -> bool:
        """Whether a run is wanted."""
        return (
            (not self.run_ids or run.run_id in self.run_ids)
            and (not self.group_id or run.group_id == self.group_id)
            and (not self.task_name or run.task_name == self.task_name)
            and (not self.outcome or (run.outcome or UNFINISHED) == self.outcome)
            and (self.min_reward is None or (run.reward is not None and run.reward >= self.min_reward))
            and not (self.no_eval and run.is_eval)
            and not (self.selected_only and (run.selection is None or not run.selection.leaf_call_ids))
        )


def check_outcome(outcome: str) -> None:
    """Raise ``ConfigError`` unless an outcome is empty, 'unfinished' or one of the table."""
    known = [*(str(name) for name in Outcome), UNFINISHED]
    if outcome and outcome not in known:
        raise ConfigError(f"no outcome {outcome!r}.", f"Outcomes are {', '.join(known)}.")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a row says of its group."""

    version: int | None = None
    """Version of the published weights when it was dispatched."""
    state: str = ""
    """'open', 'ready', 'lost', 'dropped' or 'cancelled'; empty: not known."""
    reason: str = ""
    """Why it is lost, dropped or cancelled."""
    loss_reason: str = ""
    trained_step: int | None = None
    """The optimizer step that trained it."""


@dataclass(frozen=True, slots=True)
class ScoreFacts:
    """What a row says of how its run was scored, besides the reward."""

    evaluated_ref: str = ""
    """What was evaluated, as the scorer names it."""
    details: dict[str, Any] = field(default_factory=dict)


_NO_SCORE = ScoreFacts()


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory. Arrays have one length: that of the path from the first token to the last."""

    job_id: str
    group_id: str
    group: GroupFacts
    task_name: str
    is_eval: bool
    run_id: str
    attempt: int
    outcome: str | None
    reward: float | None
    advantage: float | None
    wall_s: float | None
    detail: str
    evaluated_ref: str
    score_details: dict[str, Any]
    trajectory: int
    """Position among the run's trajectories."""
    num_trajectories: int
    """Of the run, also those that were not exported."""
    role: str
    is_selected: bool
    draw: int | None
    messages: list[dict[str, Any]]
    """The conversation with the last answer, in OpenAI's form."""
    tools: list[dict[str, Any]]
    token_ids: TokenIds
    target_mask: NDArray[np.bool_]
    logprobs: Logprobs
    """Behaviour log-probabilities of the sampled tokens, 0 elsewhere."""
    versions: NDArray[np.int32]
    """Version of the weights that sampled each token, ``NOT_SAMPLED`` elsewhere."""
    num_prompt_tokens: int
    """Tokens before the first sampled one."""
    n_run: int
    """Targets of the whole run; 0 where nothing was selected."""
    target_weight: float
    """``1 / n_run``: multiplies the term of each target, besides the advantage."""
    calls: list[dict[str, Any]]
    """The calls of the path in order, see ``_call_part``."""
    selection: dict[str, Any] | None


def rows_of_run(
    job_id: str,
    summary: RunSummary,
    run: RunCalls,
    group: GroupFacts,
    score: ScoreFacts = _NO_SCORE,
    *,
    selected_only: bool = False,
) -> Iterator[TrajectoryRow]:
    """The rows of a run, one by one: flattened, a branching run may be many times as large.

    One without any call is one row without tokens, so that its outcome is not lost. A target that lies on several
    selected paths is masked in the first of them.
    """
    given: set[str] = set()
    trajectories = trajectories_of(run)
    for one in trajectories:
        targets = _targets(one, run.selection) - given
        given |= targets
        if one.is_selected or not selected_only:
            yield _row(job_id, summary, run, group, score, one, len(trajectories), targets)
    if not trajectories and not selected_only:
        yield _row(job_id, summary, run, group, score, None, 0, set())


def _targets(trajectory: Trajectory, selection: RunSelection | None) -> set[str]:
    if selection is None or not trajectory.is_selected:
        return set()
    return {call.record.call_id for call in trajectory.calls} & set(selection.target_call_ids)


def _row(
    job_id: str,
    summary: RunSummary,
    run: RunCalls,
    group: GroupFacts,
    score: ScoreFacts,
    trajectory: Trajectory | None,
    num_trajectories: int,
    targets: set[str],
) -> TrajectoryRow:
    calls = () if trajectory is None else trajectory.calls
    selection = run.selection if calls else None  # of calls that retention deleted, nothing is a target any more
    n_run = 0 if selection is None else selection.num_targets
    messages = full_messages(calls)
    return TrajectoryRow(
        job_id=job_id,
        group_id=summary.group_id,
        group=group,
        task_name=summary.task_name,
        is_eval=summary.is_eval,
        run_id=summary.run_id,
        attempt=summary.attempt,
        outcome=None if summary.outcome is None else str(summary.outcome),
        reward=_finite(summary.reward),
        advantage=_finite(summary.advantage),
        wall_s=summary.wall_s,
        detail=summary.detail,
        evaluated_ref=score.evaluated_ref,
        score_details=score.details,
        trajectory=0 if trajectory is None else trajectory.index,
        num_trajectories=num_trajectories,
        role="" if trajectory is None else str(trajectory.role),
        is_selected=trajectory is not None and trajectory.is_selected,
        draw=None if trajectory is None else trajectory.draw,
        messages=[openai_message(message) for message in messages],
        tools=list(calls[-1].record.request.get("tools", ())) if calls else [],
        n_run=n_run,
        target_weight=1.0 / n_run if n_run else 0.0,
        calls=_call_parts(calls, run, messages, targets),
        selection=None if selection is None else _selection_part(selection),
        **_arrays(calls, targets),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _arrays(calls: Sequence[CallRow], targets: set[str]) -> dict[str, Any]:
    token_ids: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)]
    length = _end(calls[-1]) if calls else 0
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, NOT_SAMPLED, dtype=np.int32)
    for call in calls:
        record, start, end = call.record, call.num_prompt_tokens, _end(call)
        token_ids += [call.new_prompt_ids, record.output_ids]
        mask[start:end] = record.call_id in targets
        logprobs[start:end] = record.logprobs
        versions[start:end] = np.repeat(
            [span.version for span in record.version_spans], [span.num_tokens for span in record.version_spans]
        )
    starts = [call.num_prompt_tokens for call in calls if len(call.record.output_ids)]
    return {
        "token_ids": np.concatenate(token_ids),
        "target_mask": mask,
        "logprobs": logprobs,
        "versions": versions,
        "num_prompt_tokens": starts[0] if starts else length,
    }


def _end(call: CallRow) -> int:
    return call.num_prompt_tokens + len(call.record.output_ids)


def _call_parts(
    calls: Sequence[CallRow], run: RunCalls, messages: Sequence[Mapping[str, Any]], targets: set[str]
) -> list[dict[str, Any]]:
    tools = list(calls[-1].record.request.get("tools", ())) if calls else []
    return [_call_part(call, run, messages, tools, call.record.call_id in targets) for call in calls]


def _call_part(
    call: CallRow,
    run: RunCalls,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    is_target: bool,
) -> dict[str, Any]:
    """One call of a path. ``start`` is the place of its first sampled token in the row.

    Its request had the row's first ``num_messages`` messages and the row's tools; where a harness wrote its history
    anew, ``request`` holds the call's own ``messages`` or ``tools``.
    """
    record = call.record
    own_messages = list(record.request.get("messages", ()))
    request = {name: value for name, value in record.request.items() if name not in ("messages", "tools")}
    if list(messages[: len(own_messages)]) != own_messages:
        request["messages"] = own_messages
    if list(record.request.get("tools", ())) != list(tools):
        request["tools"] = list(record.request.get("tools", ()))
    return {
        "call_id": record.call_id,
        "ordinal": call.ordinal,
        "role": str(run.roles[record.call_id]),
        "fate": str(run.fates[record.call_id]),
        "is_target": is_target,
        "start": call.num_prompt_tokens,
        "num_sampled_tokens": len(record.output_ids),
        "num_messages": len(own_messages),
        "finish_reason": record.finish_reason,
        "trainable": record.trainable,
        "agent_id": record.agent_id,
        "parent_agent_id": record.parent_agent_id,
        "purpose": str(record.purpose),
        "cells": list(record.cells),
        "started_at_s": record.started_at_s,
        "ended_at_s": record.ended_at_s,
        "output_text": record.output_text,
        "answer": None if record.answer is None else openai_message(answer_message(record)),
        "num_malformed_calls": 0 if record.answer is None else record.answer.num_malformed_calls,
        "stop_string": record.stop_string,
        "sampling": None if record.sampling is None else json.dumps(asdict(record.sampling)),
        "requested_sampling": json.dumps(record.requested_sampling, sort_keys=True),
        "request": json.dumps(request, sort_keys=True),
    }


def _selection_part(selection: RunSelection) -> dict[str, Any]:
    return {
        "max_trajectories": selection.max_trajectories,
        "seed": selection.seed,
        "num_targets": selection.num_targets,
        "num_left_out": selection.num_left_out,
        "num_not_trainable": selection.num_not_trainable,
        "num_superseded": selection.num_superseded,
        "left_out": [
            {"role": str(role), "num_tokens": num_tokens} for role, num_tokens in sorted(selection.left_out.items())
        ],
    }


def full_messages(calls: Sequence[CallRow]) -> list[dict[str, Any]]:
    """The canonical messages of a path: those of its last request, and the answer to it."""
    if not calls:
        return []
    last = calls[-1].record
    answer = [answer_message(last)] if len(last.output_ids) or last.output_text else []
    return [*last.request.get("messages", ()), *answer]


def answer_message(record: CallRecord) -> dict[str, Any]:
    """The answer of a call as a canonical message: reasoning, text and tool calls apart, as its harness saw them."""
    message = asdict(answer_of(record))
    return {**message, "tool_calls": list(message["tool_calls"])}


def openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A canonical message in the form of OpenAI's Chat Completions; empty fields are left out."""
    given: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        given["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        given["tool_calls"] = [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": _arguments_json(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        given["tool_call_id"] = message["tool_call_id"]
    return given


def _arguments_json(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character: escaped, it survives in every file
        return json.dumps(arguments)
    return text


def wanted(summaries: Iterable[RunSummary], filters: ExportFilter) -> list[RunSummary]:
    """The runs to export, in order. ``ConfigError`` if a run that is asked for by its id is not there."""
    known = list(summaries)
    missing = set(filters.run_ids) - {run.run_id for run in known}
    if missing:
        raise ConfigError(f"no run {', '.join(sorted(missing))} in the store.", "See `tidegate runs list`.")
    return [run for run in known if filters.takes(run)]
