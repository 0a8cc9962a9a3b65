"""The text of an answer, token by token, with stop strings. Pure; it continues where another cell left off.

The text emitted depends on the token ids alone, never on how they were cut into chunks or cells: a stream that is
fed the first n tokens emits exactly what any other stream had emitted after the same n tokens. So a call that moves
loses no text and repeats none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.marks import longest_overlap

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns token ids into text as far as it is certain.

    Held back: bytes of a character that is not complete yet, and text that may be the beginning of a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        self._context_start = 0  # tokens before it no longer influence how the new ones are decoded
        self._decoded_end = 0  # tokens before it are decoded
        self._pending = ""  # decoded, but may begin a stop string
        self.stop_string = ""
        """The stop string that is complete; empty: none is."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Feeding a stopped stream is an error of the caller."""
        return bool(self.stop_string)

    def feed(self, token_id: int) -> str:
        """Add a token; returns the text that became certain. A complete stop string and all behind it is left out."""
        self._ids.append(token_id)
        context = self._decode(self._ids[self._context_start : self._decoded_end])
        text = self._decode(self._ids[self._context_start :])
        if len(text) <= len(context) or text.endswith(_INCOMPLETE):
            return ""
        self._context_start, self._decoded_end = self._decoded_end, len(self._ids)
        return self._release(text[len(context) :])

    def finish(self) -> str:
        """The text still held back, once it is certain that nothing follows."""
        context = self._decode(self._ids[self._context_start : self._decoded_end])
        text = self._decode(self._ids[self._context_start :])
        self._context_start, self._decoded_end = self._decoded_end, len(self._ids)
        released = self._release(text[len(context) :]) + ("" if self.stopped else self._pending)
        self._pending = ""
        return released

    def _release(self, text: str) -> str:
        text = self._pending + text
        self._pending = ""
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found, key=lambda one: one[0])
            return text[:at]
        held = longest_overlap(text, self._stop)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]
