"""The answer parser of a model folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.answer_formats import REASONING_FORMATS
from services.common.errors import ConfigError, MachineError
from services.proxy.config import ProxyConfig
from services.proxy.parsing import AnswerParser
from services.proxy.parsing.choice import ParserChoice, check_parser_names, choose_parsers
from services.proxy.parsing.vllm_parser import VllmParser, VllmParsers


def load_parser(model_path: str | Path, config: ProxyConfig) -> AnswerParser:
    """The parser of a model's answers. vLLM is imported later, with the first request that needs it.

    Raises ``ConfigError`` for a folder that cannot be read or an unknown parser, ``MachineError`` if vLLM is needed and
    not installed.
    """
    folder = Path(model_path)
    template = chat_template(folder)
    choice = _chosen(folder, template, config)
    is_open = bool(choice.reasoning) and opens_reasoning(template, choice.reasoning)
    if (choice.tool or choice.reasoning) and importlib.util.find_spec("vllm") is None:
        raise MachineError(
            "vLLM is not installed, and its parsers are needed.",
            "Install tidegate with its extra 'cpu' or 'gpu', or set proxy.tool_parser and proxy.reasoning_parser to "
            "none.",
        )
    vllm = VllmParsers(str(folder), choice.tool, choice.reasoning)
    return VllmParser(vllm, choice.tool, choice.reasoning, is_open=is_open)


def describe_parsers(model_path: str | Path, config: ProxyConfig) -> str:
    """Which parsers a model gets and why, for people. Raises ``ConfigError`` as ``load_parser`` does."""
    folder = Path(model_path)
    template = chat_template(folder)
    choice = _chosen(folder, template, config)
    notes = [choice.reason]
    if choice.reasoning and opens_reasoning(template, choice.reasoning):
        notes.append("the prompt opens the reasoning")
    if "tools" not in template:
        notes.append("the chat template does not show tools to the model")
    return "; ".join(notes)


def _chosen(folder: Path, template: str, config: ProxyConfig) -> ParserChoice:
    check_parser_names(config.tool_parser, config.reasoning_parser)
    return choose_parsers(template, _read_json(folder / "config.json"), config.tool_parser, config.reasoning_parser)


def chat_template(folder: Path) -> str:
    """The text of a model's chat template, of that for tools if there are several; empty if it has none."""
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        if file.suffix == ".jinja":
            return file.read_text(encoding="utf-8")
        template = _read_json(file).get("chat_template")
        if isinstance(template, list):
            named = {str(one.get("name")): str(one.get("template")) for one in template if isinstance(one, dict)}
            template = named.get("tool_use") or named.get("default")
        if template:
            return str(template)
    return ""


def opens_reasoning(template: str, reasoning_parser: str) -> bool:
    """Whether the prompts of a chat template end inside the reasoning, so that answers have its end mark only."""
    form = REASONING_FORMATS[reasoning_parser]
    if not form.start:
        return False
    prompt = _generation_prompt(template)
    return prompt.rfind(form.start) > prompt.rfind(form.end)


def _generation_prompt(template: str) -> str:
    """What a template renders for one question; empty if it takes no such conversation."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_options: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda _form: ""
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True, bos_token="", eos_token=""
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return ""


class _Generation(Extension):
    """The block that marks an assistant's own tokens for training: what stands in it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}).", "Copy the model's folder again.") from None
    return value if isinstance(value, dict) else {}
