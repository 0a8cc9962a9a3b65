"""How calls and results are written down in the store: compressed token arrays, requests by what is new in them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.common.types import VersionSpan
from services.proxy.types import CallPurpose, ParsedAnswer, ToolCall
from services.rollout.types import RunResult, Sampling
from services.trajectory.outcome import Outcome
from services.trajectory.types import (
    CallRecord,
    CallRole,
    GroupResult,
    Logprobs,
    LossReason,
    RunSelection,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call as it is stored."""

    record: CallRecord
    """Its ``prompt_ids`` are not stored; they are empty when read."""
    ordinal: int
    num_prompt_tokens: int
    new_prompt_ids: TokenIds
    """int32: the prompt behind the parent's prompt and answer."""
    num_shared_messages: int
    """Leading messages of the request that equal those of the parent's request."""
    shares_tools: bool
    """The request has the tools of the parent's."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What of a call's row moves into an object when its attempt is sealed."""

    prompt: TokenIds
    output: TokenIds
    logprobs: Logprobs
    request: bytes
    """JSON, in UTF-8 that may hold lone surrogates, as harnesses may send them."""
    rest: str
    """JSON of the fields that are only ever read together."""


def columns_of(row: CallRow) -> dict[str, Any]:
    """The columns of a call in the store."""
    record = row.record
    versions = [span.version for span in record.version_spans]
    return {
        "call_id": record.call_id,
        "run_id": record.run_id,
        "attempt": record.attempt,
        "ordinal": row.ordinal,
        "parent_call_id": record.parent_call_id,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_output_tokens": len(record.output_ids),
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "prompt": _pack(np.asarray(row.new_prompt_ids, dtype="<i4")),
        "output": _pack(np.asarray(record.output_ids, dtype="<i4")),
        "logprobs": _pack(np.asarray(record.logprobs, dtype="<f4")),
        "request": zlib.compress(_request_json(row), 1),
        "rest": json.dumps(_rest(row)),
    }


def payload_of(columns: Mapping[Any, Any]) -> Payload:
    """The payload of a call's columns, uncompressed."""
    return Payload(
        prompt=_unpack_ids(columns["prompt"]),
        output=_unpack_ids(columns["output"]),
        logprobs=_unpack_logprobs(columns["logprobs"]),
        request=zlib.decompress(columns["request"]),
        rest=columns["rest"],
    )


def call_row(columns: Mapping[Any, Any], payload: Payload, parent: CallRow | None) -> CallRow:
    """The call of a row of the store, given its payload and its parent's row."""
    rest = json.loads(payload.rest)
    num_shared, shares_tools = rest.pop("num_shared_messages"), rest.pop("shares_tools")
    request = json.loads(payload.request.decode("utf-8", "surrogatepass"))
    if parent is not None:
        request["messages"] = [*parent.record.request["messages"][:num_shared], *request["messages"]]
        if shares_tools:
            request["tools"] = parent.record.request["tools"]
    rest["version_spans"] = tuple(VersionSpan(*span) for span in rest["version_spans"])
    rest["cells"] = tuple(rest["cells"])
    if "purpose" in rest:
        rest["purpose"] = CallPurpose(rest["purpose"])
    if "sampling" in rest:
        rest["sampling"] = Sampling(**{**rest["sampling"], "stop": tuple(rest["sampling"]["stop"])})
    if "answer" in rest:
        rest["answer"] = _answer(rest["answer"])
    record = CallRecord(
        call_id=columns["call_id"],
        run_id=columns["run_id"],
        attempt=columns["attempt"],
        parent_call_id=columns["parent_call_id"],
        request=request,
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=payload.output,
        logprobs=payload.logprobs,
        **rest,
    )
    return CallRow(record, columns["ordinal"], columns["num_prompt_tokens"], payload.prompt, num_shared, shares_tools)


def with_prompts(rows: Sequence[CallRow]) -> list[CallRecord]:
    """The records with their whole prompts; parents stand before their children."""
    records: dict[str, CallRecord] = {}
    for row in rows:
        parent = records.get(row.record.parent_call_id or "")
        above = [] if parent is None else [parent.prompt_ids, parent.output_ids]
        records[row.record.call_id] = replace(row.record, prompt_ids=np.concatenate([*above, row.new_prompt_ids]))
    return list(records.values())


def result_json(result: RunResult | GroupResult) -> str:
    return json.dumps(asdict(result))


def run_result(data: str) -> RunResult:
    given = json.loads(data)
    return RunResult(**{**given, "outcome": Outcome(given["outcome"])})


def group_result(data: str) -> GroupResult:
    given = json.loads(data)
    loss_reason = given.get("loss_reason")  # results were once written without
    given["loss_reason"] = None if loss_reason is None else LossReason(loss_reason)
    return GroupResult(**{**given, "rewards": tuple(given["rewards"])})


def selection_json(selection: RunSelection) -> str:
    return json.dumps(asdict(selection))


def run_selection(data: str) -> RunSelection:
    given = json.loads(data)
    return RunSelection(
        **{
            **given,
            "leaf_call_ids": tuple(given["leaf_call_ids"]),
            "leaf_roles": tuple(CallRole(role) for role in given["leaf_roles"]),
            "target_call_ids": tuple(given["target_call_ids"]),
            "left_out": {CallRole(role): num_tokens for role, num_tokens in given["left_out"].items()},
        }
    )


def plain_text(text: str) -> str:
    """Text as every database takes it: without lone surrogates and NUL characters."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\N{REPLACEMENT CHARACTER}")


def _rest(row: CallRow) -> dict[str, Any]:
    """The fields of a call that are only ever read together."""
    record = row.record
    return {
        "version_spans": [[span.version, span.num_tokens] for span in record.version_spans],
        "output_text": record.output_text,
        "finish_reason": record.finish_reason,
        "trainable": record.trainable,
        "cells": list(record.cells),
        "started_at_s": record.started_at_s,
        "ended_at_s": record.ended_at_s,
        "requested_sampling": record.requested_sampling,
        "num_shared_messages": row.num_shared_messages,
        "shares_tools": row.shares_tools,
        **({"agent_id": record.agent_id} if record.agent_id else {}),
        **({"parent_agent_id": record.parent_agent_id} if record.parent_agent_id else {}),
        **({"purpose": record.purpose} if record.purpose is not CallPurpose.TURN else {}),
        **({"sampling": asdict(record.sampling)} if record.sampling is not None else {}),
        **({"answer": asdict(record.answer)} if record.answer is not None else {}),
        **({"stop_string": record.stop_string} if record.stop_string else {}),
    }


def _answer(given: Mapping[str, Any]) -> ParsedAnswer:
    return ParsedAnswer(**{**given, "tool_calls": tuple(ToolCall(**call) for call in given["tool_calls"])})


def _request_json(row: CallRow) -> bytes:
    request = dict(row.record.request)
    request["messages"] = list(request["messages"])[row.num_shared_messages :]
    if row.shares_tools:
        request.pop("tools", None)
    return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _pack(array: NDArray[Any]) -> bytes:
    """Compress 4-byte numbers; bytes of equal weight side by side compress better."""
    return zlib.compress(array.view(np.uint8).reshape(-1, 4).T.tobytes(), 1)


def _unpack(blob: bytes) -> NDArray[np.uint8]:
    flat = np.frombuffer(zlib.decompress(blob), dtype=np.uint8)
    return np.ascontiguousarray(flat.reshape(4, -1).T).reshape(-1)


def _unpack_ids(blob: bytes) -> TokenIds:
    return _unpack(blob).view("<i4").astype(np.int32, copy=False)


def _unpack_logprobs(blob: bytes) -> Logprobs:
    return _unpack(blob).view("<f4").astype(np.float32, copy=False)
