"""Groups and their runs: what was dispatched, what waits for a slot, what runs, what is ready, and the counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from services.common.errors import InvariantError
from services.common.ids import GroupId, RunId, group_of, make_run_id
from services.scheduler.types import Counters, ReadyGroup, RunView
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult, GroupSpec

NUM_ENDED_RUNS_KEPT = 2000
"""Runs of ended groups that lists still show."""


class RunStatus(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    STARTING = "starting"
    """It has a slot; its key is not open yet."""
    RUNNING = "running"
    SCORING = "scoring"
    """Its harness has ended and its slot is free; what it left is being scored."""
    ENDED = "ended"


class GroupStatus(StrEnum):
    """Where a group stands. The last four are final."""

    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    TRAINED = "trained"
    LOST = "lost"
    EVALUATED = "evaluated"
    DROPPED = "dropped"
    """Unfinished when the job ended."""


GROUP_TRANSITIONS: dict[GroupStatus, frozenset[GroupStatus]] = {
    GroupStatus.RUNNING: frozenset({GroupStatus.SCORING, GroupStatus.LOST, GroupStatus.DROPPED}),
    GroupStatus.SCORING: frozenset({GroupStatus.READY, GroupStatus.LOST, GroupStatus.EVALUATED, GroupStatus.DROPPED}),
    GroupStatus.READY: frozenset({GroupStatus.TRAINING, GroupStatus.LOST}),
    GroupStatus.TRAINING: frozenset({GroupStatus.TRAINED, GroupStatus.READY}),
    GroupStatus.TRAINED: frozenset(),
    GroupStatus.LOST: frozenset(),
    GroupStatus.EVALUATED: frozenset(),
    GroupStatus.DROPPED: frozenset(),
}
"""Every change of status that may happen to a group."""


@dataclass(slots=True, eq=False)
class Run:
    """One run, in its newest attempt."""

    run_id: str
    group: Group
    attempt: int = 0
    status: RunStatus = RunStatus.QUEUED
    left_queue: bool = False
    """Counted in p; a further attempt is not counted again."""
    slot_since_s: float = 0.0
    outcome: Outcome | None = None
    reward: float | None = None
    given_up: bool = False
    """This attempt was ended by the scheduler; later news of it means nothing."""

    @property
    def holds_slot(self) -> bool:
        return self.status in (RunStatus.STARTING, RunStatus.RUNNING)

    @property
    def is_active(self) -> bool:
        """An attempt is under way, of which a ``RunEnded`` will tell."""
        return self.holds_slot or self.status is RunStatus.SCORING


@dataclass(slots=True, eq=False)
class Group:
    """A dispatched group."""

    spec: GroupSpec
    task_index: int
    status: GroupStatus = GroupStatus.RUNNING
    runs: dict[str, Run] = field(default_factory=dict)
    num_unfinished: int = 0
    slowest_s: float = 0.0
    """Longest time that a run of it held its slot, seconds."""
    result: GroupResult | None = None

    @property
    def group_id(self) -> str:
        return self.spec.group_id

    def move_to(self, status: GroupStatus) -> None:
        """Change the status, along ``GROUP_TRANSITIONS``."""
        if status not in GROUP_TRANSITIONS[self.status]:
            raise InvariantError(f"group {self.group_id} cannot go from {self.status} to {status}.")
        self.status = status


@dataclass(slots=True, eq=False)
class Tally:
    """Mutable counters of one kind of runs."""

    dispatched: int
    started: int
    ended: int

    def counters(self) -> Counters:
        return Counters(self.dispatched, self.started, self.ended)


class GroupBook:
    """All groups that are neither trained nor lost, with their runs, queues and counters."""

    def __init__(self, training: Counters, evaluation: Counters) -> None:
        self._groups: dict[str, Group] = {}
        self._retired: set[str] = set()
        self._training = Tally(training.dispatched, training.started, training.ended)
        self._evaluation = Tally(evaluation.dispatched, evaluation.started, evaluation.ended)
        self._train_queue: deque[Run] = deque()
        self._eval_queue: deque[Run] = deque()
        self._starting: dict[str, Run] = {}
        """In the order in which they got their slots."""
        self.ready: dict[str, Group] = {}
        self.num_slots_taken = 0
        self.num_scoring_runs = 0
        """Runs whose harness has ended and whose score is awaited."""
        self.num_scoring = 0
        self.num_outstanding = 0
        """Training groups that are unfinished, or ready but untrained."""
        self.num_outstanding_by_version: dict[int, int] = {}
        """The same by the version under which they were dispatched; without those in training."""
        self.num_lost = 0
        self.num_lost_in_a_row = 0
        """Lost since a group became ready."""
        self.num_trained = 0
        self.num_retries: dict[str, int] = {}
        self.num_outcomes: dict[str, int] = {}
        self._ended_runs: deque[RunView] = deque(maxlen=NUM_ENDED_RUNS_KEPT)

    # -- queries --

    @property
    def training(self) -> Counters:
        return self._training.counters()

    @property
    def evaluation(self) -> Counters:
        return self._evaluation.counters()

    @property
    def water_level(self) -> int:
        """w: unfinished runs, held-out ones included, for they occupy slots too."""
        training, evaluation = self._training, self._evaluation
        return training.dispatched - training.ended + evaluation.dispatched - evaluation.ended

    @property
    def num_active_runs(self) -> int:
        """Attempts under way."""
        return self.num_slots_taken + self.num_scoring_runs

    @property
    def num_queued(self) -> int:
        return len(self._train_queue) + len(self._eval_queue)

    def live(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def unfinished(self, *, is_eval: bool | None = None) -> list[Group]:
        """Groups that still run or are being scored."""
        return [
            group
            for group in self._groups.values()
            if group.status in (GroupStatus.RUNNING, GroupStatus.SCORING)
            and (is_eval is None or group.spec.is_eval is is_eval)
        ]

    def find(self, group_id: str) -> Group | None:
        """None for a group that was retired: late news of it means nothing. Raises for one that never was."""
        if group_id in self._retired:
            return None
        if group_id not in self._groups:
            raise InvariantError(f"group {group_id} was never opened.")
        return self._groups[group_id]

    def find_all(self, group_ids: tuple[str, ...]) -> list[Group]:
        return [group for group_id in group_ids if (group := self.find(group_id)) is not None]

    def find_run(self, run_id: str, attempt: int) -> Run | None:
        """None for a retired group's run or a superseded attempt. Raises for an attempt that never was."""
        group = self.find(group_of(RunId(run_id)))
        if group is None:
            return None
        run = group.runs.get(run_id)
        if run is None or attempt > run.attempt:
            raise InvariantError(f"attempt {attempt} of run {run_id} was never started.")
        return run if attempt == run.attempt and not run.given_up else None

    def next_queued(self) -> Run | None:
        """Held-out runs before training runs."""
        queue = self._eval_queue or self._train_queue
        return queue[0] if queue else None

    def started_before(self, at_s: float) -> list[Run]:
        """Runs that took their slot before ``at_s`` and are not under way yet."""
        late = []
        for run in self._starting.values():
            if run.slot_since_s > at_s:
                break
            late.append(run)
        return late

    def oldest_ready(self, count: int, newest_version: int | None = None) -> list[Group]:
        """At most ``count``, oldest version first, ties by id; none newer than ``newest_version``."""
        groups = sorted(self.ready.values(), key=lambda group: (group.spec.version, group.group_id))
        if newest_version is not None:
            groups = [group for group in groups if group.spec.version <= newest_version]
        return groups[:count]

    # -- transitions of runs --

    def open(self, spec: GroupSpec, task_index: int) -> Group:
        """Dispatch a group: all its runs queue."""
        group = Group(spec, task_index, num_unfinished=len(spec.run_ids))
        for run_id in spec.run_ids:
            run = group.runs[run_id] = Run(run_id, group)
            self._queue_of(run).append(run)
        self._groups[spec.group_id] = group
        self._tally_of(group).dispatched += len(spec.run_ids)
        if not spec.is_eval:
            self.num_outstanding += 1
            self._count_version(group, 1)
        return group

    def take_slot(self, run: Run, now_s: float) -> None:
        """The run at the head of its queue begins."""
        self._queue_of(run).popleft()
        run.status, run.slot_since_s = RunStatus.STARTING, now_s
        self._starting[run.run_id] = run
        self.num_slots_taken += 1
        self._count_start(run)

    def mark_running(self, run: Run) -> None:
        if run.status in (RunStatus.RUNNING, RunStatus.SCORING):
            return  # said again after a restart of the scheduler
        if run.status is not RunStatus.STARTING:
            raise InvariantError(f"run {run.run_id} started while {run.status}.")
        del self._starting[run.run_id]
        run.status = RunStatus.RUNNING

    def begin_scoring_run(self, run: Run) -> None:
        """Its harness has ended: its slot is free for another run."""
        if run.status is RunStatus.SCORING:
            return  # said again after a restart of the scheduler
        self._leave_slot(run)
        run.status = RunStatus.SCORING
        self.num_scoring_runs += 1

    def requeue(self, run: Run, outcome: Outcome) -> None:
        """A further attempt, before all runs that never had one."""
        self._leave(run)
        run.attempt, run.status, run.given_up = run.attempt + 1, RunStatus.QUEUED, False
        self._queue_of(run).appendleft(run)
        self.num_retries[outcome] = self.num_retries.get(outcome, 0) + 1

    def end(self, run: Run, outcome: Outcome, reward: float | None) -> None:
        """The run is final."""
        if run.is_active:
            self._leave(run)
        elif run.status is RunStatus.QUEUED:
            self._queue_of(run).remove(run)
            self._count_start(run)
        else:
            raise InvariantError(f"run {run.run_id} ended twice.")
        run.status, run.outcome, run.reward = RunStatus.ENDED, outcome, reward
        run.group.num_unfinished -= 1
        self._tally_of(run.group).ended += 1
        self.num_outcomes[outcome] = self.num_outcomes.get(outcome, 0) + 1

    def _leave(self, run: Run) -> None:
        """Its attempt is over."""
        if run.status is RunStatus.SCORING:
            self.num_scoring_runs -= 1
        else:
            self._leave_slot(run)

    def _leave_slot(self, run: Run) -> None:
        if not run.holds_slot:
            raise InvariantError(f"run {run.run_id} ended while {run.status}.")
        self._starting.pop(run.run_id, None)
        self.num_slots_taken -= 1

    def _count_start(self, run: Run) -> None:
        if not run.left_queue:
            run.left_queue = True
            self._tally_of(run.group).started += 1

    # -- transitions of groups --

    def begin_scoring(self, group: Group) -> None:
        group.move_to(GroupStatus.SCORING)
        self.num_scoring += 1

    def mark_ready(self, group: Group, result: GroupResult) -> None:
        self.num_lost_in_a_row = 0
        group.move_to(GroupStatus.READY)
        group.result = result
        self.num_scoring -= 1
        self.ready[group.group_id] = group

    def begin_training(self, groups: list[Group]) -> None:
        for group in groups:
            group.move_to(GroupStatus.TRAINING)
            del self.ready[group.group_id]
            self._count_version(group, -1)

    def return_from_training(self, groups: list[Group]) -> None:
        """Their step failed: they are ready again, for a resumed job."""
        for group in groups:
            group.move_to(GroupStatus.READY)
            self.ready[group.group_id] = group
            self._count_version(group, 1)

    def retire(self, group: Group, status: GroupStatus) -> None:
        """Trained, evaluated or lost: all its runs are final, and nothing more is expected of it."""
        if group.num_unfinished:
            raise InvariantError(f"group {group.group_id} is {status} with {group.num_unfinished} unfinished runs.")
        self.num_scoring -= group.status is GroupStatus.SCORING
        if not group.spec.is_eval and group.status is not GroupStatus.TRAINING:
            self._count_version(group, -1)
        self.ready.pop(group.group_id, None)
        group.move_to(status)
        del self._groups[group.group_id]
        self._retired.add(group.group_id)
        self.num_outstanding -= not group.spec.is_eval
        self.num_trained += status is GroupStatus.TRAINED
        self.num_lost += status is GroupStatus.LOST
        self.num_lost_in_a_row += status is GroupStatus.LOST
        self._ended_runs.extend(_view(run, "") for run in group.runs.values())

    def take_back(self, ready: ReadyGroup) -> None:
        """A group that was ready when a checkpoint was saved is ready again; its runs are counted already."""
        group = Group(ready.spec, ready.task_index, GroupStatus.SCORING)
        self._groups[ready.spec.group_id] = group
        self.num_outstanding += 1
        self._count_version(group, 1)
        self.num_scoring += 1
        self.mark_ready(group, ready.result)

    def _count_version(self, group: Group, change: int) -> None:
        counts, version = self.num_outstanding_by_version, group.spec.version
        counts[version] = counts.get(version, 0) + change
        if counts[version] == 0:
            del counts[version]

    def _queue_of(self, run: Run) -> deque[Run]:
        return self._eval_queue if run.group.spec.is_eval else self._train_queue

    def _tally_of(self, group: Group) -> Tally:
        return self._evaluation if group.spec.is_eval else self._training

    # -- views --

    def runs(self, cell_ids: dict[str, str], *, live_only: bool) -> list[RunView]:
        """Newest groups first. ``cell_ids``: run id -> cell id."""
        live = [
            _view(run, cell_ids.get(run.run_id, ""))
            for group in reversed(self._groups.values())
            for run in group.runs.values()
            if not live_only or run.status is not RunStatus.ENDED
        ]
        return live if live_only else [*live, *reversed(self._ended_runs)]


def make_spec(group_id: GroupId, task_name: str, num_runs: int, version: int, *, is_eval: bool) -> GroupSpec:
    """The spec of a new group."""
    run_ids = tuple(make_run_id(group_id, index) for index in range(num_runs))
    return GroupSpec(group_id, task_name, run_ids, version, is_eval)


def _view(run: Run, cell_id: str) -> RunView:
    spec = run.group.spec
    return RunView(
        run_id=run.run_id,
        group_id=spec.group_id,
        task_name=spec.task_name,
        attempt=run.attempt,
        status=run.outcome.value if run.outcome is not None else run.status.value,
        reward=run.reward,
        cell_id=cell_id,
        version=spec.version,
        is_eval=spec.is_eval,
    )
