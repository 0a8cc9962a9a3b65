from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import ContextLengthError
from services.proxy.types import CanonicalRequest, Message, ToolCall, ToolChoice, ToolMode
from services.rollout.types import Sampling
from services.trajectory.records import continued_messages, holding_sampling, messages_of, new_in_request
from services.trajectory.types import CallTicket
from tests.unit.trajectory.world import answer, ask, data_of


def test_a_jobs_seed_becomes_one_for_each_call() -> None:
    def seed(call_id: str) -> int | None:
        return holding_sampling(
            Sampling(seed=7), ask("a", seed=1), num_prompt_tokens=1, max_model_len=10, call_id=call_id
        ).seed

    assert seed("g000000-r0-a0-c0") == seed("g000000-r0-a0-c0")
    assert seed("g000000-r0-a0-c0") != seed("g000000-r1-a0-c0")


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    assert holding_sampling(Sampling(), ask("a"), num_prompt_tokens=9, max_model_len=10, call_id="c").max_tokens == 1
    with pytest.raises(ContextLengthError):
        holding_sampling(Sampling(), ask("a"), num_prompt_tokens=10, max_model_len=10, call_id="c")


def test_stop_strings_of_job_and_harness_are_joined() -> None:
    sampling = holding_sampling(
        Sampling(stop=("J",)), ask("a", stop=["H", "J"]), num_prompt_tokens=1, max_model_len=10, call_id="c"
    )
    assert sampling.stop == ("J", "H")


def test_a_forced_tool_and_a_schema_become_a_grammar() -> None:
    def schema(**changes: Any) -> Any:
        request = replace(ask("a"), **changes)
        text = holding_sampling(Sampling(), request, num_prompt_tokens=1, max_model_len=10, call_id="c").json_schema
        return None if text is None else json.loads(text)

    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = ({"type": "function", "function": {"name": "add", "parameters": parameters}},)
    assert schema() is None
    assert schema(response_schema={"type": "object"}) == {"type": "object"}
    assert schema(tools=tools) is None
    assert schema(tools=tools, tool_choice=ToolChoice(ToolMode.REQUIRED, "add")) == parameters


def test_a_request_behind_a_stored_call_has_its_messages_but_not_its_instructions() -> None:
    earlier = CanonicalRequest(
        "openai_responses", "m", (Message("system", "be brief"), Message("user", "a")), num_instructions=1
    )
    record = answer(CallTicket("c", "r", 0, None, 1, 1, None, Sampling(), True), "b", request=data_of(earlier))
    later = CanonicalRequest(
        "openai_responses", "m", (Message("system", "be exact"), Message("user", "c")), num_instructions=1
    )
    told = [(message.role, message.content) for message in continued_messages(later, record)]
    assert told == [("system", "be exact"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def test_messages_survive_being_stored_as_json() -> None:
    request = ask("a", "b", "c")
    called = Message("assistant", "", "thought", (ToolCall("id", "name", {"x": [1, {"y": None}]}),))
    request = type(request)("openai_chat", "m", (*request.messages, called, Message("tool", "out", tool_call_id="id")))
    assert messages_of(json.loads(json.dumps(data_of(request)))) == request.messages


def test_what_the_parents_request_had_is_left_out_of_a_request() -> None:
    request = ask("a", "b", "c", temperature=1)
    new = json.loads(json.dumps(new_in_request(request, 2, shares_tools=True)))
    assert new["messages"][:2] == [{}, {}]
    assert messages_of({"messages": new["messages"][2:]}) == request.messages[2:]
    assert new["requested_sampling"] == {"temperature": 1}


def test_a_billing_line_that_is_not_rendered_is_kept_in_the_record() -> None:
    line = "x-anthropic-billing-header: cch=1\nYou are an agent."
    request = type(ask())("openai_chat", "m", (Message("system", line), Message("user", "a")))
    assert new_in_request(request, 1, shares_tools=True)["raw_system"] == {"0": line}
    assert "raw_system" not in new_in_request(ask("a", "b"), 1, shares_tools=True)
