"""Who makes a call and what for, by what each harness is known to send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.lineage import UNNAMED_SUBAGENT, lineage_of
from services.proxy.types import CallPurpose, Lineage

TURN, COMPACTION, SIDE = CallPurpose.TURN, CallPurpose.COMPACTION, CallPurpose.SIDE
TOOLS = [{"type": "function", "function": {"name": "bash"}}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.3eb; cc_entrypoint=sdk-cli;"


def purpose_of(body: dict[str, Any], **headers: str) -> CallPurpose:
    return lineage_of({name.replace("_", "-"): value for name, value in headers.items()}, body).purpose


def chat(*messages: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **fields}


def claude(system: str = BILLING, **fields: Any) -> dict[str, Any]:
    user_id = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s-1"})
    return {
        "system": [{"type": "text", "text": system}],
        "metadata": {"user_id": user_id},
        **chat(("user", "x")),
        **fields,
    }


def test_who_says_nothing_has_no_lineage() -> None:
    assert lineage_of({}, chat(("system", "You are an agent."), ("user", "fix it"), tools=TOOLS)) == Lineage()


class TestClaudeCode:
    def test_the_main_agent_is_not_named(self) -> None:
        assert lineage_of({"x-claude-code-session-id": "s-1"}, claude()) == Lineage("s-1")

    def test_a_subagent_is_named_by_a_header_and_its_parent_by_another(self) -> None:
        headers = {
            "x-claude-code-session-id": "s-1",
            "x-claude-code-agent-id": "a-7",
            "x-claude-code-parent-agent-id": "a-1",
        }
        assert lineage_of(headers, claude()) == Lineage("s-1", "a-7", "a-1")

    def test_the_session_stands_in_the_metadata_too(self) -> None:
        assert lineage_of({}, claude()).session_id == "s-1"

    def test_the_billing_line_tells_a_subagent_whose_header_was_lost(self) -> None:
        assert lineage_of({}, claude(f"{BILLING} cc_is_subagent=true;")).agent_id == UNNAMED_SUBAGENT
        assert lineage_of({}, claude(f"{BILLING}\ncc_is_subagent=false")).agent_id == ""

    def test_only_its_billing_line_makes_a_subagent(self) -> None:
        body = claude("You may write cc_is_subagent=true;")
        assert lineage_of({"x-claude-code-session-id": "s-1"}, body).agent_id == ""

    @pytest.mark.parametrize(
        ("told", "purpose"),
        [("main", TURN), ("subagent", TURN), ("workflow", TURN), ("compaction", COMPACTION), ("auxiliary", SIDE)],
    )
    def test_the_request_class_is_believed(self, told: str, purpose: CallPurpose) -> None:
        words = claude(messages=[{"role": "user", "content": "The user stepped away and is coming back."}])
        headers = {"x_claude_code_session_id": "s", "x_claude_code_request_class": told}
        assert purpose_of(words, **headers) is purpose
        assert purpose_of(words, x_claude_code_session_id="s") is SIDE

    def test_a_compaction_is_told_by_a_header_or_by_its_prompt(self) -> None:
        assert purpose_of(claude(), x_claude_code_session_id="s", x_claude_code_compaction="auto") is COMPACTION
        asked = "Text only, no tools.\n\nYour task is to create a detailed summary of the conversation so far, ..."
        content = [{"type": "tool_result", "tool_use_id": "t", "content": "out"}, {"type": "text", "text": asked}]
        assert purpose_of(claude(messages=[{"role": "user", "content": content}])) is COMPACTION
        told = [{"type": "tool_result", "tool_use_id": "t", "content": asked}]
        assert purpose_of(claude(messages=[{"role": "user", "content": told}])) is TURN

    def test_a_quota_check_asks_for_one_token(self) -> None:
        assert purpose_of(claude(max_tokens=1)) is SIDE
        assert purpose_of(claude(max_tokens=2)) is TURN
        assert purpose_of(chat(("user", "A or B?"), max_tokens=1)) is TURN  # who answers so may be trained to


def codex(kind: str = "turn", **told: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Headers, and the client metadata that repeats them."""
    metadata = {"session_id": "s", "thread_id": "s", "request_kind": kind, "thread_source": "user", **told}
    text = json.dumps(metadata)
    headers = {"session-id": "s", "thread-id": metadata["thread_id"], "x-codex-turn-metadata": text}
    client = {"session_id": "s", "thread_id": metadata["thread_id"], "x-codex-turn-metadata": text}
    return headers, client


