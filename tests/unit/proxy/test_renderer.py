from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.common.errors import ConfigError, TemplateError
from services.proxy.renderer import HfRenderer, load_renderer, template_message
from services.proxy.types import Message, ToolCall
from tests.unit.proxy.templates import CHATML, tokenizer


def test_answers_end_at_the_tokenizers_and_the_generation_configs_tokens(tmp_path: Path) -> None:
    tokenizer(CHATML).save_pretrained(tmp_path)
    assert load_renderer(str(tmp_path)).end_of_turn == {2: "<|im_end|>"}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_renderer(str(tmp_path)).end_of_turn == {0: "<|endoftext|>", 2: "<|im_end|>"}


def test_folder_without_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_renderer(str(tmp_path))
    tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        load_renderer(str(tmp_path))


def test_templates_get_arguments_as_objects_and_only_fields_that_are_set() -> None:
    assert template_message(Message("user", "x")) == {"role": "user", "content": "x"}
    call = ToolCall("i", "bash", {"command": "ls"})
    assert template_message(Message("assistant", "", "why", (call,))) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [{"id": "i", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}],
    }
    assert template_message(Message("tool", "out", tool_call_id="i"))["tool_call_id"] == "i"


def test_text_is_tokenised_as_the_tokenizer_itself_does() -> None:
    using = tokenizer(CHATML)
    text = "<|im_start|>user\nword é日🙂  two\n\n<|im_end|>x" * 3
    assert HfRenderer(using).encode(text) == using(text, add_special_tokens=False)["input_ids"]


STRICT_ROLES = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('the system speaks first') }}{% endif %}
{%- if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{- raise_exception('roles alternate') }}{% endif %}
{{- m.role }}:{{ m.content }};
{%- endfor %}"""


def test_what_a_strict_template_refuses_is_said_in_plainer_roles() -> None:
    using = HfRenderer(tokenizer(STRICT_ROLES))
    messages = [
        Message("system", "s"),
        Message("system", "t"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("system", "late"),
        Message("user", "c"),
    ]
    assert using.render(messages, (), False) == "system:s\n\nt;user:a;assistant:b;user:late\n\nc;"
    assert using.render(messages[2:4], (), False) == "user:a;assistant:b;"
    with pytest.raises(TemplateError):
        using.render([Message("assistant", "a"), Message("assistant", "b")], (), False)
