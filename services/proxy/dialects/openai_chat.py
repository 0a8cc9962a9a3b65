"""OpenAI's Chat Completions: requests into canonical form, answers and errors in the vendor's own form.

Source: the API reference of ``POST /v1/chat/completions``, and what its official clients accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.proxy.dialects import (
    AnswerStream,
    ErrorAnswer,
    Head,
    InvalidRequestError,
    Refusal,
    RefusalKind,
    sse,
)
from services.proxy.dialects.fields import (
    clean,
    clean_json,
    given_fields,
    integer,
    invalid,
    is_retry,
    number_between,
    parse_arguments,
    stop_strings,
    to_json,
    typed,
)
from services.proxy.lineage import lineage_of
from services.proxy.types import (
    CanonicalRequest,
    Choice,
    Delta,
    DeltaKind,
    Message,
    ToolCall,
    ToolChoice,
    ToolMode,
    Usage,
)

MAX_CHOICES = 16
"""Of one request (``n``)."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SAMPLING_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
    }
)
_PARSED_FIELDS = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "stream",
        "stream_options",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
    }
)


class OpenAIChat:
    """The ``Dialect`` of Chat Completions."""

    name = "openai_chat"
    keep_alive = ": keep-alive\n\n"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CanonicalRequest:
        """A request body in canonical form. Raises ``InvalidRequestError`` for what OpenAI refuses, or we do.

        Refused although OpenAI takes it: more than ``MAX_CHOICES`` choices, images, audio and files, tools that are
        not functions.
        """
        given = given_fields(body)
        model = given.get("model")
        if not isinstance(model, str) or not model:
            raise InvalidRequestError("you must provide a model parameter")
        num_choices = integer(given.get("n", 1), "n")
        if not 1 <= num_choices <= MAX_CHOICES:
            raise invalid("n", f"Expected an integer from 1 to {MAX_CHOICES}.")
        stream_options = typed(given.get("stream_options", {}), dict, "stream_options", "an object")
        return CanonicalRequest(
            dialect=self.name,
            model=clean(model),
            messages=_messages(given.get("messages")),
            tools=_tools(given.get("tools", [])),
            stream=typed(given.get("stream", False), bool, "stream", "a boolean"),
            include_usage=bool(stream_options.get("include_usage", False)),
            requested_sampling=_sampling(given),
            tool_choice=_tool_choice(given),
            response_schema=_response_schema(given.get("response_format", {"type": "text"})),
            num_choices=num_choices,
            lineage=lineage_of(headers, given),
            is_retry=is_retry(headers),
            unused_fields=tuple(sorted(clean(name) for name in given.keys() - _PARSED_FIELDS - _SAMPLING_FIELDS)),
        )

    def body(self, head: Head, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            "id": _completion_id(head),
            "object": "chat.completion",
            "created": head.created_s,
            "model": head.request.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": _answer_message(choice),
                    "logprobs": None,
                    "finish_reason": _finish_reason(choice),
                }
                for choice in choices
            ],
            "usage": usage_object(usage),
        }

    def stream(self, head: Head) -> AnswerStream:
        return _ChatStream(head)

    def error(self, refusal: Refusal) -> ErrorAnswer:
        """An error answer in OpenAI's form."""
        return openai_error(refusal)


# --- errors ----------------------------------------------------------------------------------------------------


def openai_error(refusal: Refusal) -> ErrorAnswer:
    """A refusal as both of OpenAI's dialects word it. Keys and paths are never repeated: they may be secret."""
    kind = refusal.kind
    if kind is RefusalKind.INVALID_REQUEST:
        return _error(400, refusal.message, param=refusal.param or None, code=refusal.code or None)
    if kind is RefusalKind.CONTEXT_LENGTH:  # worded so that harnesses recognise it and compact their history
        message = (
            f"This model's maximum context length is {refusal.max_model_len} tokens. However, your messages resulted "
            f"in {refusal.num_prompt_tokens} tokens. Please reduce the length of the messages."
        )
        return _error(400, message, param="messages", code="context_length_exceeded")
    if kind is RefusalKind.BODY_TOO_LARGE:
        return _error(413, f"Request body is larger than {refusal.max_body_bytes} bytes.", code="request_too_large")
    status, kind_name, code, message = _ERRORS[kind]
    return _error(status, message or refusal.message, kind=kind_name, code=code)


