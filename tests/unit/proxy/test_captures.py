"""Requests that real harnesses sent, replayed: each parses, each main request extends the one before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.proxy.conversation import stable_messages
from services.proxy.types import Message
from services.trajectory.encoding import CallRow, call_row, columns_of, payload_of
from services.trajectory.roles import roles_of
from services.trajectory.types import CallRole
from tests.unit.proxy.captures import FILES, SCENARIOS, Capture, Replay, load, replay, scenario, with_text
from tests.unit.proxy.templates import CHATML, TOOLS_AND_REASONING, renderer, tokenizer

EXPECTED = {
    "aider/aider-basic": "1 main",
    "claude-code/cc-basic": "1 main, 2<1 main",
    "claude-code/cc-ctxE": "1 main, 2<1 refused, 3 main_summary, 4 main",
    "claude-code/cc-multi": "1 main, 2<1 main, 3<2 main, 4<3 main, 5<4 main",
    "claude-code/cc-task2": "1 main, 2 subagent, 3 subagent, 4<2 subagent, 5<3 subagent, 6<1 main",
    "codex/cx-basic": "1 main, 2<1 main",
    "codex/cx-ctx": "1 main, 2<1 refused",
    "codex/cx-multi": "1 main, 2<1 main, 3<2 main, 4<3 main, 5<4 main",
    "harbor-terminus-2/hb-basic": "1 main, 2<1 main, 3<2 main",
    "mini-swe-agent/mini-basic": "1 main, 2<1 main",
    "mini-swe-agent/mini-multi": "1 main, 2<1 main, 3<2 main, 4<3 main",
    "mini-swe-agent/mini-par": "1 main, 2<1 main",
    "opencode/oc-basic": "1 side, 2 main, 3<2 main",
    "opencode/oc-ctx": "1 side, 2 main, 3<2 refused, 4 main_summary, 5 main",
    "opencode/oc-eof": "1 side, 2 main, 3<2 main, 4<3 main",
    "opencode/oc-multi": "1 side, 2 main, 3<2 main, 4<3 main, 5<4 main, 6<5 main",
    "pi/pi-fc-basic": "1 main, 2<1 main",
    "pi/pi-fc-ctx": "1 main, 2<1 refused, 3 main_summary, 4 main",
    "pi/pi-fc-multi": "1 main, 2<1 main, 3<2 main, 4<3 main, 5<4 main",
    "pi/pi-fr-multi": "1 main, 2<1 main, 3<2 main, 4<3 main, 5<4 main",
    "qwen-code/qwl-basic": "1 main, 2<1 main",
    "qwen-code/qwl-drop": "1 main, 2<1 main, 3 main, 4<3 main",
    "qwen-code/qwl-multi": "1 main, 2<1 main, 3<2 main, 4<3 main, 5<4 main",
}
"""Of each request: which one it continues, and its role. Compactions begin anew; so does what Qwen Code makes of an
answer that was cut (qwl-drop: the beginning and the rest become one message)."""

SUMMARY = (
    "The user wants hello.txt.\nI have written it with echo, and looked at what ls says of it.\nNothing is left to do."
)


WORDS = {
    "claude-code/cc-ctxE": (3, "Your task is to create a detailed summary of the conversation so far."),
    "opencode/oc-ctx": (4, "You are a context summarization agent."),
    "pi/pi-fc-ctx": (3, "You are a context summarization assistant."),
}
"""By which a request for a summary is known: Claude Code's last text, the others' system prompt."""


def worded(name: str) -> list[Capture]:
    """A scenario with the words by which its request for a summary is known: the captures' prose is filler."""
    captures = scenario(name)
    if name in WORDS:
        number, words = WORDS[name]
        asked = captures[number - 1]
        texts = said(asked.body["messages"])
        captures[number - 1] = with_text(asked, texts[-1 if name.startswith("claude") else 0], words)
    return captures


def shown(made: Replay) -> str:
    """A replay in the form of ``EXPECTED``."""
    roles = made.log.roles
    return ", ".join(
        f"{one.number}{'' if one.parent is None else f'<{one.parent}'} {roles.get(one.call_id, 'refused')}"
        for one in made.calls
    )


def said(value: Any, key: str = "") -> list[str]:
    """All prose and all data that a body's messages have."""
    if isinstance(value, str):
        return [] if key in _MARKS or value.startswith("x-anthropic-billing-header") else [value]
    if isinstance(value, dict):
        return [text for name, one in value.items() for text in said(one, name)]
    return [text for one in value for text in said(one, key)] if isinstance(value, list) else []


