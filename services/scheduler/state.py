"""The scheduler's state machine: events in, decisions out. No I/O, no clock, no randomness of its own.

An event changes the records (``transitions.HANDLERS``, one function an event type). Then ``rules.RULES`` are tried in
order until none has anything to decide. Rules look at the state only, never at the event: whatever order events come
in, a decision that is due is made, and one that is under way is not made twice.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvariantError, TidegateError
from services.common.ids import make_group_id
from services.common.types import RouteTable
from services.scheduler import policy, requests
from services.scheduler.actions import (
    AbortRuns,
    Action,
    Decision,
    DropGroup,
    FinishJob,
    MarkBest,
    OpenGroup,
    PublishWeights,
    SaveCheckpoint,
)
from services.scheduler.awaits import awaits
from services.scheduler.cells import CellTable
from services.scheduler.events import Event, PolicyRequested, Request
from services.scheduler.groups import Group, GroupBook, GroupStatus, make_spec
from services.scheduler.options import AtStalenessBound, JobOptions, OnLostGroup
from services.scheduler.order import TaskOrder
from services.scheduler.rules import ENDING_RULES, RULES
from services.scheduler.step import OpenStep
from services.scheduler.transitions import HANDLERS
from services.scheduler.types import Counters, JobStatus, ReadyGroup, ResumeState, RunView, TaskRewards
from services.scheduler.views import make_snapshot
from services.trajectory.outcome import Outcome

SHARE_OF_KNOWN_TASKS = 0.75
"""Of the next burst's tasks, whose duration has to be known before a burst goes without carry-over."""
HISTORY_LENGTH = 40
"""Events that an ``InvariantError`` tells."""


@dataclass(slots=True)
class Evaluation:
    """A held-out pass in progress."""

    version: int
    pending: dict[str, None] = field(default_factory=dict)
    tasks: list[TaskRewards] = field(default_factory=list)


