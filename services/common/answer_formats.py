"""Marks by which models set reasoning and tool calls apart from their text, one entry for each of vLLM's parsers.

Source: the parsers of vLLM 0.32 (``vllm.tool_parsers``, ``vllm.reasoning``, ``vllm.parser``); a test compares. With
the marks at hand nobody needs vLLM to know what text is certain to be text, and a cell knows which special tokens must
stay in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    openers: tuple[str, ...] = ()
    """What every call begins with. Text before the first of them is text. Empty: not known, nothing is certain."""
    begins: tuple[str, ...] = ()
    """What one call of several behind an opener begins with; empty: an opener."""
    closers: tuple[str, ...] = ()
    """Without one of these behind the last beginning an answer was cut inside a call, though vLLM may read one. Empty:
    the arguments are JSON, and cut JSON is none."""
    holds_json: bool = False
    """One JSON value stands behind each beginning; an answer without all of the last was cut."""
    inner: tuple[str, ...] = ()
    """Other special tokens of a call."""
    is_plain: bool = False
    """The openers occur in ordinary text too."""
    wraps_text: bool = False
    """Text stands between marks too: it is unwrapped even where no tool may be called."""
    only_at_start: bool = False
    """Calls stand at the beginning of an answer's text, or nowhere."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model sets its reasoning apart."""

    start: str = ""
    """Empty, with ``end``: not known, only vLLM's parser tells, and only at the end."""
    end: str = ""
    call_openers: tuple[str, ...] = ()
    """Openers of tool calls that end the reasoning too."""
    inner: tuple[str, ...] = ()
    """Other special tokens around the reasoning or the text."""


