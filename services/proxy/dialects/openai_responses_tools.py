"""Tools of OpenAI Responses: every kind that a model can be given becomes a function tool, and its calls go back.

A namespace's tools are called ``NAMESPACE__NAME``, as vLLM's own Responses server calls them. A custom tool, whose
input is free text, becomes a function of one string. ``Origins`` leads each such function back to its tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.proxy.dialects import InvalidRequestError
from services.proxy.dialects.fields import clean, clean_json, invalid, parse_arguments, to_json, typed
from services.proxy.types import ToolCall, ToolChoice, ToolMode

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)
"""Kinds of tools that the vendor runs or has built in: the model is not told of them."""
_DATED_TOOLS = ("web_search_", "web_search_preview_", "computer_use_preview_")
_FUNCTION_FIELDS = frozenset({"type", "name", "description", "parameters"})
_CUSTOM_FIELDS = frozenset({"type", "name", "description", "format"})
_SEPARATOR = "__"
_CUSTOM_INPUT = "input"


@dataclass(frozen=True, slots=True)
class Origin:
    """The tool behind a function tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False


def flat_name(name: str, namespace: str) -> str:
    """What the model knows a tool by."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


@dataclass(slots=True)
class Tools:
    """The tools of one request."""

    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Canonical function tools by name, in the order in which they were given."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Of those functions."""
    unused: set[str] = field(default_factory=set)
    """What was given but changes nothing."""

    def add(self, given: Any, where: str) -> None:
        """Take in a list of tools. One that was given before is replaced. Raises ``InvalidRequestError``."""
        for index, one in enumerate(typed(given, list, where, "an array")):
            self._add_tool(typed(one, dict, f"{where}[{index}]", "an object"), f"{where}[{index}]")

    def _add_tool(self, tool: Mapping[str, Any], where: str) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            self._add_namespace(tool, where)
        elif kind in ("function", "custom"):
            self._add_function(tool, where)
        elif isinstance(kind, str) and (kind in HOSTED_TOOLS or kind.startswith(_DATED_TOOLS)):
            self.unused.add(f"tools.{clean(kind)}")
        else:
            known = sorted({"function", "custom", "namespace", *HOSTED_TOOLS})
            raise invalid(f"{where}.type", f"Supported values are: {', '.join(map(repr, known))}.")

    def _add_namespace(self, tool: Mapping[str, Any], where: str) -> None:
        """The first of its tools carries what is said of the namespace as a whole."""
        namespace = _name(tool, where)
        about = _description(tool, where)
        nested = typed(tool.get("tools"), list, f"{where}.tools", "an array")
        for index, one in enumerate(nested):
            at = f"{where}.tools[{index}]"
            inner = typed(one, dict, at, "an object")
            if inner.get("type") not in ("function", "custom"):
                raise invalid(f"{at}.type", "Supported values are: 'function' and 'custom'.")
            preface = f"{namespace}{_SEPARATOR}*: {about}" if about and index == 0 else ""
            self._add_function(inner, at, namespace, preface)

    def _add_function(self, tool: Mapping[str, Any], where: str, namespace: str = "", preface: str = "") -> None:
        origin = Origin(_name(tool, where), namespace, tool["type"] == "custom")
        name = flat_name(origin.name, namespace)
        if self.origins.get(name, origin) != origin:
            raise invalid(f"{where}.name", f"Another tool is called {name!r} too.")
        description = "\n\n".join(part for part in (preface, _description(tool, where)) if part)
        if origin.is_custom:
            parameters = _custom_parameters(tool, where)
        else:
            parameters = typed(tool.get("parameters") or {}, dict, f"{where}.parameters", "an object")
        function = {"name": name, "description": description, "parameters": clean_json(parameters)}
        self.functions[name] = {
            "type": "function",
            "function": {key: value for key, value in function.items() if value or key == "name"},
        }
        self.origins[name] = origin
        known = _CUSTOM_FIELDS if origin.is_custom else _FUNCTION_FIELDS
        self.unused |= {f"tools.{clean(key)}" for key in tool.keys() - known if tool[key] not in (None, False)}

    def choice(self, given: Mapping[str, Any]) -> ToolChoice:
        """``tool_choice`` and ``parallel_tool_calls``. Raises ``InvalidRequestError``."""
        is_parallel = typed(given.get("parallel_tool_calls", True), bool, "parallel_tool_calls", "a boolean")
        chosen = given.get("tool_choice", "auto")
        if isinstance(chosen, dict):
            mode, name = self._chosen(chosen)
        elif isinstance(chosen, str) and chosen in tuple(ToolMode):
            mode, name = ToolMode(chosen), ""
        else:
            raise invalid("tool_choice", "Supported values are: 'none', 'auto', and 'required', or an object.")
        if mode is ToolMode.REQUIRED and not self.functions:
            raise InvalidRequestError(
                "Tool choice 'required' must be specified with 'tools' parameter.",
                param="tool_choice",
                code="invalid_value",
            )
        return ToolChoice(mode, name, is_parallel)

    def _chosen(self, chosen: Mapping[str, Any]) -> tuple[ToolMode, str]:
        kind = chosen.get("type")
        if kind in ("function", "custom"):
            return ToolMode.REQUIRED, self._resolve(chosen, "tool_choice")
        if kind == "allowed_tools":
            return self._allowed(chosen)
        if not isinstance(kind, str) or not (kind in HOSTED_TOOLS or kind.startswith(_DATED_TOOLS)):
            raise invalid("tool_choice.type", "Supported values are: 'function', 'custom', and 'allowed_tools'.")
        self.unused.add("tool_choice")
        return ToolMode.AUTO, ""

    def _allowed(self, chosen: Mapping[str, Any]) -> tuple[ToolMode, str]:
        """A choice among some tools. Only a forced choice of one is one that can be kept."""
        allowed = typed(chosen.get("tools"), list, "tool_choice.tools", "an array")
        names = [
            self._resolve(typed(one, dict, f"tool_choice.tools[{index}]", "an object"), f"tool_choice.tools[{index}]")
            for index, one in enumerate(allowed)
            if not isinstance(one, dict) or one.get("type") in ("function", "custom")
        ]
        mode = chosen.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise invalid("tool_choice.mode", "Supported values are: 'auto' and 'required'.")
        is_forced = mode == "required"
        if is_forced and len(allowed) == len(names) == 1:
            return ToolMode.REQUIRED, names[0]
        if {*names} != self.functions.keys():
            self.unused.add("tool_choice")
        return (ToolMode.REQUIRED if is_forced else ToolMode.AUTO), ""

    def _resolve(self, chosen: Mapping[str, Any], where: str) -> str:
        """The function tool that a choice names: by its full name, or by its own if no other has it."""
        name, namespace = _name(chosen, where), chosen.get("namespace") or ""
        full = flat_name(name, clean(typed(namespace, str, f"{where}.namespace", "a string")))
        if full in self.functions:
            return full
        found = [one for one, origin in self.origins.items() if origin.name == name and not namespace]
        if len(found) != 1:
            raise InvalidRequestError(
                f"Tool choice {name!r} not found in 'tools' parameter.", param=where, code="invalid_value"
            )
        return found[0]


