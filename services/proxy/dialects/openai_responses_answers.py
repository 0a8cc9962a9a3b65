"""Answers of OpenAI Responses: one body, or the events of a stream that ends with the very same response object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.proxy.dialects import Head, sse
from services.proxy.dialects.fields import to_json
from services.proxy.dialects.openai_responses_ids import item_id, response_id, seal_reasoning, seal_summary
from services.proxy.dialects.openai_responses_tools import Origins, custom_input, echoed
from services.proxy.types import CanonicalRequest, Choice, Delta, DeltaKind, ToolCall, Usage

_LENGTH = "length"


def response_body(head: Head, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The response object of a whole answer."""
    items = _Items(head)
    answer = choice.answer
    output: list[dict[str, Any]] = []
    if items.is_compaction:
        output.append(items.compaction(0, answer.text))
    else:
        if answer.reasoning:
            output.append(items.reasoning(0, answer.reasoning))
        if answer.text or not (output or answer.tool_calls):
            is_cut = choice.finish_reason == _LENGTH and not answer.tool_calls
            output.append(items.message(len(output), answer.text, is_cut=is_cut))
        for call in answer.tool_calls:
            output.append(items.call(len(output), call))
    return {**_own(head, output, choice, usage), **_repeated(head.request)}


class ResponseStream:
    """The events of one streamed response."""

    def __init__(self, head: Head, keep_alive: str) -> None:
        self._head = head
        self._keep_alive = keep_alive
        self._items = _Items(head)
        self._repeated = to_json(_repeated(head.request))
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: DeltaKind | None = None
        """What the item is whose pieces are coming; None between items."""
        self._texts: list[str] = []
        """Its pieces."""

    def begin(self, usage: Usage) -> str:
        """``usage`` is of no use: the vendor gives it at the end only."""
        own = _own(self._head, [], None, None)
        events = self._lifecycle("response.created", own) + self._lifecycle("response.in_progress", own)
        if self._items.is_compaction:
            item = self._items.compaction(0, "")
            events += self._item_event("response.output_item.added", {**item, "encrypted_content": ""})
            events += self._event("response.compaction.compacting", output_index=0, item_id=item["id"])
        return events

    def delta(self, choice: int, delta: Delta) -> str:
        if self._items.is_compaction:  # its text goes out whole; until then the stream must not look dead
            self._texts.append(delta.text if delta.kind is DeltaKind.TEXT else "")
            return self._keep_alive
        if delta.kind is DeltaKind.TOOL_CALL:
            assert delta.tool_call is not None
            return self._close() + self._call(delta.tool_call)
        if not delta.text:
            return ""
        opening = "" if self._open is delta.kind else self._close() + self._begin_item(delta.kind)
        self._texts.append(delta.text)
        return opening + self._piece(delta.text)

    def end(self, choices: Sequence[Choice], usage: Usage) -> str:
        (choice,) = choices
        is_cut = choice.finish_reason == _LENGTH
        if self._items.is_compaction:
            item = self._items.compaction(0, "".join(self._texts))
            events = self._item_event("response.output_item.done", item)
            self._output.append(item)
        else:
            events = "" if self._output or self._open else self._begin_item(DeltaKind.TEXT)
            events += self._close(is_cut=is_cut)
        own = _own(self._head, self._output, choice, usage)
        return events + self._lifecycle("response.incomplete" if is_cut else "response.completed", own)

    # --- items -----------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._output)

    def _begin_item(self, kind: DeltaKind) -> str:
        self._open, self._texts = kind, []
        if kind is DeltaKind.REASONING:
            item = {**self._items.reasoning(self._index, ""), "summary": []}
            name, part = "response.reasoning_summary_part.added", _summary_part("")
        else:
            item = {**self._items.message(self._index, ""), "status": "in_progress", "content": []}
            name, part = "response.content_part.added", _text_part("")
        added = self._item_event("response.output_item.added", item)
        return added + self._event(name, **self._place(kind), part=part)

    def _piece(self, text: str) -> str:
        if self._open is DeltaKind.REASONING:
            return self._event("response.reasoning_summary_text.delta", **self._place(self._open), delta=text)
        return self._event("response.output_text.delta", **self._place(DeltaKind.TEXT), delta=text, logprobs=[])

    def _close(self, *, is_cut: bool = False) -> str:
        """The last events of the item whose pieces were coming."""
        if self._open is None:
            return ""
        kind, text = self._open, "".join(self._texts)
        place = self._place(kind)
        if kind is DeltaKind.REASONING:
            item = self._items.reasoning(self._index, text)
            events = self._event("response.reasoning_summary_text.done", **place, text=text)
            events += self._event("response.reasoning_summary_part.done", **place, part=_summary_part(text))
        else:
            item = self._items.message(self._index, text, is_cut=is_cut)
            events = self._event("response.output_text.done", **place, text=text, logprobs=[])
            events += self._event("response.content_part.done", **place, part=_text_part(text))
        events += self._item_event("response.output_item.done", item)
        self._open = None
        self._output.append(item)
        return events

    def _call(self, call: ToolCall) -> str:
        item = self._items.call(self._index, call)
        is_custom = item["type"] == "custom_tool_call"
        key = "input" if is_custom else "arguments"
        name = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
        done = {key: item[key]} if is_custom else {key: item[key], "name": item["name"]}
        place = {"item_id": item["id"], "output_index": self._index}
        events = (
            self._item_event("response.output_item.added", {**item, key: "", "status": "in_progress"})
            + self._event(f"{name}.delta", **place, delta=item[key])
            + self._event(f"{name}.done", **place, **done)
            + self._item_event("response.output_item.done", item)
        )
        self._output.append(item)
        return events

    def _place(self, kind: DeltaKind) -> dict[str, Any]:
        """Where a piece of the open item belongs."""
        if kind is DeltaKind.REASONING:
            return {"item_id": self._items.id("rs", self._index), "output_index": self._index, "summary_index": 0}
        return {"item_id": self._items.id("msg", self._index), "output_index": self._index, "content_index": 0}

    # --- events ----------------------------------------------------------------------------------------------------

    def _event(self, name: str, /, **fields: Any) -> str:
        number = self._num_events
        self._num_events += 1
        return sse(to_json({"type": name, "sequence_number": number, **fields}), name)

    def _item_event(self, name: str, item: Mapping[str, Any]) -> str:
        return self._event(name, output_index=self._index, item=item)

    def _lifecycle(self, name: str, own: Mapping[str, Any]) -> str:
        """An event with the response object. What it repeats of the request may be long: it was written once."""
        number = self._num_events
        self._num_events += 1
        response = f"{to_json(own)[:-1]},{self._repeated[1:]}"
        return sse(f'{{"type":"{name}","sequence_number":{number},"response":{response}}}', name)


