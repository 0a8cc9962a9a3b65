"""Answers, errors and lists as Anthropic's Messages API words them.

Source: the vendor's API reference, the types and the event reader of its official Python client, and the words by
which Claude Code tells errors apart.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from services.proxy.dialects import ErrorAnswer, Head, Refusal, RefusalKind, sse
from services.proxy.dialects.fields import to_json
from services.proxy.types import Choice, Delta, DeltaKind, Usage

_INVALID = "invalid_request_error"
_ERRORS: dict[RefusalKind, tuple[int, str, str]] = {
    RefusalKind.INVALID_REQUEST: (400, _INVALID, "Invalid request"),
    RefusalKind.INVALID_KEY: (401, "authentication_error", "invalid x-api-key"),
    RefusalKind.NOT_FOUND: (
        404,
        "not_found_error",
        "Not found. Known are /v1/messages, /v1/messages/count_tokens and /v1/models; a base URL ends before /v1.",
    ),
    RefusalKind.METHOD_NOT_ALLOWED: (405, _INVALID, "Method not allowed"),
    RefusalKind.TURN_LIMIT: (400, _INVALID, "this run has made all the model calls that it may make."),
    RefusalKind.BODY_TIMEOUT: (408, "timeout_error", "The body of your request did not arrive in time."),
    RefusalKind.RATE_LIMITED: (429, "rate_limit_error", "Too many requests at once. Please try again later."),
    RefusalKind.OVERLOADED: (529, "overloaded_error", "Overloaded"),
    RefusalKind.SERVER_ERROR: (500, "api_error", "Internal server error"),
}
"""Kind -> HTTP status, the vendor's type, the message where the refusal has none."""


# --- errors ----------------------------------------------------------------------------------------------------


def error_answer(refusal: Refusal) -> ErrorAnswer:
    """A refusal in the vendor's form. Keys and paths are never repeated: they may be secret."""
    if refusal.kind is RefusalKind.CONTEXT_LENGTH:
        return _error(400, _INVALID, _context_message(refusal))
    if refusal.kind is RefusalKind.BODY_TOO_LARGE:
        return _error(413, "request_too_large", f"Request exceeds the maximum size of {refusal.max_body_bytes} bytes")
    status, kind, message = _ERRORS[refusal.kind]
    return _error(status, kind, refusal.message or message)


def _context_message(refusal: Refusal) -> str:
    """The words by which harnesses compact.

    Two forms. The first says that the prompt is too long; clients look for it from beginning to end, so nothing may
    stand around it. The second says that the prompt fits, but not with an answer: Claude Code asks once more for a
    shorter answer where at least 4,000 tokens are left, and compacts where fewer are.
    """
    prompt, limit = refusal.num_prompt_tokens, refusal.max_model_len
    if prompt >= limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {limit - prompt + 1} > {limit}, "
        "decrease input length or `max_tokens` and try again"
    )


