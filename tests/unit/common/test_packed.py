from __future__ import annotations

import pickle

import pytest

from services.common.types import VersionSpan
from services.proxy.types import CanonicalRequest, Lineage, Message, ParsedAnswer, ToolCall, ToolChoice, ToolMode
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling

ONE_OF_EACH = [
    VersionSpan(1, 2),
    ToolCall("i", "n", {"a": [1]}),
    Message("assistant", "x", "why", (ToolCall("i", "n", {}),), "t"),
    CanonicalRequest(
        "d",
        "m",
        (Message("user", "x"),),
        stream=True,
        tool_choice=ToolChoice(ToolMode.NONE),
        lineage=Lineage(agent_id="a"),
        num_choices=2,
    ),
    ParsedAnswer("x", num_malformed_calls=1),
    Sampling(0.5, 3, ("s",), 1, "{}"),
    GenerateRequest("c", "r", Sampling(), (1,), 0.5),
    GenerateChunk((1,), (0.5,), "t", 3, "stop", 4, "s"),
]


@pytest.mark.parametrize("one", ONE_OF_EACH, ids=lambda one: type(one).__name__)
def test_every_field_survives_pickling(one: object) -> None:
    assert pickle.loads(pickle.dumps(one)) == one
