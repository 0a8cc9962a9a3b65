"""Answers as models write them, one writer for each format of vLLM's tool parsers.

The forms are those of the models' chat templates and of the docstrings and own tests of vLLM's parsers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from services.common.answer_formats import structure_tokens
from tests.unit.proxy.templates import CHATML, tokenizer

Call = tuple[str, dict[str, Any]]

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
)
CALLS: tuple[Call, ...] = (
    ("run", {"command": "echo {a: [1, 2]} > 'x.txt'", "timeout": 5}),
    ("look", {"path": "/tmp/grüße 🦊"}),
)


@functools.cache
def marked_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that has the marks of every format as tokens."""
    made = tokenizer(CHATML)
    made.add_tokens(sorted(structure_tokens()))
    made.add_tokens(["<tool_sep>", "<assistant>", "<tool_calls>", "</tool_calls>", "<arg_key>", "Ġ</", "think"])
    return made


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[dict[str, Any]]:
    return [{"name": name, key: arguments} for name, arguments in calls]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call], opener: str = "<tool_call>", closer: str = "</tool_call>") -> str:
    return "\n".join(f"{opener}\n{_json(one)}\n{closer}" for one in _objects(calls))


def _functions(calls: Sequence[Call], opener: str = "<tool_call>", closer: str = "</tool_call>") -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())

    return "\n".join(
        f"{opener}\n<function={name}>\n{parameters(arguments)}</function>\n{closer}" for name, arguments in calls
    )


def _arg_keys(calls: Sequence[Call]) -> str:
    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
        )

    return "\n".join(f"<tool_call>{name}\n{pairs(arguments)}</tool_call>" for name, arguments in calls)


def _deepseek(calls: Sequence[Call], one: Callable[[str, str], str]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>{one(name, _json(arguments))}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _dsml(calls: Sequence[Call], block: str, space: str = "") -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(
            f'<｜DSML｜{space}parameter name="{key}" string="{_json(isinstance(value, str))}">{_text(value)}'
            f"</｜DSML｜{space}parameter>\n"
            for key, value in arguments.items()
        )

    inner = "".join(
        f'<｜DSML｜{space}invoke name="{name}">\n{parameters(arguments)}</｜DSML｜{space}invoke>\n'
        for name, arguments in calls
    )
    return f"<｜DSML｜{space}{block}>\n{inner}</｜DSML｜{space}{block}>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _minimax(calls: Sequence[Call]) -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())

    inner = "".join(f'<invoke name="{name}">\n{parameters(arguments)}</invoke>\n' for name, arguments in calls)
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def _python(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(one(name, arguments) for name, arguments in calls)}]"


