"""What a model wrote, told apart into reasoning, text and tool calls: one policy for training and evaluation."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from services.proxy.types import CanonicalRequest, Delta, DeltaKind, ParsedAnswer


class AnswerReader(Protocol):
    """Reads one answer. The deltas, put together, are the parsed answer, however the text came in pieces."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that are certain now."""
        ...

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        """The rest of the deltas, and the whole answer. Nothing is fed any more."""
        ...


@runtime_checkable
class SlowReader(Protocol):
    """A reader whose ``finish`` is to be called in a thread: it may take long, and the first time it may have to wait
    for what takes seconds to import."""

    @property
    def is_slow(self) -> bool:
        """Whether it would wait now: ``prepare`` first, in a thread."""
        ...

    def prepare(self) -> None:
        """Returns when ``finish`` will not wait any more."""
        ...


class AnswerParser(Protocol):
    """Reads the answers of one model."""

    def reader(self, request: CanonicalRequest, call_id: str) -> AnswerReader:
        """A reader for the answer to a request. ``call_id`` is what the ids of its tool calls are made of: the same
        answer read again has the same ids."""
        ...


class PlainParser:
    """The ``AnswerParser`` of a model with no tool calls and no reasoning: all is text."""

    def reader(self, request: CanonicalRequest, call_id: str) -> AnswerReader:
        return _PlainReader()


class _PlainReader:
    def __init__(self) -> None:
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        self._texts.append(text)
        return [Delta(DeltaKind.TEXT, text)] if text else []

    def finish(self) -> tuple[list[Delta], ParsedAnswer]:
        return [], ParsedAnswer("".join(self._texts))
