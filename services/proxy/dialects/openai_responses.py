"""OpenAI's Responses: requests into canonical form, errors in the vendor's own form, answers by their own module.

Source: the API reference of ``POST /v1/responses``, what its official clients and Codex send, and what they accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.proxy.dialects import AnswerStream, ErrorAnswer, Head, InvalidRequestError, Refusal, RefusalKind
from services.proxy.dialects.fields import (
    clean,
    clean_json,
    given_fields,
    integer,
    invalid,
    is_retry,
    number_between,
    typed,
)
from services.proxy.dialects.openai_chat import openai_error
from services.proxy.dialects.openai_responses_answers import ResponseStream, response_body
from services.proxy.dialects.openai_responses_ids import call_of
from services.proxy.dialects.openai_responses_items import ItemReader
from services.proxy.dialects.openai_responses_tools import Origins, Tools, missing, names_of
from services.proxy.lineage import lineage_of
from services.proxy.types import CallPurpose, CanonicalRequest, Choice, Message, ToolChoice, ToolMode, Usage

MIN_OUTPUT_TOKENS = 16
"""The vendor takes no smaller ``max_output_tokens``."""
CONTEXT_MESSAGE = "Your input exceeds the context window of this model. Please adjust your input and try again."
"""With its code it makes Codex drop its oldest items while it compacts, and pi compact."""

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
    }
)
_PARSED_FIELDS = _SAMPLING_FIELDS | {
    "background",
    "input",
    "instructions",
    "max_output_tokens",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "stream",
    "text",
    "tool_choice",
    "tools",
}
_ECHOED: dict[str, tuple[Any, str]] = {
    "max_output_tokens": (int, "an integer"),
    "max_tool_calls": (int, "an integer"),
    "metadata": (dict, "an object"),
    "previous_response_id": (str, "a string"),
    "prompt_cache_key": (str, "a string"),
    "prompt_cache_retention": (str, "a string"),
    "reasoning": (dict, "an object"),
    "safety_identifier": (str, "a string"),
    "service_tier": (str, "a string"),
    "store": (bool, "a boolean"),
    "temperature": (int | float, "a number"),
    "text": (dict, "an object"),
    "tool_choice": (str | dict, "a string or an object"),
    "top_logprobs": (int, "an integer"),
    "top_p": (int | float, "a number"),
    "truncation": (str, "a string"),
    "user": (str, "a string"),
}
"""Fields that an answer repeats, and their types."""
_REFUSED = {
    "conversation": "Conversations are not kept here: send the items, or name the last answer with "
    "'previous_response_id'.",
    "prompt": "Prompt templates are not kept here: send 'instructions' and 'input'.",
}


class OpenAIResponses:
    """The ``Dialect`` of Responses."""

    name = "openai_responses"
    keep_alive = ": keep-alive\n\n"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CanonicalRequest:
        """A request body in canonical form. Raises ``InvalidRequestError`` for what OpenAI refuses, or we do.

        Refused although OpenAI takes it: images, audio and files, answers in the background, conversations, prompt
        templates, references to items.
        """
        given = given_fields(body)
        _refuse(given)
        model = typed(_required(given, "model"), str, "model", "a string")
        tools = Tools()
        tools.add(given.get("tools", []), "tools")
        instructions = clean(typed(given.get("instructions", ""), str, "instructions", "a string"))
        leading = (Message("system", instructions),) if instructions else ()
        reader, messages = _read_input(given, tools)
        schema, unused = _response_schema(given)
        lineage, choice = lineage_of(headers, given), tools.choice(given)
        if reader.is_compaction:
            lineage, choice = replace(lineage, purpose=CallPurpose.COMPACTION), ToolChoice(ToolMode.NONE)
            schema = None
        return CanonicalRequest(
            dialect=self.name,
            model=clean(model),
            messages=(*leading, *messages),
            tools=tuple(tools.functions.values()),
            stream=typed(given.get("stream", False), bool, "stream", "a boolean"),
            include_usage=True,
            requested_sampling=_sampling(given),
            tool_choice=choice,
            response_schema=schema,
            previous_call_id=_previous_call_id(given),
            num_instructions=len(leading),
            lineage=lineage,
            is_retry=is_retry(headers),
            unused_fields=tuple(sorted(unused | tools.unused | reader.unused | names_of(given, _PARSED_FIELDS))),
            answer_form=_answer_form(given, tools, is_compaction=reader.is_compaction),
        )

    def body(self, head: Head, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed. One choice: Responses has no ``n``."""
        return response_body(head, choices[0], usage)

    def stream(self, head: Head) -> AnswerStream:
        """The events of an answer that is."""
        return ResponseStream(head, self.keep_alive)

    def error(self, refusal: Refusal) -> ErrorAnswer:
        """An error answer in OpenAI's form."""
        if refusal.kind is RefusalKind.CONTEXT_LENGTH:
            return _error(400, CONTEXT_MESSAGE, "input", "context_length_exceeded")
        if refusal.kind is RefusalKind.NOT_FOUND and refusal.message:  # something in the body, not the path
            return _error(404, refusal.message, refusal.param or None, refusal.code or None)
        return openai_error(refusal)


