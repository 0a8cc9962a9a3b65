"""Input items of OpenAI Responses as canonical messages.

The vendor cuts one answer into items: reasoning, a message, calls. Those that stand together become one assistant
message again, exactly as it was parsed from the model's text; the ids that we gave them tell answers apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.proxy.dialects import InvalidRequestError
from services.proxy.dialects.fields import clean, clean_json, invalid, parse_arguments, to_json, typed, wrong_type
from services.proxy.dialects.openai_responses_ids import open_reasoning, open_summary, turn_of
from services.proxy.dialects.openai_responses_tools import Tools, custom_arguments, flat_name, missing
from services.proxy.types import Message, ToolCall

COMPACTION_PROMPT = (
    "The context of this conversation is nearly used up. Write a hand-over for whoever goes on with the work and "
    "will have nothing else to go by: the task and its constraints, what was decided and what was done, the state of "
    "files and tools, what is left to do, and every name, value and wording that will be needed. Answer with this "
    "text alone and call no tool."
)
"""What a ``compaction_trigger`` asks the model."""
SUMMARY_PREFIX = "Everything before this was summarised to save room. The summary:\n\n"

_LEFT_OUT = "[left out: {kind}, for this model takes text only]"
"""Stands for a part of a tool's output that cannot be shown: refusing it would end the run over one call."""

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_HOSTED_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of tools and settings that no answer of ours uses: left out of the prompt."""


@dataclass(slots=True)
class _Turn:
    """The items of one answer, so far."""

    key: str = ""
    """Which answer of ours it is; empty while unknown."""
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    is_given: bool = False
    """Something of it can be shown to the model."""

    @property
    def message(self) -> Message:
        """Pieces of an answer of ours were cut out of one text; those of others stand for themselves."""
        between = ("", "") if self.key else ("\n\n", "\n")
        return Message("assistant", between[1].join(self.texts), between[0].join(self.reasoning), tuple(self.calls))


class ItemReader:
    """Reads the items of one request, in order."""

    def __init__(self, tools: Tools) -> None:
        self.unused: set[str] = set()
        """What was given but changes nothing."""
        self.is_compaction = False
        """The last item asks for a summary."""
        self._tools = tools
        self._entries: list[Message | _Turn] = []
        self._turn: _Turn | None = None
        """The newest answer, unless something other than tool outputs stands behind it."""
        self._is_behind_output = False
        """Outputs of its calls stand behind it."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(
            entry if isinstance(entry, Message) else entry.message
            for entry in self._entries
            if isinstance(entry, Message) or entry.is_given
        )

    def add(self, given: Any, where: str) -> None:
        """Raises ``InvalidRequestError`` for an item that has no meaning here."""
        item = typed(given, dict, where, "an object")
        if self.is_compaction:
            raise invalid(where, "Nothing may stand behind a 'compaction_trigger'.")
        kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
        reads = _READERS.get(kind) if isinstance(kind, str) else None
        if reads is not None:
            reads(self, item, where)
        elif isinstance(kind, str) and kind in _HOSTED_ITEMS:
            self.unused.add(f"input.{kind}")
        else:
            known = sorted(_READERS.keys() | _HOSTED_ITEMS)
            raise invalid(f"{where}.type", f"Supported values are: {', '.join(map(repr, known))}.")

    # --- what an assistant said ------------------------------------------------------------------------------------

    def _turn_for(self, item: Mapping[str, Any]) -> _Turn:
        """The answer that an item belongs to: the newest, unless the item's id or its place say otherwise."""
        key = turn_of(item.get("id"))
        turn = self._turn
        is_same = turn is not None and (key == turn.key if key and turn.key else not self._is_behind_output)
        if turn is None or not is_same:
            turn = self._turn = _Turn()
            self._is_behind_output = False
            self._entries.append(turn)
        turn.key = turn.key or key
        return turn

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{where}.role", f"Supported values are: {', '.join(map(repr, _ROLES))}.")
        content = text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            turn = self._turn_for(item)
            turn.texts.append(content)
            turn.is_given = True
        else:
            self._append(Message(_ROLES[role], content))

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        """The sealed text is the whole; the readable ones may have been cut or left out on the way."""
        turn = self._turn_for(item)
        sealed = item.get("encrypted_content")
        text = open_reasoning(sealed)
        if text is None:
            if sealed is not None:
                self.unused.add("input.encrypted_content")
            text = text_of(item.get("content"), f"{where}.content", "\n\n")
            text = text or text_of(item.get("summary"), f"{where}.summary", "\n\n")
        if text:
            turn.reasoning.append(text)
            turn.is_given = True

    def _add_call(self, item: Mapping[str, Any], where: str, name: str, arguments: dict[str, Any]) -> None:
        turn = self._turn_for(item)
        turn.calls.append(ToolCall(_string(item, "call_id", where), name, arguments))
        turn.is_given = True

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        self._add_call(item, where, _called(item, where), parse_arguments(item.get("arguments")))

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        is_json = turn_of(item.get("id")) != "" and str(item["id"]).startswith("ctj_")
        arguments = custom_arguments(_string(item, "input", where), is_json=is_json)
        self._add_call(item, where, _called(item, where), arguments)

    def _local_shell_call(self, item: Mapping[str, Any], where: str) -> None:
        action = clean_json(typed(item.get("action"), dict, f"{where}.action", "an object"))
        arguments = {key: value for key, value in action.items() if key != "type" and value not in (None, {})}
        self._add_call(item, where, "local_shell", arguments)

    # --- what was said to it ---------------------------------------------------------------------------------------

    def _append(self, message: Message) -> None:
        self._entries.append(message)
        self._turn = None

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = item.get("call_id") or (item.get("id") if item.get("type") == "local_shell_call_output" else None)
        if call_id is None:
            raise missing(f"{where}.call_id")
        call_id = clean(typed(call_id, str, f"{where}.call_id", "a string"))
        output = item.get("output")
        if isinstance(output, list):
            output = [self._shown(part) for part in output]
        text = to_json(clean_json(output)) if isinstance(output, dict) else text_of(output, f"{where}.output")
        self._entries.append(Message("tool", text, tool_call_id=call_id))
        self._is_behind_output = True

    def _shown(self, part: Any) -> Any:
        """A part of an output, or the words that stand for an image or a file."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_image", "input_file", "input_audio"):
            return part
        self.unused.add(f"input.{kind}")
        return {"type": "input_text", "text": _LEFT_OUT.format(kind=str(kind).removeprefix("input_"))}

    def _agent_message(self, item: Mapping[str, Any], where: str) -> None:
        """What one agent of Codex tells another. Its client seals no text of ours, whatever the part is called."""
        parts = typed(item.get("content"), list, f"{where}.content", "an array")
        texts = [
            _string(part, "encrypted_content", f"{where}.content[{index}]")
            if isinstance(part, dict) and part.get("type") == "encrypted_content"
            else text_of([part], f"{where}.content")
            for index, part in enumerate(parts)
        ]
        self._append(Message("user", "\n".join(texts)))

    def _additional_tools(self, item: Mapping[str, Any], where: str) -> None:
        self._tools.add(item.get("tools", []), f"{where}.tools")

    def _compaction(self, item: Mapping[str, Any], where: str) -> None:
        summary = open_summary(item.get("encrypted_content"))
        if summary is None:
            self.unused.add("input.compaction")
        else:
            self._append(Message("user", SUMMARY_PREFIX + summary))

    def _compaction_trigger(self, item: Mapping[str, Any], where: str) -> None:
        self._append(Message("user", COMPACTION_PROMPT))
        self.is_compaction = True

    def _item_reference(self, item: Mapping[str, Any], where: str) -> None:
        named = _string(item, "id", where)
        raise InvalidRequestError(
            f"Item with id {named[:80]!r} not found. This server keeps answers, not items: send the item itself, or "
            "name the answer with 'previous_response_id'.",
            param="input",
            status=404,
        )


_READERS: dict[str, Callable[[ItemReader, Mapping[str, Any], str], None]] = {
    "message": ItemReader._message,
    "reasoning": ItemReader._reasoning,
    "function_call": ItemReader._function_call,
    "function_call_output": ItemReader._output,
    "custom_tool_call": ItemReader._custom_call,
    "custom_tool_call_output": ItemReader._output,
    "local_shell_call": ItemReader._local_shell_call,
    "local_shell_call_output": ItemReader._output,
    "agent_message": ItemReader._agent_message,
    "additional_tools": ItemReader._additional_tools,
    "compaction": ItemReader._compaction,
    "compaction_summary": ItemReader._compaction,
    "context_compaction": ItemReader._compaction,
    "compaction_trigger": ItemReader._compaction_trigger,
    "item_reference": ItemReader._item_reference,
}


def text_of(given: Any, where: str, between: str = "\n") -> str:
    """A string, or parts with text. Raises ``InvalidRequestError`` for anything else: this model takes text only."""
    if given is None:
        return ""
    if isinstance(given, str):
        return clean(given)
    parts = typed(given, list, where, "a string or an array of parts")
    return between.join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(parts))


def _part_text(given: Any, where: str) -> str:
    part = typed(given, dict, where, "an object")
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is not None:
        return _string(part, key, where)
    if kind == "input_image":
        raise invalid(f"{where}.image_url", "This model takes text only, no images.")
    raise invalid(
        f"{where}.type", f"This model takes text only. Supported values are: {', '.join(map(repr, _TEXT_PARTS))}."
    )


def _called(item: Mapping[str, Any], where: str) -> str:
    namespace = typed(item.get("namespace") or "", str, f"{where}.namespace", "a string")
    return flat_name(_string(item, "name", where), clean(namespace))


def _string(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if value is None:
        raise missing(f"{where}.{key}")
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{key}", "a string")
    return clean(value)
