"""Reasoning, text and what may be calls, the same however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.answer_formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat
from services.proxy.parsing.split import CallSplit, ReasoningSplit, find_first

FORM = ReasoningFormat("<t>", "</t>")
PIECES = st.lists(st.sampled_from(["<t>", "</t>", "<c>", "<", "t>", "a", " ", "\n", "/"]), max_size=10).map("".join)


def split(pieces: list[str], *, is_open: bool = False, openers: tuple[str, ...] = ()) -> tuple[str, str]:
    reader = ReasoningSplit(FORM, is_open=is_open, call_openers=openers)
    parts = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    return "".join(one for one, _ in parts), "".join(other for _, other in parts)


def cut(text: str, ends: list[int]) -> list[str]:
    places = sorted({min(end, len(text)) for end in ends} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<t>why</t>so", False, ("why", "so")),
        ("\n<t>\nwhy\n</t>\n\nso\n", False, ("\nwhy\n", "\n\nso\n")),
        ("<t>why", False, ("why", "")),
        ("so", False, ("", "so")),
        ("so <t>x</t>", False, ("", "so <t>x</t>")),
        ("so</t>", False, ("", "so</t>")),
        ("<t>a</t>b<t>c</t>d", False, ("a", "b<t>c</t>d")),
        ("why</t>so", True, ("why", "so")),
        ("\n why", True, ("\n why", "")),
        ("<t>why</t>so", True, ("why", "so")),
        ("</t>so", True, ("", "so")),
        ("<t", False, ("", "<t")),
        ("<t", True, ("<t", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_stands_at_the_beginning_between_its_marks(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    assert split([text], is_open=is_open) == expected
    assert split(list(text), is_open=is_open) == expected


def test_a_call_ends_the_reasoning_where_the_format_says_so() -> None:
    assert split(list("<t>why<c>x"), openers=("<c>",)) == ("why", "<c>x")
    assert split(list("<t>why<c>x")) == ("why<c>x", "")


@given(PIECES, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_reasoning_is_the_same_however_the_text_is_cut(text: str, is_open: bool, ends: list[int]) -> None:
    assert split(cut(text, ends), is_open=is_open, openers=("<c>",)) == split([text], is_open=is_open, openers=("<c>",))


@given(PIECES, st.booleans())
def test_nothing_but_the_marks_is_lost(text: str, is_open: bool) -> None:
    reasoning, content = split([text], is_open=is_open)
    marks = (f"{start}{reasoning}{end}{content}" for start in ("", "<t>") for end in ("", "</t>"))
    assert any(text.endswith(kept) and not text.removesuffix(kept).strip() for kept in marks)


@given(PIECES, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_the_text_before_calls_is_the_same_however_it_is_cut(text: str, at_start: bool, ends: list[int]) -> None:
    def parts(pieces: list[str]) -> tuple[str, str]:
        reader = CallSplit(("<c>", "<t>"), only_at_start=at_start)
        certain = "".join(reader.feed(piece) for piece in pieces)
        held, body = reader.finish()
        return certain + held, body

    head, body = parts(cut(text, ends))
    assert (head, body) == parts([text])
    assert head + body == text
    assert not body or body.startswith(("<c>", "<t>"))
    assert at_start or find_first(head, ("<c>", "<t>")) is None


def test_text_goes_on_as_soon_as_it_is_certain() -> None:
    reader = CallSplit(("<call>",))
    assert [reader.feed(piece) for piece in ("\n", "so <", "ca", "t", "<call>", "x")] == [
        "",
        "\nso ",
        "",
        "<cat",
        "",
        "",
    ]
    assert reader.finish() == ("", "<call>x")


def test_blank_text_is_held_back_until_it_is_known_what_follows() -> None:
    reader = CallSplit(("<call>",))
    assert [reader.feed(piece) for piece in ("\n", "  ", "<call>{}")] == ["", "", ""]
    assert reader.finish() == ("\n  ", "<call>{}")


def test_what_begins_with_no_opener_has_no_call_where_calls_stand_at_the_start() -> None:
    reader = CallSplit(("[",), only_at_start=True)
    assert [reader.feed(piece) for piece in ("see ", "[1]")] == ["see ", "[1]"]


def test_no_mark_hides_in_another_of_its_format() -> None:
    """Else the first mark of a text would depend on how much of it is there."""
    sets = [form.openers for form in TOOL_FORMATS.values()]
    sets += [(form.end, *form.call_openers) for form in REASONING_FORMATS.values() if form.end]
    for marks in sets:
        for one, other in itertools.permutations(marks, 2):
            assert one not in other[1:]
