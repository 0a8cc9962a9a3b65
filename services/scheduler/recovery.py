"""Rebuilds the core from the records of its journal. Pure: records in, a state out, and what it still has to do.

The core is deterministic: the same events at the same times give the same decisions. So replaying is both how a
restarted scheduler gets its state back and the proof that it is the same one.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from services.common.errors import ConfigError, InvariantError
from services.common.types import CellRole
from services.scheduler.actions import Action, Decision, OpenGroup, TrainStep
from services.scheduler.codec import decode, encode
from services.scheduler.events import GroupScored, StepTrained
from services.scheduler.groups import RunStatus
from services.scheduler.performer import Recovered
from services.scheduler.state import JobState
from services.scheduler.types import LoggedEvent
from services.trajectory.types import GroupResult

JOB_STARTED = "JobStarted"
"""Kind of the first record of each start of a job: its options and what it was resumed from."""
CORE_FAILED = "CoreFailed"
"""Kind of the record of an event that the core could not take in: it ended the job."""
SCHEDULER_RECOVERED = "SchedulerRecovered"
"""Kind of the record that a scheduler writes when it has gone on from its journal."""


@dataclass(frozen=True, slots=True)
class Todo:
    """A decision of which the journal does not say that it was performed to its end."""

    sequence: int
    position: int
    """Among the decisions of that record."""
    action: Action


class Replay:
    """A core that is fed with records.

    The records of a later start begin with a new ``JobStarted``, and so does the core. ``performed`` holds (sequence,
    position) of the decisions that need not be performed again; None: nobody will ask.
    """

    def __init__(self, performed: Set[tuple[int, int]] | None = None) -> None:
        self._performed = performed
        self._state: JobState | None = None
        self._unperformed: list[Todo] = []
        self._scored: list[GroupResult] = []
        self.code_version = ""
        """Version of the code that wrote the newest start."""
        self.num_events = 0
        """Of the newest start."""
        self.num_decisions = 0

    @property
    def state(self) -> JobState:
        if self._state is None:
            raise ConfigError("the journal has no JobStarted record.", "Was it written by another version?")
        return self._state

    def take(self, record: LoggedEvent) -> str:
        """Take in the next record. Returns in what the decisions differ from the journal's; empty: in nothing.

        Raises ``ConfigError`` for a record that this version cannot understand.
        """
        if record.kind == JOB_STARTED:
            self._start(record.payload)
            return ""
        if record.kind == SCHEDULER_RECOVERED:
            return ""
        try:
            decisions = self._decide(record)
        except (InvariantError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"at record {record.sequence} ({record.kind}) the core now raises {type(error).__name__}: {error}"
        self.num_events += 1
        self.num_decisions += len(decisions)
        if difference := _difference(record, decisions):
            return difference
        if self._performed is not None:
            self._unperformed += [
                Todo(record.sequence, position, decision.action)
                for position, decision in enumerate(decisions)
                if (record.sequence, position) not in self._performed or isinstance(decision.action, TrainStep)
            ]
        return ""

    def _start(self, payload: dict[str, Any]) -> None:
        resume = payload["resume"]
        self._state = JobState(decode(payload["options"]), None if resume is None else decode(resume))
        self._unperformed, self._scored = [], []
        self.code_version = payload.get("code_version", "")
        self.num_events = self.num_decisions = 0

    def _decide(self, record: LoggedEvent) -> list[Decision]:
        if record.kind == CORE_FAILED:
            return self._fail(record.payload)
        event = decode(record.payload)
        if isinstance(event, GroupScored):
            group = self.state.book.find(event.result.group_id)
            if group is not None and not group.spec.is_eval:
                self._scored.append(event.result)
        elif isinstance(event, StepTrained):
            self._scored = []
        return self.state.handle(event, record.at_s)

    def _fail(self, payload: dict[str, Any]) -> list[Decision]:
        """What the shell did when the core could not take an event in."""
        if payload.get("event") is not None:
            try:
                self.state.handle(decode(payload["event"]), payload["event_at_s"])
            except Exception as error:  # it did then, too; its traces in the state are wanted
                del error
        return self.state.fail(payload["reason"])

    def todo(self) -> list[Todo]:
        """The decisions that are to be performed again, groups that are to be opened first.

        All portions of the step in flight are: the performer that was told of them is gone. Of equal decisions only
        the last is awaited; the others' marks were lost.
        """
        due = {one.action: one for one in self._unperformed if self.state.awaits(one.action)}
        return sorted(due.values(), key=lambda one: (not isinstance(one.action, OpenGroup), one.sequence, one.position))

    def recovered(self) -> Recovered:
        """What a new performer needs to know of the job."""
        state = self.state
        return Recovered(
            groups=tuple(group.spec for group in state.book.live()),
            scored=tuple(self._scored),
            attempts=state.active_attempts(),
            started=tuple(
                (run.run_id, run.attempt)
                for group in state.book.live()
                for run in group.runs.values()
                if run.status in (RunStatus.RUNNING, RunStatus.SCORING)
            ),
            cells=tuple(cell.cell_id for cell in state.cells if cell.is_live),
            training=tuple(cell.cell_id for cell in state.cells if cell.role is CellRole.TRAIN),
        )


def _difference(record: LoggedEvent, decisions: list[Decision]) -> str:
    """In what decisions differ from those of the journal, for people."""
    made = [(type(one.action).__name__, encode(one.action), one.reason) for one in decisions]
    logged = [(one.action, one.payload, one.reason) for one in record.decisions]
    if made == logged:
        return ""
    position = next(
        (at for at, (mine, its) in enumerate(zip(made, logged, strict=False)) if mine != its),
        min(len(made), len(logged)),
    )
    what = [_told(side[position]) if position < len(side) else "nothing" for side in (made, logged)]
    return (
        f"at record {record.sequence} ({record.kind}) decision {position} differs: "
        f"the core now decides {what[0]}; the journal has {what[1]}"
    )


def _told(decision: tuple[str, Any, str]) -> str:
    action, payload, reason = decision
    fields = ", ".join(f"{name}={value!r}" for name, value in payload.items() if name != "type")
    return f"{action}({fields}), because {reason}"
