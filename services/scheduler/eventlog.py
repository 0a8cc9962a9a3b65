"""The log of events and decisions: the newest in memory for watchers, all of them in a JSON Lines file."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

from services.scheduler.actions import Decision
from services.scheduler.codec import encode
from services.scheduler.events import Event
from services.scheduler.options import JobOptions
from services.scheduler.types import LoggedDecision, LoggedEvent, ResumeState

EVENTS_SKIPPED = "EventsSkipped"
"""Kind of the record that a watcher gets in place of records that it was too slow (or came too late) for."""


class EventLog:
    """Numbered records, in the order in which the core took the events in.

    With a path every record also becomes a line of that file. The first line of each start (``JobStarted``) holds
    the options and the resume state, so that the core can be replayed from the file alone.
    """

    def __init__(self, path: Path | None, num_kept: int = 2000) -> None:
        self._records: deque[LoggedEvent] = deque(maxlen=num_kept)
        self._decisions: deque[LoggedDecision] = deque(maxlen=num_kept)
        self._sequence = 0
        self._file: TextIO | None = None
        self._changed = asyncio.Condition()
        self.is_closed = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._sequence = _mend(path)
            self._file = path.open("a", encoding="utf-8")

    def start(self, at_s: float, options: JobOptions, resume: ResumeState | None) -> None:
        """The first record of a start."""
        self._add("JobStarted", at_s, {"options": encode(options), "resume": encode(resume)}, [])

    def append(self, at_s: float, event: Event, decisions: list[Decision]) -> None:
        """Record an event with what was decided about it."""
        self._add(type(event).__name__, at_s, encode(event), decisions)

    def note(self, at_s: float, kind: str, payload: dict[str, Any], decisions: list[Decision]) -> None:
        """Record something that was not an event of the core."""
        self._add(kind, at_s, payload, decisions)

    def _add(self, kind: str, at_s: float, payload: dict[str, Any], decisions: list[Decision]) -> None:
        self._sequence += 1
        logged = tuple(
            LoggedDecision(
                self._sequence, at_s, type(decision.action).__name__, encode(decision.action), decision.reason
            )
            for decision in decisions
        )
        self._records.append(LoggedEvent(self._sequence, at_s, kind, payload, logged))
        self._decisions.extend(logged)
        if self._file is not None:
            line = {
                "sequence": self._sequence,
                "at_s": at_s,
                "kind": kind,
                "payload": payload,
                "decisions": [
                    {"action": decision.action, "payload": decision.payload, "reason": decision.reason}
                    for decision in logged
                ],
            }
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()

    async def wake_watchers(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """No more records; watchers end once they have seen the last one."""
        self.is_closed = True
        if self._file is not None:
            self._file.close()
            self._file = None
        await self.wake_watchers()

    def decisions(self, limit: int) -> list[LoggedDecision]:
        """The newest decisions, oldest first; all that are kept if ``limit`` is 0."""
        return list(self._decisions)[-limit:] if limit > 0 else list(self._decisions)

    async def watch(self, after_sequence: int) -> AsyncIterator[LoggedEvent]:
        """Records behind ``after_sequence``, then new ones as they come; ends when the log is closed.

        A watcher holds nothing but its position. If it falls behind what is kept in memory it is told so by an
        ``EventsSkipped`` record, and goes on with the oldest one kept.
        """
        position = after_sequence
        while True:
            batch = self._after(position)
            if batch:
                first = batch[0].sequence
                if first > position + 1:
                    skipped = {"first_sequence": position + 1, "last_sequence": first - 1}
                    yield LoggedEvent(first - 1, batch[0].at_s, EVENTS_SKIPPED, skipped)
                for record in batch:
                    yield record
                position = batch[-1].sequence
                continue
            if self.is_closed:
                return
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_closed or self._sequence > position)  # noqa: B023

    def _after(self, position: int) -> list[LoggedEvent]:
        if not self._records or self._records[-1].sequence <= position:
            return []
        num_new = min(len(self._records), self._records[-1].sequence - position)
        return list(self._records)[-num_new:][:_BATCH_SIZE]


_BATCH_SIZE = 200
"""Records handed to a watcher before its position is looked at again."""


def _mend(path: Path) -> int:
    """Prepare a log for being continued: cut off a torn last line; returns the last sequence, 0 for a new log."""
    if not path.exists():
        return 0
    last, end = 0, 0
    with path.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                last, end = json.loads(line)["sequence"], end + len(line)
        file.truncate(end)
    return last