class _Items:
    """Output items of one answer. The same answer again has the same ids."""

    def __init__(self, head: Head) -> None:
        form = head.request.answer_form
        self._call_id = head.call_id
        self._origins = Origins(form.get("origins", {}))
        self.is_compaction: bool = form.get("is_compaction", False)
        """The answer is a summary, sent as one compaction item."""

    def id(self, prefix: str, index: int) -> str:
        return item_id(prefix, self._call_id, index)

    def reasoning(self, index: int, text: str) -> dict[str, Any]:
        return {
            "id": self.id("rs", index),
            "type": "reasoning",
            "summary": [_summary_part(text)],
            "encrypted_content": seal_reasoning(text),
        }

    def message(self, index: int, text: str, *, is_cut: bool = False) -> dict[str, Any]:
        return {
            "id": self.id("msg", index),
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if is_cut else "completed",
            "content": [_text_part(text)],
        }

    def call(self, index: int, call: ToolCall) -> dict[str, Any]:
        origin = self._origins.of(call)
        if origin.is_custom:
            text, is_json = custom_input(call.arguments)
            item = {"type": "custom_tool_call", "id": self.id("ctj" if is_json else "ctc", index), "input": text}
        else:
            item = {"type": "function_call", "id": self.id("fc", index), "arguments": to_json(call.arguments)}
        item |= {"status": "completed", "call_id": call.call_id, "name": origin.name}
        return item | {"namespace": origin.namespace} if origin.namespace else item

    def compaction(self, index: int, summary: str) -> dict[str, Any]:
        return {"id": self.id("cmp", index), "type": "compaction", "encrypted_content": seal_summary(summary)}


def _own(head: Head, output: list[dict[str, Any]], choice: Choice | None, usage: Usage | None) -> dict[str, Any]:
    """The part of a response object that is the answer's own. ``choice`` None: it has only begun."""
    is_cut = choice is not None and choice.finish_reason == _LENGTH
    return {
        "id": response_id(head.call_id),
        "object": "response",
        "created_at": head.created_s,
        "status": "in_progress" if choice is None else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": None if usage is None else usage_object(usage),
    }


def _repeated(request: CanonicalRequest) -> dict[str, Any]:
    """The part that repeats the request."""
    instructions = request.messages[0].content if request.num_instructions else None
    return {
        "background": False,
        "instructions": instructions,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": request.tool_choice.is_parallel,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": echoed(request.tools),
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        **request.answer_form.get("echo", {}),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
