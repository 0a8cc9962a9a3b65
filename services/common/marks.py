"""Marks in a text that comes in pieces: the end of a piece may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


def longest_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a mark without completing it."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
