"""Waiting for a condition with a deadline, in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let the event loop run until a condition holds. Raises ``TimeoutError`` at the deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions look at plain state
            await asyncio.sleep(0.005)


def wait_until(
    condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "the condition holds", *, poll_s: float = 0.05
) -> Any:
    """Block until a condition gives something true; returns it. Raises ``AssertionError`` at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(poll_s)
    return value
