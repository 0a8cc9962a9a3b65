from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import TemplateError
from services.proxy.renderer import HfRenderer
from services.proxy.session import Bridge, Prompt, StoredCall
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


@dataclass(frozen=True)
class Stored:
    """A stored call, and its answer as the harness saw it."""

    call: StoredCall
    answer: Message


def answered(
    asked: CanonicalRequest,
    prompt: Prompt,
    text: str,
    using: HfRenderer,
    *,
    end: Sequence[int] = (IM_END,),
    seen: Message | None = None,
) -> Stored:
    """The stored call of a model that answered ``text``."""
    return sampled(asked, prompt, [*using.encode(text), *end], seen or assistant(text))


def sampled(asked: CanonicalRequest, prompt: Prompt, output_ids: Sequence[int], answer: Message) -> Stored:
    output = np.asarray(output_ids, dtype=np.int32)
    last = output_ids[-1] if output_ids else -1
    return Stored(StoredCall("c", len(asked.messages), (prompt.ids, output), last), answer)


def build_prompt(using: Any, stored: Stored | None, asked: CanonicalRequest) -> Prompt:
    return Bridge(using).prompt(stored and stored.call, asked)


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
    assert bridged.num_new_tokens == len(full) - sum(map(len, stored.call.history))


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
    stored = sampled(first, prompt, [*letters, IM_END], assistant("done"))

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
    stored: Stored | None = None
    bridge = Bridge(using)
    canonical = True
    for asked, text, is_whole in turns:
        messages = (*messages, user(asked))
        now = request(*messages)
        prompt = bridge.prompt(stored and stored.call, now)
        rendered = using.render(messages, (), True)
        assert not prompt.is_false_fork
        assert using.decode(prompt.ids.tolist()) == rendered
        if canonical:
            assert prompt.ids.tolist() == using.encode(rendered)
        end = (IM_END,) if is_whole else ()
        stored = answered(now, prompt, text, using, end=end)
        messages = (*messages, assistant(text))
        so_far = [*prompt.ids.tolist(), *using.encode(text), IM_END]
        canonical = canonical and so_far == using.encode(rendered + text + "<|im_end|>")


class Seeing:
    """A renderer that notes how many messages it renders."""

    def __init__(self, inner: HfRenderer) -> None:
        self.inner = inner
        self.rendered: list[int] = []

    @property
    def end_of_turn(self) -> Mapping[int, str]:
        return self.inner.end_of_turn

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        self.rendered.append(len(messages))
        return self.inner.render(messages, tools, add_generation_prompt)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)


@pytest.mark.parametrize("template", [CHATML, CHATML_DEFAULT_SYSTEM, TOOLS_AND_REASONING])
def test_of_a_long_conversation_only_a_window_is_rendered(template: str) -> None:
    using = Seeing(renderer(template))
    whole = renderer(template)
    bridge = Bridge(using)
    asked = request(Message("system", "You are an agent."), user("fix it"))
    prompt = bridge.prompt(None, asked)
    for turn in range(40):
        stored = answered(asked, prompt, f"step {turn}", using.inner)
        asked = request(*asked.messages, stored.answer, user(f"line {turn}"))
        using.rendered.clear()
        prompt = bridge.prompt(stored.call, asked)
        assert whole.decode(prompt.ids.tolist()) == whole.render(asked.messages, (), True)
        num_messages = len(asked.messages)
        if num_messages > 16 and (num_messages - 2).bit_length() == num_messages.bit_length():
            assert max(using.rendered) == 4  # system, the last user message, the answer, what is new


COUNTS_MESSAGES = CHATML.replace("{% if add_generation_prompt", "({{ messages | length }}){% if add_generation_prompt")


def test_a_template_that_looks_back_is_rendered_as_a_whole() -> None:
    using = renderer(COUNTS_MESSAGES)
    bridge = Bridge(using)
    asked = request(user("fix it"))
    prompt = bridge.prompt(None, asked)
    for turn in range(30):
        stored = answered(asked, prompt, f"step {turn}", using)
        asked = request(*asked.messages, stored.answer, user(f"line {turn}"))
        prompt = bridge.prompt(stored.call, asked)
        assert using.decode(prompt.ids.tolist()).endswith(f"({len(asked.messages)})<|im_start|>assistant\n")