def _step3(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f'<steptml:parameter name="{key}">{_text(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        invoke = f'<steptml:invoke name="{name}">{parameters}</steptml:invoke>'
        return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"

    return f"<｜tool_calls_begin｜>{''.join(one(*call) for call in calls)}<｜tool_calls_end｜>"


def _plamo(calls: Sequence[Call]) -> str:
    def mark(text: str) -> str:
        return f"<|plamo:{text}:plamo|>"

    def one(name: str, arguments: dict[str, Any]) -> str:
        return (
            f"{mark('begin_tool_request')}{mark('begin_tool_name')}{name}{mark('end_tool_name')}"
            f"{mark('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>{_json(arguments)}"
            f"{mark('end_tool_arguments')}{mark('end_tool_request')}"
        )

    inner = "".join(one(*call) for call in calls)
    return f"{mark('begin_tool_requests')}{inner}{mark('end_tool_requests')}"


def _gemma4(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        return f'<|"|>{one}<|"|>' if isinstance(one, str) else _json(one)

    return "".join(
        f"<|tool_call>call:{name}{{{','.join(f'{key}:{value(one)}' for key, one in arguments.items())}}}<tool_call|>"
        for name, arguments in calls
    )


def _function_gemma(calls: Sequence[Call]) -> str:
    return "".join(
        f"<start_function_call>call:{name}"
        f"{{{','.join(f'{key}:<escape>{_text(value)}<escape>' for key, value in arguments.items())}}}"
        "<end_function_call>"
        for name, arguments in calls
    )


def _minicpm(calls: Sequence[Call]) -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(f'<param name="{key}"><![CDATA[{_text(value)}]]></param>' for key, value in arguments.items())

    return "".join(f'<function name="{name}">{parameters(arguments)}</function>' for name, arguments in calls)


def _minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["

    def elements(arguments: dict[str, Any]) -> str:
        return "".join(f"{mark}<{key}>{_text(value)}{mark}</{key}>\n" for key, value in arguments.items())

    inner = "".join(
        f'{mark}<invoke name="{name}">\n{elements(arguments)}{mark}</invoke>\n' for name, arguments in calls
    )
    return f"{mark}<tool_call>\n{inner}{mark}</tool_call>"


def _kimi_k3(calls: Sequence[Call]) -> str:
    def block(kind: str, attributes: str, body: str) -> str:
        return f"<|open|>{kind}{attributes}<|sep|>{body}<|close|>{kind}<|sep|>"

    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "number"
        return block("argument", f' key="{key}" type="{kind}"', _text(value))

    inner = "".join(
        block("call", f' tool="{name}" index="{index}"', "".join(argument(*item) for item in arguments.items()))
        for index, (name, arguments) in enumerate(calls, start=1)
    )
    return block("tools", "", inner)


def _k2_horizon(calls: Sequence[Call]) -> str:
    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{_text(value)}</ifm|arg_value>"
            for key, value in arguments.items()
        )

    inner = "".join(f"<ifm|tool_call>{name}{pairs(arguments)}</ifm|tool_call>" for name, arguments in calls)
    return f"<ifm|tool_calls>{inner}</ifm|tool_calls>"


Writer = Callable[[Sequence[Call]], str]

WRITERS: dict[str, Writer] = {
    "apertus": lambda calls: f"<|tools_prefix|>{_json([{name: args} for name, args in calls])}<|tools_suffix|>",
    "deepseek_v3": lambda calls: _deepseek(
        calls, lambda name, args: f"function<｜tool▁sep｜>{name}\n```json\n{args}\n```"
    ),
    "deepseek_v31": lambda calls: _deepseek(calls, lambda name, args: f"{name}<｜tool▁sep｜>{args}"),
    "deepseek_v32": lambda calls: _dsml(calls, "function_calls"),
    "deepseek_v4": lambda calls: _dsml(calls, "tool_calls"),
    "deepseek_v41": lambda calls: _dsml(calls, "calls", " "),
    "dots": lambda calls: _hermes(calls, "<dots_function_call>", "</dots_function_call>"),
    "ernie45": _hermes,
    "functiongemma": _function_gemma,
    "gemma4": _gemma4,
    "gigachat3": lambda calls: f"<|function_call|>{_json(_objects(calls)[0])}",
    "glm45": _arg_keys,
    "glm47": _arg_keys,
    "granite": lambda calls: f"<|tool_call|>{_json(_objects(calls))}",
    "granite-20b-fc": lambda calls: "".join(f"<function_call>{_json(one)}" for one in _objects(calls)),
    "granite4": _hermes,
    "hermes": _hermes,
    "hunyuan_a13b": lambda calls: f"<tool_calls>{_json(_objects(calls))}</tool_calls>",
    "inkling": lambda calls: "".join(
        f"<|message_model|><|content_invoke_tool_json|>{_json({'name': name, 'args': arguments})}<|end_message|>"
        for name, arguments in calls
    ),
    "internlm": lambda calls: f"<|action_start|><|plugin|>{_json(_objects(calls, 'parameters')[0])}<|action_end|>",
    "jamba": lambda calls: f"<tool_calls>{_json(_objects(calls))}</tool_calls>",
    "k2_horizon": _k2_horizon,
    "kimi_k2": _kimi,
    "kimi_k3": _kimi_k3,
    "lfm2": lambda calls: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>",
    "ling3": _arg_keys,
    "llama3_json": lambda calls: "; ".join(_json(one) for one in _objects(calls, "parameters")),
    "llama4_json": lambda calls: "; ".join(_json(one) for one in _objects(calls, "parameters")),
    "llama4_pythonic": _python,
    "longcat": lambda calls: _hermes(calls, "<longcat_tool_call>", "</longcat_tool_call>"),
    "mimo": lambda calls: "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    ),
    "minicpm5": _minicpm,
    "minimax_m2": _minimax,
    "minimax_m3": _minimax_m3,
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(args)}" for name, args in calls),
    "olmo3": lambda calls: "<function_calls>" + "\n".join(_python([one])[1:-1] for one in calls) + "</function_calls>",
    "phi4_mini_json": lambda calls: f"functools{_json(_objects(calls))}",
    "plamo3": _plamo,
    "poolside_v1": _arg_keys,
    "pythonic": _python,
    "qwen3_coder": _functions,
    "qwen3_json": _hermes,
    "qwen3_xml": _functions,
    "seed_oss": lambda calls: _functions(calls, "<seed:tool_call>", "</seed:tool_call>"),
    "step3": _step3,
    "step3p5": _functions,
    "xlam": lambda calls: _json(_objects(calls)),
}
"""Formats with writers. The others need a tokenizer that only their makers have."""
ONE_CALL_ONLY = frozenset({"gigachat3", "internlm"})
