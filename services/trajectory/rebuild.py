"""Runs made again from the rows of an export: the calls, results and selections that a store takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from services.common.types import VersionSpan
from services.proxy.types import CallPurpose, ParsedAnswer, ToolCall
from services.rollout.types import RunResult, Sampling
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


class RunBuilder:
    """Takes in the rows of one run, which were checked, and keeps what is new in each."""

    def __init__(self, first: TrajectoryRow) -> None:
        self._first = first
        self._calls: dict[str, CallRow] = {}
        self._leaves: dict[int, tuple[str, CallRole]] = {}
        self._targets: dict[str, int] = {}

    def take(self, row: TrajectoryRow) -> None:
        """Add a row. A call that lies on several rows is one call."""
        messages = [canonical_message(one) for one in row.messages]
        parent: CallRow | None = None
        last_sampled = ""
        for part in row.calls:
            call_id = part["call_id"]
            parent = self._calls.get(call_id) or _call(row, part, messages, parent)
            self._calls[call_id] = parent
            if part["is_target"]:
                self._targets[call_id] = part["ordinal"]
            if part["num_sampled_tokens"]:
                last_sampled = call_id
        if row.draw is not None:
            self._leaves[row.draw] = (last_sampled, CallRole(row.role))

    def run(self) -> RebuiltRun:
        """The run of the rows so far."""
        first = self._first
        result = None
        if first.outcome is not None:
            wall_s, outcome = first.wall_s or 0.0, Outcome(first.outcome)
            result = RunResult(
                run_id=first.run_id,
                attempt=first.attempt,
                outcome=outcome,
                reward=first.reward,
                wall_s=wall_s,
                harness_s=0.0,
                verifier_s=0.0,
                exit_code=None,
                detail=first.detail,
                evaluated_ref=first.evaluated_ref,
                score_details=first.score_details,
            )
        return RebuiltRun(
            run_id=first.run_id,
            attempt=first.attempt,
            result=result,
            calls=tuple(sorted(self._calls.values(), key=lambda call: call.ordinal)),
            selection=self._selection(),
        )

    def _selection(self) -> RunSelection | None:
        given = self._first.selection
        if given is None:
            return None
        leaves = [self._leaves[draw] for draw in sorted(self._leaves)]
        return RunSelection(
            max_trajectories=given["max_trajectories"],
            seed=given["seed"],
            leaf_call_ids=tuple(call_id for call_id, _ in leaves),
            leaf_roles=tuple(role for _, role in leaves),
            target_call_ids=tuple(sorted(self._targets, key=self._targets.__getitem__)),
            num_targets=given["num_targets"],
            num_left_out=given["num_left_out"],
            num_not_trainable=given["num_not_trainable"],
            num_superseded=given["num_superseded"],
            left_out={CallRole(one["role"]): one["num_tokens"] for one in given["left_out"]},
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


def sampling_of(text: str | None) -> Sampling | None:
    """The sampling of a call from its JSON; None for none."""
    if not text:
        return None
    given = json.loads(text)
    return Sampling(**{**given, "stop": tuple(given.get("stop", ()))})


def _answer(part: Mapping[str, Any]) -> ParsedAnswer | None:
    if part["answer"] is None:
        return None
    message = canonical_message(part["answer"])
    return ParsedAnswer(
        text=message["content"],
        reasoning=message["reasoning"],
        tool_calls=tuple(ToolCall(**call) for call in message["tool_calls"]),
        num_malformed_calls=part["num_malformed_calls"],
    )


def _call(
    row: TrajectoryRow, part: Mapping[str, Any], messages: Sequence[dict[str, Any]], parent: CallRow | None
) -> CallRow:
    start, stop = part["start"], part["start"] + part["num_sampled_tokens"]
    begin = 0 if parent is None else parent.num_prompt_tokens + len(parent.record.output_ids)
    own = json.loads(part["request"])
    request = {
        **own,
        "messages": own.get("messages", list(messages[: part["num_messages"]])),
        "tools": own.get("tools", row.tools),
    }
    record = CallRecord(
        call_id=part["call_id"],
        run_id=row.run_id,
        attempt=row.attempt,
        parent_call_id=None if parent is None else parent.record.call_id,
        request=request,
        prompt_ids=_NO_IDS,
        output_ids=row.token_ids[start:stop].copy(),  # no view of the whole row
        logprobs=row.logprobs[start:stop].copy(),
        version_spans=_spans(row.versions[start:stop].tolist()),
        output_text=part["output_text"],
        finish_reason=part["finish_reason"],
        trainable=part["trainable"],
        cells=tuple(part["cells"]),
        started_at_s=part["started_at_s"],
        ended_at_s=part["ended_at_s"],
        requested_sampling=json.loads(part["requested_sampling"]),
        sampling=sampling_of(part["sampling"]),
        agent_id=part["agent_id"],
        parent_agent_id=part["parent_agent_id"],
        purpose=CallPurpose(part["purpose"]),
        answer=_answer(part),
        stop_string=part["stop_string"],
    )
    above = None if parent is None else parent.record.request
    return CallRow(
        record=record,
        ordinal=part["ordinal"],
        num_prompt_tokens=start,
        new_prompt_ids=row.token_ids[begin:start].copy(),
        num_shared_messages=0 if above is None else _num_shared(request["messages"], above["messages"]),
        shares_tools=above is not None and above["tools"] == request["tools"],
    )


def _num_shared(messages: Sequence[Any], known: Sequence[Any]) -> int:
    if messages[: len(known)] == known:
        return len(known)
    pairs = enumerate(zip(messages, known, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(messages), len(known)))


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    changes = [at for at, (one, other) in enumerate(pairwise(versions), 1) if one != other]
    bounds = [0, *changes, len(versions)] if versions else []
    return tuple(VersionSpan(versions[start], stop - start) for start, stop in pairwise(bounds))
