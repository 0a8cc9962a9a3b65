"""Text of an answer: the same however the tokens were cut, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.text_stream import TextStream


def decode(ids: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def emitted(ids: Sequence[int], stop: Sequence[str] = (), skip: int = 0) -> tuple[str, int]:
    """The text that a stream emits for all but the first ``skip`` tokens, and how many tokens it took."""
    stream = TextStream(decode, stop)
    text = ""
    for index, token in enumerate(ids):
        piece = stream.feed(token)
        text += piece if index >= skip else ""
        if stream.stopped:
            return text, index + 1
    return text + stream.finish(), len(ids)


def test_a_character_is_emitted_once_it_is_whole() -> None:
    stream = TextStream(decode)
    fox = "🦊!".encode()
    assert [stream.feed(byte) for byte in fox] == ["", "", "", "🦊", "!"]


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    assert emitted("a🦊".encode()[:-1])[0] == "a\ufffd"


@given(st.text(max_size=20))
def test_all_text_is_emitted(text: str) -> None:
    assert emitted(text.encode())[0] == text


@given(st.binary(max_size=20))
def test_bytes_that_are_no_text_are_emitted_as_they_decode(data: bytes) -> None:
    assert emitted(data)[0].replace("\ufffd", "") == decode(data).replace("\ufffd", "")


@given(st.text(alphabet="abé🦊", max_size=12), st.text(alphabet="abé🦊", min_size=1, max_size=3), st.integers(0, 12))
def test_a_call_that_moves_neither_loses_nor_repeats_text(text: str, stop: str, cut: int) -> None:
    ids = text.encode()
    whole, num_tokens = emitted(ids, [stop])
    cut = min(cut, num_tokens - 1) if num_tokens else 0
    before = TextStream(decode, [stop])
    first_part = "".join(before.feed(token) for token in ids[:cut])
    assert first_part + emitted(ids[:num_tokens], [stop], skip=cut)[0] == whole


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    got, num_tokens = emitted(text.encode(), stops)
    if not ends:
        assert (got, num_tokens) == (text, len(text))
    else:
        assert num_tokens == min(ends)
        complete = [text.find(stop) for stop in stops if stop in text[:num_tokens]]
        assert got == text[: min(complete)]


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ["END"])
    assert [stream.feed(byte) for byte in b"xENx"] == ["x", "", "", "ENx"]
    assert [stream.feed(byte) for byte in b"EN"] == ["", ""]
    assert stream.finish() == "EN"


def test_a_real_tokenizer_streams_what_it_decodes_at_once(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from services.common.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-qwen3", tmp_path))
    ids = tokenizer.encode("Create a file.\n\n```bash\necho 'grüß 🦊' > a.txt\n```<|im_end|>")
    stream = TextStream(lambda part: tokenizer.decode(part, skip_special_tokens=True))
    text = "".join(stream.feed(token) for token in ids) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert text.endswith("```")


@pytest.mark.parametrize("stop", [(), ("",)])
def test_no_stop_string_never_stops(stop: tuple[str, ...]) -> None:
    assert emitted(b"abc", stop) == ("abc", 3)


@pytest.mark.parametrize(
    ("stops", "which"),
    [(["END"], "END"), (["x", "END", "EN"], "EN"), (["ND", "END"], "END"), (["D", "ND"], "ND"), (["x"], "")],
)
def test_it_says_which_stop_string_ended_it(stops: list[str], which: str) -> None:
    stream = TextStream(decode, stops)
    for byte in b"a END":
        stream.feed(byte)
        if stream.stopped:
            break
    stream.finish()
    assert (stream.stop_string, stream.stopped) == (which, bool(which))
