"""Which command the ranks of a cell do next, and what is done again after they died. Pure state machine.

Commands are done one at a time, in the order of their submission. When the ranks die, the command in flight waits for
the next group of ranks and is handed out again from the start; steps that were trained after the checkpoint from which
that group starts are handed out first, so no update is lost and what is published is what was trained. (A gradient sum
that died with its ranks is not made again here: the reports say what a sum holds, and the division of work goes on
from that.)

Submitting is idempotent: a command equal to one in flight or queued joins it, one that makes a step which is trained
already is answered with that step's report, and the checkpoint, mark or publication made last is answered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from services.common.errors import TrainingError
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Command,
    GradientSum,
    MailboxStatus,
    MarkBest,
    Order,
    Publish,
    SaveCheckpoint,
    StepCommand,
    Stop,
    SumReport,
    TrainStep,
    Update,
)
from services.trainer.types import StepReport

_HINT = "Look into the logs of the training ranks (runs/<job>/ and Ray's worker logs) for the cause."
_KEPT_REPORTS = 64


@dataclass(frozen=True, slots=True)
class Settled:
    """What came of a command."""

    ticket: int
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Entry:
    """A command on its way."""

    ticket: int
    order_id: int
    command: Command
    is_repeated: bool = False
    """A step that is taken again to catch up: nobody waits for it."""
    results: dict[int, Any] = field(default_factory=dict)
    """By rank."""
    takers: set[int] = field(default_factory=set)
    deadline_s: float = 0.0

    def start_over(self, order_id: int) -> None:
        """Nothing is done yet, and what ranks say about the old order no longer matters."""
        self.order_id, self.results, self.takers = order_id, {}, set()


class OrderBook:
    """The commands of one cell. ``timeout_s``: a command that a group of ranks holds for longer has failed.
    ``shares_micro_steps``: every rank takes all micro-steps, for they share each of them.

    What was settled by a call is fetched with ``take_settled`` after it.
    """

    def __init__(self, timeout_s: float, *, shares_micro_steps: bool = False) -> None:
        self._shares_micro_steps = shares_micro_steps
        self._timeout_s = timeout_s
        self._queue: deque[_Entry] = deque()
        self._current: _Entry | None = None
        self._trained: list[TrainStep] = []
        """Steps that are in no checkpoint, as one command each."""
        self._reports: dict[int, StepReport] = {}
        """By step."""
        self._done_last: dict[type[Any], tuple[Command, Any]] = {}
        """The newest publication, checkpoint and mark, with their results."""
        self._settled: list[Settled] = []
        self._group = ""
        self._world_size = 0
        self._registered: set[int] = set()
        self._num_orders = 0
        self.closed = ""
        """Why no command is taken any more, if so."""

    # -- the side of those who want something done --

    def submit(self, command: Command, now_s: float) -> int:
        """Take a command in; returns its ticket, which may be that of an equal command.

        Raises:
            TrainingError: no command is taken any more.
        """
        if self.closed:
            raise TrainingError(self.closed, _HINT)
        for known in self._pending():
            if not known.is_repeated and known.command == command:
                return known.ticket
        entry = self._make_entry(command)
        if not self._answer_again(entry):
            self._drop_older_epochs(command)
            self._queue.append(entry)
            self._advance(now_s)
        return entry.ticket

    def take_settled(self) -> list[Settled]:
        """What was settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def expire(self, now_s: float) -> None:
        """Fail the command in flight if it is past its deadline."""
        entry = self._current
        if entry is None or now_s < entry.deadline_s:
            return
        late = f"{type(entry.command).__name__} took longer than {self._timeout_s:g} s."
        if entry.is_repeated:
            self.close(f"the restarted training ranks could not catch up: {late}")
            return
        self._finish(entry, error=TrainingError(late, _HINT))
        self._advance(now_s)

    def close(self, reason: str) -> None:
        """No rank will come any more: everything waiting fails with ``reason``."""
        self.closed = self.closed or reason
        pending = list(self._pending())
        self._queue.clear()
        for entry in pending:
            self._finish(entry, error=TrainingError(reason, _HINT))

    # -- the ranks' side --

    def register(self, group: str, rank: int, world_size: int, start_step: int, now_s: float) -> None:
        """A rank of a (new) group is ready, its weights standing at ``start_step``. Older groups are fenced off."""
        if group != self._group:
            self._group, self._world_size, self._registered = group, world_size, set()
            self._done_last.pop(Publish, None)  # its buffer is gone
            self._hand_back(start_step)
        self._registered.add(rank)
        self._advance(now_s)

    def next_order(self, group: str, rank: int) -> Order | None:
        """The next order for a rank; None: there is none yet. A fenced rank is told to stop."""
        if group != self._group or self.closed:
            return Order(-1, Stop())
        entry = self._current
        if entry is None or len(self._registered) < self._world_size or rank in entry.results:
            return None
        entry.takers.add(rank)
        if not isinstance(entry.command, TrainStep | Accumulate):
            return Order(entry.order_id, entry.command)
        num_claims = len(entry.command.micro_steps)
        share = slice(None) if self._shares_micro_steps else slice(rank, None, self._world_size)
        claims = tuple(range(num_claims)[share])
        return Order(entry.order_id, entry.command, claims, num_claims)

    def done(self, group: str, rank: int, order_id: int, result: Any, now_s: float) -> bool:
        """A rank did its order. Whether that still counts (False: the order was taken from it)."""
        entry = self._current
        if group != self._group or entry is None or entry.order_id != order_id:
            return False
        entry.results[rank] = result
        if len(entry.results) == self._world_size:
            joint = _joint(entry.results)
            self._note_done(entry.command, joint)
            self._finish(entry, result=joint)
            self._advance(now_s)
        return True

    def failed(self, group: str, order_id: int, error: Exception, now_s: float) -> None:
        """A rank could not do its order, and doing it again would not help."""
        entry = self._current
        if group != self._group or entry is None or entry.order_id != order_id:
            return
        if entry.is_repeated:
            self.close(f"the restarted training ranks could not catch up: {error}")
            return
        self._finish(entry, error=error)
        self._advance(now_s)

    # -- what it says of itself --

    @property
    def deadline_s(self) -> float | None:
        """Of the command in flight."""
        return None if self._current is None else self._current.deadline_s

    def report_of(self, step: int) -> StepReport | None:
        """Of a step that is trained, if it is remembered."""
        return self._reports.get(step)

    def status(self) -> MailboxStatus:
        entry = self._current
        return MailboxStatus(
            num_ranks=len(self._registered),
            command=type(entry.command).__name__ if entry else "",
            num_taken=len(entry.takers) if entry else 0,
            num_waiting=len(self._queue),
            closed=self.closed,
        )

    # -- inside --

    def _pending(self) -> Iterator[_Entry]:
        if self._current is not None:
            yield self._current
        yield from self._queue

    def _make_entry(self, command: Command, *, is_repeated: bool = False) -> _Entry:
        order_id = self._next_order_id()
        return _Entry(order_id, order_id, command, is_repeated)

    def _next_order_id(self) -> int:
        self._num_orders += 1
        return self._num_orders

    def _advance(self, now_s: float) -> None:
        while self._current is None and self._queue and not self.closed:
            entry = self._queue.popleft()
            if entry.is_repeated or not self._answer_again(entry):
                self._current = entry
                entry.deadline_s = now_s + self._timeout_s

    def _answer_again(self, entry: _Entry) -> bool:
        """Answer what is done already."""
        command = entry.command
        if isinstance(command, StepCommand) and command.step in self._reports:
            self._finish(entry, result=self._reports[command.step])
            return True
        done = self._done_last.get(type(command))
        if done is not None and done[0] == command:
            self._finish(entry, result=done[1])
            return True
        return False

    def _drop_older_epochs(self, command: Command) -> None:
        """Whoever divides the work of a step began anew: what was queued before has no one who asks for it."""
        if not isinstance(command, Accumulate | Absorb | Update):
            return
        kinds = Accumulate | Absorb | Update
        for entry in list(self._queue):
            old = entry.command
            if isinstance(old, kinds) and old.step == command.step and old.epoch != command.epoch:
                self._queue.remove(entry)
                self._finish(entry, error=TrainingError(f"step {old.step} was begun anew.", "Ask for it again."))

    def _note_done(self, command: Command, result: Any) -> None:
        if isinstance(command, TrainStep | Update) and not isinstance(result, SumReport):
            self._trained.append(_as_one_command(command))
            self._reports.setdefault(command.step, result)
            for step in sorted(self._reports)[:-_KEPT_REPORTS]:
                del self._reports[step]
        elif isinstance(command, Publish | SaveCheckpoint | MarkBest):
            self._done_last[type(command)] = (command, result)
        if isinstance(command, SaveCheckpoint):
            self._trained = [step for step in self._trained if step.step > command.step]

    def _hand_back(self, start_step: int) -> None:
        """Put the command in flight back, behind the steps that the new group's checkpoint does not hold."""
        if self._current is not None:
            self._current.start_over(self._next_order_id())
            self._queue.appendleft(self._current)
            self._current = None
        repeated = [entry.command for entry in self._queue if entry.is_repeated]
        known = [*self._trained, *(step for step in repeated if isinstance(step, TrainStep))]
        self._trained = [step for step in known if step.step <= start_step]
        self._queue = deque(entry for entry in self._queue if not entry.is_repeated)
        missing = sorted((step for step in known if step.step > start_step), key=lambda step: step.step)
        self._queue.extendleft(self._make_entry(step, is_repeated=True) for step in reversed(missing))

    def _finish(self, entry: _Entry, result: Any = None, error: Exception | None = None) -> None:
        if self._current is entry:
            self._current = None
        if not entry.is_repeated:
            self._settled.append(Settled(entry.ticket, result, error))


def _joint(results: dict[int, Any]) -> Any:
    """The answer of all ranks: that of the first one; a sum's micro-steps are those of all."""
    first = results[0]
    if not isinstance(first, SumReport | GradientSum):
        return first
    return replace(first, keys=frozenset().union(*(result.keys for result in results.values())))


def _as_one_command(command: TrainStep | Update) -> TrainStep:
    """The command that takes the same step with one cell."""
    if isinstance(command, TrainStep):
        return command
    micro_steps = tuple(micro_step.data for micro_step in command.micro_steps)
    return TrainStep(command.step, command.version, command.temperature, micro_steps)
