"""Where reasoning ends and tool calls may begin, as far as the text so far tells."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from services.common.answer_formats import ReasoningFormat
from services.common.marks import longest_overlap


class _Phase(StrEnum):
    BEGINNING = "beginning"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningSplit:
    """Tells an answer's reasoning from its content (text and tool calls), however the text is cut into pieces.

    Both are the model's own, character by character. An answer has reasoning if it begins with the start mark (white
    space before it is left out), or if the prompt ended inside the reasoning. An end mark elsewhere is text.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool, call_openers: Sequence[str] = ()) -> None:
        """``is_open``: the prompt ended inside the reasoning. ``call_openers``: these end it too, and are content."""
        self._form = form
        self._is_open = is_open
        self._ends = (form.end, *call_openers)
        self._phase = _Phase.BEGINNING
        self._pending = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that are certain now."""
        self._pending += text
        if self._phase is _Phase.BEGINNING:
            self._begin()
        if self._phase is _Phase.BEGINNING:
            return "", ""
        reasoning = self._take_reasoning() if self._phase is _Phase.REASONING else ""
        return reasoning, self._take_all() if self._phase is _Phase.CONTENT else ""

    def finish(self) -> tuple[str, str]:
        """The rest."""
        rest = self._take_all()
        in_reasoning = self._phase is _Phase.REASONING or (self._phase is _Phase.BEGINNING and self._is_open)
        return (rest, "") if in_reasoning else ("", rest)

    def _begin(self) -> None:
        start, text = self._form.start, self._pending.lstrip()
        if text.startswith(start):
            self._pending = text[len(start) :]
            self._phase = _Phase.REASONING
        elif not start.startswith(text):
            self._phase = _Phase.REASONING if self._is_open else _Phase.CONTENT

    def _take_reasoning(self) -> str:
        text = self._pending
        found = find_first(text, self._ends)
        if found is None:
            size = len(text) - longest_overlap(text, self._ends)
            self._pending = text[size:]
            return text[:size]
        at, mark = found
        self._pending = text[at + len(mark) :] if mark == self._form.end else text[at:]
        self._phase = _Phase.CONTENT
        return text[:at]

    def _take_all(self) -> str:
        text, self._pending = self._pending, ""
        return text


class CallSplit:
    """Tells the text before the first tool call from what may be calls, however the content is cut into pieces.

    White space at the beginning is held back until text follows: alone before calls it is not part of the answer.
    """

    def __init__(self, openers: Sequence[str], *, only_at_start: bool = False) -> None:
        """``only_at_start``: what begins with no opener has no calls."""
        self._openers = openers
        self._is_undecided = only_at_start
        self._pending = ""
        self._is_blank = True
        self._body: list[str] = []

    @property
    def has_body(self) -> bool:
        """Whether a call may have begun."""
        return bool(self._body)

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if self._body:
            self._body.append(text)
            return ""
        self._pending += text
        if self._is_undecided:
            self._decide()
        found = find_first(self._pending, self._openers)
        if found is not None:
            self._body.append(self._pending[found[0] :])
            self._pending = self._pending[: found[0]]
        size = len(self._pending) - (0 if self._body else longest_overlap(self._pending, self._openers))
        certain = self._pending[:size]
        if self._is_blank and not certain.strip():
            return ""
        self._is_blank = False
        self._pending = self._pending[size:]
        return certain

    def finish(self) -> tuple[str, str]:
        """The text held back that stands before the calls, and what may be calls."""
        text, self._pending = self._pending, ""
        return text, "".join(self._body)

    def _decide(self) -> None:
        text = self._pending.lstrip()
        if any(opener.startswith(text) for opener in self._openers):
            return
        self._is_undecided = False
        if not text.startswith(tuple(self._openers)):
            self._openers = ()


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of some marks stands, and which; the longest of those that begin there."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark
