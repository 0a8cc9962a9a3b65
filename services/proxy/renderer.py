"""The chat template and tokenizer of a Hugging Face model folder, as ``services.proxy.session`` needs them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2

from services.common.errors import ConfigError, TemplateError
from services.proxy.types import Message

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: threads only cost, and forks warn

_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises for messages that it was not made for."""


class HfRenderer:
    """A ``Renderer`` over a tokenizer of ``transformers``."""

    def __init__(self, tokenizer: Any, end_of_turn_ids: Sequence[int] = ()) -> None:
        """``end_of_turn_ids``: further ids than the tokenizer's own at which answers stop."""
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template.", "Use an instruction-tuned model.")
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        ids = {int(one) for one in (tokenizer.eos_token_id, *end_of_turn_ids) if one is not None}
        self._end_of_turn = {one: str(tokenizer.convert_ids_to_tokens(one)) for one in sorted(ids)}

    @property
    def end_of_turn(self) -> Mapping[int, str]:
        """The tokens at which a model's answer stops: id and text."""
        return self._end_of_turn

    @property
    def is_thread_safe(self) -> bool:
        """The backend of a fast tokenizer is only read."""
        return self._backend is not None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a conversation. Raises ``TemplateError`` if the template refuses it.

        What it refuses is tried in plainer roles (``in_plain_roles``): harnesses speak as their vendor's model allows.
        """
        try:
            return self._render(messages, tools, add_generation_prompt)
        except TemplateError:
            plain = in_plain_roles(messages)
            if plain == list(messages):
                raise
            return self._render(plain, tools, add_generation_prompt)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [template_message(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except _REFUSALS as error:
            raise TemplateError(f"the model's chat template refuses these messages ({error}).") from error
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens may stand; nothing is added at its ends."""
        ids: list[int]
        if self._backend is not None:  # without offsets and masks, which nobody asks for
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def in_plain_roles(messages: Sequence[Message]) -> list[Message]:
    """A conversation as the strictest templates take it: one system message, at the beginning; what else is said by
    the system or by the user in a row is one message of the user's."""
    plain: list[Message] = []
    for message in messages:
        is_late = message.role == "system" and any(one.role != "system" for one in plain)
        role = "user" if is_late else message.role
        if plain and role in ("system", "user") and plain[-1].role == role:
            plain[-1] = Message(role, f"{plain[-1].content}\n\n{message.content}")
        else:
            plain.append(replace(message, role=role))
    return plain


def load_renderer(model_path: str) -> HfRenderer:
    """The renderer of a model folder. Raises ``ConfigError`` if it has no tokenizer or no chat template."""
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer in {model_path} ({error}).", "Give a folder in Hugging Face's layout."
        ) from error
    return HfRenderer(tokenizer, _generation_eos_ids(Path(model_path)))


def _generation_eos_ids(model_path: Path) -> list[int]:
    """The ids at which the engine stops besides the tokenizer's own: ``generation_config.json``."""
    file = model_path / "generation_config.json"
    if not file.is_file():
        return []
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: arguments as objects, optional fields only where they are set."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        given["tool_call_id"] = message.tool_call_id
    return given
