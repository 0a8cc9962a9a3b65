"""OpenAI's Chat Completions: requests into canonical form, answers and errors in the vendor's own form.

Source: the API reference of ``POST /v1/chat/completions``, and what its official clients accept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.proxy.dialects import DialectError
from services.proxy.types import CanonicalRequest, Message, ToolCall

_T = TypeVar("_T")

NAME = "openai_chat"

RAW_ARGUMENTS = "__raw_arguments__"
"""Key under which a tool call's arguments are kept when they are no JSON object."""

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"
"""A comment line: clients skip it, and connections that carry it do not look dead."""

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
    {"model", "messages", "tools", "stream", "stream_options", "n", "stop", "max_tokens", "max_completion_tokens"}
)


# --- errors ----------------------------------------------------------------------------------------------------


def error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> DialectError:
    """An error answer in OpenAI's form."""
    return DialectError(status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, message)


def invalid_api_key() -> DialectError:
    """401. The key itself is never repeated."""
    return error(
        401,
        "Incorrect API key provided. The key of a run ends with the run; the base URL and the key that this "
        "harness was started with belong together.",
        code="invalid_api_key",
    )


def context_length_exceeded(num_prompt_tokens: int, max_model_len: int) -> DialectError:
    """400, worded so that harnesses recognise it and compact their history."""
    return error(
        400,
        f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
        f"{num_prompt_tokens} tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
    )


def body_too_large(max_body_bytes: int) -> DialectError:
    """413."""
    return error(413, f"Request body is larger than {max_body_bytes} bytes.", code="request_too_large")


def overloaded() -> DialectError:
    """503: no cell can serve the call now."""
    return error(
        503, "The engine is currently overloaded, please try again later.", kind="server_error", code="overloaded"
    )


def server_error() -> DialectError:
    """500: a fault of ours."""
    return error(500, "The server had an error while processing your request. Sorry about that!", kind="server_error")


def not_found() -> DialectError:
    """404. The path is not repeated: it may hold a key."""
    return error(404, "Invalid URL. Known: chat/completions and models, under /v1.", code="unknown_url")


def method_not_allowed() -> DialectError:
    """405."""
    return error(405, "Not allowed to use this method on this URL.", code="method_not_supported")


# --- requests --------------------------------------------------------------------------------------------------


