from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.types import CallPurpose, Message, ParsedAnswer, ToolCall
from services.trajectory.roles import MAX_OPENING_CHARS, MAX_SIDE_CALLS, RoleBook, is_carried, opening_of
from services.trajectory.types import CallRecord, CallRole

MAIN, MAIN_SUMMARY = CallRole.MAIN, CallRole.MAIN_SUMMARY
SUBAGENT, SUBAGENT_SUMMARY = CallRole.SUBAGENT, CallRole.SUBAGENT_SUMMARY
SIDE = CallRole.SIDE
AGENT = "You are an agent that edits code."
SEARCHER = "You search files and report what you found."
SUMMARY = "The user wants x renamed to y.\nI have changed a.py and b.py so far.\nThe tests of c.py still fail."
TASK = "Find every caller of the function parse_config and list the files."
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("bash", "task")]


class Harness:
    """Makes calls and tells the book of them."""

    def __init__(self) -> None:
        self.book = RoleBook()

    def begin(
        self,
        call: str,
        system: str,
        prompt: str,
        answer: str = "",
        *,
        tools: bool = True,
        agent: str = "",
        parent: str = "",
        purpose: CallPurpose = CallPurpose.TURN,
    ) -> None:
        opening = opening_of([Message("system", system), Message("user", prompt)], TOOLS if tools else [])
        self.book.add(call, None, agent, opening, answer, purpose=purpose, parent_agent_id=parent)

    def go_on(
        self,
        call: str,
        parent: str,
        answer: str = "",
        *,
        agent: str = "",
        purpose: CallPurpose = CallPurpose.TURN,
    ) -> None:
        self.book.add(call, parent, agent, None, answer, purpose=purpose)


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_one_conversation_is_the_main_one(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "b": MAIN}


