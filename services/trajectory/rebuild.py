"""Runs made again from the rows of an export: the calls, results and selections that a store takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from services.common.types import VersionSpan
from services.rollout.types import RunResult
from services.trajectory.encoding import CallRow
from services.trajectory.export import TrajectoryRow
from services.trajectory.outcome import Outcome
from services.trajectory.types import CallRecord, CallRole, RunSelection, TokenIds

_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RebuiltRun:
    """A run as a store takes it."""

    run_id: str
    attempt: int
    result: RunResult | None
    """None for one that was unfinished."""
    calls: tuple[CallRow, ...]
    """Parents before their children."""
    selection: RunSelection | None


def rebuild_run(rows: Sequence[TrajectoryRow]) -> RebuiltRun:
    """The run of these rows, which were checked. A call that lies on several of them is one call."""
    first = rows[0]
    calls: dict[str, CallRow] = {}
    for row in rows:
        parent: CallRow | None = None
        for part in row.calls:
            parent = calls.get(part["call_id"]) or _call(row, part, parent)
            calls[part["call_id"]] = parent
    result = None
    if first.outcome is not None:
        wall_s = first.wall_s or 0.0
        outcome = Outcome(first.outcome)
        result = RunResult(first.run_id, first.attempt, outcome, first.reward, wall_s, 0.0, 0.0, None, first.detail)
    return RebuiltRun(
        run_id=first.run_id,
        attempt=first.attempt,
        result=result,
        calls=tuple(sorted(calls.values(), key=lambda call: call.ordinal)),
        selection=_selection(rows),
    )


def canonical_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form as a canonical one (``services.proxy.types.Message``)."""
    return {
        "role": message["role"],
        "content": message["content"],
        "reasoning": message.get("reasoning_content") or "",
        "tool_calls": [
            {
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls") or ()
        ],
        "tool_call_id": message.get("tool_call_id") or "",
    }


def _call(row: TrajectoryRow, part: Mapping[str, Any], parent: CallRow | None) -> CallRow:
    start, stop = part["start"], part["start"] + part["num_sampled_tokens"]
    begin = 0 if parent is None else parent.num_prompt_tokens + len(parent.record.output_ids)
    own = json.loads(part["request"])
    request = {
        **own,
        "messages": own.get("messages") or [canonical_message(one) for one in row.messages[: part["num_messages"]]],
        "tools": own.get("tools", row.tools),
    }
    record = CallRecord(
        call_id=part["call_id"],
        run_id=row.run_id,
        attempt=row.attempt,
        parent_call_id=None if parent is None else parent.record.call_id,
        request=request,
        prompt_ids=_NO_IDS,
        output_ids=row.token_ids[start:stop],
        logprobs=row.logprobs[start:stop],
        version_spans=_spans(row.versions[start:stop].tolist()),
        output_text=part["output_text"],
        finish_reason=part["finish_reason"],
        trainable=part["trainable"],
        cells=tuple(part["cells"]),
        started_at_s=part["started_at_s"],
        ended_at_s=part["ended_at_s"],
        requested_sampling=json.loads(part["requested_sampling"]),
        agent_id=part["agent_id"],
    )
    above = None if parent is None else parent.record.request
    return CallRow(
        record=record,
        ordinal=part["ordinal"],
        num_prompt_tokens=start,
        new_prompt_ids=row.token_ids[begin:start],
        num_shared_messages=0 if above is None else _num_shared(request["messages"], above["messages"]),
        shares_tools=above is not None and above["tools"] == request["tools"],
    )


def _num_shared(messages: Sequence[Any], known: Sequence[Any]) -> int:
    pairs = enumerate(zip(messages, known, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(messages), len(known)))


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    changes = [at for at, (one, other) in enumerate(pairwise(versions), 1) if one != other]
    bounds = [0, *changes, len(versions)] if versions else []
    return tuple(VersionSpan(versions[start], stop - start) for start, stop in pairwise(bounds))


def _selection(rows: Sequence[TrajectoryRow]) -> RunSelection | None:
    given = rows[0].selection
    if given is None:
        return None
    selected = sorted((row for row in rows if row.draw is not None), key=lambda row: row.draw or 0)
    targets = {call["call_id"]: call["ordinal"] for row in rows for call in row.calls if call["is_target"]}
    return RunSelection(
        max_trajectories=given["max_trajectories"],
        seed=given["seed"],
        leaf_call_ids=tuple(_last_sampled(row) for row in selected),
        leaf_roles=tuple(CallRole(row.role) for row in selected),
        target_call_ids=tuple(sorted(targets, key=targets.__getitem__)),
        num_targets=given["num_targets"],
        num_left_out=given["num_left_out"],
        num_not_trainable=given["num_not_trainable"],
        num_superseded=given["num_superseded"],
        left_out={CallRole(one["role"]): one["num_tokens"] for one in given["left_out"]},
    )


def _last_sampled(row: TrajectoryRow) -> str:
    return next((call["call_id"] for call in reversed(row.calls) if call["num_sampled_tokens"]), "")