_MARKS = {"type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "encrypted_content"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_capture_parses_with_nothing_lost(path: Path) -> None:
    capture = load(path)
    request = capture.parse()
    found = [text for one in request.messages for text in (one.content, one.reasoning)]
    calls = [call for one in request.messages for call in one.tool_calls]
    data = [json.dumps(call.arguments, ensure_ascii=False) for call in calls]
    for field in ("system", "instructions", "messages", "input"):
        for text in said(capture.body.get(field, [])):
            is_name = text in {call.name for call in calls}
            assert is_name or any(text in one for one in found) or _is_data(text, data), text
    assert request.tools or not capture.body.get("tools")
    assert request.model == capture.body["model"]
    assert request.stream == capture.body.get("stream", False)


def _is_data(text: str, data: list[str]) -> bool:
    try:
        given = json.loads(text)
    except ValueError:
        return any(json.dumps(text, ensure_ascii=False) in one for one in data)
    return any(json.loads(one) == given for one in data)


def test_every_scenario_has_its_expectations() -> None:
    assert list(EXPECTED) == SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_main_request_extends_its_predecessor_and_has_its_role(name: str) -> None:
    made = replay(renderer(TOOLS_AND_REASONING), worded(name))
    assert shown(made) == EXPECTED[name]
    assert not any(one.matched.prompt.is_false_fork for one in made.calls)


@pytest.mark.parametrize("template", [CHATML, TOOLS_AND_REASONING], ids=["chatml", "tools"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_prompts_are_the_stored_ids_and_what_is_new(name: str, template: str) -> None:
    made = replay(renderer(template), scenario(name))
    by_number = {one.number: one for one in made.calls}
    for one in made.calls:
        prompt = one.matched.prompt
        history = np.empty(0, dtype=np.int32) if one.parent is None else by_number[one.parent].ids
        assert prompt.ids[: len(history)].tolist() == history.tolist()
        assert prompt.num_new_tokens == len(prompt.ids) - len(history)


@pytest.mark.parametrize("name", SCENARIOS)
def test_prompts_read_as_the_whole_conversation_does(name: str) -> None:
    """Where the template drops no reasoning of earlier turns: ids are never taken back."""
    using = renderer(TOOLS_AND_REASONING)
    for one in replay(using, scenario(name)).calls:
        request = one.matched.request
        if not any(message.reasoning for message in request.messages):
            whole = using.render(stable_messages(request.messages), request.tools, add_generation_prompt=True)
            assert tokenizer(None).decode(one.matched.prompt.ids) == whole


@pytest.mark.parametrize("name", SCENARIOS)
def test_roles_are_the_same_when_calls_are_read_back(name: str) -> None:
    made = replay(renderer(CHATML), worded(name))
    read: dict[str, CallRow] = {}
    for call_id, row in made.rows.items():
        columns = columns_of(row)
        read[call_id] = call_row(columns, payload_of(columns), read.get(row.record.parent_call_id or ""))
    assert roles_of([row.record for row in read.values()]) == made.log.roles


@pytest.mark.parametrize("name", WORDS)
def test_a_compaction_in_unknown_words_is_known_by_what_goes_on_from_it(name: str) -> None:
    captures, (number, _) = scenario(name), WORDS[name]
    seen = {text for one in captures[:number] for text in said(one.body["messages"])}
    new = [text for text in said(captures[number].body["messages"]) if text not in seen]
    captures[number] = with_text(captures[number], max(new, key=len), f"Here is what was done:\n{SUMMARY}")
    made = Replay(renderer(CHATML))
    for capture in captures:
        answer = Message("assistant", SUMMARY if capture.number == number else "Yes.")
        made.take(capture.number, capture.parse(), None if capture.is_refused else answer)
    roles = {one.number: made.log.roles.get(one.call_id) for one in made.calls}
    assert (roles[number], roles[number + 1]) == (CallRole.MAIN_SUMMARY, CallRole.MAIN)


@pytest.mark.parametrize("name", ["qwen-code/qwl-drop", "opencode/oc-eof"])
def test_a_request_whose_stream_was_cut_is_the_same_call_when_it_is_sent_again(name: str) -> None:
    made = Replay(renderer(CHATML))
    for capture in scenario(name):
        first = made.log.match(capture.parse(), made.bridge)
        pending = made.log.begin(first)
        made.log.requests.begin(first.same_call_key, pending.call_id, 0.0)
        again = made.log.match(capture.parse(), made.bridge)
        assert made.log.requests.shared_call(again.same_call_key, is_retry=False) == pending.call_id
