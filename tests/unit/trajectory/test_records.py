from __future__ import annotations

import json

import pytest

from services.common.errors import ContextLengthError
from services.proxy.types import Message, ToolCall
from services.rollout.types import Sampling
from services.trajectory.records import holding_sampling, messages_of, share_messages
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


def test_equal_messages_are_kept_once() -> None:
    known = ask("a", "b").messages
    messages, num_shared = share_messages(ask("a", "b", "c").messages, known)
    assert num_shared == 2
    assert messages[0] is known[0]
    assert messages == ask("a", "b", "c").messages
    assert share_messages(ask("x", "b").messages, known) == (ask("x", "b").messages, 0)
