"""What harnesses change in the history that they send back: nothing of it forks a run, and a changed message does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.proxy.captures import Capture, Replay, answer_to, scenario
from tests.unit.proxy.templates import CHATML, renderer

SCENARIOS = [
    "claude-code/cc-multi",
    "claude-code/cc-task2",
    "codex/cx-multi",
    "mini-swe-agent/mini-multi",
    "mini-swe-agent/mini-par",
    "opencode/oc-multi",
    "pi/pi-fc-multi",
    "pi/pi-fr-multi",
    "qwen-code/qwl-multi",
]
Drift = Callable[[dict[str, Any], int], None]
"""Changes the body of the request of that number."""


def items(body: dict[str, Any]) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = body.get("messages") or body["input"]
    return given


def blocks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every item and every part of one."""
    for item in items(body):
        yield item
        if isinstance(item.get("content"), list):
            yield from item["content"]


def backwards(value: Any) -> Any:
    """The same data, the keys of objects in the opposite order."""
    if isinstance(value, dict):
        return {name: backwards(value[name]) for name in reversed(value)}
    return [backwards(one) for one in value] if isinstance(value, list) else value


def serialise_arguments_anew(body: dict[str, Any], number: int) -> None:
    def anew(text: str) -> str:
        return json.dumps(backwards(json.loads(text)), indent=number, ensure_ascii=number % 2 == 0)

    for block in blocks(body):
        for call in block.get("tool_calls") or []:
            call["function"]["arguments"] = anew(call["function"]["arguments"])
        if block.get("type") == "function_call":
            block["arguments"] = anew(block["arguments"])
        if block.get("type") == "tool_use":
            block["input"] = backwards(block["input"])


def drop_reasoning(body: dict[str, Any], number: int) -> None:
    kept = [item for item in items(body) if item.get("type") != "reasoning"]
    items(body)[:] = kept
    for item in kept:
        item.pop("reasoning_content", None)
        item.pop("reasoning", None)
        if isinstance(item.get("content"), list):
            item["content"] = [part for part in item["content"] if part.get("type") != "thinking"]


def move_cache_marks(body: dict[str, Any], number: int) -> None:
    parts = [one for one in blocks(body) if one.get("type") in ("text", "tool_result", "tool_use")]
    for at, part in enumerate(parts):
        part.pop("cache_control", None)
        if at % 3 == number % 3:
            part["cache_control"] = {"type": "ephemeral"}


def change_the_billing_line(body: dict[str, Any], number: int) -> None:
    if isinstance(body.get("system"), list):
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"


def rename_tool_calls(body: dict[str, Any], number: int) -> None:
    """Consistently within a request, otherwise in the next one."""

    def renamed(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            is_call = value.get("type") in ("tool_use", "function")
            named = {"tool_use_id", "tool_call_id", "call_id", *(["id"] if is_call else [])}
            return {
                name: f"id-{number}-{one}" if name in named and isinstance(one, str) else renamed(one, name)
                for name, one in value.items()
            }
        return [renamed(one, key) for one in value] if isinstance(value, list) else value

    items(body)[:] = renamed(items(body))


def add_white_space(body: dict[str, Any], number: int) -> None:
    for item in items(body):
        if item.get("role") != "assistant":
            continue
        if isinstance(item.get("content"), str) and item["content"]:
            item["content"] += "\n" * number
        elif isinstance(item.get("content"), list):
            texts = [part for part in item["content"] if part.get("type") in ("text", "output_text")]
            for part in texts[-1:]:
                part["text"] += " \n" * number


def empty_content(body: dict[str, Any], number: int) -> None:
    for item in items(body):
        if item.get("tool_calls") and not item.get("content"):
            item.pop("content", None)
            if number % 4:
                item["content"] = (None, "", [])[number % 4 - 1]


DRIFTS: dict[str, Drift] = {
    one.__name__: one
    for one in (
        serialise_arguments_anew,
        drop_reasoning,
        move_cache_marks,
        change_the_billing_line,
        rename_tool_calls,
        add_white_space,
        empty_content,
    )
}


def drifted(capture: Capture, *drifts: str) -> Capture:
    body = copy.deepcopy(capture.body)
    for name in drifts:
        DRIFTS[name](body, capture.number)
    return replace(capture, body=body)


def take_all(captures: list[Capture], sent: list[Capture]) -> Replay:
    """The answers are those of the captures; what is sent may differ from them."""
    made = Replay(renderer(CHATML))
    requests = [one.parse() for one in captures]
    for at, (request, one) in enumerate(zip(requests, sent, strict=True)):
        made.take(one.number, one.parse(), answer_to(request, requests[at + 1 :]))
    return made


def assert_alike(name: str, drifts: list[frozenset[str]]) -> None:
    captures = scenario(name)
    sent = [drifted(one, *sorted(kinds)) for one, kinds in zip(captures, drifts[: len(captures)], strict=True)]
    plain, made = take_all(captures, captures), take_all(captures, sent)
    assert [one.parent for one in made.calls] == [one.parent for one in plain.calls]
    assert made.log.roles == plain.log.roles
    by_number = {one.number: one.ids for one in made.calls}
    for one in made.calls:
        assert not one.matched.prompt.is_false_fork
        if one.parent is not None:
            history = by_number[one.parent]
            assert one.matched.prompt.ids[: len(history)].tolist() == history.tolist()


@pytest.mark.parametrize("drift", DRIFTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_drift_forks_a_run(name: str, drift: str) -> None:
    assert_alike(name, [frozenset({drift})] * 9)


@pytest.mark.parametrize("name", SCENARIOS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(drifts=st.lists(st.frozensets(st.sampled_from(sorted(DRIFTS))), min_size=9, max_size=9))
def test_drifts_of_several_kinds_at_once_fork_no_run(name: str, drifts: list[frozenset[str]]) -> None:
    assert_alike(name, drifts)


def test_every_drift_changes_something() -> None:
    for drift in DRIFTS:
        captures = [one for name in SCENARIOS for one in scenario(name)]
        assert any(drifted(one, drift).body != one.body for one in captures), drift


def change_the_task(body: dict[str, Any], number: int) -> None:
    asked = [one for one in blocks(body) if one.get("role") == "user" or one.get("type") in ("text", "input_text")]
    texts = [one for one in asked if isinstance(one.get("text"), str)] or [
        one for one in asked if isinstance(one.get("content"), str)
    ]
    key = "text" if "text" in texts[0] else "content"
    texts[0][key] += " and now something else"


def change_an_argument(body: dict[str, Any], number: int) -> None:
    for block in blocks(body):
        for call in block.get("tool_calls") or []:
            call["function"]["arguments"] = json.dumps({"other": 1})
        if block.get("type") == "function_call":
            block["arguments"] = json.dumps({"other": 1})
        if block.get("type") == "tool_use":
            block["input"] = {"other": 1}


def change_a_tool(body: dict[str, Any], number: int) -> None:
    for tool in body["tools"]:
        tool.get("function", tool)["description"] = f"another one, {number}"


@pytest.mark.parametrize("change", [change_the_task, change_an_argument, change_a_tool])
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_really_changed_forks(name: str, change: Drift) -> None:
    captures = scenario(name)
    last = copy.deepcopy(captures[-1].body)
    change(last, captures[-1].number)
    made = take_all(captures, [*captures[:-1], replace(captures[-1], body=last)])
    plain = take_all(captures, captures)
    assert plain.calls[-1].parent is not None
    assert made.calls[-1].parent != plain.calls[-1].parent