def parse(body: Any) -> CanonicalRequest:
    """A request body in canonical form. Raises ``DialectError`` (400) for what OpenAI refuses, or we do.

    Refused although OpenAI takes it: ``n`` above 1, images, audio and files, tools that are not functions.
    """
    if not isinstance(body, dict):
        raise error(400, "We could not parse the JSON body of your request. It must be an object.")
    given = {name: value for name, value in body.items() if value is not None}
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise error(400, "you must provide a model parameter")
    if given.get("n", 1) != 1:
        raise error(
            400, "Invalid value for 'n': this server makes one choice per request.", param="n", code="invalid_value"
        )
    stream_options = _typed(given.get("stream_options", {}), dict, "stream_options", "an object")
    return CanonicalRequest(
        dialect=NAME,
        model=_clean(model),
        messages=_messages(given.get("messages")),
        tools=_tools(given.get("tools", [])),
        stream=_typed(given.get("stream", False), bool, "stream", "a boolean"),
        include_usage=bool(stream_options.get("include_usage", False)),
        requested_sampling=_sampling(given),
        unused_fields=tuple(sorted(_clean(name) for name in given.keys() - _PARSED_FIELDS - _SAMPLING_FIELDS)),
    )


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list):
        raise error(400, "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter")
    if not given:
        raise error(400, "Invalid 'messages': empty array.", param="messages", code="empty_array")
    return tuple(_message(message, f"messages.[{index}]") for index, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    message = _typed(given, dict, where, "an object")
    role = message.get("role")
    if role not in _ROLES:
        raise _invalid(f"{where}.role", f"Supported values are: {', '.join(map(repr, _ROLES))}.")
    content = _content(message.get("content"), f"{where}.content")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = _typed(message.get("tool_calls") or [], list, f"{where}.tool_calls", "an array")
        return Message(
            role=role,
            content=content,
            reasoning=_clean(_typed(reasoning, str, f"{where}.reasoning_content", "a string")),
            tool_calls=tuple(_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        )
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or not call_id:
            raise error(
                400,
                f"Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id' ({where}).",
                param=f"{where}.tool_call_id",
            )
        return Message(role=role, content=content, tool_call_id=_clean(call_id))
    return Message(role="system" if role == "developer" else role, content=content)


def _content(given: Any, where: str) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return _clean(given)
    parts = _typed(given, list, where, "a string or an array of parts")
    return "\n".join(_text_of(part, f"{where}.[{index}]") for index, part in enumerate(parts))


def _text_of(given: Any, where: str) -> str:
    part = _typed(given, dict, where, "an object")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise _invalid(f"{where}.type", f"This model takes text only, not {kind!r}.")
    return _clean(_typed(part.get(kind), str, f"{where}.{kind}", "a string"))


def _tool_call(given: Any, where: str) -> ToolCall:
    call = _typed(given, dict, where, "an object")
    if call.get("type", "function") != "function":
        raise _invalid(f"{where}.type", "Supported values are: 'function'.")
    function = _typed(call.get("function"), dict, f"{where}.function", "an object")
    name = _typed(function.get("name"), str, f"{where}.function.name", "a string")
    call_id = _typed(call.get("id") or "", str, f"{where}.id", "a string")
    return ToolCall(_clean(call_id), _clean(name), parse_arguments(function.get("arguments")))


def parse_arguments(given: Any) -> dict[str, Any]:
    """A tool call's arguments as an object; what is no JSON object is kept under ``RAW_ARGUMENTS``."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except ValueError:
            value = given
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {RAW_ARGUMENTS: _clean_json(given)}
    cleaned: dict[str, Any] = _clean_json(value)
    return cleaned


def _tools(given: Any) -> tuple[dict[str, Any], ...]:
    tools = _typed(given, list, "tools", "an array")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if _typed(tool, dict, where, "an object").get("type") != "function":
            raise _invalid(f"{where}.type", "Supported values are: 'function'.")
        function = _typed(tool.get("function"), dict, f"{where}.function", "an object")
        _typed(function.get("name"), str, f"{where}.function.name", "a string")
    return tuple(_clean_json(tool) for tool in tools)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness asked for: both limits as ``max_tokens``, ``stop`` as a list."""
    sampling = {name: given[name] for name in sorted(_SAMPLING_FIELDS & given.keys())}
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0)):
        if name in sampling and not low <= _number(sampling[name], name) <= high:
            raise _invalid(name, f"Expected a number from {low:g} to {high:g}.")
    if "seed" in sampling:
        _integer(sampling["seed"], "seed")
    limits = [_integer(given[name], name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    if limits:
        if min(limits) < 1:
            raise _invalid("max_tokens", "Expected a value >= 1.")
        sampling["max_tokens"] = min(limits)
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else _typed(stop, list, "stop", "a string or an array of strings")
    if stops:
        sampling["stop"] = [_clean(_typed(one, str, "stop", "a string")) for one in stops if one != ""]
    return sampling


def _invalid(param: str, message: str) -> DialectError:
    return error(400, f"Invalid value for '{param}'. {message}", param=param, code="invalid_value")


def _typed(value: Any, kind: type[_T], param: str, expected: str) -> _T:
    if not isinstance(value, kind):
        raise _wrong_type(param, expected)
    return value


def _wrong_type(param: str, expected: str) -> DialectError:
    return error(400, f"Invalid type for '{param}': expected {expected}.", param=param, code="invalid_type")


def _number(value: Any, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(param, "a number")
    return float(value)


def _integer(value: Any, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(param, "an integer")
    return value


def _clean(text: str) -> str:
    """Text without lone surrogates, which JSON can carry but no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _clean_json(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, list):
        return [_clean_json(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean_json(item) for key, item in value.items()}
    return value


# --- answers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    call_id: str
    created_s: int
    """Unix time, seconds."""
    model: str
    """As the request named it."""

    @property
    def completion_id(self) -> str:
        return f"chatcmpl-{self.call_id}"


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def completion(head: Head, text: str, finish_reason: str, usage_of_call: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer that is not streamed. ``finish_reason`` is 'stop' or 'length'."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": head.completion_id,
        "object": "chat.completion",
        "created": head.created_s,
        "model": head.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
        "usage": dict(usage_of_call),
    }


def stream_head(head: Head) -> str:
    """The first event of a stream: the role."""
    return _chunk(head, {"role": "assistant", "content": ""}, None)


def stream_text(head: Head, text: str) -> str:
    """The event of a piece of text."""
    return _chunk(head, {"content": text}, None)


def stream_tail(head: Head, finish_reason: str, usage_of_call: Mapping[str, Any] | None) -> str:
    """The last events: the finish reason, the usage if it was asked for, ``[DONE]``."""
    tail = _chunk(head, {}, finish_reason)
    if usage_of_call is not None:
        tail += _event({**_chunk_head(head), "choices": [], "usage": dict(usage_of_call)})
    return tail + DONE


def _chunk(head: Head, delta: Mapping[str, Any], finish_reason: str | None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _event({**_chunk_head(head), "choices": [choice]})


def _chunk_head(head: Head) -> dict[str, Any]:
    return {
        "id": head.completion_id,
        "object": "chat.completion.chunk",
        "created": head.created_s,
        "model": head.model,
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def model_list(model_names: Sequence[str], created_s: int) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": created_s, "owned_by": "tidegate"} for name in model_names],
    }
