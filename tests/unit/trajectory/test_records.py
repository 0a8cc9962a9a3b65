from __future__ import annotations

import json

import pytest

from services.common.errors import ContextLengthError
from services.proxy.types import Message, ToolCall
from services.rollout.types import Sampling
from services.trajectory.records import holding_sampling, messages_of, new_in_request
from tests.unit.trajectory.world import ask, data_of


def test_a_jobs_seed_becomes_one_for_each_call() -> None:
    def seed(call_id: str) -> int | None:
        return holding_sampling(
            Sampling(seed=7), {"seed": 1}, num_prompt_tokens=1, max_model_len=10, call_id=call_id
        ).seed

    assert seed("g000000-r0-a0-c0") == seed("g000000-r0-a0-c0")
    assert seed("g000000-r0-a0-c0") != seed("g000000-r1-a0-c0")


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    assert holding_sampling(Sampling(), {}, num_prompt_tokens=9, max_model_len=10, call_id="c").max_tokens == 1
    with pytest.raises(ContextLengthError):
        holding_sampling(Sampling(), {}, num_prompt_tokens=10, max_model_len=10, call_id="c")


def test_stop_strings_of_job_and_harness_are_joined() -> None:
    sampling = holding_sampling(
        Sampling(stop=("J",)), {"stop": ["H", "J"]}, num_prompt_tokens=1, max_model_len=10, call_id="c"
    )
    assert sampling.stop == ("J", "H")


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
