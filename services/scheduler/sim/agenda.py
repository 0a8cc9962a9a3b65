"""Simulated time: a heap of calls that are due. Ties are broken by the order in which they were entered."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """What will happen when. There is no other clock in a simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_entered = 0

    def after(self, delay_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """``call(argument)`` in ``delay_s`` seconds."""
        self._num_entered += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._num_entered, call, argument))

    def advance(self) -> bool:
        """Go on to the next call and make it; False if nothing will happen any more."""
        if not self._heap:
            return False
        self.now_s, _, call, argument = heapq.heappop(self._heap)
        call(argument)
        return True
