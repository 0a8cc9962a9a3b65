"""Anthropic's Messages: requests into canonical form; answers and errors are in ``anthropic_answers``.

Source: the API reference of ``POST /v1/messages``, the types of the official Python client, what Claude Code sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.proxy.dialects import AnswerStream, ErrorAnswer, Head, Refusal
from services.proxy.dialects.anthropic_answers import PING, MessageStream, error_answer, message_body
from services.proxy.dialects.anthropic_content import MessageReader
from services.proxy.dialects.anthropic_fields import function_of, invalid, number, required, typed, unexpected
from services.proxy.dialects.fields import clean, clean_json, is_retry
from services.proxy.lineage import lineage_of
from services.proxy.types import CanonicalRequest, Choice, ToolChoice, ToolMode, Usage

_PARSED_FIELDS = frozenset(
    {
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "stream",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop_sequences",
        "output_config",
        "output_format",
    }
)
_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "cache_control", "defer_loading"})
_CHOICE_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}


class Anthropic:
    """The ``Dialect`` of Anthropic's Messages."""

    name = "anthropic"
    keep_alive = PING

    def parse(self, body: Any, headers: Mapping[str, str]) -> CanonicalRequest:
        """A request body in canonical form. Raises ``InvalidRequestError`` for what the vendor refuses, or we do.

        Refused although the vendor takes it: images and documents that are not text (but in a tool's result a note
        stands for them), a last message of the assistant, blocks of tools that run at the vendor.
        """
        return self._parse(body, headers, is_count=False)

    def parse_count(self, body: Any, headers: Mapping[str, str]) -> CanonicalRequest:
        """A body of ``/v1/messages/count_tokens``: no ``max_tokens``, and any message may be the last."""
        return self._parse(body, headers, is_count=True)

    def body(self, head: Head, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed. There is one choice."""
        return message_body(head, choices[0], usage)

    def stream(self, head: Head) -> AnswerStream:
        return MessageStream(head)

    def error(self, refusal: Refusal) -> ErrorAnswer:
        return error_answer(refusal)

    def _parse(self, body: Any, headers: Mapping[str, str], *, is_count: bool) -> CanonicalRequest:
        given = {name: value for name, value in typed(body, dict, "body").items() if value is not None}
        model = required(given, "model", str, "")
        if not model:
            raise invalid("model", "String should have at least 1 character")
        tools = _Tools.read(given.get("tools", []))
        reader = MessageReader(tools.deferred, tools.unused)
        messages = (*reader.system(given.get("system", "")), *reader.messages(given))
        if not messages:
            raise invalid("messages", "at least one message must have content")
        if messages[-1].role == "assistant" and not is_count:
            raise invalid("messages", "this model cannot go on with a message of the assistant (prefill)")
        sampling = _sampling(given, needs_max_tokens=not is_count)
        schema = _response_schema(given, tools.unused)
        unused = {clean(name) for name in given.keys() - _PARSED_FIELDS} | tools.unused
        return CanonicalRequest(
            dialect=self.name,
            model=clean(model),
            messages=messages,
            tools=tuple(tools.offered),
            stream=typed(given.get("stream", False), bool, "stream"),
            requested_sampling=sampling,
            tool_choice=_tool_choice(given, tools.offered),
            response_schema=schema,
            lineage=lineage_of(headers, given),
            is_retry=is_retry(headers),
            unused_fields=tuple(sorted(unused)),
        )


# --- tools -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tools:
    """The tools of a request, told apart."""

    offered: list[dict[str, Any]] = field(default_factory=list)
    """Custom ones, in OpenAI's form."""
    deferred: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> a custom one with ``defer_loading``, in OpenAI's form of a function."""
    unused: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, given: Any) -> _Tools:
        """Tools that the vendor defines are left out: they run there, or its models know them by heart."""
        tools = cls()
        named: set[str] = set()
        for index, tool in enumerate(typed(given, list, "tools")):
            where = f"tools.{index}"
            kind = typed(tool, dict, where).get("type") or "custom"
            if kind != "custom":
                tools.unused.add(f"tools[{index}]:{clean(typed(kind, str, f'{where}.type'))}")
                continue
            function = function_of(tool, f"{where}.custom")
            if function["name"] in named:
                raise invalid("tools", "Tool names must be unique.")
            named.add(function["name"])
            tools.unused.update(f"tools.{clean(name)}" for name in tool.keys() - _TOOL_FIELDS)
            if tool.get("defer_loading") is True:
                tools.deferred[function["name"]] = function
            else:
                tools.offered.append({"type": "function", "function": function})
        tools._offer_what_nobody_finds()
        return tools

    def _offer_what_nobody_finds(self) -> None:
        """With a search that would run at the vendor, no block will ever name a deferred tool."""
        if any(":tool_search_tool" in name for name in self.unused):
            self.offered += [{"type": "function", "function": function} for function in self.deferred.values()]
            self.deferred = {}


def _tool_choice(given: Mapping[str, Any], offered: Sequence[dict[str, Any]]) -> ToolChoice:
    choice = typed(given.get("tool_choice", {"type": "auto"}), dict, "tool_choice")
    kind = required(choice, "type", str, "tool_choice")
    if kind not in _CHOICE_MODES:
        raise unexpected(kind, "tool_choice", ", ".join(map(repr, _CHOICE_MODES)))
    mode = _CHOICE_MODES[kind]
    is_parallel = not typed(
        choice.get("disable_parallel_tool_use") or False, bool, f"tool_choice.{kind}.disable_parallel_tool_use"
    )
    if mode is ToolMode.REQUIRED and not offered:
        raise invalid(f"tool_choice.{kind}", "there is no tool to use: give custom tools in `tools`")
    name = clean(required(choice, "name", str, "tool_choice.tool")) if kind == "tool" else ""
    if name and name not in {tool["function"]["name"] for tool in offered}:
        raise invalid("tool_choice.tool.name", f"Tool '{name}' not found in provided tools")
    return ToolChoice(mode, name, is_parallel)


# --- sampling and output ---------------------------------------------------------------------------------------


def _sampling(given: Mapping[str, Any], *, needs_max_tokens: bool) -> dict[str, Any]:
    """What the harness asked for, under OpenAI's names."""
    sampling: dict[str, Any] = {}
    for name, high in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        if name in given:
            sampling[name] = number(given[name], name, 0.0, high, is_integer=name == "top_k")
    if "max_tokens" in given:
        sampling["max_tokens"] = number(given["max_tokens"], "max_tokens", 1, None, is_integer=True)
    elif needs_max_tokens:
        raise invalid("max_tokens", "Field required")
    stops = [
        clean(typed(stop, str, f"stop_sequences.{index}"))
        for index, stop in enumerate(typed(given.get("stop_sequences", []), list, "stop_sequences"))
    ]
    if not all(stops):
        raise invalid("stop_sequences", "each stop sequence must contain at least one character")
    if stops:
        sampling["stop"] = stops
    return sampling


def _response_schema(given: Mapping[str, Any], unused: set[str]) -> dict[str, Any] | None:
    """The JSON schema of ``output_config.format``, or of ``output_format`` as it was called before."""
    config = typed(given.get("output_config", {}), dict, "output_config")
    unused.update(f"output_config.{clean(name)}" for name in config.keys() - {"format"})
    where = "output_format" if config.get("format") is None else "output_config.format"
    asked = given.get("output_format") if config.get("format") is None else config["format"]
    if asked is None:
        return None
    if required(typed(asked, dict, where), "type", str, where) != "json_schema":
        raise unexpected(asked["type"], where, "'json_schema'")
    schema: dict[str, Any] = clean_json(required(asked, "schema", dict, where))
    return schema


ANTHROPIC = Anthropic()
