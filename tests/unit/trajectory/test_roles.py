from __future__ import annotations

import json

import pytest

from services.proxy.types import Message
from services.trajectory.roles import MAX_OPENING_CHARS, RoleBook, is_carried, opening_of
from services.trajectory.types import CallRole

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
        self, call: str, system: str, prompt: str, answer: str = "", *, tools: bool = True, agent: str = ""
    ) -> None:
        messages = [Message("system", system), Message("user", prompt)]
        self.book.add(call, None, agent, opening_of(messages, TOOLS if tools else []), answer)

    def go_on(self, call: str, parent: str, answer: str = "", *, agent: str = "") -> None:
        self.book.add(call, parent, agent, None, answer)


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
