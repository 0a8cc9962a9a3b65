from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.proxy.conversation import Continued, ConversationIndex, stable_messages, without_cut_answers
from services.proxy.types import Message, ToolCall

TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "bash", "parameters": {}}},)
Stored = tuple[str, tuple[Message, ...], Message]


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str, **more: Any) -> Message:
    return Message("assistant", content, **more)


def stored(call_id: str, *messages: Message, answer: Message) -> Stored:
    return call_id, messages, answer


def match(calls: list[Stored], messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> str | None:
    index = ConversationIndex()
    for call_id, asked, answer in calls:
        index.add(call_id, index.walk(stable_messages(asked), ()).nodes[-1], answer)
    found = index.match(index.walk(stable_messages(messages), tools))
    return found.call_id if found else None


def test_longest_stored_call_is_continued() -> None:
    a = stored("a", user("1"), answer=assistant("2"))
    b = stored("b", user("1"), assistant("2"), user("3"), answer=assistant("4"))
    assert match([b, a], (user("1"), assistant("2"), user("3"), assistant("4"), user("5")), ()) == "b"
    assert match([b, a], (user("1"), assistant("2"), user("other")), ()) == "a"


def test_other_history_or_other_tools_do_not_match() -> None:
    call = stored("a", user("1"), answer=assistant("2"))
    assert match([call], (user("1"), assistant("x"), user("3")), ()) is None
    assert match([call], (user("0"), assistant("2"), user("3")), ()) is None
    assert match([call], (user("1"),), ()) is None
    assert match([call], (user("1"), assistant("2"), user("3")), TOOLS) is None


def test_tools_are_the_same_whatever_the_order_of_their_fields() -> None:
    index = ConversationIndex()
    walk = index.walk((user("1"),), TOOLS)
    index.add("a", walk.nodes[-1], assistant("2"))
    turned = ({"function": {"parameters": {}, "name": "bash"}, "type": "function"},)
    parsed_again = tuple(json.loads(json.dumps(TOOLS)))
    for tools in (turned, parsed_again):
        assert index.shares_tools("a", tools)
        assert index.walk((user("1"),), tools) == walk
    assert not index.shares_tools("a", ())
    assert not index.shares_tools("a", (*TOOLS, *TOOLS))


def test_of_tools_and_messages_only_digests_stay_in_memory() -> None:
    index = ConversationIndex()
    tracemalloc.start()
    index.walk((user("m" * 1_000_000),), ({"description": "t" * 1_000_000},))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100_000


def test_white_space_around_an_answer_and_dropped_reasoning_do_not_fork() -> None:
    call = stored("a", user("1"), answer=assistant("2\n\n", reasoning="because"))
    assert match([call], (user("1"), assistant("2"), user("3")), ()) == "a"


def test_tool_calls_are_equal_by_value_whatever_their_ids() -> None:
    def turn(one: str, two: str, answers: tuple[str, str]) -> tuple[Message, ...]:
        calls = (ToolCall(one, "bash", {"a": 1, "b": 2}), ToolCall(two, "bash", {"b": 2, "a": 1}))
        return (
            assistant("", tool_calls=calls),
            Message("tool", "x", tool_call_id=answers[0]),
            Message("tool", "y", tool_call_id=answers[1]),
        )

    call = stored("a", user("1"), *turn("p", "q", ("p", "q")), answer=assistant("ok"))
    assert match([call], (user("1"), *turn("r", "s", ("r", "s")), assistant("ok"), user("2")), ()) == "a"
    assert match([call], (user("1"), *turn("r", "s", ("s", "r")), assistant("ok"), user("2")), ()) is None


def test_changing_billing_line_does_not_fork() -> None:
    def system(stamp: str) -> Message:
        return Message("system", f"x-anthropic-billing-header: cch={stamp}\nYou are an agent.")

    call = stored("a", system("1"), user("1"), answer=assistant("2"))
    assert match([call], (system("2"), user("1"), assistant("2"), user("3")), ()) == "a"


def test_of_equal_calls_the_one_with_the_same_reasoning_then_the_newest_is_continued() -> None:
    calls = [stored(name, user("1"), answer=assistant("2", reasoning=name)) for name in ("x", "y", "z")]
    assert match(calls, (user("1"), assistant("2", reasoning="y"), user("3")), ()) == "y"
    assert match(calls, (user("1"), assistant("2"), user("3")), ()) == "z"


def test_where_a_call_is_continued_its_answer_stands_behind_its_request() -> None:
    index = ConversationIndex()
    index.add("a", index.walk((user("1"), assistant("2"), user("3")), ()).nodes[-1], assistant("4"))
    walk = index.walk((user("1"), assistant("2"), user("3"), assistant("4"), user("5")), ())
    assert index.match(walk) == Continued("a", 3)


def test_messages_that_were_sent_just_so_before_are_shared() -> None:
    index = ConversationIndex()
    index.add("a", index.walk((user("1"), assistant("2", reasoning="r"), user("3")), ()).nodes[-1], assistant("4"))

    def num_shared(*messages: Message) -> int:
        return index.num_shared("a", index.walk(messages, ()))

    assert num_shared(user("1"), assistant("2", reasoning="r"), user("3"), assistant("4")) == 3
    assert num_shared(user("1"), assistant("2"), user("3"), assistant("4")) == 1
    assert num_shared(user("0")) == 0


def test_a_walk_that_is_taken_up_from_a_stored_call_is_the_whole_walk() -> None:
    index = ConversationIndex()
    index.add("a", index.walk((user("1"), assistant("2"), user("3")), ()).nodes[-1], assistant("4"))
    whole = index.walk((user("1"), assistant("2"), user("x")), ())
    assert index.walk_on("a", 2, (user("x"),)).nodes == whole.nodes[2:]


def test_tool_call_ids_may_be_used_again_in_a_later_turn() -> None:
    def turn(call_id: str, answer: str) -> tuple[Message, ...]:
        call = ToolCall(call_id, "bash", {"a": answer})
        return (assistant("", tool_calls=(call,)), Message("tool", answer, tool_call_id=call_id))

    call = stored("a", user("1"), *turn("x", "p"), *turn("x", "q"), answer=assistant("ok"))
    renamed = (user("1"), *turn("x1", "p"), *turn("x2", "q"), assistant("ok"), user("2"))
    assert match([call], renamed, ()) == "a"


_ANY = st.builds(Message, st.sampled_from(["user", "assistant"]), st.sampled_from(["a", "b", " b"]))
_MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), st.sampled_from(["a", "b", " b"])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(st.lists(st.tuples(_MESSAGES, st.sampled_from(["a", "b"])), max_size=6), _MESSAGES)
def test_the_call_that_is_found_is_the_longest_that_begins_the_request(
    calls: list[tuple[list[Message], str]], request: list[Message]
) -> None:
    def comparable(messages: list[Message]) -> list[tuple[str, str]]:
        return [(one.role, one.content.strip() if one.role == "assistant" else one.content) for one in messages]

    index = ConversationIndex()
    lengths = []
    for number, (messages, answer) in enumerate(calls):
        index.add(str(number), index.walk(messages, ()).nodes[-1], assistant(answer))
        whole = comparable([*messages, assistant(answer)])
        if comparable(request)[: len(whole)] == whole:
            lengths.append(len(messages))
    found = index.match(index.walk(request, ()))
    assert (found.num_messages if found else None) == (max(lengths) if lengths else None)


def test_an_unknown_call_is_a_fault() -> None:
    with pytest.raises(Exception, match="no answered call"):
        ConversationIndex().walk_on("a", 0, ())


def test_the_rest_of_a_cut_answer_in_front_of_the_whole_one_is_left_out() -> None:
    user, whole = Message("user", "a"), Message("assistant", "I will look. Done.", "because of this")
    for cut in (Message("assistant", ""), Message("assistant", "\nI will "), Message("assistant", "", "because")):
        assert without_cut_answers((user, cut, whole)) == (user, whole)
    for other in (
        Message("assistant", "You will"),
        Message("assistant", "", tool_calls=(ToolCall("i", "n", {}),)),
        user,
    ):
        messages = (user, other, whole)
        assert without_cut_answers(messages) is messages
    assert without_cut_answers((user, Message("assistant", ""))) == (user, Message("assistant", ""))
