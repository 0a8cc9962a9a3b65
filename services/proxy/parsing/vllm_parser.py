"""An ``AnswerParser`` over vLLM's parsers of tool calls and reasoning. The only module of the proxy that knows them.

What an answer is is decided once, from its whole text: by the marks of the format where they are known
(``services.common.answer_formats``), else by vLLM's functions for whole answers. vLLM's functions for streams are not
used: they read some answers differently. So a streamed answer and a whole one, an answer in training and one in
evaluation, are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.answer_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from services.proxy.parsing import AnswerReader
from services.proxy.parsing.calls import MalformedCallError, is_runaway, make_call
from services.proxy.parsing.forced import ForcedReader
from services.proxy.parsing.schema import is_forced, is_masked, may_call
from services.proxy.parsing.split import CallSplit, ReasoningSplit
from services.proxy.types import CanonicalRequest, Delta, DeltaKind, ParsedAnswer, ToolCall

_TOOL_SETS_KEPT = 16
_CHAT_KWARGS = {"thinking": True, "enable_thinking": True}
"""vLLM's parsers read reasoning only if told that the model reasons; whether it does is seen in its answers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Extracted:
    """What vLLM's tool parser made of a text."""

    calls: tuple[tuple[str, str], ...]
    """Names, and arguments as text."""
    text: str
    """What it left over."""