class TestCodex:
    def test_the_main_thread_is_the_session(self) -> None:
        headers, client = codex()
        assert lineage_of(headers, {"input": [], "client_metadata": client}) == Lineage("s")

    def test_a_spawned_thread_is_an_agent_and_names_its_parent(self) -> None:
        headers, _ = codex(thread_id="t-2", parent_thread_id="t-1", thread_source="subagent")
        assert lineage_of(headers, {"input": []}) == Lineage("s", "t-2", "t-1")
        headers["x-codex-parent-thread-id"] = "s"
        assert lineage_of(headers, {"input": []}) == Lineage("s", "t-2", "")

    def test_the_body_has_all_of_it_too(self) -> None:
        _, client = codex("compaction", thread_id="t-2", parent_thread_id="t-1")
        assert lineage_of({}, {"input": [], "client_metadata": client}) == Lineage("s", "t-2", "t-1", COMPACTION)

    @pytest.mark.parametrize(
        ("told", "purpose"),
        [
            (codex("turn"), TURN),
            (codex("compaction"), COMPACTION),
            (codex("memory"), SIDE),
            (codex("prewarm"), SIDE),
            (codex(thread_source="thread_title"), SIDE),
            (codex(thread_source="subagent", subagent_kind="review"), TURN),
        ],
    )
    def test_the_kind_of_request_is_believed(
        self, told: tuple[dict[str, str], dict[str, Any]], purpose: CallPurpose
    ) -> None:
        headers, client = told
        assert lineage_of(headers, {"input": []}).purpose is purpose
        assert lineage_of({}, {"input": [], "client_metadata": client}).purpose is purpose

    def test_the_kind_of_subagent_stands_in_a_header(self) -> None:
        headers, _ = codex()
        for kind, purpose in [("compact", COMPACTION), ("memory_consolidation", SIDE), ("collab_spawn", TURN)]:
            assert lineage_of({**headers, "x-openai-subagent": kind}, {}).purpose is purpose
        assert lineage_of({**headers, "x-openai-memgen-request": "true"}, {}).purpose is SIDE

    def test_a_compaction_trigger_asks_for_a_compaction(self) -> None:
        headers, _ = codex()
        assert lineage_of(headers, {"input": [{"type": "compaction_trigger"}]}).purpose is COMPACTION

    def test_broken_metadata_leaves_what_the_headers_say(self) -> None:
        headers, _ = codex(thread_id="t-2")
        for text in ("{", "[1]", "null", '"x"', "[" * 100_000):
            told = lineage_of({**headers, "x-codex-turn-metadata": text}, {"input": "x"})
            assert told == Lineage("s", "t-2")