def test_what_goes_on_from_a_summary_is_main_and_the_summary_is_a_summary(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.go_on("b", "a", "an answer")
    harness.go_on("sum", "b", SUMMARY)
    assert harness.book.roles()["sum"] is MAIN
    harness.begin("c", AGENT, f"This session goes on from an earlier one.\n{SUMMARY}\nGo on.")
    harness.go_on("d", "c")
    assert harness.book.roles() == {"a": MAIN, "b": MAIN, "sum": MAIN_SUMMARY, "c": MAIN, "d": MAIN}


def test_a_summary_is_looked_for_where_a_conversation_begins() -> None:
    for before, role in [("go on", MAIN_SUMMARY), ("x" * MAX_OPENING_CHARS, MAIN)]:
        harness = Harness()
        harness.begin("a", AGENT, "fix it")
        harness.go_on("sum", "a", SUMMARY)
        harness.begin("c", AGENT, f"{before}\n{SUMMARY}")
        assert harness.book.roles() == {"a": MAIN, "sum": role, "c": MAIN}


def test_a_summary_that_was_asked_of_another_system_prompt_is_one_too(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.begin(
        "sum", "Summarise conversations.", "user: fix it ...", f"<summary>\n{SUMMARY}\n</summary>", tools=False
    )
    harness.begin("b", AGENT, SUMMARY)
    assert harness.book.roles() == {"a": MAIN, "sum": MAIN_SUMMARY, "b": MAIN}


def test_a_delegated_conversation_is_a_subagents(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", f'<tool_call>{{"name": "task", "arguments": {json.dumps({"prompt": TASK})}}}')
    harness.begin("s1", SEARCHER, TASK)
    harness.go_on("s2", "s1")
    harness.go_on("s3", "s2")
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "s2": SUBAGENT, "s3": SUBAGENT, "b": MAIN}


def test_a_subagent_may_have_the_main_agents_prompt_and_tools(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", json.dumps({"prompt": TASK}))
    harness.begin("s1", AGENT, TASK)
    harness.go_on("s2", "s1")
    harness.go_on("s3", "s2")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "s2": SUBAGENT, "s3": SUBAGENT}


def test_a_subagents_summary_is_told_from_the_main_one(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", json.dumps({"prompt": TASK}))
    harness.begin("s1", SEARCHER, TASK, "I found three files, and look on.")
    harness.go_on("s-sum", "s1", SUMMARY)
    harness.begin("s2", SEARCHER, SUMMARY)
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "s-sum": SUBAGENT_SUMMARY, "s2": SUBAGENT, "b": MAIN}


def test_a_call_without_tools_beside_a_main_agent_with_tools_is_a_side_call(harness: Harness) -> None:
    harness.begin("title", "Write a title.", "fix it", "Fixing it", tools=False)
    harness.begin("a", AGENT, "fix it")
    assert harness.book.roles() == {"title": SIDE, "a": MAIN}


def test_the_harness_word_on_who_asks_wins(harness: Harness) -> None:
    harness.begin("s1", AGENT, "look", agent="agent-7")
    harness.go_on("s2", "s1", SUMMARY, agent="agent-7")
    harness.begin("s3", "another prompt", SUMMARY, agent="agent-7")
    harness.begin("a", AGENT, "fix it")
    assert harness.book.roles() == {"s1": SUBAGENT, "s2": SUBAGENT_SUMMARY, "s3": SUBAGENT, "a": MAIN}


def test_a_main_conversation_that_was_cut_without_a_summary_stays_main(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", "I look at the first file now, and then at the second.")
    harness.go_on("b", "a")
    harness.begin("c", AGENT, "(earlier turns were dropped) the output of the last command")
    assert set(harness.book.roles().values()) == {MAIN}


def test_an_answer_is_carried_whole_or_by_most_of_its_lines() -> None:
    assert is_carried(SUMMARY, f"before {SUMMARY} after")
    assert is_carried(f"<analysis>thinking</analysis>\n{SUMMARY}", "\n- ".join(SUMMARY.splitlines()))
    assert not is_carried(SUMMARY, SUMMARY.splitlines()[0])
    assert not is_carried("Done.", "Done. What now?")


@pytest.mark.parametrize(("num_kept", "carried"), [(1000, True), (600, True), (400, False), (0, False)])
def test_a_long_answer_is_carried_if_the_better_half_of_it_is(num_kept: int, carried: bool) -> None:
    lines = [f"{at:04d}: what was found out in step {at:04d}" for at in range(1000)]
    assert is_carried("\n".join(lines), "\n* ".join(["So far:", *lines[:num_kept]])) is carried


COMPACTION, SIDE_CALL = CallPurpose.COMPACTION, CallPurpose.SIDE


def test_a_compaction_is_a_summary_even_if_nothing_goes_on_from_it(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.go_on("sum", "a", "Short.", purpose=COMPACTION)
    assert harness.book.roles() == {"a": MAIN, "sum": MAIN_SUMMARY}


def test_a_compaction_of_its_own_is_of_the_agent_whose_prompt_it_begins_with(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix what is broken", json.dumps({"prompt": TASK}))
    harness.begin("s1", SEARCHER, TASK)
    harness.begin("sum-s", "Summarise.", f"<conversation>user: {TASK} assistant: ...", tools=False, purpose=COMPACTION)
    harness.begin("sum-a", "Summarise.", f"user: fix what is broken call: {TASK}", tools=False, purpose=COMPACTION)
    harness.begin("sum-x", "Summarise.", "nothing that is known", tools=False, purpose=COMPACTION)
    roles = harness.book.roles()
    assert (roles["sum-s"], roles["sum-a"], roles["sum-x"]) == (SUBAGENT_SUMMARY, MAIN_SUMMARY, MAIN_SUMMARY)


def test_a_named_agents_compaction_is_its_own(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.begin("s1", AGENT, "look", agent="agent-7")
    harness.begin("sum", "Summarise.", "fix it", "done", tools=False, agent="agent-7", purpose=COMPACTION)
    harness.begin("s2", "another prompt", "go on", agent="agent-7")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "sum": SUBAGENT_SUMMARY, "s2": SUBAGENT}


def test_summaries_of_summaries_are_main_ones(harness: Harness) -> None:
    other = SUMMARY.replace("x", "z").replace("c.py", "d.py")
    harness.begin("a", AGENT, "fix it")
    harness.begin("sum-1", "Summarise.", "user: fix it", SUMMARY, tools=False)
    harness.begin("b", AGENT, f"fix it\n{SUMMARY}")
    harness.begin("sum-2", "Summarise.", f"<previous-summary>{SUMMARY}</previous-summary>", other, tools=False)
    harness.begin("c", AGENT, f"fix it\n{other}")
    expected = {"a": MAIN, "sum-1": MAIN_SUMMARY, "b": MAIN, "sum-2": MAIN_SUMMARY, "c": MAIN}
    assert harness.book.roles() == expected


def test_what_a_harness_calls_a_side_call_is_one_and_so_is_what_goes_on_from_it(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", SUMMARY)
    harness.go_on("memory", "a", "I will save what I learned.", purpose=SIDE_CALL)
    harness.go_on("memory-2", "memory")
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "memory": SIDE, "memory-2": SIDE, "b": MAIN}


def test_side_calls_alone_make_no_main_conversation(harness: Harness) -> None:
    harness.begin("title", AGENT, "a title, please", purpose=SIDE_CALL)
    harness.begin("title-2", AGENT, "a title, please", purpose=SIDE_CALL)
    assert set(harness.book.roles().values()) == {SIDE}
    harness.begin("a", AGENT, "fix it")
    assert harness.book.roles()["a"] is MAIN


def test_calls_of_a_tool_that_found_the_endpoint_are_side_calls(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", "I run the evaluation now, which asks the model itself.")
    for at in range(5):
        harness.begin(f"tool-{at}", "", f"Is this answer right? Answer {at}.", "Yes.", tools=False)
    harness.go_on("b", "a")
    roles = harness.book.roles()
    assert {roles[f"tool-{at}"] for at in range(5)} == {SIDE}
    assert (roles["a"], roles["b"]) == (MAIN, MAIN)


def test_a_conversation_of_many_calls_is_an_agents_though_it_has_no_tools(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    harness.begin("s0", SEARCHER, "look", tools=False)
    for at in range(MAX_SIDE_CALLS):
        harness.go_on(f"s{at + 1}", f"s{at}")
    assert harness.book.roles()["s0"] is SUBAGENT


def test_a_delegated_conversation_without_tools_is_a_subagents(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", json.dumps({"prompt": TASK}))
    harness.begin("s1", "Think.", TASK, tools=False)
    assert harness.book.roles()["s1"] is SUBAGENT


def test_where_the_main_agent_has_no_tools_nothing_is_a_side_call_by_its_form(harness: Harness) -> None:
    harness.begin("a", "Answer with a command in a block.", "fix it", tools=False)
    harness.go_on("b", "a")
    harness.begin("x", "Review the work.", "Is it done?", tools=False)
    assert harness.book.roles() == {"a": MAIN, "b": MAIN, "x": SUBAGENT}


def test_an_empty_system_prompt_is_no_sign_of_one_agent(harness: Harness) -> None:
    harness.begin("a", "", "fix it")
    harness.begin("x", "", "Is this right?", tools=False)
    harness.begin("b", "", "go on")
    assert harness.book.roles() == {"a": MAIN, "x": SIDE, "b": MAIN}


def test_subagents_keep_their_roles_when_their_calls_interleave(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it")
    for at in (1, 2):
        harness.begin(f"s{at}", SEARCHER, "look", agent=f"agent-{at}")
    harness.go_on("s1+", "s1", agent="agent-1")
    harness.go_on("b", "a")
    harness.go_on("s2+", "s2", agent="agent-2")
    roles = harness.book.roles()
    assert roles == {"a": MAIN, "s1": SUBAGENT, "s2": SUBAGENT, "s1+": SUBAGENT, "b": MAIN, "s2+": SUBAGENT}


def test_an_agent_that_was_given_the_main_history_is_none_the_less_another(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", SUMMARY)
    harness.go_on("s1", "a", agent="agent-1")
    harness.go_on("s2", "s1", agent="agent-1")
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "s2": SUBAGENT, "b": MAIN}


def test_an_agent_with_a_parent_is_not_the_main_one(harness: Harness) -> None:
    harness.begin("s1", AGENT, "look", agent="agent-7", parent="agent-1")
    harness.go_on("s2", "s1", agent="agent-7")
    harness.begin("a", SEARCHER, "fix it", agent="agent-1")
    assert harness.book.roles() == {"s1": SUBAGENT, "s2": SUBAGENT, "a": MAIN}


def test_a_delegated_prompt_may_stand_behind_reminders(harness: Harness) -> None:
    harness.begin("a", AGENT, "fix it", json.dumps({"prompt": f"Look around.\n{TASK}"}))
    harness.begin("s1", AGENT, f"<reminder>Today is a day.</reminder>\nLook around.\n{TASK}")
    harness.go_on("s2", "s1")
    harness.go_on("b", "a")
    assert harness.book.roles() == {"a": MAIN, "s1": SUBAGENT, "s2": SUBAGENT, "b": MAIN}


def test_tool_calls_delegate_and_reasoning_carries_nothing() -> None:
    book = RoleBook()
    call = ToolCall("c", "task", {"job": [{"prompt": TASK}]})
    answer = ParsedAnswer("I ask for help.", reasoning=SUMMARY * 9, tool_calls=(call,))
    book.add_call(record("a", answer), opening_of([Message("system", AGENT), Message("user", "fix it")], TOOLS))
    book.add_call(record("s"), opening_of([Message("system", AGENT), Message("user", TASK)], TOOLS))
    book.add_call(record("x"), opening_of([Message("system", AGENT), Message("user", SUMMARY)], TOOLS))
    assert book.roles() == {"a": MAIN, "s": SUBAGENT, "x": MAIN}


def record(call_id: str, answer: ParsedAnswer | None = None) -> CallRecord:
    nothing = np.empty(0, dtype=np.int32)
    return CallRecord(
        call_id, "g-r0", 0, None, {}, nothing, nothing, nothing.astype(np.float32), (), "raw", "stop", True, (), 0, 1,
        answer=answer,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_called_every_call_has_a_role(data: st.DataObject) -> None:
    book, made = RoleBook(), list[str]()
    side: set[str] = set()
    for at in range(data.draw(st.integers(0, 12))):
        call, parent = f"c{at}", data.draw(st.sampled_from([None, *made]))
        purpose = data.draw(st.sampled_from(CallPurpose))
        text = st.sampled_from(["", "fix it", TASK, SUMMARY, f"{TASK}\n{SUMMARY}"])
        asked = [Message("system", data.draw(st.sampled_from(["", AGENT, SEARCHER]))), Message("user", data.draw(text))]
        book.add(
            call,
            parent,
            data.draw(st.sampled_from(["", "agent-1", "agent-2"])),
            opening_of(asked, data.draw(st.sampled_from([[], TOOLS]))) if parent is None else None,
            data.draw(text),
            purpose=purpose,
            parent_agent_id=data.draw(st.sampled_from(["", "agent-1"])),
        )
        made.append(call)
        if purpose is SIDE_CALL or (purpose is CallPurpose.TURN and parent in side):
            side.add(call)
        roles = book.roles()
        assert list(roles) == made
        assert {one for one, role in roles.items() if role is SIDE} >= side
