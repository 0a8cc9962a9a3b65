"""A small fake world: it performs the scheduler's actions whenever a test says so, and checks each against the rules.

It keeps its own books (unfinished runs, slots, roles, versions), so that a wrong count in the core is noticed here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import TidegateError
from services.common.types import CellKind, CellRole
from services.scheduler.actions import (
    AbortRuns,
    Decision,
    DropGroup,
    FinishJob,
    MarkBest,
    OpenGroup,
    PublishWeights,
    RecordEvaluation,
    SaveCheckpoint,
    ScoreGroup,
    StartRun,
    SwitchCell,
    TrainStep,
)
from services.scheduler.events import (
    ActionFailed,
    BestMarked,
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellLost,
    CellServing,
    CellStale,
    CellUpdating,
    CheckpointSaved,
    DrainRequested,
    Event,
    GroupScored,
    HarnessEnded,
    PublicationEnded,
    Request,
    RunEnded,
    RunStarted,
    StepTrained,
    SwitchRequested,
    TrainingProgressed,
    UndrainRequested,
)
from services.scheduler.options import JobOptions, OnLostGroup, PolicyMode
from services.scheduler.state import JobState
from services.scheduler.types import ResumeState
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.types import GroupResult, GroupSpec


def options(**changes) -> JobOptions:
    numbers = {
        "job_id": "job",
        "num_cells": 2,
        "task_names": ("t0", "t1", "t2"),
        "steps": 3,
        "groups_per_step": 2,
        "group_size": 2,
        "max_concurrent_runs": 100,
        "eval_at_end": False,
    }
    return JobOptions(**{**numbers, **changes})


def group_result(group_id: str, *, ready: bool = True, reward: float = 0.5, reason: str = "") -> GroupResult:
    return GroupResult(group_id, ready, reason, 2, 2, 10, 20, reward, (reward, reward), 0)


@dataclass
class WorldCell:
    slots: int
    kind: CellKind
    role: CellRole = CellRole.ROLLOUT
    version: int = -1
    serving: bool = False
    runs: set[str] = field(default_factory=set)
    is_draining: bool = False
    came_late: bool = False
    """It came (back) to rollout inside a burst."""

    @property
    def is_core(self) -> bool:
        return self.kind is CellKind.CORE


class World:
    """Feeds events to a ``JobState`` and keeps the answers that it owes in ``pending``."""

    def __init__(
        self,
        job: JobOptions,
        slots: tuple[int, ...] = (4, 4),
        resume: ResumeState | None = None,
        *,
        others: CellKind = CellKind.STANDALONE,
    ) -> None:
        """``others``: the kind of all cells but the core."""
        self.others = others
        self.options = job
        self.state = JobState(job, resume)
        self.now_s = 0.0
        self.cells: dict[str, WorldCell] = {}
        self.slots = {f"cell-{index}": count for index, count in enumerate(slots)}
        self.pending: list[object] = []
        self.usual_outcome = Outcome.FINISHED
        self.attempts: dict[tuple[str, int], str] = {}
        self.specs: dict[str, GroupSpec] = {}
        self.unfinished: set[str] = set()
        self.ends: dict[str, str] = {}
        self.ready: set[str] = {group.spec.group_id for group in resume.ready} if resume else set()
        for group in resume.ready if resume else ():
            self.specs[group.spec.group_id] = group.spec
        self.step = resume.step if resume else 0
        self.log: list[tuple[float, Event, list[Decision]]] = []
        self.evaluations: list[RecordEvaluation] = []
        self.checkpoints: list[SaveCheckpoint] = []
        self.eval_reward: Callable[[int], float] = lambda version: 0.5
        """Reward of every held-out run of a version."""
        self.exported: set[int] = {resume.exported_step} if resume else set()
        """Steps whose checkpoints are complete, with an export."""
        self.best: tuple[int, float | None] = (resume.best_eval_step, resume.best_eval_reward) if resume else (-1, None)
        self.best_before = self.best[1]
        self.marked: list[int] = []
        self.finish: FinishJob | None = None
        self.trained_staleness: list[int] = []
        self.in_step: list[str] = []
        """Groups that were told of the step that is being filled or trained."""
        self.num_unclaimed = 0
        self.burst_done = 0

    # -- feeding --

    def feed(self, event: Event) -> list[Decision]:
        self.now_s += 0.1
        decisions = self.state.handle(event, self.now_s)
        self.log.append((self.now_s, event, decisions))
        for decision in decisions:
            assert decision.reason
            self.perform(decision)
        self.check_counters()
        return decisions

    def join_all(self) -> None:
        for cell_id in self.slots:
            self.join(cell_id)

    def join(self, cell_id: str) -> None:
        kind = CellKind.CORE if cell_id == "cell-0" else self.others
        self.cells[cell_id] = WorldCell(self.slots[cell_id], kind, came_late=self.is_inside_burst)
        before = len(self.log)
        self.feed(CellJoined(cell_id, self.slots[cell_id], kind))
        assert len(self.log) == before + 1
        self._take_roles()

    @property
    def is_inside_burst(self) -> bool:
        training = any(cell.role in (CellRole.TRAIN, CellRole.TO_TRAIN) for cell in self.cells.values())
        return training or bool(self.in_step) or self.burst_done > 0

    def ask(self, request: Request) -> TidegateError | None:
        """A user's request: refused without any change, or taken in."""
        before = self.state.snapshot()
        refusal = self.state.refusal(request)
        assert self.state.snapshot() == before
        if refusal is not None:
            return refusal
        if isinstance(request, DrainRequested | UndrainRequested):
            cell = self.cells[request.cell_id]
            cell.is_draining = isinstance(request, DrainRequested)
            if not cell.is_draining:
                cell.came_late = self.is_inside_burst
                cell.serving = cell.serving and cell.version == self.state.version
        if isinstance(request, SwitchRequested) and request.role is CellRole.ROLLOUT:
            self.cells[request.cell_id].came_late = True
        self.feed(request)
        return None

    def lose(self, cell_id: str) -> None:
        cell = self.cells[cell_id]
        cell.role, cell.serving = CellRole.DOWN, False
        self.feed(CellLost(cell_id, "killed by the test"))

    def make_stale(self, cell_id: str) -> None:
        self.cells[cell_id].serving = False
        self.feed(CellStale(cell_id, "made stale by the test"))

    def _take_roles(self) -> None:
        for view in self.state.snapshot()["cells"]:
            if view["cell_id"] in self.cells:
                self.cells[view["cell_id"]].role = CellRole(view["role"])

    # -- performing: each action is checked and leaves an answer to be given later --

    def perform(self, decision: Decision) -> None:
        assert self.finish is None, "an action follows FinishJob"
        action = decision.action
        match action:
            case OpenGroup(spec, _):
                assert spec.group_id not in self.specs, "a group id was used twice"
                self.specs[spec.group_id] = spec
                self.unfinished |= set(spec.run_ids)
            case StartRun():
                self._check_start(action)
                self.attempts[(action.run_id, action.attempt)] = "starting"
                self.pending.append(action)
            case AbortRuns(attempts, _):
                for key in attempts:
                    assert self.attempts[key] in ("starting", "running", "scoring"), f"{key} is {self.attempts[key]}"
                    self.attempts[key] = "aborted"
            case DropGroup(group_id, _):
                self._end_group(group_id, "dropped")
                self.unfinished -= set(self.specs[group_id].run_ids)
                self.ready.discard(group_id)
            case SwitchCell(cell_id, role, _):
                self._check_switch(cell_id, role)
                self.pending.append(action)
            case TrainStep():
                self._check_step(action)
                self.pending.append(action)
            case PublishWeights(version, cell_ids):
                assert version in (self.step, self.state.version)
                assert len(set(cell_ids)) == len(cell_ids) > 0
                assert "cell-0" not in cell_ids[:-1], "the core is updated last"
                self.pending.append(action)
            case SaveCheckpoint():
                self._check_save(action)
                self.checkpoints.append(action)
                self.pending.append(action)
            case MarkBest(step, reward_mean):
                assert step in self.exported, "a checkpoint without an export is marked best"
                assert self.best[1] is None or reward_mean > self.best[1]
                assert not any(isinstance(other, MarkBest) for other in self.pending)
                self.pending.append(action)
            case RecordEvaluation():
                self.evaluations.append(action)
                if action.version == 0 and self.best[1] is None:
                    self.best = (0, action.reward_mean)
            case ScoreGroup():
                self.pending.append(action)
            case FinishJob():
                self.finish = action

    def _check_start(self, action: StartRun) -> None:
        cell = self.cells[action.cell_id]
        assert not cell.is_draining, "a drained cell gets no traffic"
        assert cell.role is CellRole.ROLLOUT, f"a run starts on a cell in {cell.role}"
        assert cell.serving, "a stale cell gets no traffic"
        running = sum(status in ("starting", "running") for status in self.attempts.values())
        assert running < self.options.max_concurrent_runs
        assert action.run_id in self.unfinished
        assert (action.run_id, action.attempt) not in self.attempts, "an attempt was started twice"

    def _check_switch(self, cell_id: str, role: CellRole) -> None:
        cell = self.cells[cell_id]
        if role is CellRole.ROLLOUT:
            assert cell.role is CellRole.TRAIN
            cell.role = CellRole.TO_ROLLOUT
            return
        assert cell.role is CellRole.ROLLOUT
        assert cell.kind is not CellKind.STANDALONE
        assert not cell.is_draining
        cell.role = CellRole.TO_TRAIN
        if self.state.options.policy.mode is PolicyMode.ELASTIC:
            self._check_elastic_departure(cell)

    def _check_elastic_departure(self, cell: WorldCell) -> None:
        """Eq. 5 at this event, something to train, one cell at a time, in fixed order."""
        others = sum(
            other.slots
            for other in self.cells.values()
            if other is not cell and other.role is CellRole.ROLLOUT and other.serving and not other.is_draining
        )
        assert len(self.unfinished) <= others, "Eq. 5 does not hold at a departure"
        if cell.is_core:
            streaming = self.state.options.policy.streaming
            assert len(self.ready) >= (1 if streaming else self.state.seats_left)
        else:
            assert self.in_step, "a satellite left with nothing to train"
        moving = [other for other in self.cells.values() if other.role is CellRole.TO_TRAIN]
        assert moving == [cell], "cells leave one at a time"
        self.check_prefix()

    def check_prefix(self) -> None:
        """Cells in training are the first of the live, undrained ones (but those that came back inside the burst)."""
        order = [
            cell.role in (CellRole.TRAIN, CellRole.TO_TRAIN)
            for cell in self.cells.values()
            if cell.kind is not CellKind.STANDALONE
            and cell.role not in (CellRole.DOWN, CellRole.TO_ROLLOUT)
            and not cell.is_draining
            and not cell.came_late
        ]
        assert order == sorted(order, reverse=True), "cells in training are no prefix"

    def _check_step(self, action: TrainStep) -> None:
        core = self.cells.get("cell-0")
        assert core is None or core.role in (CellRole.TRAIN, CellRole.DOWN)
        assert action.step == self.step + 1
        seats = len(self.in_step) + len(action.group_ids) + action.num_missing
        if self.state.options.on_lost_group is OnLostGroup.REPLACE:
            assert seats == self.options.groups_per_step
        assert 1 <= seats <= self.options.groups_per_step
        assert self.state.options.policy.streaming or (not self.in_step and action.num_missing == 0)
        assert len(set(action.group_ids)) == len(action.group_ids)
        assert set(action.group_ids) <= self.ready
        versions = [self.specs[group_id].version for group_id in action.group_ids]
        assert versions == sorted(versions), "oldest version first"
        left = [self.specs[group_id].version for group_id in self.ready - set(action.group_ids)]
        assert not left or not versions or min(left) >= versions[-1]
        staleness = [self.step - version for version in versions]
        assert max(staleness, default=0) <= self.options.max_staleness_steps
        self.trained_staleness += staleness
        self.in_step += action.group_ids
        self.ready -= set(action.group_ids)

    def _check_save(self, action: SaveCheckpoint) -> None:
        assert action.step == self.step
        assert not any(isinstance(other, SaveCheckpoint) for other in self.pending)
        if self.state.evaluation is not None and self.state.evaluation.version not in (0, action.step):
            assert self.state.evaluation.version in action.kept_steps, "a checkpoint in its held-out pass may go"
        if len(self.checkpoints) > 0 and self.checkpoints[-1].step != action.step:
            assert self.checkpoints[-1].step in action.kept_steps, "the last commit's checkpoint may go"

    def _end_group(self, group_id: str, how: str) -> None:
        assert group_id not in self.ends, f"{group_id} ended twice: {self.ends[group_id]}, {how}"
        self.ends[group_id] = how

    # -- answers --

    def answer(self, index: int, rng: random.Random, *, faults: bool = False) -> None:
        """Give the answer to one pending action (for a run: its start, then its end)."""
        action = self.pending.pop(index % len(self.pending))
        match action:
            case StartRun():
                self._answer_run(action, rng, faults)
            case ScoreGroup(group_id):
                self._answer_score(group_id, ready=not (faults and rng.random() < 0.2))
            case SwitchCell(cell_id, role, _):
                self._answer_switch(cell_id, role)
            case TrainStep(step):
                self._answer_step(step, action.num_missing, rng)
            case PublishWeights(version, cell_ids):
                self._answer_publication(version, cell_ids, rng, faults)
            case SaveCheckpoint(step, export):
                self.exported |= {step} if export else set()
                self.feed(CheckpointSaved(step))
            case MarkBest(step, reward_mean):
                self.best = (step, reward_mean)
                self.marked.append(step)
                self.feed(BestMarked(step))

    def _answer_step(self, step: int, num_missing: int, rng: random.Random) -> None:
        if self.state.training_step is None or self.state.training_step.step != step:
            return  # it was abandoned
        earlier = [other for other in self.pending if isinstance(other, TrainStep)]
        if num_missing > 0 or earlier:  # a part of the step, or its parts are not through
            self.feed(TrainingProgressed(step, rng.randrange(3)))
            if earlier and num_missing == 0:
                self.pending.append(TrainStep(step, (), 0))
            return
        self.step = step
        self.burst_done += 1
        for group_id in self.in_step:
            self._end_group(group_id, "trained")
        self.in_step = []
        self.feed(StepTrained(step, num_tokens=10))

    def _answer_run(self, action: StartRun, rng: random.Random, faults: bool) -> None:
        key = (action.run_id, action.attempt)
        status = self.attempts[key]
        if status == "starting" and not (faults and rng.random() < 0.1):
            self.attempts[key] = "running"
            self.pending.append(action)
            self.feed(RunStarted(*key))
            return
        if status == "running" and rng.random() < 0.5:
            self.attempts[key] = "scoring"
            self.pending.append(action)
            self.feed(HarnessEnded(*key))
            return
        outcome = self.usual_outcome
        if status == "aborted":
            outcome = Outcome.CANCELLED
        elif status == "starting":
            outcome = Outcome.SETUP_FAILURE
        elif faults:
            outcome = rng.choice(list(Outcome))
        if status != "aborted":
            rule = OUTCOME_TABLE[outcome]
            if rule.scored or action.attempt >= rule.max_retries:
                self.unfinished.discard(action.run_id)
        self.attempts[key] = "ended"
        self.feed(RunEnded(*key, outcome, 1.0 if OUTCOME_TABLE[outcome].counted else None))

    def _answer_score(self, group_id: str, *, ready: bool) -> None:
        spec = self.specs[group_id]
        if group_id not in self.ends:
            if spec.is_eval:
                self._end_group(group_id, "evaluated")
            elif ready:
                self.ready.add(group_id)
            else:
                self._end_group(group_id, "lost")
        reward = self.eval_reward(spec.version) if spec.is_eval else 0.5
        reason = "" if ready else "all rewards are equal"
        self.feed(GroupScored(group_result(group_id, ready=ready, reward=reward, reason=reason)))

    def _answer_switch(self, cell_id: str, role: CellRole) -> None:
        cell = self.cells[cell_id]
        if cell.role is (CellRole.TO_TRAIN if role is CellRole.TRAIN else CellRole.TO_ROLLOUT):
            cell.role = role
        # otherwise the cell was lost meanwhile, and the answer comes late
        self.feed(CellDrained(cell_id) if role is CellRole.TRAIN else CellAdmitted(cell_id))

    def _answer_publication(self, version: int, cell_ids: tuple[str, ...], rng: random.Random, faults: bool) -> None:
        for cell_id in cell_ids:
            cell = self.cells[cell_id]
            if cell.role is CellRole.DOWN:
                continue
            if rng.random() < 0.5:
                self.feed(CellUpdating(cell_id, version))
            if faults and rng.random() < 0.1:
                self.make_stale(cell_id)
            else:
                cell.version, cell.serving = version, True
                self.feed(CellServing(cell_id, version))
        if version == self.step and self.state.wanted_version == version:
            self.burst_done = 0
            for cell in self.cells.values():
                cell.came_late = False
        self.feed(PublicationEnded(version))

    def fail_one(self, index: int) -> None:
        """One pending action could not be performed."""
        action = self.pending[index % len(self.pending)]
        match action:
            case StartRun(run_id, attempt):
                if self.attempts[(run_id, attempt)] != "starting":
                    return
                self.attempts[(run_id, attempt)] = "ended"
                if attempt >= OUTCOME_TABLE[Outcome.RUNNER_LOSS].max_retries:
                    self.unfinished.discard(run_id)
            case SwitchCell(cell_id):
                to_role = CellRole.TO_TRAIN if action.role is CellRole.TRAIN else CellRole.TO_ROLLOUT
                if self.cells[cell_id].role is to_role:
                    self.cells[cell_id].role, self.cells[cell_id].serving = CellRole.ROLLOUT, False
                    self.cells[cell_id].came_late = True
            case TrainStep():
                self.ready |= set(self.in_step)
                self.in_step = []
        self.pending.remove(action)
        self.feed(ActionFailed(action, "broken by the test"))

    def give_up_late_starts(self) -> None:
        """Before a ``Tick`` long after: attempts that did not start are lost, in this world's books too."""
        for (run_id, attempt), status in self.attempts.items():
            if status == "starting" and attempt >= OUTCOME_TABLE[Outcome.RUNNER_LOSS].max_retries:
                self.unfinished.discard(run_id)

    # -- checks --

    def check_counters(self) -> None:
        snapshot = self.state.snapshot()
        assert snapshot["water_level"] == snapshot["dispatched"] - snapshot["ended"]
        assert 0 <= snapshot["ended"] <= snapshot["started"] <= snapshot["dispatched"]
        num_harnesses = snapshot["active_runs"] - snapshot["scoring_runs"]
        assert sum(cell["num_runs"] for cell in snapshot["cells"]) <= num_harnesses, "a slot was not released"
        training = self.state.book.training
        assert training.water_level >= 0
        if not self.state.status.is_final:
            assert snapshot["water_level"] == len(self.unfinished), "w differs from the runs that are unfinished"

    def play(self, rng: random.Random, *, max_answers: int = 5000, faults: bool = False) -> FinishJob:
        """Answer everything until the job ends. Fails if it waits for nothing, or never ends."""
        for _ in range(max_answers):
            if self.finish is not None:
                self.check_end()
                return self.finish
            assert self.pending, f"deadlock: nothing is pending.\n{self.state.history()}"
            self.answer(rng.randrange(len(self.pending)), rng, faults=faults)
        raise AssertionError(f"the job did not end within {max_answers} answers.\n{self.state.history()}")

    def check_end(self) -> None:
        """Every dispatched group ended exactly once, or is kept ready for a resumed job."""
        assert self.finish is not None
        if self.finish.status == "failed":
            return
        assert not any(isinstance(action, SaveCheckpoint | MarkBest) for action in self.pending)
        if self.finish.status == "finished":
            self.check_best()
        abandoned = set(self.in_step)  # told of a step that was never complete
        assert abandoned <= set(self.state.book.ready), "groups of an abandoned step are kept ready"
        open_groups = set(self.specs) - set(self.ends) - self.ready - abandoned
        assert not open_groups, f"groups without an end: {open_groups}"
        for spec in self.specs.values():
            if self.ends.get(spec.group_id) == "trained":
                assert not self.unfinished & set(spec.run_ids)

    def check_best(self) -> None:
        """Each version whose held-out pass was better than all before is marked, if a checkpoint can hold it."""
        assert {record.version for record in self.evaluations} <= self.exported | {0}
        failed = [
            e.action.step for _, e, _ in self.log if isinstance(e, ActionFailed) and isinstance(e.action, MarkBest)
        ]
        best, expected = self.best_before, []
        for record in self.evaluations:
            if record.reward_mean is not None and (best is None or record.reward_mean > best):
                if record.version in failed:
                    continue
                best = record.reward_mean
                expected += [record.version] if record.version else []
        assert self.marked == expected
