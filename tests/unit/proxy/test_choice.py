"""Parsers are chosen by the marks of a model's chat template and by its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from services.common.errors import ConfigError
from services.proxy.config import ProxyConfig
from services.proxy.parsing import choice
from services.proxy.parsing.choice import choose_parsers
from services.proxy.parsing.load import chat_template, describe_parsers, load_parser, opens_reasoning
from services.proxy.types import CanonicalRequest, ParsedAnswer
from tests.unit.proxy.formats import TOOLS
from tests.unit.proxy.templates import CHATML, FORGETFUL, STRICT_TOOLS, TOOLS_AND_REASONING

HERMES = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
CODER = "<tool_call>\\n<function=example>\\n<parameter=a>\\n</parameter>\\n</function>\\n</tool_call>"
THINKS = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
ARG_KEYS = "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("template", "model_type", "tool", "reasoning"),
    [
        (HERMES, "qwen2", "hermes", ""),
        (HERMES + THINKS, "qwen3", "hermes", "qwen3"),
        (HERMES + THINKS, "qwen3_moe", "hermes", "qwen3"),
        (HERMES + THINKS, "smollm3", "hermes", "deepseek_r1"),
        (CODER, "qwen3_moe", "qwen3_coder", ""),
        (CODER + THINKS, "qwen3_next", "qwen3_coder", "qwen3"),
        (CODER + THINKS, "nemotron_h", "qwen3_coder", "nemotron_v3"),
        (CODER + THINKS, "mimo_v2_flash", "mimo", "mimo"),
        ("<|python_tag|>{{ m.content }}", "llama", "llama3_json", ""),
        ("<|python_start|>", "llama4", "llama4_pythonic", ""),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", "mistral", ""),
        ("[TOOL_CALLS][ARGS][THINK][/THINK]", "mistral3", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>\\n```json\\n</think>", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
        ("<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜></think>", "deepseek_v3", "deepseek_v31", "deepseek_r1"),
        ("<｜DSML｜function_calls></think>", "deepseek_v32", "deepseek_v32", "deepseek_r1"),
        (ARG_KEYS + THINKS, "glm4_moe", "glm45", "glm45"),
        ("<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2", ""),
        ("<|tool_calls_section_begin|><think></think>", "deepseek_v3", "kimi_k2", "kimi_k2"),
        ("<minimax:tool_call><think>\\n</think>", "minimax_m2", "minimax_m2", "minimax_m2"),
        ("<seed:tool_call><seed:think>", "seed_oss", "seed_oss", "seed_oss"),
        ("<|tool_call|>", "granite", "granite", ""),
        ("<tool_call>", "granitemoehybrid", "granite4", ""),
        ("<|tool|>", "phi3", "phi4_mini_json", ""),
        ("<|channel|>analysis<think></think>", "gpt_oss", "", ""),
        (CHATML, "llama", "", ""),
        (TOOLS_AND_REASONING, "qwen3", "hermes", "qwen3"),
        (STRICT_TOOLS, "llama", "", ""),
        ("", "", "", ""),
    ],
)
def test_a_model_gets_the_parsers_of_its_family(template: str, model_type: str, tool: str, reasoning: str) -> None:
    chosen = choose_parsers(template, {"model_type": model_type})
    assert (chosen.tool, chosen.reasoning) == (tool, reasoning)
    assert (tool or "none") in chosen.reason


def test_the_configuration_wins() -> None:
    chosen = choose_parsers(HERMES + THINKS, {"model_type": "qwen3"}, "pythonic", "none")
    assert (chosen.tool, chosen.reasoning) == ("pythonic", "")
    assert "configured" in chosen.reason


def test_every_parser_that_is_ever_chosen_exists() -> None:
    assert {rule.parser for rule in choice._TOOL_RULES} <= {*TOOL_FORMATS}
    assert {rule.parser for rule in choice._REASONING_RULES} <= {*REASONING_FORMATS}


@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_those_that_exist(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"proxy\.{key} 'qwen9'.*deepseek_v4, "):
        ProxyConfig.model_validate({key: "qwen9"})
    with pytest.raises(ConfigError, match="token ids"):
        ProxyConfig.model_validate({key: "cohere_command3"})
    assert ProxyConfig.model_validate({key: "none"})


QUESTION = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|assistant|>\\n", False),
        ("<|assistant|><think>\\n", True),
        ("{{ '<|assistant|>\\n<think>\\n' }}", True),
        ("<|assistant|><think>\\n\\n</think>\\n\\n", False),
        ("<|assistant|></think>", False),
        ("{% if enable_thinking is defined and enable_thinking is false %}<think>\\n\\n</think>{% endif %}", False),
        ("{% generation %}<think>{% endgeneration %}{{ strftime_now('%Y') }}{{ tools | tojson(indent=4) }}", True),
        ("{{ raise_exception('never') }}<think>", False),
    ],
)
def test_whether_prompts_end_inside_the_reasoning_is_seen_in_one(prompt: str, is_open: bool) -> None:
    template = QUESTION.replace("{% for", "{% set tools = [] %}{% for", 1) + prompt + "{% endif %}"
    assert opens_reasoning(template, "qwen3") is is_open
    assert not opens_reasoning(template, "granite")


def model(folder: Path, template: Any, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_a_template_is_found_wherever_models_have_it(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS_AND_REASONING}]
    for index, template in enumerate((TOOLS_AND_REASONING, named)):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert chat_template(model(folder, template)) == TOOLS_AND_REASONING
    assert chat_template(tmp_path) == ""


def test_answers_of_a_model_without_tools_and_reasoning_are_text(tmp_path: Path) -> None:
    parser = load_parser(model(tmp_path, FORGETFUL, model_type="llama"), ProxyConfig())
    reader = parser.reader(CanonicalRequest("openai_chat", "m", (), tools=TOOLS), "g000000-r0-a0-c0")
    assert [delta.text for delta in reader.feed("<tool_call>{")] == ["<tool_call>{"]
    assert reader.finish() == ([], ParsedAnswer("<tool_call>{"))


def test_the_choice_and_its_reason_are_told(tmp_path: Path) -> None:
    template = TOOLS_AND_REASONING.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>{% endif %}"
    )
    folder = model(tmp_path, template, model_type="qwen3")
    line = describe_parsers(folder, ProxyConfig())
    for part in ("hermes", "'<tool_call>'", "qwen3", "its type is qwen3", "opens the reasoning"):
        assert part in line
    assert "does not show tools" not in line
    parser = load_parser(folder, ProxyConfig())
    reader = parser.reader(CanonicalRequest("openai_chat", "m", ()), "g000000-r0-a0-c0")
    deltas = reader.feed("why</think>so")
    assert [delta.text for delta in deltas] == ["why", "so"]


def test_a_template_that_shows_no_tools_is_told_of(tmp_path: Path) -> None:
    line = describe_parsers(model(tmp_path, CHATML, model_type="llama"), ProxyConfig())
    assert line.startswith("tool parser none")
    assert line.endswith("the chat template does not show tools to the model")


def test_a_broken_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_parser(tmp_path, ProxyConfig())
