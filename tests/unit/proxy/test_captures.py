"""Requests that real harnesses sent, replayed: each parses, and each main request extends the one before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.proxy.conversation import ConversationIndex, Walk, stable_messages
from services.proxy.dialects import openai_chat
from services.proxy.session import Bridge, StoredCall
from services.proxy.types import CanonicalRequest
from tests.unit.proxy.templates import CHATML, TOOLS_AND_REASONING, renderer

CAPTURES = Path(__file__).parents[2] / "fixtures" / "captures"
FILES = sorted(CAPTURES.glob("*/*.json"))

CHAINS: dict[str, tuple[tuple[int, ...], ...]] = {
    "harbor-terminus-2/hb-basic": ((1, 2, 3),),
    "mini-swe-agent/mini-basic": ((1, 2),),
    "mini-swe-agent/mini-multi": ((1, 2, 3, 4),),
    "mini-swe-agent/mini-par": ((1, 2),),
    "opencode/oc-basic": ((2, 3),),
    "opencode/oc-ctx": ((2, 3),),
    "opencode/oc-eof": ((2, 3, 4),),
    "opencode/oc-multi": ((2, 3, 4, 5, 6),),
    "pi/pi-fc-basic": ((1, 2),),
    "pi/pi-fc-ctx": ((1, 2),),
    "pi/pi-fc-multi": ((1, 2, 3, 4, 5),),
    "qwen-code/qwl-basic": ((1, 2),),
    "qwen-code/qwl-drop": ((1, 2), (1, 3, 4)),
    "qwen-code/qwl-multi": ((1, 2, 3, 4, 5),),
}
"""Numbers of the requests that continue one another. The others are side calls (a title) and compactions."""


def load(path: Path) -> dict[str, Any]:
    capture: dict[str, Any] = json.loads(path.read_text())
    return capture


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_capture_parses_with_nothing_lost(path: Path) -> None:
    body = load(path)["body"]
    request = openai_chat.parse(body)
    assert len(request.messages) == len(body["messages"])
    assert len(request.tools) == len(body.get("tools", []))
    for sent, message in zip(body["messages"], request.messages, strict=True):
        assert message.reasoning == (sent.get("reasoning_content") or "")
        assert [call.arguments for call in message.tool_calls] == [
            json.loads(call["function"]["arguments"]) for call in sent.get("tool_calls") or []
        ]


@pytest.mark.parametrize("template", [CHATML, TOOLS_AND_REASONING], ids=["chatml", "tools"])
@pytest.mark.parametrize(
    ("scenario", "chain"), [(scenario, chain) for scenario, chains in CHAINS.items() for chain in chains]
)
def test_every_main_request_extends_its_predecessor(scenario: str, chain: tuple[int, ...], template: str) -> None:
    requests = [openai_chat.parse(load(CAPTURES / f"{scenario}-{number:02}.json")["body"]) for number in chain]
    using = renderer(template)
    index, bridge = ConversationIndex(), Bridge(using)
    stored: StoredCall | None = None
    for number, request in enumerate(requests):
        walk = walk_of(index, request)
        matched = index.match(walk)
        assert (matched and matched.call_id) == (str(number - 1) if number else None)
        prompt = bridge.prompt(stored, request)
        assert not prompt.is_false_fork
        if stored is not None:
            history = np.concatenate(stored.history).tolist()
            assert prompt.ids[: len(history)].tolist() == history
            assert prompt.num_new_tokens == len(prompt.ids) - len(history)
        if number + 1 < len(requests):
            answer = requests[number + 1].messages[len(request.messages)]  # the next request repeats it
            index.add(str(number), walk.nodes[-1], answer)
            output = np.asarray([*renderer().encode(answer.content), 2], dtype=np.int32)
            stored = StoredCall(str(number), len(request.messages), (prompt.ids, output), 2)


def walk_of(index: ConversationIndex, request: CanonicalRequest) -> Walk:
    return index.walk(stable_messages(request.messages), request.tools)


def test_side_calls_and_compactions_are_forks() -> None:
    multi = [openai_chat.parse(load(CAPTURES / f"opencode/oc-multi-0{number}.json")["body"]) for number in (1, 2)]
    index = ConversationIndex()
    index.add("title", walk_of(index, multi[0]).nodes[-1], multi[1].messages[0])
    assert index.match(walk_of(index, multi[1])) is None
