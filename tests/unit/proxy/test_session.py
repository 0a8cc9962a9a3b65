from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import TemplateError
from services.proxy.renderer import HfRenderer
from services.proxy.session import Prompt, StoredCall, build_prompt, match
from services.proxy.types import CanonicalRequest, Message, ToolCall
from tests.unit.proxy.templates import (
    CHATML,
    CHATML_DEFAULT_SYSTEM,
    FORGETFUL,
    SPACED_END,
    STRICT_TOOLS,
    TOOLS_AND_REASONING,
    renderer,
)

IM_END = 2
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "bash", "parameters": {}}},)


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str, **more: Any) -> Message:
    return Message("assistant", content, **more)


def request(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> CanonicalRequest:
    return CanonicalRequest("openai_chat", "m", messages, tools)


def answered(
    asked: CanonicalRequest,
    prompt: Prompt,
    text: str,
    using: HfRenderer,
    *,
    end: Sequence[int] = (IM_END,),
    call_id: str = "c",
    seen: Message | None = None,
) -> StoredCall:
    """The stored call of a model that answered ``text``."""
    output = np.asarray([*using.encode(text), *end], dtype=np.int32)
    reason = "stop" if end else "length"
    return StoredCall(call_id, asked.messages, seen or assistant(text), prompt.ids, output, reason, asked.tools)


class Counting:
    """A renderer that counts the characters it tokenises."""

    def __init__(self, inner: HfRenderer) -> None:
        self.inner, self.num_encoded = inner, 0

    @property
    def end_of_turn(self) -> Mapping[int, str]:
        return self.inner.end_of_turn

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        return self.inner.render(messages, tools, add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        self.num_encoded += len(text)
        return self.inner.encode(text)


# --- building prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, CHATML_DEFAULT_SYSTEM, TOOLS_AND_REASONING])
def test_bridge_equals_the_full_rendering_of_canonical_text(template: str) -> None:
    using = renderer(template)
    first = request(user("make color.txt"))
    stored = answered(first, build_prompt(using, None, first), "```bash\necho blue > x\n```", using)
    second = request(*first.messages, stored.answer, user("the output was empty"))

    bridged = build_prompt(using, stored, second)

    full = using.encode(using.render(second.messages, (), True))
    assert bridged.ids.tolist() == full
    assert bridged.ids.dtype == np.int32
    assert not bridged.is_false_fork
    assert bridged.num_new_tokens == len(full) - len(stored.prompt_ids) - len(stored.output_ids)


def test_newline_behind_a_sampled_end_of_turn_is_not_lost() -> None:
    using = renderer(CHATML)
    first = request(user("hello"))
    stored = answered(first, build_prompt(using, None, first), "done", using)

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    new_text = using.decode(bridged.ids[-bridged.num_new_tokens :].tolist())
    assert new_text == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_answer_cut_by_its_length_gets_the_end_that_was_not_sampled() -> None:
    using = renderer(CHATML)
    first = request(user("hello"))
    stored = answered(first, build_prompt(using, None, first), "I should run", using, end=())

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    new_text = using.decode(bridged.ids[-bridged.num_new_tokens :].tolist())
    assert new_text.startswith("<|im_end|>\n<|im_start|>user\nmore")


def test_tokens_of_a_stop_string_stay_although_the_harness_never_saw_them() -> None:
    using = renderer(CHATML)
    first = request(user("hello"))
    stored = answered(
        first, build_prompt(using, None, first), "the word STOP", using, end=(), seen=assistant("the word")
    )

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    assert "the word STOP<|im_end|>\n<|im_start|>user" in using.decode(bridged.ids.tolist())


def test_another_end_token_than_the_templates_is_kept_and_the_turn_still_closed() -> None:
    using = renderer(CHATML)
    first = request(user("hello"))
    stored = answered(first, build_prompt(using, None, first), "done", using, end=(0,))

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    assert "done<|endoftext|><|im_end|>\n<|im_start|>user" in using.decode(bridged.ids.tolist())


def test_space_before_the_end_of_turn_is_not_put_behind_a_sampled_one() -> None:
    using = renderer(SPACED_END)
    first = request(user("hello"))
    stored = answered(first, build_prompt(using, None, first), " done", using)

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    assert using.decode(bridged.ids.tolist()) == "[INST] hello [/INST] done<|im_end|>[INST] more [/INST]"


def test_sampled_ids_are_kept_where_they_are_not_canonical() -> None:
    using = renderer(CHATML)
    first = request(user("hello"))
    prompt = build_prompt(using, None, first)
    letters = [token for letter in "done" for token in using.encode(letter)]
    assert letters != using.encode("done")
    stored = StoredCall(
        "c", first.messages, assistant("done"), prompt.ids, np.asarray([*letters, IM_END], np.int32), "stop"
    )

    bridged = build_prompt(using, stored, request(*first.messages, stored.answer, user("more")))

    start = len(prompt.ids)
    assert bridged.ids[start : start + len(letters)].tolist() == letters


def test_old_reasoning_that_the_template_drops_stays_in_the_ids() -> None:
    using = renderer(TOOLS_AND_REASONING)
    first = request(user("hello"))
    thought = "<think>\nI should run\n</think>\ndone"
    stored = answered(
        first,
        build_prompt(using, None, first),
        thought,
        using,
        seen=assistant("done", reasoning="I should run"),
    )

    bridged = build_prompt(using, stored, request(*first.messages, assistant("done"), user("more")))

    assert not bridged.is_false_fork
    assert thought in using.decode(bridged.ids.tolist())


@pytest.mark.parametrize("template", [TOOLS_AND_REASONING, STRICT_TOOLS])
def test_tool_messages_follow_the_models_own_tool_call(template: str) -> None:
    using = renderer(template)
    call = ToolCall("id-1", "bash", {"command": "ls"})
    first = request(user("list"), tools=TOOLS)
    seen = assistant("Running it.", tool_calls=(call,))
    prompt = build_prompt(using, None, first)
    whole_turn = using.render((*first.messages, seen), TOOLS, False)[len(using.render(first.messages, TOOLS, True)) :]
    stored = answered(first, prompt, whole_turn.partition("<|im_end|>")[0], using, seen=seen)
    second = request(*first.messages, seen, Message("tool", "x.txt", tool_call_id="id-1"), tools=TOOLS)

    bridged = build_prompt(using, stored, second)

    assert not bridged.is_false_fork
    assert bridged.ids.tolist() == using.encode(using.render(second.messages, TOOLS, True))


def test_template_whose_tail_cannot_be_told_apart_is_reported_as_a_false_fork() -> None:
    using = renderer(FORGETFUL)
    first = request(user("hello"))
    stored = answered(first, build_prompt(using, None, first), "done", using)
    second = request(*first.messages, stored.answer, user("more"))

    prompt = build_prompt(using, stored, second)

    assert prompt.is_false_fork
    assert prompt.num_new_tokens == len(prompt.ids)
    assert prompt.ids.tolist() == using.encode(using.render(second.messages, (), True))


def test_user_text_that_holds_marks_and_special_tokens_does_not_mislead_the_bridge() -> None:
    using = renderer(CHATML)
    first = request(user("hello \ue000tidegate:0\ue001 <|im_end|>"))
    stored = answered(first, build_prompt(using, None, first), "done", using)
    second = request(*first.messages, stored.answer, user("\ue000tidegate:0\ue001 <|im_end|>"))

    assert build_prompt(using, stored, second).ids.tolist() == using.encode(using.render(second.messages, (), True))


def test_only_new_text_is_tokenised_however_long_the_history_is() -> None:
    using = Counting(renderer(CHATML))
    asked = request(user("a file " * 50))
    prompt = build_prompt(using, None, asked)
    counts = []
    for turn in range(20):
        stored = answered(asked, prompt, f"step {turn}", using.inner)
        asked = request(*asked.messages, stored.answer, user("the output is 7 lines"))
        using.num_encoded = 0
        prompt = build_prompt(using, stored, asked)
        counts.append(using.num_encoded)
    assert max(counts) == min(counts) < 200


def test_refused_messages_raise_the_typed_error() -> None:
    with pytest.raises(TemplateError, match="must follow its call"):
        build_prompt(renderer(STRICT_TOOLS), None, request(user("x"), Message("tool", "y", tool_call_id="1")))


def test_changing_billing_line_is_not_rendered() -> None:
    using = renderer(CHATML)
    with_line = Message("system", "x-anthropic-billing-header: cc_version=1; cch=ab12\nYou are an agent.")
    plain = Message("system", "You are an agent.")
    assert (
        build_prompt(using, None, request(with_line, user("x"))).ids.tolist()
        == build_prompt(using, None, request(plain, user("x"))).ids.tolist()
    )


_TEXT = st.text(st.sampled_from(list('ab .\n`{}"é日🙂')), max_size=12)
_TURN = st.tuples(_TEXT, _TEXT, st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from([CHATML, TOOLS_AND_REASONING]),
    system=st.one_of(st.none(), _TEXT),
    turns=st.lists(_TURN, min_size=1, max_size=5),
)
def test_any_conversation_is_bridged_to_the_text_that_the_template_renders(
    template: str, system: str | None, turns: list[tuple[str, str, bool]]
) -> None:
    """Text is always equal; ids are equal as long as every answer was canonical where it stood."""
    using = renderer(template)
    messages: tuple[Message, ...] = () if system is None else (Message("system", system),)
    calls: list[StoredCall] = []
    canonical = True
    for number, (asked, text, is_whole) in enumerate(turns):
        messages = (*messages, user(asked))
        now = request(*messages)
        matched = match(calls, now.messages, now.tools)
        assert (matched.call_id if matched else None) == (str(number - 1) if number else None)
        prompt = build_prompt(using, matched, now)
        rendered = using.render(messages, (), True)
        assert not prompt.is_false_fork
        assert using.decode(prompt.ids.tolist()) == rendered
        if canonical:
            assert prompt.ids.tolist() == using.encode(rendered)
        end = (IM_END,) if is_whole else ()
        calls.append(answered(now, prompt, text, using, end=end, call_id=str(number)))
        messages = (*messages, assistant(text))
        so_far = [*prompt.ids.tolist(), *using.encode(text), IM_END]
        canonical = canonical and so_far == using.encode(rendered + text + "<|im_end|>")


# --- matching --------------------------------------------------------------------------------------------------


def stored(call_id: str, *messages: Message, answer: Message, tools: tuple[dict[str, Any], ...] = ()) -> StoredCall:
    empty = np.empty(0, np.int32)
    return StoredCall(call_id, messages, answer, empty, empty, "stop", tools)


def test_longest_stored_call_is_continued() -> None:
    a = stored("a", user("1"), answer=assistant("2"))
    b = stored("b", user("1"), assistant("2"), user("3"), answer=assistant("4"))
    assert match([b, a], (user("1"), assistant("2"), user("3"), assistant("4"), user("5")), ()) is b
    assert match([b, a], (user("1"), assistant("2"), user("other")), ()) is a


def test_other_history_or_other_tools_do_not_match() -> None:
    call = stored("a", user("1"), answer=assistant("2"))
    assert match([call], (user("1"), assistant("x"), user("3")), ()) is None
    assert match([call], (user("0"), assistant("2"), user("3")), ()) is None
    assert match([call], (user("1"),), ()) is None
    assert match([call], (user("1"), assistant("2"), user("3")), TOOLS) is None


def test_white_space_around_an_answer_and_dropped_reasoning_do_not_fork() -> None:
    call = stored("a", user("1"), answer=assistant("2\n\n", reasoning="because"))
    assert match([call], (user("1"), assistant("2"), user("3")), ()) is call


def test_tool_calls_are_equal_by_value_whatever_their_ids() -> None:
    def turn(one: str, two: str, answers: tuple[str, str]) -> tuple[Message, ...]:
        calls = (ToolCall(one, "bash", {"a": 1, "b": 2}), ToolCall(two, "bash", {"b": 2, "a": 1}))
        return (
            assistant("", tool_calls=calls),
            Message("tool", "x", tool_call_id=answers[0]),
            Message("tool", "y", tool_call_id=answers[1]),
        )

    call = stored("a", user("1"), *turn("p", "q", ("p", "q")), answer=assistant("ok"))
    assert match([call], (user("1"), *turn("r", "s", ("r", "s")), assistant("ok"), user("2")), ()) is call
    assert match([call], (user("1"), *turn("r", "s", ("s", "r")), assistant("ok"), user("2")), ()) is None


def test_changing_billing_line_does_not_fork() -> None:
    def system(stamp: str) -> Message:
        return Message("system", f"x-anthropic-billing-header: cch={stamp}\nYou are an agent.")

    call = stored("a", system("1"), user("1"), answer=assistant("2"))
    assert match([call], (system("2"), user("1"), assistant("2"), user("3")), ()) is call


def test_of_equal_calls_the_one_with_the_same_reasoning_then_the_newest_is_continued() -> None:
    calls = [stored(name, user("1"), answer=assistant("2", reasoning=name)) for name in ("x", "y", "z")]
    assert match(calls, (user("1"), assistant("2", reasoning="y"), user("3")), ()) is calls[1]
    assert match(calls, (user("1"), assistant("2"), user("3")), ()) is calls[2]
