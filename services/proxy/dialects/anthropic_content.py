"""The messages of Anthropic's bodies, block by block, in canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.proxy.dialects.anthropic_fields import function_of, invalid, required, typed, unexpected
from services.proxy.dialects.fields import clean, parse_arguments, to_json
from services.proxy.types import Message, ToolCall

_NO_CONTENT = "(no content)"
"""What Claude Code sends back for an answer that had no content."""
_UNSEEN = {
    "image": "[image: left out, this model takes text only]",
    "document": "[document: left out, this model takes text only]",
}
"""What a tool's result holds in their place: a harness that was refused them would be refused for ever."""


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads messages. One of the vendor's may be several canonical ones."""

    deferred: Mapping[str, dict[str, Any]]
    """Tools that are not offered until a block names them."""
    unused: set[str]
    """Takes the names of what was accepted but changes nothing."""

    def system(self, given: Any) -> Iterator[Message]:
        """The system prompt: one message, blocks joined by newlines, so that a line can be told from the next."""
        text = self._text(given, "system", self._system_block)
        if text:
            yield Message("system", text)

    def messages(self, given: Mapping[str, Any]) -> Iterator[Message]:
        messages = required(given, "messages", list, "")
        if not messages:
            raise invalid("messages", "at least one message is required")
        for index, message in enumerate(messages):
            yield from self._message(typed(message, dict, f"messages.{index}"), f"messages.{index}")

    def _message(self, message: dict[str, Any], where: str) -> Iterator[Message]:
        role, content = message.get("role"), message.get("content")
        if role == "system":
            self.unused.update(f"messages.{name}" for name in ("clear_at", "output_config") if name in message)
            text = self._text([] if content is None else content, f"{where}.content", self._system_block)
            if text:
                yield Message("system", text)
        elif role not in ("user", "assistant"):
            raise invalid(f"{where}.role", "Input should be 'user', 'assistant' or 'system'")
        elif content is None:
            raise invalid(f"{where}.content", "Field required")
        elif role == "assistant":
            yield self._assistant(_blocks(content, f"{where}.content"))
        else:
            yield from self._user(_blocks(content, f"{where}.content"))

    def _user(self, blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
        """Results of tools and what stands between them, in the order of the blocks."""
        texts: list[str] = []
        for where, block in blocks:
            if block["type"] != "tool_result":
                texts.append(self._user_block(block, where))
                continue
            if texts:
                yield Message("user", "\n".join(filter(None, texts)))
                texts = []
            yield self._tool_result(block, where)
        if texts or not blocks:
            yield Message("user", "\n".join(filter(None, texts)))

    def _assistant(self, blocks: list[tuple[str, dict[str, Any]]]) -> Message:
        """The blocks of each kind put together, without a joint: where a stream closed a block is no newline."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for where, block in blocks:
            kind = block["type"]
            if kind == "text":
                texts.append(required(block, "text", str, where))
            elif kind == "thinking":
                thoughts.append(required(block, "thinking", str, where))
            elif kind == "tool_use":
                name, call_id = (required(block, one, str, where) for one in ("name", "id"))
                calls.append(ToolCall(clean(call_id), clean(name), parse_arguments(block.get("input"))))
            elif kind in ("redacted_thinking", "fallback"):
                self.unused.add(f"messages.{kind}")
            else:
                raise unexpected(kind, where, "'text', 'thinking', 'redacted_thinking', 'tool_use'")
        if texts == [_NO_CONTENT] and len(blocks) == 1:
            texts = []
        return Message("assistant", clean("".join(texts)), clean("".join(thoughts)), tuple(calls))

    def _tool_result(self, block: dict[str, Any], where: str) -> Message:
        call_id = required(block, "tool_use_id", str, where)
        if not call_id:
            raise invalid(f"{where}.tool_use_id", "String should have at least 1 character")
        if block.get("is_error") is True:
            self.unused.add("tool_result.is_error")
        content = block.get("content")
        text = self._text([] if content is None else content, f"{where}.content", self._result_block)
        return Message("tool", text, tool_call_id=clean(call_id))

    def _text(self, given: Any, where: str, read: Callable[[dict[str, Any], str], str]) -> str:
        return "\n".join(filter(None, (read(block, at) for at, block in _blocks(given, where))))

    def _system_block(self, block: dict[str, Any], where: str) -> str:
        kind = block["type"]
        if kind == "tool_addition":
            return self._tool_addition(required(block, "tool", dict, where))
        if kind == "tool_removal":
            self.unused.add("messages.tool_removal")
            return ""
        return _plain_text(block, where, "'text', 'tool_addition', 'tool_removal'")

    def _user_block(self, block: dict[str, Any], where: str) -> str:
        """Text. Media are refused in words by which Claude Code leaves them out and asks again."""
        kind = block["type"]
        if kind == "image":
            raise invalid(f"{where}.image", "Could not process image: this model takes text only")
        if kind == "document" and not _is_text_document(block):
            raise invalid(f"{where}.document", "this model does not support PDF input, it takes text only")
        return _plain_text(block, where, "'text', 'tool_result', 'document', 'search_result'")

    def _result_block(self, block: dict[str, Any], where: str) -> str:
        kind = block["type"]
        if kind == "tool_reference":
            return self._tool_reference(required(block, "tool_name", str, where))
        if kind in _UNSEEN and not _is_text_document(block):
            self.unused.add(f"tool_result.{kind}")
            return _UNSEEN[kind]
        return _plain_text(block, where, "'text', 'image', 'document', 'search_result', 'tool_reference'")

    def _tool_reference(self, name: str) -> str:
        """A tool that is offered from here on. It is told in the text, for the list of tools heads the prompt: were
        it added there, all that was said since would have to be read anew."""
        function = self.deferred.get(clean(name))
        told = f"The tool {clean(name)} is available from here on."
        return f"{told} Its definition: {to_json(function)}" if function else told

    def _tool_addition(self, tool: dict[str, Any]) -> str:
        definition = tool.get("definition")
        if isinstance(definition, dict) and isinstance(definition.get("name"), str):
            function = function_of(definition, "definition")
            return f"The tool {function['name']} is available from here on. Its definition: {to_json(function)}"
        return self._tool_reference(str(tool.get("name", "")))


def _blocks(given: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content, each with its place; a string is one block of text."""
    if isinstance(given, str):
        return [(where, {"type": "text", "text": given})]
    if not isinstance(given, list):
        raise invalid(where, "Input should be a valid string or a valid list")
    blocks = [(f"{where}.{index}", typed(block, dict, f"{where}.{index}")) for index, block in enumerate(given)]
    for at, block in blocks:
        required(block, "type", str, at)
    return blocks


def _plain_text(block: dict[str, Any], where: str, expected: str) -> str:
    """The text of a block; of a document or a search result, with its title and source."""
    kind = block["type"]
    if kind == "text":
        return clean(required(block, "text", str, where))
    if kind == "document":
        source = required(block, "source", dict, where)
        data = source.get("data") if source.get("type") == "text" else source.get("content")
        return _titled(block, ("title", "context"), data, f"{where}.source")
    if kind == "search_result":
        return _titled(block, ("title", "source"), block.get("content", []), f"{where}.content")
    raise unexpected(kind, where, expected)


def _titled(block: dict[str, Any], names: tuple[str, ...], content: Any, where: str) -> str:
    titles = [clean(block[name]) for name in names if isinstance(block.get(name), str)]
    return "\n".join([*titles, *(_plain_text(one, at, "'text'") for at, one in _blocks(content, where))])


def _is_text_document(block: dict[str, Any]) -> bool:
    """Whether a document's source is text, or blocks of nothing but text."""
    source = block.get("source")
    if block["type"] != "document" or not isinstance(source, dict):
        return False
    if source.get("type") == "text":
        return isinstance(source.get("data"), str)
    content = source.get("content")
    if source.get("type") != "content" or not isinstance(content, str | list):
        return False
    return all(isinstance(one, str) or (isinstance(one, dict) and one.get("type") == "text") for one in content)