class Origins:
    """Leads calls of function tools back to the tools behind them."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        """``form``: what ``form_of`` made."""
        self._origins = {name: Origin(*origin) for name, origin in form.items()}

    @staticmethod
    def form_of(origins: Mapping[str, Origin]) -> dict[str, list[Any]]:
        """Those that are no plain functions, JSON-ready."""
        return {
            name: [origin.name, origin.namespace, origin.is_custom]
            for name, origin in origins.items()
            if origin.namespace or origin.is_custom
        }

    def of(self, call: ToolCall) -> Origin:
        """A tool that was not offered is its own origin."""
        return self._origins.get(call.name) or Origin(call.name)


def custom_arguments(text: str, *, is_json: bool) -> dict[str, Any]:
    """The canonical arguments of a call of a custom tool. ``is_json``: ``custom_input`` said so."""
    return parse_arguments(text) if is_json else {_CUSTOM_INPUT: text}


def custom_input(arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """The free text of a call of a custom tool; with True, the JSON of arguments that are not one text alone."""
    text = arguments.get(_CUSTOM_INPUT)
    if isinstance(text, str) and len(arguments) == 1:
        return text, False
    return to_json(arguments), True


def echoed(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Canonical tools as an answer repeats them: as the model got them."""
    return [
        {"type": "function", "description": None, "parameters": {}, "strict": False, **tool["function"]}
        for tool in functions
    ]


def _custom_parameters(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    about = "The tool's whole input, as free text."
    given = typed(tool.get("format") or {}, dict, f"{where}.format", "an object")
    if given.get("type", "text") == "grammar":
        definition = typed(given.get("definition"), str, f"{where}.format.definition", "a string")
        syntax = typed(given.get("syntax"), str, f"{where}.format.syntax", "a string")
        about += f" It must satisfy this {clean(syntax)} grammar:\n{clean(definition)}"
    return {
        "type": "object",
        "properties": {_CUSTOM_INPUT: {"type": "string", "description": about}},
        "required": [_CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if name is None:
        raise missing(f"{where}.name")
    name = clean(typed(name, str, f"{where}.name", "a string"))
    if not name:
        raise invalid(f"{where}.name", "Expected a name.")
    return name


def _description(tool: Mapping[str, Any], where: str) -> str:
    return clean(typed(tool.get("description") or "", str, f"{where}.description", "a string"))


def missing(param: str) -> InvalidRequestError:
    """The error for a field that must be there."""
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def names_of(fields: Iterable[str], known: frozenset[str]) -> set[str]:
    """Names of fields that nothing was made of."""
    return {clean(name) for name in fields if name not in known}