class TestOpencode:
    def test_a_session_without_a_parent_is_the_main_one(self) -> None:
        headers = {"x-session-affinity": "ses_1", "x-session-id": "ses_1"}
        assert lineage_of(headers, chat(("user", "x"))) == Lineage("ses_1")

    def test_a_child_session_is_an_agent(self) -> None:
        headers = {"x-session-affinity": "ses_2", "x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
        assert lineage_of(headers, chat(("user", "x"))) == Lineage("ses_2", "ses_2", "ses_1")

    def test_titles_and_summaries_are_known_by_their_system_prompts(self) -> None:
        for system, purpose in [
            ("You are a title generator. You output ONLY a thread title.", SIDE),
            ("You are a context summarization agent. You are given a conversation", COMPACTION),
            ("You are opencode, a coding agent. You are no title generator", TURN),
        ]:
            body = chat(("system", system), ("user", "x"))
            assert purpose_of(body, x_session_id="ses_1") is purpose


def test_pi_names_its_session_to_responses_servers_only() -> None:
    assert lineage_of({"session_id": "u-1"}, {"input": [{"role": "user", "content": "x"}]}) == Lineage("u-1")


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": "a reminder"}, {"type": "input_text", "text": text}]


SUMMARY_REQUESTS = {
    "pi": chat(("system", "You are a context summarization assistant. Your task is"), ("user", "<conversation>...")),
    "pi-responses": {"instructions": "You are a context summarization assistant.", "input": "<conversation>..."},
    "pi-developer": {"input": [{"role": "developer", "content": parts("You are a context summarization assistant.")}]},
    "qwen": chat(("system", "\nYou are the component that summarizes a conversation when"), ("user", "x")),
    "qwen-cached": chat(("system", "an agent"), ("user", parts("Then, produce the <state_snapshot> XML."))),
    "opencode": chat(("user", "x" * 100_000 + "\nCreate a new anchored summary from the conversation history in")),
    "terminus": chat(("user", "You are about to hand off your work to another AI agent.\nPlease provide")),
    "openhands": chat(("user", "You are maintaining a context-aware state summary for an interactive agent.")),
    "aider": chat(("system", "*Briefly* summarize this partial conversation about programming."), ("user", "x")),
    "codex": {"input": [{"role": "user", "content": parts("You are performing a CONTEXT CHECKPOINT COMPACTION.")}]},
}


@pytest.mark.parametrize("body", SUMMARY_REQUESTS.values(), ids=SUMMARY_REQUESTS)
def test_a_summary_is_known_by_the_words_that_ask_for_it(body: dict[str, Any]) -> None:
    assert purpose_of(body) is COMPACTION


def test_the_words_of_an_earlier_turn_say_nothing_of_this_one() -> None:
    asked = "You are about to hand off your work to another AI agent."
    turn = chat(("system", "an agent"), ("user", asked), ("assistant", "summary"), ("user", "Go on."))
    assert purpose_of(turn) is TURN
    assert purpose_of(chat(("user", asked), ("assistant", asked))) is TURN


def test_qwens_only_tool_for_verdicts_makes_a_side_call() -> None:
    tool = {"type": "function", "function": {"name": "respond_in_schema"}}
    assert purpose_of(chat(("user", "x"), tools=[tool])) is SIDE
    assert purpose_of(chat(("user", "x"), tools=[tool, *TOOLS])) is TURN


def test_a_task_that_speaks_of_titles_is_no_side_call() -> None:
    task = "Write a program. You are a title generator, says its prompt; [SUGGESTION MODE: is its marker."
    assert (
        purpose_of(chat(("system", "You are an agent. Generate a concise, sentence-case title"), ("user", task)))
        is TURN
    )


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    ["system", "instructions", "messages", "input", "tools", "metadata", "client_metadata", "max_tokens"]
)
_HEADERS = st.sampled_from(
    [
        "x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-request-class", "session-id", "thread-id",
        "x-codex-turn-metadata", "x-session-id", "x-parent-session-id", "session_id",
    ]
)  # fmt: skip
_ITEM = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer", 1]), "content": _JSON})


@settings(deadline=None)
@given(
    headers=st.dictionaries(_HEADERS, st.text(max_size=20) | _JSON.map(json.dumps), max_size=4),
    body=st.dictionaries(_NAMES, _JSON | st.lists(_ITEM, max_size=3), max_size=5),
)
def test_nothing_makes_it_raise(headers: dict[str, str], body: dict[str, Any]) -> None:
    lineage = lineage_of(headers, body)
    assert all(isinstance(one, str) for one in (lineage.session_id, lineage.agent_id, lineage.parent_agent_id))