def previous_response_not_found(response_id: str) -> InvalidRequestError:
    """For a ``previous_response_id`` that no stored answer of the run has."""
    return InvalidRequestError(
        f"Previous response with id {response_id[:80]!r} not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _error(status: int, message: str, param: str | None, code: str | None) -> ErrorAnswer:
    kind = "invalid_request_error"
    return ErrorAnswer(status, {"error": {"message": message, "type": kind, "param": param, "code": code}})


def _refuse(given: Mapping[str, Any]) -> None:
    for name, why in _REFUSED.items():
        if name in given:
            raise InvalidRequestError(
                f"Unsupported parameter: '{name}'. {why}", param=name, code="unsupported_parameter"
            )
    if typed(given.get("background", False), bool, "background", "a boolean"):
        raise invalid("background", "Answers are not made in the background here: only false is supported.")


def _required(given: Mapping[str, Any], name: str) -> Any:
    if not given.get(name):
        raise missing(name)
    return given[name]


def _read_input(given: Mapping[str, Any], tools: Tools) -> tuple[ItemReader, tuple[Message, ...]]:
    reader = ItemReader(tools)
    items = given.get("input")
    if items is None:
        raise missing("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for index, item in enumerate(typed(items, list, "input", "a string or an array of items")):
        reader.add(item, f"input[{index}]")
    messages = reader.messages
    if not messages:
        raise InvalidRequestError(
            "Invalid 'input': it holds nothing that this model can be shown.", param="input", code="empty_array"
        )
    return reader, messages


def _previous_call_id(given: Mapping[str, Any]) -> str:
    if "previous_response_id" not in given:
        return ""
    named = typed(given["previous_response_id"], str, "previous_response_id", "a string")
    call_id = call_of(named)
    if not call_id:
        raise previous_response_not_found(clean(named))
    return call_id


def _response_schema(given: Mapping[str, Any]) -> tuple[dict[str, Any] | None, set[str]]:
    """The schema of ``text.format``, and what else ``text`` says that changes nothing."""
    text = typed(given.get("text", {}), dict, "text", "an object")
    unused = {f"text.{clean(name)}" for name in text if name != "format" and text[name] is not None}
    form = typed(text.get("format") or {"type": "text"}, dict, "text.format", "an object")
    kind = form.get("type")
    if kind == "text":
        return None, unused
    if kind == "json_object":
        return {"type": "object"}, unused
    if kind != "json_schema":
        raise invalid("text.format.type", "Supported values are: 'text', 'json_object', and 'json_schema'.")
    if form.get("schema") is None:
        raise missing("text.format.schema")
    schema: dict[str, Any] = clean_json(typed(form["schema"], dict, "text.format.schema", "an object"))
    return schema, unused


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the harness asked for, under Chat Completions' names."""
    sampling = {name: clean_json(given[name]) for name in sorted(_SAMPLING_FIELDS & given.keys())}
    number_between(sampling, "temperature", 0.0, 2.0)
    number_between(sampling, "top_p", 0.0, 1.0)
    if "seed" in sampling:
        integer(sampling["seed"], "seed")
    if "max_output_tokens" in given:
        limit = integer(given["max_output_tokens"], "max_output_tokens")
        if limit < MIN_OUTPUT_TOKENS:
            raise InvalidRequestError(
                f"Invalid 'max_output_tokens': integer below minimum value. Expected a value >= {MIN_OUTPUT_TOKENS}, "
                f"but got {limit} instead.",
                param="max_output_tokens",
                code="integer_below_min_value",
            )
        sampling["max_tokens"] = limit
    return sampling


def _answer_form(given: Mapping[str, Any], tools: Tools, *, is_compaction: bool) -> dict[str, Any]:
    echo = {
        name: clean_json(typed(given[name], kind, name, expected))
        for name, (kind, expected) in _ECHOED.items()
        if name in given
    }
    return {"echo": echo, "origins": Origins.form_of(tools.origins), "is_compaction": is_compaction}


OPENAI_RESPONSES = OpenAIResponses()
