"""Requests of an attempt that are one call: made twice at a time, or made again because an answer was cut.

A request that is made again while its call is generated shares the generation. One whose call was cut goes on behind
the tokens that there are. One whose answer was complete but did not reach its harness gets that answer. One whose
answer did reach it asks for another sample: the tree tells such siblings apart, and trains the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from services.proxy.types import CanonicalRequest
from services.trajectory.records import request_key
from services.trajectory.types import PartialAnswer, SharedAnswer

LEASE_S = 6.0
"""A call in flight of which its proxy replica says nothing for so long is lost with the replica."""
_MAX_KEPT = 8
"""Answers kept for requests that may be made again; the newest are."""


def same_call_key(request: CanonicalRequest, last_node: int) -> Hashable:
    """Equal for requests that are the same call. ``last_node``: where the messages end in the tree of messages."""
    key = request_key(
        request.requested_sampling,
        choice=request.choice,
        tool_choice=asdict(request.tool_choice),
        response_schema=request.response_schema,
        agent_id=request.lineage.agent_id,
        purpose=request.lineage.purpose,
    )
    return last_node, key


@dataclass
class RequestBook:
    """The requests of one attempt that may be made again."""

    _in_flight: dict[Hashable, str] = field(default_factory=dict)
    _keys: dict[str, Hashable] = field(default_factory=dict)
    """Of the calls in flight and of the answers kept."""
    _renewed_at_s: dict[str, float] = field(default_factory=dict)
    _partial: dict[Hashable, PartialAnswer] = field(default_factory=dict)
    _answered: dict[Hashable, SharedAnswer] = field(default_factory=dict)
    _undelivered: set[str] = field(default_factory=set)

    def shared_call(self, key: Hashable, *, is_retry: bool) -> str | None:
        """The call whose answer a request is to get; None: it is a call of its own.

        ``is_retry``: the client says that it sends the request again, so whatever it got was no use to it.
        """
        if key in self._in_flight:
            return self._in_flight[key]
        answered = self._answered.get(key)
        if answered is None:
            return None
        call_id = answered.record.call_id
        return call_id if is_retry or call_id in self._undelivered else None

    def begin(self, key: Hashable, call_id: str, now_s: float) -> PartialAnswer | None:
        """Note a call that is generated now; what it goes on behind."""
        self._in_flight[key], self._keys[call_id], self._renewed_at_s[call_id] = call_id, key, now_s
        self._forget_answer(key)
        return self._partial.pop(key, None)

    def renew(self, call_ids: Sequence[str], now_s: float) -> None:
        """Note that calls are still being generated."""
        self._renewed_at_s.update((call_id, now_s) for call_id in call_ids if call_id in self._renewed_at_s)

    def is_in_flight(self, call_id: str) -> bool:
        return call_id in self._renewed_at_s

    def is_lost(self, call_id: str, now_s: float) -> bool:
        """Whether a call in flight was lost with its proxy replica."""
        return now_s - self._renewed_at_s.get(call_id, now_s) > LEASE_S

    def abandon(self, call_id: str, partial: PartialAnswer | None) -> None:
        """Note that a call will not be completed, and what the same request may go on behind."""
        key = self._end(call_id)
        if key is not None and partial is not None:
            self._partial[key] = partial
            if len(self._partial) > _MAX_KEPT:
                del self._partial[next(iter(self._partial))]

    def complete(self, shared: SharedAnswer) -> None:
        """Note a completed call."""
        call_id = shared.record.call_id
        key = self._end(call_id)
        if key is not None:
            self._keys[call_id], self._answered[key] = key, shared
            if len(self._answered) > _MAX_KEPT:
                self._forget_answer(next(iter(self._answered)))

    def note_undelivered(self, call_id: str) -> None:
        """Note that an answer did not reach its harness."""
        if call_id in self._keys and call_id not in self._renewed_at_s:
            self._undelivered.add(call_id)

    def take_answer(self, call_id: str) -> SharedAnswer | None:
        """The answer of a completed call, which is delivered now."""
        self._undelivered.discard(call_id)
        key = self._keys.get(call_id)
        answered = self._answered.get(key) if key is not None else None
        return answered if answered is not None and answered.record.call_id == call_id else None

    def _end(self, call_id: str) -> Hashable | None:
        self._renewed_at_s.pop(call_id, None)
        key = self._keys.pop(call_id, None)
        if key is not None and self._in_flight.get(key) == call_id:
            del self._in_flight[key]
        return key

    def _forget_answer(self, key: Hashable) -> None:
        answered = self._answered.pop(key, None)
        if answered is not None:
            self._keys.pop(answered.record.call_id, None)
            self._undelivered.discard(answered.record.call_id)
