"""The numbered records of a job: the newest in memory for watchers, all of them in the journal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from services import __version__
from services.scheduler.actions import Decision
from services.scheduler.codec import encode
from services.scheduler.events import Event
from services.scheduler.journal import Journal
from services.scheduler.options import JobOptions
from services.scheduler.recovery import JOB_STARTED
from services.scheduler.types import LoggedDecision, LoggedEvent, ResumeState

EVENTS_SKIPPED = "EventsSkipped"
"""Kind of the record that a watcher gets in place of records that are kept nowhere any more."""
_BATCH_SIZE = 200
"""Records handed to a watcher before its position is looked at again."""


class EventLog:
    """Numbered records, in the order in which the core took the events in.

    With a journal each record is committed there before it counts; without one only the newest are kept.
    """

    def __init__(self, journal: Journal | None = None, num_kept: int = 2000) -> None:
        self._journal = journal
        self._records: deque[LoggedEvent] = deque(maxlen=num_kept)
        self._decisions: deque[LoggedDecision] = deque(maxlen=num_kept)
        self._sequence = 0
        self._changed = asyncio.Condition()
        self.is_closed = False
        if journal is not None:
            self._sequence = journal.last_sequence
            for record in journal.records(max(0, self._sequence - num_kept)):
                self._keep(record)

    def start(self, at_s: float, start_id: str, options: JobOptions, resume: ResumeState | None) -> None:
        """The first record of a start: all that is needed to replay what follows."""
        record = {
            "start_id": start_id,
            "code_version": __version__,
            "options": encode(options),
            "resume": encode(resume),
        }
        self._add(JOB_STARTED, at_s, record, [])

    def append(self, at_s: float, event: Event, decisions: Sequence[Decision]) -> int:
        """Record an event with what was decided about it; its sequence. It is committed on return."""
        return self._add(type(event).__name__, at_s, encode(event), decisions)

    def note(self, at_s: float, kind: str, payload: dict[str, Any], decisions: Sequence[Decision] = ()) -> int:
        """Record something that was not an event of the core."""
        return self._add(kind, at_s, payload, decisions)

    def mark_performed(self, sequence: int, position: int) -> None:
        """A decision was performed, and what came of it was appended."""
        if self._journal is not None:
            self._journal.mark_performed(sequence, position)

    def flush(self) -> None:
        """Commit the marks."""
        if self._journal is not None:
            self._journal.flush()

    def _add(self, kind: str, at_s: float, payload: dict[str, Any], decisions: Sequence[Decision]) -> int:
        sequence = self._sequence + 1
        logged = tuple(
            LoggedDecision(sequence, at_s, type(decision.action).__name__, encode(decision.action), decision.reason)
            for decision in decisions
        )
        record = LoggedEvent(sequence, at_s, kind, payload, logged)
        if self._journal is not None:
            self._journal.append(record)
        self._sequence = sequence
        self._keep(record)
        return sequence

    def _keep(self, record: LoggedEvent) -> None:
        self._records.append(record)
        self._decisions.extend(record.decisions)

    async def wake_watchers(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """No more records; watchers end once they have seen the last one. (The journal stays open for them.)"""
        self.is_closed = True
        await self.wake_watchers()

    def decisions(self, limit: int) -> list[LoggedDecision]:
        """The newest decisions, oldest first; all that are kept in memory if ``limit`` is 0."""
        return list(self._decisions)[-limit:] if limit > 0 else list(self._decisions)

    async def watch(self, after_sequence: int) -> AsyncIterator[LoggedEvent]:
        """Records behind ``after_sequence``, then new ones as they come; ends when the log is closed.

        A watcher holds nothing but its position. Where that is older than what is kept in memory, it reads the
        journal; without one it is told what it missed (``EventsSkipped``), and goes on with the oldest record kept.
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
        if self._journal is not None and self._records[0].sequence > position + 1:
            return self._journal.batch(position, _BATCH_SIZE)
        num_new = min(len(self._records), self._records[-1].sequence - position)
        return list(self._records)[-num_new:][:_BATCH_SIZE]
