"""Which of vLLM's parsers suit a model, by the marks in its chat template and the type in its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.answer_formats import REASONING_FORMATS, TOOL_FORMATS, UNUSABLE_PARSERS
from services.common.errors import ConfigError

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Names of vLLM's parsers; empty: none."""

    tool: str
    reasoning: str
    reason: str
    """One line for people."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A parser for models whose template has ``mark`` (and ``other``), and whose type begins with one of ``types``
    (empty: any)."""

    parser: str
    mark: str
    types: tuple[str, ...] = ()
    other: str = ""

    def holds(self, template: str, model_type: str) -> bool:
        has_marks = self.mark in template and self.other in template
        return has_marks and (not self.types or model_type.startswith(self.types))


# The first rule that holds decides: what is particular stands before what is general. The marks are those of the
# templates that the models' makers publish on the Hugging Face hub; the pairs of model and parser are those of vLLM's
# page on tool calling (docs.vllm.ai, "Tool Calling") and of the docstrings of its parsers.
_TOOL_RULES = (
    _Rule("kimi_k2", "<|tool_calls_section_begin|>"),  # Kimi K2, K2 Thinking, K2.5
    _Rule("deepseek_v41", "<｜DSML｜ calls>"),
    _Rule("deepseek_v4", "<｜DSML｜tool_calls>"),
    _Rule("deepseek_v32", "<｜DSML｜function_calls>"),
    _Rule("deepseek_v3", "<｜tool▁calls▁begin｜>", other="```json"),  # V3, R1: arguments in a block of code
    _Rule("deepseek_v31", "<｜tool▁calls▁begin｜>"),  # V3.1: name, separator, arguments
    _Rule("mistral", "[TOOL_CALLS]"),  # Mistral, Mixtral, Devstral, Magistral
    _Rule("llama4_pythonic", "<|python_start|>"),  # Llama 4
    _Rule("llama3_json", "<|python_tag|>"),  # Llama 3.1, 3.2, 3.3
    _Rule("minimax_m3", "]<]minimax[>["),
    _Rule("minimax_m2", "<minimax:tool_call>"),
    _Rule("seed_oss", "<seed:tool_call>"),
    _Rule("longcat", "<longcat_tool_call>"),
    _Rule("dots", "<dots_function_call>"),
    _Rule("apertus", "<|tools_prefix|>"),
    _Rule("lfm2", "<|tool_call_start|>"),
    _Rule("internlm", "<|plugin|>", ("internlm",)),
    _Rule("functiongemma", "<start_function_call>"),
    _Rule("gemma4", "<|tool_call>"),
    _Rule("step3", "<｜tool_calls_begin｜>"),
    _Rule("plamo3", "<|plamo:begin_tool_requests:plamo|>"),
    _Rule("k2_horizon", "<ifm|tool_calls>"),
    _Rule("inkling", "<|content_invoke_tool_json|>"),
    _Rule("gigachat3", "<|function_call|>"),
    _Rule("glm45", "<arg_key>"),  # GLM-4.5, 4.6, 4.7
    _Rule("mimo", "<function=", ("mimo",)),
    _Rule("step3p5", "<function=", ("step3p5",)),
    _Rule("qwen3_coder", "<function="),  # Qwen3-Coder, Qwen3.5, Nemotron 3
    _Rule("granite4", "<tool_call>", ("granitemoehybrid",)),
    _Rule("granite", "<|tool_call|>", ("granite",)),  # Granite 3
    _Rule("phi4_mini_json", "<|tool|>", ("phi",)),
    _Rule("ernie45", "<tool_call>", ("ernie",)),
    _Rule("hunyuan_a13b", "<tool_calls>", ("hunyuan",)),
    _Rule("jamba", "<tool_calls>", ("jamba",)),
    _Rule("olmo3", "<function_calls>"),
    _Rule("hermes", "<tool_call>"),  # Qwen2.5, Qwen3, QwQ, Hermes 2 Pro and 3, SmolLM3
)
_REASONING_RULES = (
    _Rule("mistral", "[THINK]"),  # Magistral
    _Rule("seed_oss", "<seed:think>"),
    _Rule("gemma4", "<|channel>"),
    _Rule("plamo3", "<|plamo:begin_think:plamo|>"),
    _Rule("minimax_m3", "<mm:think>"),
    _Rule("inkling", "<|content_thinking|>"),
    _Rule("hunyuan_a13b", "<answer>", ("hunyuan",)),
    _Rule("deepseek_v41", "<｜DSML｜ calls>"),
    _Rule("deepseek_v4", "<｜DSML｜tool_calls>"),
    _Rule("qwen3", "</think>", ("qwen3",)),
    _Rule("glm45", "</think>", ("glm4",)),
    _Rule("kimi_k2", "</think>", other="<|tool_calls_section_begin|>"),
    _Rule("minimax_m2", "</think>", ("minimax",)),
    _Rule("nemotron_v3", "</think>", ("nemotron",)),
    _Rule("step3p5", "</think>", ("step3p5",)),
    _Rule("mimo", "</think>", ("mimo",)),
    _Rule("ernie45", "</think>", ("ernie",)),
    _Rule("deepseek_r1", "</think>"),  # DeepSeek R1 and V3.1, QwQ, SmolLM3 and others
    _Rule("deepseek_r1", "<think>"),
)
_TYPES_ON_IDS = ("gpt_oss", "cohere")
"""Types of models whose answers vLLM reads by token ids, not by text."""


def choose_parsers(
    template: str, config: Mapping[str, Any], tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ParserChoice:
    """The parsers for a model: those of the configuration, or those that its template and its type call for."""
    model_type = str(config.get("model_type") or "").lower()
    tool, tool_reason = _choose(_TOOL_RULES, template, model_type, tool_parser)
    reasoning, reasoning_reason = _choose(_REASONING_RULES, template, model_type, reasoning_parser)
    return ParserChoice(
        tool,
        reasoning,
        f"tool parser {tool or NONE} ({tool_reason}), reasoning parser {reasoning or NONE} ({reasoning_reason})",
    )


def _choose(rules: Sequence[_Rule], template: str, model_type: str, configured: str) -> tuple[str, str]:
    if configured != AUTO:
        return "" if configured == NONE else configured, "configured"
    if model_type.startswith(_TYPES_ON_IDS):
        return "", f"vLLM reads answers of {model_type} by token ids only"
    for rule in rules:
        if rule.holds(template, model_type):
            of_type = f", its type is {model_type}" if rule.types else ""
            return rule.parser, f"the chat template has {rule.mark!r}{of_type}"
    return "", "the chat template has no mark of any"


def check_parser_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ``ConfigError`` unless both are 'auto', 'none', or a parser of vLLM's that reads text."""
    _check_name("proxy.tool_parser", tool_parser, TOOL_FORMATS)
    _check_name("proxy.reasoning_parser", reasoning_parser, REASONING_FORMATS)


def _check_name(key: str, name: str, known: Mapping[str, Any]) -> None:
    if name in (AUTO, NONE) or name in known:
        return
    found = f"{key} {name!r} works on token ids, inside vLLM's server only"
    if name not in UNUSABLE_PARSERS:
        found = f"{key} {name!r} is no parser of vLLM's"
    raise ConfigError(f"{found}.", f"Use auto, none, or one of: {', '.join(sorted(known))}.")
