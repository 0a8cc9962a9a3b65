"""Answers made under the grammar of a forced tool (see ``services.proxy.parsing.schema``)."""

from __future__ import annotations

from typing import Any

from services.proxy.parsing.calls import MalformedCallError, checked_call, read_json
from services.proxy.types import CanonicalRequest, Delta, DeltaKind, ParsedAnswer, ToolCall


class ForcedReader:
    """An ``AnswerReader`` of the JSON that stands for the calls of a forced tool. Calls come whole, at the end."""

    def __init__(self, request: CanonicalRequest, call_id: str) -> None:
        self._request = request
        self._call_id = call_id
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        """Nothing: before its end the answer is no JSON."""
        self._texts.append(text)
        return []

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        """The calls; or all of it as text if it was cut before it was JSON."""
        text = "".join(self._texts)
        try:
            calls = self._calls(read_json(text))
        except MalformedCallError:
            return [Delta(DeltaKind.TEXT, text)] if text else [], ParsedAnswer(text, num_malformed_calls=1)
        return [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in calls], ParsedAnswer("", tool_calls=calls)

    def _calls(self, value: Any) -> tuple[ToolCall, ...]:
        choice = self._request.tool_choice
        if choice.name:
            return (checked_call(self._call_id, 0, choice.name, value),)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise MalformedCallError("forced calls are an array of objects")
        items = value if choice.is_parallel else value[:1]
        return tuple(
            checked_call(self._call_id, ordinal, item.get("name"), item.get("parameters"))
            for ordinal, item in enumerate(items)
        )