_INVALID = "invalid_request_error"
_ERRORS: dict[RefusalKind, tuple[int, str, str | None, str]] = {
    RefusalKind.INVALID_KEY: (
        401,
        _INVALID,
        "invalid_api_key",
        "Incorrect API key provided. The key of a run ends with the run; the base URL and the key that this harness "
        "was started with belong together.",
    ),
    RefusalKind.TURN_LIMIT: (400, _INVALID, "turn_limit_reached", ""),
    RefusalKind.BODY_TIMEOUT: (
        408,
        _INVALID,
        "request_timeout",
        "The body of your request did not arrive in time.",
    ),
    RefusalKind.RATE_LIMITED: (
        429,
        "requests",
        "rate_limit_exceeded",
        "Rate limit reached: too many requests at once. Please try again later.",
    ),
    RefusalKind.OVERLOADED: (
        503,
        "server_error",
        "overloaded",
        "The engine is currently overloaded, please try again later.",
    ),
    RefusalKind.SERVER_ERROR: (
        500,
        "server_error",
        None,
        "The server had an error while processing your request. Sorry about that!",
    ),
    RefusalKind.NOT_FOUND: (
        404,
        _INVALID,
        "unknown_url",
        "Invalid URL. Known under /v1: chat/completions, responses, messages, messages/count_tokens and models.",
    ),
    RefusalKind.METHOD_NOT_ALLOWED: (
        405,
        _INVALID,
        "method_not_supported",
        "Not allowed to use this method on this URL.",
    ),
}


def _error(
    status: int, message: str, *, kind: str = _INVALID, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    return ErrorAnswer(status, {"error": {"message": message, "type": kind, "param": param, "code": code}})


# --- requests --------------------------------------------------------------------------------------------------


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list):
        raise InvalidRequestError(
            "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter"
        )
    if not given:
        raise InvalidRequestError("Invalid 'messages': empty array.", param="messages", code="empty_array")
    return tuple(_message(message, f"messages.[{index}]") for index, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    message = typed(given, dict, where, "an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"Supported values are: {', '.join(map(repr, _ROLES))}.")
    content = _content(message.get("content"), f"{where}.content")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = typed(message.get("tool_calls") or [], list, f"{where}.tool_calls", "an array")
        return Message(
            role=role,
            content=content,
            reasoning=clean(typed(reasoning, str, f"{where}.reasoning_content", "a string")),
            tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        )
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRequestError(
                f"Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id' ({where}).",
                param=f"{where}.tool_call_id",
            )
        return Message(role=role, content=content, tool_call_id=clean(call_id))
    return Message(role="system" if role == "developer" else role, content=content)


def _content(given: Any, where: str) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return clean(given)
    parts = typed(given, list, where, "a string or an array of parts")
    return "\n".join(_text_of(part, f"{where}.[{index}]") for index, part in enumerate(parts))


def _text_of(given: Any, where: str) -> str:
    part = typed(given, dict, where, "an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise invalid(f"{where}.type", f"This model takes text only, not {kind!r}.")
    return clean(typed(part.get(kind), str, f"{where}.{kind}", "a string"))


def _tool_call(given: Any, where: str) -> ToolCall:
    call = typed(given, dict, where, "an object")
    if call.get("type", "function") != "function":
        raise invalid(f"{where}.type", "Supported values are: 'function'.")
    function = typed(call.get("function"), dict, f"{where}.function", "an object")
    name = typed(function.get("name"), str, f"{where}.function.name", "a string")
    call_id = typed(call.get("id") or "", str, f"{where}.id", "a string")
    return ToolCall(clean(call_id), clean(name), parse_arguments(function.get("arguments")))


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    tools = typed(given, list, "tools", "an array")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if typed(tool, dict, where, "an object").get("type") != "function":
            raise invalid(f"{where}.type", "Supported values are: 'function'.")
        function = typed(tool.get("function"), dict, f"{where}.function", "an object")
        typed(function.get("name"), str, f"{where}.function.name", "a string")
        typed(function.get("parameters") or {}, dict, f"{where}.function.parameters", "an object")
    return tuple(clean_json(tool) for tool in tools)


def _tool_choice(given: Mapping[str, Any]) -> ToolChoice:
    is_parallel = typed(given.get("parallel_tool_calls", True), bool, "parallel_tool_calls", "a boolean")
    chosen = given.get("tool_choice", "auto")
    if isinstance(chosen, str):
        if chosen not in tuple(ToolMode):
            raise invalid("tool_choice", "Supported values are: 'none', 'auto', and 'required'.")
        if chosen == ToolMode.REQUIRED and not given.get("tools"):
            raise invalid("tool_choice", "'required' needs 'tools'.")
        return ToolChoice(ToolMode(chosen), is_parallel=is_parallel)
    chosen = typed(chosen, dict, "tool_choice", "a string or an object")
    if chosen.get("type") == "allowed_tools":
        mode = typed(chosen.get("allowed_tools"), dict, "tool_choice.allowed_tools", "an object").get("mode", "auto")
        return ToolChoice(ToolMode.REQUIRED if mode == "required" else ToolMode.AUTO, is_parallel=is_parallel)
    function = typed(chosen.get("function"), dict, "tool_choice.function", "an object")
    name = clean(typed(function.get("name"), str, "tool_choice.function.name", "a string"))
    tools = given.get("tools", [])
    if not any(isinstance(tool, dict) and (tool.get("function") or {}).get("name") == name for tool in tools):
        raise invalid("tool_choice", f"There is no tool {name!r} in 'tools'.")
    return ToolChoice(ToolMode.REQUIRED, name, is_parallel)


def _response_schema(given: Any) -> dict[str, Any] | None:
    response_format = typed(given, dict, "response_format", "an object")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise invalid("response_format.type", "Supported values are: 'text', 'json_object', and 'json_schema'.")
    named = typed(response_format.get("json_schema"), dict, "response_format.json_schema", "an object")
    schema = typed(named.get("schema") or {"type": "object"}, dict, "response_format.json_schema.schema", "an object")
    cleaned: dict[str, Any] = clean_json(schema)
    return cleaned


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness asked for: both limits as ``max_tokens``, ``stop`` as a list."""
    sampling = {name: clean_json(given[name]) for name in sorted(_SAMPLING_FIELDS & given.keys())}
    number_between(sampling, "temperature", 0.0, 2.0)
    number_between(sampling, "top_p", 0.0, 1.0)
    if "seed" in sampling:
        integer(sampling["seed"], "seed")
    limits = [integer(given[name], name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    if limits:
        if min(limits) < 1:
            raise invalid("max_tokens", "Expected a value >= 1.")
        sampling["max_tokens"] = min(limits)
    stops = stop_strings(given.get("stop", []), "stop")
    if stops:
        sampling["stop"] = stops
    return sampling


# --- answers ---------------------------------------------------------------------------------------------------


def _completion_id(head: Head) -> str:
    return f"chatcmpl-{head.call_id}"


def _finish_reason(choice: Choice) -> str:
    return "tool_calls" if choice.answer.tool_calls and choice.finish_reason == "stop" else choice.finish_reason


def _answer_message(choice: Choice) -> dict[str, Any]:
    answer = choice.answer
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.tool_calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [_tool_call_object(call) for call in answer.tool_calls]
    return message


def _tool_call_object(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": to_json(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def usage_object(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens, "audio_tokens": 0},
    }


class _ChatStream:
    """Chunks of one streamed completion."""

    def __init__(self, head: Head) -> None:
        self._head = {
            "id": _completion_id(head),
            "object": "chat.completion.chunk",
            "created": head.created_s,
            "model": head.request.model,
        }
        self._request = head.request
        self._num_tool_calls = [0] * head.request.num_choices

    def begin(self, usage: Usage) -> str:
        return "".join(
            self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(self._request.num_choices)
        )

    def delta(self, choice: int, delta: Delta) -> str:
        if delta.kind is DeltaKind.TEXT:
            return self._chunk(choice, {"content": delta.text})
        if delta.kind is DeltaKind.REASONING:
            return self._chunk(choice, {"reasoning_content": delta.text})
        assert delta.tool_call is not None
        index = self._num_tool_calls[choice]
        self._num_tool_calls[choice] += 1
        return self._chunk(choice, {"tool_calls": [{"index": index, **_tool_call_object(delta.tool_call)}]})

    def end(self, choices: Sequence[Choice], usage: Usage) -> str:
        tail = "".join(self._chunk(choice.index, {}, _finish_reason(choice)) for choice in choices)
        if self._request.include_usage:
            tail += sse(to_json({**self._head, "choices": [], "usage": usage_object(usage)}))
        return tail + sse("[DONE]")

    def _chunk(self, choice: int, delta: Mapping[str, Any], finish_reason: str | None = None) -> str:
        chunk = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse(to_json({**self._head, "choices": [chunk]}))


OPENAI_CHAT = OpenAIChat()


def model_list(model_names: Sequence[str], created_s: int) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    return {"object": "list", "data": [model_object(name, created_s) for name in model_names]}


def model_object(name: str, created_s: int) -> dict[str, Any]:
    """The body of ``GET /v1/models/NAME``."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "tidegate"}
