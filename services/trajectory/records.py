"""Calls as they are asked for and as they come back: sampling that holds, checks, and what is new in a request."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.common.errors import ContextLengthError, InvariantError
from services.proxy.conversation import stable_messages
from services.proxy.parsing.schema import required_schema
from services.proxy.types import CallPurpose, CanonicalRequest, Message, ParsedAnswer, ToolCall
from services.rollout.types import Sampling
from services.trajectory.encoding import CallRow
from services.trajectory.tree import TreeCall
from services.trajectory.types import CallRecord

_LIMITS = ("max_tokens", "max_completion_tokens")


def holding_sampling(
    job: Sampling, request: CanonicalRequest, *, num_prompt_tokens: int, max_model_len: int, call_id: str
) -> Sampling:
    """The sampling of one call. The job's parameters win; a harness may only ask for fewer tokens, for stop strings
    of its own, and for an answer by a schema or a tool that it forces. A job's seed becomes one of the call's own,
    else all runs of a group would sample alike.

    Raises ``ContextLengthError`` if the prompt leaves no room for one token.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(num_prompt_tokens, max_model_len)
    requested = request.requested_sampling
    limits = [requested[name] for name in _LIMITS if requested.get(name) is not None]
    stop = requested.get("stop") or ()
    return Sampling(
        temperature=job.temperature,
        max_tokens=max(1, min(job.max_tokens, room, *(int(limit) for limit in limits))),
        stop=tuple(dict.fromkeys([*job.stop, *([stop] if isinstance(stop, str) else stop)])),
        seed=None if job.seed is None else zlib.crc32(f"{job.seed}/{call_id}".encode()),
        json_schema=required_schema(request),
    )


def check_record(record: CallRecord) -> None:
    """Raise ``InvariantError`` unless ids, finite log-probabilities and version spans fit together.

    Versions usually rise within a call; they may fall too, when a call moves during a rolling publication to a cell
    that serves the version before. Every token has the stamp of the weights that made it.
    """
    num_tokens = len(record.output_ids)
    num_spanned = sum(span.num_tokens for span in record.version_spans)
    if not num_tokens == len(record.logprobs) == num_spanned:
        raise InvariantError(
            f"call {record.call_id} has {num_tokens} token ids, {len(record.logprobs)} log-probabilities and version "
            f"spans for {num_spanned} tokens.",
            "The three must be equal; nothing was stored.",
        )
    if not np.isfinite(record.logprobs).all():
        raise InvariantError(
            f"call {record.call_id} has log-probabilities that are no finite numbers.",
            "The engine that made them is broken; nothing was stored.",
        )


def request_key(
    requested_sampling: Mapping[str, Any],
    *,
    choice: int = 0,
    tool_choice: Mapping[str, Any] | None = None,
    response_schema: Mapping[str, Any] | None = None,
    agent_id: str = "",
    purpose: CallPurpose = CallPurpose.TURN,
) -> str:
    """Tells requests of one prompt apart. A retry repeats its request, but a client that falls back from streaming
    may ask for another limit. ``choice``: which of a request's answers. ``purpose``: a harness may ask for one token
    of a prompt, to warm a cache, before it asks for the answer."""
    sampling = {name: value for name, value in requested_sampling.items() if name not in _LIMITS}
    key = [sampling, choice, tool_choice, response_schema, agent_id, purpose]
    return json.dumps(key, sort_keys=True, separators=(",", ":"), default=str)


def new_in_request(request: CanonicalRequest, num_shared: int, *, shares_tools: bool) -> dict[str, Any]:
    """A request as JSON-ready data, without the messages and tools that its parent's request had too.

    A harness sends its whole history with every call; this keeps each message once. System messages that differ in a
    line that is not rendered count as shared; such lines are kept under ``raw_system`` (position -> content).
    """
    sent, stable = request.messages, stable_messages(request.messages)
    raw = {}
    if stable is not sent:
        raw = {str(at): sent[at].content for at in range(num_shared) if sent[at] is not stable[at]}
    fields = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
    return {
        **fields,
        "tool_choice": dataclasses.asdict(request.tool_choice),
        "lineage": dataclasses.asdict(request.lineage),
        "messages": [*[{}] * num_shared, *map(dataclasses.asdict, sent[num_shared:])],
        "tools": [] if shares_tools else list(request.tools),
        "unused_fields": list(request.unused_fields),
        **({"raw_system": raw} if raw else {}),
    }


def messages_of(request: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a stored request."""
    return tuple(
        Message(
            role=given["role"],
            content=given["content"],
            reasoning=given.get("reasoning", ""),
            tool_calls=tuple(
                ToolCall(call["call_id"], call["name"], dict(call["arguments"])) for call in given.get("tool_calls", ())
            ),
            tool_call_id=given.get("tool_call_id", ""),
        )
        for given in request["messages"]
    )


def tools_of(request: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools of a stored request."""
    return tuple(request.get("tools", ()))


def answer_of(record: CallRecord) -> Message:
    """The answer as the harness saw it."""
    return (record.answer or ParsedAnswer(record.output_text)).message


def continued_messages(request: CanonicalRequest, previous: CallRecord) -> tuple[Message, ...]:
    """The messages of a request that stands behind a stored call's answer; each has its own instructions."""
    history = messages_of(previous.request)[previous.request.get("num_instructions", 0) :]
    at = request.num_instructions
    return (*request.messages[:at], *history, answer_of(previous), *request.messages[at:])


def is_trainable(record: CallRecord) -> bool:
    """Whether the sampled tokens of a call may be targets. An answer that was cut from outside may not."""
    return record.trainable and record.finish_reason != "abort"


def tree_call(row: CallRow) -> TreeCall:
    """A stored call as the tree takes it."""
    record = row.record
    return TreeCall(
        call_id=record.call_id,
        parent_call_id=record.parent_call_id,
        ordinal=row.ordinal,
        new_prompt_ids=row.new_prompt_ids,
        output_ids=record.output_ids,
        logprobs=record.logprobs,
        version_spans=record.version_spans,
        trainable=is_trainable(record),
        request_key=request_key(
            record.requested_sampling,
            choice=record.request.get("choice", 0),
            tool_choice=record.request.get("tool_choice"),
            response_schema=record.request.get("response_schema"),
            agent_id=record.agent_id,
            purpose=record.purpose,
        ),
    )