_QWEN_XML = ToolFormat(("<tool_call>", "<function="), closers=("</function>", "</tool_call>"))
_ARG_KEYS = ToolFormat(
    ("<tool_call>",), closers=("</tool_call>",), inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
)
_HERMES = ToolFormat(("<tool_call>",), inner=("</tool_call>",))
_LLAMA_JSON = ToolFormat(("<|python_tag|>", "{"), is_plain=True)
_DEEPSEEK = ToolFormat(
    ("<｜tool▁calls▁begin｜>",),
    inner=("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "apertus": ToolFormat(("<|tools_prefix|>",), holds_json=True, inner=("<|tools_suffix|>",)),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": ToolFormat(
        ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'), closers=("</｜DSML｜invoke>",), inner=("｜DSML｜",)
    ),
    "deepseek_v4": ToolFormat(
        ("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", '<｜DSML｜invoke name="'),
        closers=("</｜DSML｜invoke>",),
        inner=("｜DSML｜",),
    ),
    "deepseek_v41": ToolFormat(
        ("<｜DSML｜ calls>", '<｜DSML｜ invoke name="'), closers=("</｜DSML｜ invoke>",), inner=("｜DSML｜",)
    ),
    "dots": ToolFormat(("<dots_function_call>",), inner=("</dots_function_call>",)),
    "ernie45": ToolFormat(("<tool_call>",), inner=("</tool_call>", "<response>", "</response>")),
    "functiongemma": ToolFormat(("<start_function_call>",), closers=("<end_function_call>",), inner=("<escape>",)),
    "gemma4": ToolFormat(("<|tool_call>",), closers=("<tool_call|>",), inner=('<|"|>',)),
    "gigachat3": ToolFormat(inner=("<|function_call|>", "<|role_sep|>", "<|message_sep|>")),
    "glm45": _ARG_KEYS,
    "glm47": _ARG_KEYS,
    "granite": ToolFormat(("<|tool_call|>", "<tool_call>"), holds_json=True),
    "granite-20b-fc": ToolFormat(("<function_call>",)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": ToolFormat(("<tool_calls>",), inner=("</tool_calls>",)),
    "hy_v3": ToolFormat(),
    "hy_v4": ToolFormat(),
    "inkling": ToolFormat(
        begins=("<|content_invoke_tool_json|>",),
        holds_json=True,
        inner=(
            "<|content_invoke_tool_text|>",
            "<|content_model_end_sampling|>",
            "<|content_text|>",
            "<|content_tool_error|>",
            "<|message_model|>",
        ),
        wraps_text=True,
    ),
    "internlm": ToolFormat(("<|action_start|><|plugin|>",), inner=("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    "jamba": ToolFormat(("<tool_calls>",), inner=("</tool_calls>",)),
    "k2_horizon": ToolFormat(
        ("<ifm|tool_calls>", "<ifm|tool_call>"),
        closers=("</ifm|tool_call>",),
        inner=(
            "</ifm|tool_calls>",
            "<ifm|arg_key>",
            "</ifm|arg_key>",
            "<ifm|arg_type>",
            "</ifm|arg_type>",
            "<ifm|arg_value>",
            "</ifm|arg_value>",
        ),
    ),
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>",),
        begins=("<|tool_call_begin|>",),
        closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
    ),
    "kimi_k3": ToolFormat(inner=("<|open|>", "<|close|>", "<|sep|>"), wraps_text=True),
    "lfm2": ToolFormat(("<|tool_call_start|>",), closers=("<|tool_call_end|>",)),
    "ling3": _ARG_KEYS,
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "llama4_pythonic": ToolFormat(
        ("<|python_start|>", "["), inner=("<|python_end|>",), is_plain=True, only_at_start=True
    ),
    "longcat": ToolFormat(("<longcat_tool_call>",), inner=("</longcat_tool_call>",)),
    "mimo": _QWEN_XML,
    "minicpm5": ToolFormat(("<function",), closers=("</function>", "/>")),
    "minimax_m2": ToolFormat(
        ("<minimax:tool_call>", "<invoke name="), closers=("</invoke>",), inner=("</minimax:tool_call>",)
    ),
    "minimax_m3": ToolFormat(
        ("]<]minimax[>[<tool_call>",),
        begins=("]<]minimax[>[<invoke name=",),
        closers=("]<]minimax[>[</invoke>",),
        inner=("]<]minimax[>[",),
    ),
    "mistral": ToolFormat(("[TOOL_CALLS]",), closers=("}",), inner=("[ARGS]", "[CALL_ID]")),
    "muse_glimmer": ToolFormat(),
    "olmo3": ToolFormat(("<function_calls>",), closers=("</function_calls>",)),
    "phi4_mini_json": ToolFormat(("functools[",)),
    "plamo3": ToolFormat(
        ("<|plamo:begin_tool_requests:plamo|>",),
        begins=("<|plamo:begin_tool_request:plamo|>",),
        closers=("<|plamo:end_tool_request:plamo|>",),
        inner=(
            "<|plamo:constrain|>",
            "<|plamo:msg|>",
            "<|plamo:tag|>",
            "<|plamo:end_tool_requests:plamo|>",
            "<|plamo:begin_tool_name:plamo|>",
            "<|plamo:end_tool_name:plamo|>",
            "<|plamo:begin_tool_arguments:plamo|>",
            "<|plamo:end_tool_arguments:plamo|>",
        ),
    ),
    "poolside_v1": _ARG_KEYS,
    "pythonic": ToolFormat(("[",), is_plain=True, only_at_start=True),
    "qwen3_coder": _QWEN_XML,
    "qwen3_json": _HERMES,
    "qwen3_xml": _QWEN_XML,
    "seed_oss": ToolFormat(("<seed:tool_call>", "<function="), closers=("</function>", "</seed:tool_call>")),
    "step3": ToolFormat(
        ("<｜tool_calls_begin｜>",),
        begins=("<｜tool_call_begin｜>",),
        closers=("<｜tool_call_end｜>",),
        inner=("<｜tool_calls_end｜>", "<｜tool_sep｜>"),
    ),
    "step3p5": _QWEN_XML,
    "xlam": ToolFormat(),
}
"""vLLM's tool parsers that read text, by their names."""

_THINK = ReasoningFormat("<think>", "</think>")
_THINK_OR_CALL = ReasoningFormat("<think>", "</think>", ("<tool_call>",))

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_v4": ReasoningFormat(
        "<think>", "</think>", ("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>")
    ),
    "deepseek_v41": ReasoningFormat("<think>", "</think>", ("<｜DSML｜ calls>",)),
    "ernie45": _THINK,
    "gemma4": ReasoningFormat(inner=("<|channel>", "<channel|>")),
    "glm45": _THINK_OR_CALL,
    "glm47": _THINK_OR_CALL,
    "granite": ReasoningFormat(),
    "granite_thinking_parser": _THINK_OR_CALL,
    "holo2": _THINK,
    "hunyuan_a13b": ReasoningFormat(inner=("<answer>", "</answer>")),
    "hy_v3": ReasoningFormat(),
    "hy_v4": ReasoningFormat(),
    "inkling": ReasoningFormat(inner=("<|content_thinking|>", "<|end_message|>")),
    "k2_horizon": ReasoningFormat(),
    "kimi_k2": ReasoningFormat("<think>", "</think>", ("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningFormat(),
    "ling3": _THINK_OR_CALL,
    "mimo": _THINK_OR_CALL,
    "minicpmv": _THINK_OR_CALL,
    "minimax_m2": ReasoningFormat("<think>", "</think>", ("<minimax:tool_call>",)),
    "minimax_m2_append_think": ReasoningFormat(),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[TOOL_CALLS]",)),
    "muse_glimmer": ReasoningFormat(),
    "nemotron_v3": _THINK_OR_CALL,
    "olmo3": _THINK,
    "plamo3": ReasoningFormat(
        "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>", ("<|plamo:begin_tool_requests:plamo|>",)
    ),
    "poolside_v1": _THINK,
    "qwen3": _THINK_OR_CALL,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", ("<seed:tool_call>",)),
    "step3": _THINK,
    "step3p5": _THINK_OR_CALL,
}
"""vLLM's reasoning parsers that read text, by their names."""

UNUSABLE_PARSERS: frozenset[str] = frozenset({"hf", "openai", "openai_gptoss", "cohere_command3", "cohere_command4"})
"""Parsers that do not read text on their own: inside vLLM's server they work on token ids."""


def structure_tokens() -> frozenset[str]:
    """Texts that, where a tokenizer has them as special tokens, must stay in an answer's text: without them its parts
    cannot be told apart."""
    tools = [(*one.openers, *one.begins, *one.closers, *one.inner) for one in TOOL_FORMATS.values()]
    reasoning = [(one.start, one.end, *one.call_openers, *one.inner) for one in REASONING_FORMATS.values()]
    return frozenset(text for texts in (*tools, *reasoning) for text in texts if text)