class JobState:
    """Everything the scheduler knows of one job, and every decision about it.

    Lifecycle: construct, feed ``handle`` with every event in order, perform the decisions that it returns, feed
    back what became of them. After ``FinishJob`` further events change nothing.
    """

    def __init__(self, options: JobOptions, resume: ResumeState | None = None) -> None:
        start = resume or ResumeState()
        self.options = options
        self.status = JobStatus.STARTING
        self.reason = ""
        self.step = start.step
        self.version = -1
        """Version of the weights published last; -1 before the first."""
        self.cells = CellTable(options.job_id)
        self.book = GroupBook(start.training, start.evaluation)
        self.book.num_lost = start.num_lost_groups
        for ready in start.ready:
            self.book.take_back(ready)
        self.evaluation: Evaluation | None = None
        self.last_eval_step = start.last_eval_step
        self.last_eval_reward: float | None = None
        self.best_eval_step, self.best_eval_reward = start.best_eval_step, start.best_eval_reward
        self.new_best: MarkBest | None = None
        """A checkpoint that is to be marked, until that is answered."""
        self.is_marking_best = False
        self.reward_mean_by_step = list(start.reward_mean_by_step)
        self.train_tokens = start.train_tokens

        self.next_group_index = start.next_group_index
        self.next_eval_group_index = start.next_eval_group_index
        self.order = TaskOrder(
            len(options.task_names),
            options.seed,
            start.data_position,
            start.unfinished_task_indices,
            window_size=options.window_groups,
            num_wanted=options.steps * options.groups_per_step,
        )
        self.wanted_version: int | None = start.step
        """A version that is to be published, until its publication has ended."""
        self.publication: PublishWeights | None = None
        self.num_publication_failures = 0
        self.at_boundary = False
        self.burst_done = 0
        self.burst_steps = 0
        """Steps that this burst has."""
        self.training_step: OpenStep | None = None
        self.next_step_seats = options.groups_per_step
        """Groups that the next step trains."""
        self.staleness_sum, self.num_counted = 0, 0
        """Staleness of the groups trained since the first burst, and their number."""
        self.departures_are_over = False
        """No further satellite leaves rollout in this burst: one had to go back."""
        self.pending_policy: PolicyRequested | None = None
        """What a user wants from the next boundary on."""
        self.checkpoint: SaveCheckpoint | None = None
        self.saved_step = start.step
        self.exported_step = start.exported_step
        self.planned_end: FinishJob | None = None
        self.staleness_is_due = True
        self.now_s = 0.0
        self._decisions: list[Decision] = []
        self._history: deque[tuple[float, Event, list[Decision]]] = deque(maxlen=HISTORY_LENGTH)

    # -- the interface ------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Decision]:
        """Take in one event; returns what to do. Raises ``InvariantError`` for what must not happen."""
        if self.status.is_final:
            return []
        self.now_s, self._decisions = now_s, []
        self._history.append((now_s, event, self._decisions))
        try:
            HANDLERS[type(event)](self, event)
            while not self.status.is_final and self._apply_rules():
                pass
        except InvariantError as error:
            raise InvariantError(error.message, self.history()) from error
        return self._decisions

    def _apply_rules(self) -> bool:
        """One pass; True if another is needed."""
        status = self.status
        for rule in ENDING_RULES if status is JobStatus.ENDING else RULES:
            if rule(self):
                return True
            if self.status is not status:
                return not self.status.is_final
        return False

    def fail(self, reason: str) -> list[Decision]:
        """End the job at once, whatever its state: for a shell that cannot go on."""
        self._decisions = []
        active = self.active_attempts()
        if active:
            self.decide(AbortRuns(active, reason), reason)
        self.finish(JobStatus.FAILED, reason)
        return self._decisions

    def history(self) -> str:
        """The newest events with what was decided, one a line."""
        return "\n".join(
            f"{at_s:.3f} {event!r} -> {', '.join(type(decision.action).__name__ for decision in decisions) or '-'}"
            for at_s, event, decisions in self._history
        )

    def routes(self) -> RouteTable:
        """The route table; its epoch rises with each change."""
        return self.cells.routes()

    def snapshot(self) -> dict[str, Any]:
        """JSON-ready: what clients see, and the summary's figures."""
        return make_snapshot(self)

    def runs(self, *, live_only: bool = False) -> list[RunView]:
        """Runs for lists, newest groups first."""
        placed = {run_id: cell.cell_id for cell in self.cells for run_id in cell.runs}
        return self.book.runs(placed, live_only=live_only)

    def resume_state(self) -> ResumeState:
        """What a job that is resumed from this moment needs. Runs that are unfinished now count as ended."""
        unfinished = [group.task_index for group in self.book.unfinished(is_eval=False)]
        training, evaluation = self.book.training, self.book.evaluation
        return ResumeState(
            step=self.step,
            version=self.version,
            next_group_index=self.next_group_index,
            next_eval_group_index=self.next_eval_group_index,
            data_position=self.order.position,
            unfinished_task_indices=(*self.order.waiting, *unfinished),
            ready=tuple(
                ReadyGroup(group.spec, group.task_index, group.result)
                for group in self.book.ready.values()
                if group.result is not None
            ),
            training=Counters(training.dispatched, training.dispatched, training.dispatched),
            evaluation=Counters(evaluation.dispatched, evaluation.dispatched, evaluation.dispatched),
            num_lost_groups=self.book.num_lost,
            last_eval_step=self.last_eval_step,
            best_eval_step=self.best_eval_step,
            best_eval_reward=self.best_eval_reward,
            exported_step=self.exported_step,
            reward_mean_by_step=tuple(self.reward_mean_by_step),
            train_tokens=self.train_tokens,
        )

    def refusal(self, request: Request) -> TidegateError | None:
        """Why a user's request cannot be (``services.scheduler.requests``); None if it can."""
        return requests.refusal(self, request)

    def awaits(self, action: Action) -> bool:
        """Whether the answer to an action is still awaited (True for actions that need none): what a scheduler that
        was restarted has to perform again."""
        return awaits(self, action)

    @property
    def next_options(self) -> JobOptions:
        """The options from the next burst boundary on."""
        return self.options if self.pending_policy is None else requests.with_policy(self.options, self.pending_policy)

    def cadence(self) -> tuple[float, int]:
        """phi and mu of the next burst.

        ``sorted``: as soon as it is known how long the next tasks take, the same mean staleness without carry-over.
        """
        options = self.options
        configured = (options.carry_over_steps, options.steps_per_burst)
        if options.window_groups == 0:
            return configured
        phi, mu = policy.homogeneous_cadence(*configured)
        is_within_bound = phi + mu - 1 <= options.max_staleness_steps
        is_known = self.order.known_share(mu * options.groups_per_step) >= SHARE_OF_KNOWN_TASKS
        if not (is_within_bound and is_known):
            return configured
        if mu >= self.steps_left and self._mean_staleness_after(self.steps_left) > self._mean_staleness_wanted:
            mu = math.ceil(self.steps_left / 2)  # the last burst, in two: the change of cadence had its price
        return phi, mu

    @property
    def _mean_staleness_wanted(self) -> float:
        return self.options.carry_over_steps + (self.options.steps_per_burst - 1) / 2

    def _mean_staleness_after(self, num_steps: int) -> float:
        """Of all groups trained since the first burst, if all that are outstanding are trained in so many steps."""
        size, versions = self.options.groups_per_step, self.book.num_outstanding_by_version.items()
        carried = sum((self.step - version) * number for version, number in versions)
        total = self.staleness_sum + carried + size * num_steps * (num_steps - 1) / 2
        return total / max(1, self.num_counted + size * num_steps)

    @property
    def burst_left(self) -> int:
        """Steps of this burst that are not trained yet."""
        return self.burst_steps - self.burst_done

    @property
    def is_inside_burst(self) -> bool:
        """Cells may be in training, so that a cell that comes late is out of the switching order."""
        return self.training_step is not None or self.burst_done > 0 or bool(self.cells.in_training)

    @property
    def seats_left(self) -> int:
        """Groups that the step that is being filled still takes."""
        return self.next_step_seats if self.training_step is None else self.training_step.num_missing

    @property
    def num_ready_needed(self) -> int:
        """Ready groups with which training can begin or go on."""
        return min(1, self.seats_left) if self.options.policy.streaming else self.seats_left

    @property
    def num_unclaimed(self) -> int:
        """Micro-steps of the step in flight that no cell has claimed."""
        return 0 if self.training_step is None else self.training_step.num_unclaimed

    @property
    def can_train_now(self) -> bool:
        """The burst has a step to be filled, and the groups are there with which a core in training goes on."""
        if self.burst_left == 0 or self.wanted_version is not None:
            return False
        return len(self.admissible(self.seats_left)) >= self.num_ready_needed

    def admissible(self, num_seats: int) -> list[Group]:
        """Ready groups that may take seats of the step that is being filled, oldest first: at most ``num_seats``.

        In ``wait`` mode a seat that an unfinished group will need before it grows too old is kept for it.
        """
        if not self.book.ready or num_seats <= 0:
            return []
        if self.options.at_staleness_bound is AtStalenessBound.DROP:
            return self.book.oldest_ready(num_seats)
        num_by_version = dict(self.book.num_outstanding_by_version)
        taken: list[Group] = []
        for group in self.book.oldest_ready(num_seats):
            newest = self._newest_admissible_version(num_seats - len(taken), num_by_version)
            if newest is not None and group.spec.version > newest:
                break
            taken.append(group)
            num_by_version[group.spec.version] -= 1
        return taken

    def _newest_admissible_version(self, num_seats: int, num_by_version: dict[int, int]) -> int | None:
        options = self.options
        newest, _ = policy.newest_admissible_version(
            self.step, num_seats, options.groups_per_step, options.max_staleness_steps, num_by_version
        )
        return newest

    @property
    def steps_left(self) -> int:
        return max(0, self.options.steps - self.step)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the weights of this step get a held-out pass once they are published."""
        options, running = self.options, self.evaluation
        return bool(options.eval_task_names) and policy.evaluation_is_due(
            self.step,
            self.last_eval_step if running is None else running.version,
            options.steps,
            options.eval_every,
            at_start=options.eval_at_start,
            at_end=options.eval_at_end,
        )

    # -- parts of decisions -------------------------------------------------------------------------------------------

    def decide(self, action: Action, reason: str) -> None:
        self._decisions.append(Decision(action, reason))

    def open_training_groups(self, number: int, reason: str) -> None:
        """Dispatch the next groups under the version published last."""
        names = self.options.task_names
        for task_index in self.order.take(number):
            group_id = make_group_id(self.next_group_index)
            self.next_group_index += 1
            spec = make_spec(group_id, names[task_index], self.options.group_size, self.version, is_eval=False)
            self.book.open(spec, task_index)
            self.decide(OpenGroup(spec, task_index), reason)

    def open_evaluation(self) -> None:
        names = self.options.eval_task_names
        self.evaluation = Evaluation(self.version)
        for task_index, name in enumerate(names):
            group_id = make_group_id(self.next_eval_group_index, is_eval=True)
            self.next_eval_group_index += 1
            spec = make_spec(group_id, name, self.options.eval_group_size, self.version, is_eval=True)
            self.evaluation.pending[group_id] = None
            self.book.open(spec, task_index)
            self.decide(
                OpenGroup(spec, task_index), f"held-out pass of version {self.version}: {len(names)} tasks are due"
            )

    def save_checkpoint(self, reason: str, *, export: bool) -> None:
        kept = {self.saved_step}
        if self.evaluation is not None:
            kept.add(self.evaluation.version)
        if self.new_best is not None:
            kept.add(self.new_best.step)
        if export:
            self.exported_step = self.step
        self.checkpoint = SaveCheckpoint(self.step, export, tuple(sorted(kept - {0, self.step})), self.resume_state())
        self.decide(self.checkpoint, f"{reason}: step {self.step}, last saved {self.saved_step}")

    def lose(self, group: Group, reason: str) -> None:
        """A training group will not be trained; another takes its place at once."""
        self.book.retire(group, GroupStatus.LOST)
        limit = self.options.max_lost_groups
        if self.book.num_lost_in_a_row > limit:
            number = self.book.num_lost_in_a_row
            lost = f"{number} groups in a row were lost, max_lost_groups is {limit}; the last one: {reason}"
            self.begin_ending(JobStatus.FAILED, lost)
            return
        if self.status is not JobStatus.RUNNING or self.at_boundary or self._closes_short(group):
            return
        if self.book.num_outstanding < self.steps_left * self.options.groups_per_step:
            self.open_training_groups(1, f"replaces {group.group_id} inside the burst: {reason}")

    def _closes_short(self, lost: Group) -> bool:
        """Whether the step that is being filled does without a lost group: it keeps one, and no group grows too old."""
        if self.options.on_lost_group is OnLostGroup.REPLACE or self.burst_left == 0:
            return False
        step, seats = self.training_step, self.seats_left - 1
        num_told = 0 if step is None else len(step.group_ids)
        if seats < 0 or seats + num_told < 1:
            return False
        newest = self._newest_admissible_version(seats + 1, self.book.num_outstanding_by_version)
        if newest is not None and newest < lost.spec.version:
            return False
        if step is None:
            self.next_step_seats -= 1
        else:
            step.num_seats -= 1
        return True

    def drop_and_replace(self, group: Group, reason: str) -> None:
        """Give a training group up, ready or not."""
        self.end_runs(group, reason)
        self.decide(DropGroup(group.group_id, reason), reason)
        self.lose(group, reason)

    def drop_unfinished(self, reason: str, *, held_out_too: bool) -> None:
        """At the job's end: nothing waits for these groups any more. Their tasks come first in a resumed job."""
        for group in self.book.unfinished(is_eval=None if held_out_too else False):
            if not group.spec.is_eval:
                self.order.give_back(group.task_index)
            self.end_runs(group, reason)
            self.decide(DropGroup(group.group_id, reason), reason)
            self.book.retire(group, GroupStatus.DROPPED)

    def end_runs(self, group: Group, reason: str) -> None:
        """Cancel the unfinished runs of a group; what becomes of the group is the caller's to say."""
        unfinished = [run for run in group.runs.values() if run.outcome is None]
        active = tuple((run.run_id, run.attempt) for run in unfinished if run.is_active)
        if active:
            self.decide(AbortRuns(active, reason), reason)
        for run in unfinished:
            self.cells.release(run.run_id)
            self.book.end(run, Outcome.CANCELLED, None)

    def active_attempts(self) -> tuple[tuple[str, int], ...]:
        runs = (run for group in self.book.live() for run in group.runs.values())
        return tuple((run.run_id, run.attempt) for run in runs if run.is_active)

    def begin_ending(self, status: JobStatus, reason: str) -> None:
        """End the job in good order. The first reason wins."""
        if self.planned_end is not None:
            return
        self.status, self.reason = JobStatus.ENDING, reason
        if self.training_step is not None and not self.training_step.is_closed:
            self.abandon_step()
        self.planned_end = FinishJob(status, reason)
        self.evaluation = None
        self.drop_unfinished(f"the job ends: {reason}", held_out_too=True)

    def abandon_step(self) -> None:
        """The step in flight will not be trained; its groups are ready again, for a resumed job."""
        if self.training_step is not None:
            self.book.return_from_training(self.book.find_all(tuple(self.training_step.group_ids)))
            self.training_step = None

    def end_at_once(self, reason: str) -> None:
        """End the job without saving: there is nothing to save, or no way to."""
        self.begin_ending(JobStatus.FAILED, reason)
        if self.planned_end is not None:
            status = self.planned_end.status
            self.finish(status, reason if status is JobStatus.FAILED else f"{self.planned_end.reason}; {reason}")

    def finish(self, status: JobStatus, reason: str) -> None:
        self.status, self.reason = status, reason
        self.decide(FinishJob(status, reason), reason)