class VllmParsers:
    """vLLM's parsers of one model. Imported with the first use: vLLM takes seconds and half a gigabyte."""

    def __init__(
        self, model_path: str, tool: str, reasoning: str, load_tokenizer: Callable[[str], Any] | None = None
    ) -> None:
        """Names of parsers, empty: none. ``load_tokenizer``: vLLM's own loader by default."""
        self._model_path, self._tool, self._reasoning = model_path, tool, reasoning
        self._load_tokenizer = load_tokenizer
        self._loading = threading.Lock()
        self._remembering = threading.Lock()
        """Answers are read in several threads."""
        self._is_warm = False
        self._is_loaded = False
        self._failure: Exception | None = None
        self._tokenizer: Any = None
        self._tool_class: Any = None
        self._reasoning_class: Any = None
        self._requests: list[tuple[tuple[dict[str, Any], ...], Any]] = []

    def warm(self) -> None:
        """Begin to import vLLM in a thread of its own, unless that was done."""
        if not self._is_warm:
            self._is_warm = True
            threading.Thread(target=self.load, name="import-vllm", daemon=True).start()

    @property
    def is_loaded(self) -> bool:
        """Whether what was to be imported is there, or cannot be."""
        return self._is_loaded

    def load(self) -> None:
        """Import it, or wait until it is imported. That it cannot be is in the log, and raised with its use."""
        with contextlib.suppress(Exception):
            self._load()

    def tool_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> Extracted:
        """Read tool calls. Raises whatever vLLM's parser raises."""
        self._load()
        request = self._request(tuple(tools))
        parser = self._tool_class(self._tokenizer, request.tools)
        _loosen(parser)
        found = parser.extract_tool_calls(text, request)
        calls = found.tool_calls if found.tools_called else ()
        return Extracted(tuple((one.function.name, one.function.arguments) for one in calls), found.content or "")

    def reasoning(self, text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """Reasoning and content of an answer. Raises whatever vLLM's parser raises."""
        self._load()
        parser = self._reasoning_class(self._tokenizer, chat_template_kwargs=dict(_CHAT_KWARGS))
        reasoning, content = parser.extract_reasoning(text, self._request(tuple(tools)))
        return reasoning or "", content or ""

    def _load(self) -> None:
        """Import and build what is needed, once. Raises what that raised, every time."""
        with self._loading:
            if not self._is_loaded:
                try:
                    self._import()
                except Exception as error:  # of any kind: answers are text then, and the log says why
                    self._failure = error
                self._is_loaded = True
                if self._failure is not None:
                    _log.error(
                        "vLLM's parsers cannot be used, calls and reasoning are taken for text: %s",
                        _first_line(self._failure),
                    )
        if self._failure is not None:
            raise self._failure

    def _import(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import get_tokenizer
        from vllm.tool_parsers import ToolParserManager

        for name in ("tool_parsers", "reasoning", "parser"):  # they log the text of every malformed call
            logging.getLogger(f"vllm.{name}").setLevel(logging.CRITICAL)
        self._tokenizer = (self._load_tokenizer or get_tokenizer)(self._model_path)
        if self._tool:
            self._tool_class = ToolParserManager.get_tool_parser(self._tool)
            self._tool_class(self._tokenizer, None)  # raises if the tokenizer lacks a token of the format
        if self._reasoning:
            self._reasoning_class = ReasoningParserManager.get_reasoning_parser(self._reasoning)

    def _request(self, tools: tuple[dict[str, Any], ...]) -> Any:
        """A request with these tools in vLLM's types, of the last ones if the tools are equal."""
        with self._remembering:
            return self._remembered(tools)

    def _remembered(self, tools: tuple[dict[str, Any], ...]) -> Any:
        for index, (known, request) in enumerate(self._requests):
            if known == tools:
                self._requests.insert(0, self._requests.pop(index))
                return request
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}
        if tools:
            body |= {"tools": [_vllm_tool(tool) for tool in tools], "tool_choice": "auto"}
        made = ChatCompletionRequest(**body)
        self._requests = [(tools, made), *self._requests[: _TOOL_SETS_KEPT - 1]]
        return made


def _loosen(parser: Any) -> None:
    """Keep a parser of vLLM's newer kind from what is no business of tool calls: reasoning, which is not in its text
    any more, and tools that were not offered, which the harness answers with an error."""
    engine = getattr(parser, "_parser_engine", None)
    if engine is None:
        return
    parser.skip_reasoning_parsing = True
    engine.parser_engine_config = dataclasses.replace(engine.parser_engine_config, validate_tool_names=False)


def _vllm_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The parts of a tool that parsers look at."""
    function = tool.get("function") or {}
    parameters = function.get("parameters")
    return {
        "type": "function",
        "function": {
            "name": str(function.get("name", "")),
            "parameters": parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}},
        },
    }


class VllmParser:
    """The ``AnswerParser`` of a model."""

    def __init__(self, vllm: VllmParsers, tool: str, reasoning: str, *, is_open: bool = False) -> None:
        """Names of parsers, empty: none. ``is_open``: the model's prompts end inside the reasoning."""
        self._vllm = vllm
        self._tool_format = TOOL_FORMATS[tool] if tool else None
        self._reasoning_format = REASONING_FORMATS[reasoning] if reasoning else None
        self._is_open = is_open

    def reader(self, request: CanonicalRequest, call_id: str) -> AnswerReader:
        """A reader for the answer to a request."""
        if is_forced(request):
            return ForcedReader(request, call_id)
        tool_format = self._tool_format
        if tool_format is not None and (is_masked(request) or not (may_call(request) or tool_format.wraps_text)):
            tool_format = None
        # a grammar leaves no room for reasoning
        reasoning_format = None if is_masked(request) else self._reasoning_format
        if tool_format is not None or (reasoning_format is not None and not reasoning_format.end):
            self._vllm.warm()
        return _Reader(self._vllm, request, call_id, tool_format, reasoning_format, is_open=self._is_open)


class _Reader:
    def __init__(
        self,
        vllm: VllmParsers,
        request: CanonicalRequest,
        call_id: str,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        *,
        is_open: bool,
    ) -> None:
        self._vllm, self._request, self._call_id = vllm, request, call_id
        self._tool_format = tool_format
        self._held: list[str] | None = None
        """All of the text, where only vLLM can tell its reasoning."""
        self._reasoning_split: ReasoningSplit | None = None
        if reasoning_format is not None and not reasoning_format.end:
            self._held = []
        elif reasoning_format is not None:
            openers = reasoning_format.call_openers if tool_format is not None else ()
            self._reasoning_split = ReasoningSplit(reasoning_format, is_open=is_open, call_openers=openers)
        openers = tool_format.openers if tool_format is not None else ()
        self._call_split = CallSplit(openers, only_at_start=tool_format is not None and tool_format.only_at_start)
        self._is_opaque = tool_format is not None and not openers
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._text: list[str] = []

    @property
    def is_slow(self) -> bool:
        """Whether ``finish`` would have to import vLLM."""
        needs_vllm = self._held is not None or self._is_opaque or self._call_split.has_body
        return needs_vllm and not self._vllm.is_loaded

    def prepare(self) -> None:
        """Import it."""
        self._vllm.load()

    def feed(self, text: str) -> list[Delta]:
        """The deltas that are certain now."""
        if self._held is not None:
            self._held.append(text)
            return []
        reasoning, content = self._reasoning_split.feed(text) if self._reasoning_split is not None else ("", text)
        return [*self._add_reasoning(reasoning), *self._add_text(self._certain(content))]

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        """The rest of the deltas, and the whole answer."""
        reasoning, content = self._rest()
        deltas = [*self._add_reasoning(reasoning), *self._add_text(self._certain(content))]
        if self._is_opaque:
            head, body = "", "".join(self._content)
        else:
            head, body = self._call_split.finish()
        calls, text, num_malformed = self._read(head, body)
        deltas += self._add_text(text)
        deltas += [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in calls]
        return deltas, ParsedAnswer("".join(self._text), "".join(self._reasoning), calls, num_malformed)

    def _certain(self, content: str) -> str:
        if self._is_opaque:
            self._content.append(content)
            return ""
        return self._call_split.feed(content) if content else ""

    def _rest(self) -> tuple[str, str]:
        if self._reasoning_split is not None:
            return self._reasoning_split.finish()
        if self._held is None:
            return "", ""
        text = "".join(self._held)
        try:
            return self._vllm.reasoning(text, self._request.tools)
        except Exception as error:  # whatever vLLM raises: the text is not lost for it
            _log.warning("the reasoning of %s is taken for text: %s", self._call_id, _first_line(error))
            return "", text

    def _read(self, head: str, body: str) -> tuple[tuple[ToolCall, ...], str, int]:
        """Calls, the rest of the text, and the number of malformed calls, of the text before the calls as far as it
        was held back and of what may be calls."""
        if self._tool_format is None or not body:
            return (), head + body, 0
        num_expected = _count_calls(body, self._tool_format)
        if is_runaway(body):
            return (), head + body, max(num_expected, 1)
        try:
            found = self._vllm.tool_calls(body, self._request.tools)
            if not found.calls or not may_call(self._request):
                text = found.text if self._is_opaque and not found.calls else ""
                return (), head + (text or body), num_expected
            if _is_cut(body, self._tool_format):
                raise MalformedCallError("the answer ends inside a call")
            counted = found.calls if self._request.tool_choice.is_parallel else found.calls[:1]
            calls = tuple(make_call(self._call_id, ordinal, *call) for ordinal, call in enumerate(counted))
        except MalformedCallError as error:
            _log.debug("calls of %s are taken for text: %s", self._call_id, error)
            return (), head + body, max(len(found.calls), num_expected, 1)
        except Exception as error:  # whatever vLLM raises: the answer is text then
            _log.debug("calls of %s are taken for text: %s", self._call_id, _first_line(error))
            return (), head + body, max(num_expected, 1)
        return calls, (head if head.strip() else "") + (found.text if found.text.strip() else ""), 0

    def _add_reasoning(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._reasoning.append(text)
        return [Delta(DeltaKind.REASONING, text)]

    def _add_text(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._text.append(text)
        return [Delta(DeltaKind.TEXT, text)]


def _count_calls(body: str, form: ToolFormat) -> int:
    """How many calls a text begins, by its marks."""
    if not form.is_plain:
        return max((body.count(mark) for mark in (*form.begins, *form.openers)), default=0)
    return int('"name"' in body and body.startswith(form.openers))


def _is_cut(body: str, form: ToolFormat) -> bool:
    """Whether a text ends inside a call."""
    begins = (*form.begins, *form.openers)
    if form.holds_json:
        return not _holds_json(min((body.rpartition(begin)[2] for begin in begins), key=len))
    return bool(form.closers) and max(map(body.rfind, form.closers)) < max(map(body.rfind, begins))


def _holds_json(text: str) -> bool:
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