def _error(status: int, kind: str, message: str) -> ErrorAnswer:
    return ErrorAnswer(status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": None})


# --- answers ---------------------------------------------------------------------------------------------------


def message_body(head: Head, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The body of an answer that is not streamed.

    At most one thinking block, one text block, then the tool calls. Blocks of white space only are left out: the
    vendor refuses them in a history, and harnesses drop them.
    """
    answer = choice.answer
    content: list[dict[str, Any]] = []
    if answer.reasoning.strip():
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature(answer.reasoning)})
    if answer.text.strip():
        content.append({"type": "text", "text": answer.text})
    content += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments}
        for call in answer.tool_calls
    ]
    return {**_message(head, usage), "content": content, **_stop(head, choice)}


def signature(thinking: str) -> str:
    """The opaque string that goes with a thinking block: the same for the same text."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).digest()).decode()


class MessageStream:
    """The events of one streamed message: one open block at a time, their indices without a gap.

    Tool calls go out with the end, behind all text. So streamed or not, an answer is one message; and a harness that
    starts a tool as soon as its block is closed never runs one of an answer that is not stored yet.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = -1
        """Of the newest block."""
        self._open: DeltaKind | None = None
        self._held = {DeltaKind.REASONING: "", DeltaKind.TEXT: ""}
        """White space that no block has begun with: it opens none."""
        self._thinking: list[str] = []
        """Of the open block."""

    def begin(self, usage: Usage) -> str:
        usage = replace(usage, num_output_tokens=0, num_reasoning_tokens=0)
        message = {**_message(self._head, usage), "content": [], **_stopped(None)}
        return _event("message_start", message=message) + _event("ping")

    def delta(self, choice: int, delta: Delta) -> str:
        if delta.kind is DeltaKind.TOOL_CALL:
            return ""
        text = self._held[delta.kind] + delta.text
        events = ""
        if self._open is not delta.kind:
            if not text.strip():
                self._held[delta.kind] = text
                return ""
            self._held[delta.kind] = ""
            events = self._close() + self._start(_EMPTY_BLOCKS[delta.kind])
            self._open = delta.kind
        if delta.kind is DeltaKind.REASONING:
            self._thinking.append(text)
            return events + self._piece("thinking_delta", thinking=text)
        return events + self._piece("text_delta", text=text)

    def end(self, choices: Sequence[Choice], usage: Usage) -> str:
        (choice,) = choices
        events = self._close()
        for call in choice.answer.tool_calls:
            events += self._start({"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}})
            events += self._piece("input_json_delta", partial_json=to_json(call.arguments))
            events += _event("content_block_stop", index=self._index)
        events += _event("message_delta", delta=_stop(self._head, choice), usage=usage_object(usage))
        return events + _event("message_stop")

    def _start(self, block: dict[str, Any]) -> str:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, kind: str, **fields: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> str:
        """End the open block; a thinking block is signed before."""
        if self._open is None:
            return ""
        signed = ""
        if self._open is DeltaKind.REASONING:
            signed = self._piece("signature_delta", signature=signature("".join(self._thinking)))
            self._thinking.clear()
        self._open = None
        return signed + _event("content_block_stop", index=self._index)


_EMPTY_BLOCKS: dict[DeltaKind, dict[str, Any]] = {
    DeltaKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    DeltaKind.TEXT: {"type": "text", "text": ""},
}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Counts as the vendor splits them: ``input_tokens`` are those that were in no cache."""
    num_cached = min(usage.num_cached_tokens, usage.num_prompt_tokens)
    return {
        "input_tokens": usage.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def _message(head: Head, usage: Usage) -> dict[str, Any]:
    return {
        "id": f"msg_{head.call_id}",
        "type": "message",
        "role": "assistant",
        "model": head.request.model,
        "usage": usage_object(usage),
    }


def _stop(head: Head, choice: Choice) -> dict[str, Any]:
    """Why the answer ended. Stop strings that the job added are none of the harness's ``stop_sequences``."""
    if choice.finish_reason == "length":
        return _stopped("max_tokens")
    if choice.answer.tool_calls:
        return _stopped("tool_use")
    if choice.stop_string in head.request.requested_sampling.get("stop", ()):
        return _stopped("stop_sequence", choice.stop_string)
    return _stopped("end_turn")


def _stopped(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _event(kind: str, **fields: Any) -> str:
    return sse(to_json({"type": kind, **fields}), kind)


PING = _event("ping")


# --- other endpoints -------------------------------------------------------------------------------------------


def token_count(num_prompt_tokens: int) -> dict[str, Any]:
    """The body of ``POST /v1/messages/count_tokens``."""
    return {"input_tokens": num_prompt_tokens}


def model_list(model_names: Sequence[str], created_s: int, max_model_len: int = 0) -> dict[str, Any]:
    """The body of ``GET /v1/models`` for a client that sends ``anthropic-version``."""
    return {
        "data": [model_info(name, created_s, max_model_len) for name in model_names],
        "has_more": False,
        "first_id": model_names[0] if model_names else None,
        "last_id": model_names[-1] if model_names else None,
    }


def model_info(model_name: str, created_s: int, max_model_len: int = 0) -> dict[str, Any]:
    """The body of ``GET /v1/models/{id}``. ``created_s``: Unix time; ``max_model_len`` 0: not told."""
    limit = max_model_len or None
    return {
        "type": "model",
        "id": model_name,
        "display_name": model_name,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }
