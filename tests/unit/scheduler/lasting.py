"""A world that outlives its scheduler: shards, runners, cells and training ranks that go on while there is none.

Everything in it happens once, however often it is asked for: what a killed scheduler had begun is still there when
the next one asks again. It keeps its own books of what really happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from services.common.types import CellKind, CellRole
from services.scheduler.actions import (
    AbortRuns,
    Action,
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
from services.scheduler.actor import JobScheduler
from services.scheduler.events import (
    BestMarked,
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellReported,
    CellServing,
    CellUpdating,
    CheckpointSaved,
    Event,
    GroupScored,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
)
from services.scheduler.options import JobOptions
from services.scheduler.performer import Recovered
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.types import GroupSpec
from tests.unit.scheduler.world import group_result

Emit = Callable[[Event], None]


class LastingWorld:
    """What a job's other processes know. ``fault_rate``: share of attempts that end as no fault of the policy."""

    def __init__(self, job: JobOptions, seed: int, fault_rate: float = 0.0) -> None:
        self.job = job
        self.fault_rate = fault_rate
        self.rng = random.Random(seed)
        self.specs: dict[str, GroupSpec] = {}
        self.attempts: dict[tuple[str, int], asyncio.Task[Outcome]] = {}
        self.num_executed: Counter[tuple[str, int]] = Counter()
        self.aborted: set[tuple[str, int]] = set()
        self.scored: set[str] = set()
        self.trained: dict[int, tuple[str, ...]] = {}
        self.saved: set[int] = set()
        self.versions = {f"cell-{index}": -1 for index in range(job.num_cells)}
        self.updates: Counter[tuple[str, int]] = Counter()
        self.evaluations: dict[int, RecordEvaluation] = {}
        self.marked: list[int] = []
        self.finish: FinishJob | None = None
        self.num_performed = 0

    async def pause(self) -> None:
        """A few turns of the loop: what a process in between takes."""
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)

    def outcome_of(self, run_id: str, attempt: int) -> Outcome:
        """The same one whenever it is asked: it depends on nothing but the attempt."""
        if random.Random(f"{run_id}/{attempt}").random() < self.fault_rate:
            return random.Random(f"{attempt}/{run_id}").choice((Outcome.ENGINE_LOSS, Outcome.VERIFIER_TIMEOUT))
        return Outcome.FINISHED

    async def run(self, run_id: str, attempt: int) -> Outcome:
        """A runner's side of an attempt: it is executed once, and goes on when whoever asked is gone."""
        key = (run_id, attempt)
        if key not in self.attempts:
            self.attempts[key] = asyncio.create_task(self._execute(key))
        return await asyncio.shield(self.attempts[key])

    async def _execute(self, key: tuple[str, int]) -> Outcome:
        self.num_executed[key] += 1
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
            if key in self.aborted:
                return Outcome.CANCELLED
        return self.outcome_of(*key)


class LastingPerformer:
    """One scheduler's way into the world. It dies with the scheduler."""

    def __init__(self, world: LastingWorld) -> None:
        self.world = world
        self.recovered: Recovered | None = None

    async def recover(self, recovered: Recovered) -> None:
        self.recovered = recovered
        world = self.world
        for key, task in world.attempts.items():
            if key not in recovered.attempts and not task.done():
                world.aborted.add(key)

    async def attend(self, emit: Emit) -> None:
        was_up = self.recovered.cells if self.recovered else ()
        for cell_id, version in self.world.versions.items():
            await self.world.pause()
            version = self.world.versions[cell_id]
            if cell_id in was_up and version >= 0:
                emit(CellReported(cell_id, 4, version))
            else:
                emit(CellJoined(cell_id, 4, CellKind.CORE if cell_id == "cell-0" else CellKind.SATELLITE))

    async def perform(self, action: Action, emit: Emit) -> None:
        world = self.world
        await world.pause()
        match action:
            case OpenGroup(spec, _):
                assert world.specs.setdefault(spec.group_id, spec) == spec, "a group id has two meanings"
            case StartRun():
                await self._run(action, emit)
            case ScoreGroup(group_id):
                await self._score(group_id, emit)
            case TrainStep():
                await self._train(action, emit)
            case PublishWeights(version, cell_ids):
                await self._publish(version, cell_ids, emit)
            case SwitchCell(cell_id, role, _):
                emit(CellDrained(cell_id) if role is CellRole.TRAIN else CellAdmitted(cell_id))
            case SaveCheckpoint(step):
                world.saved.add(step)
                emit(CheckpointSaved(step))
            case MarkBest(step):
                if step not in world.marked:
                    world.marked.append(step)
                emit(BestMarked(step))
            case RecordEvaluation(version):
                assert world.evaluations.setdefault(version, action) == action
            case AbortRuns(attempts):
                world.aborted.update(attempts)
            case DropGroup():
                pass
            case FinishJob():
                world.finish = action
        world.num_performed += 1

    async def _run(self, action: StartRun, emit: Emit) -> None:
        world = self.world
        assert action.group_id in world.specs, "a run starts before its group is open"
        running = asyncio.ensure_future(world.run(action.run_id, action.attempt))
        emit(RunStarted(action.run_id, action.attempt))
        outcome = await running
        await world.pause()
        emit(RunEnded(action.run_id, action.attempt, outcome, 1.0 if OUTCOME_TABLE[outcome].counted else None))

    async def _score(self, group_id: str, emit: Emit) -> None:
        world = self.world
        spec = world.specs[group_id]
        for run_id in spec.run_ids:
            last = max(attempt for run, attempt in world.attempts if run == run_id)
            assert world.attempts[(run_id, last)].done(), f"{group_id} is scored while {run_id} runs"
        world.scored.add(group_id)
        emit(GroupScored(group_result(group_id, reward=0.1 * spec.version if spec.is_eval else 0.5)))

    async def _train(self, action: TrainStep, emit: Emit) -> None:
        world = self.world
        told = world.trained.setdefault(action.step, ())
        world.trained[action.step] = told + tuple(group for group in action.group_ids if group not in told)
        assert set(world.trained[action.step]) <= world.scored
        await world.pause()
        if action.num_missing == 0:
            emit(StepTrained(action.step, num_tokens=7))

    async def _publish(self, version: int, cell_ids: tuple[str, ...], emit: Emit) -> None:
        world = self.world
        for cell_id in cell_ids:
            emit(CellUpdating(cell_id, version))
            await world.pause()
            if world.versions[cell_id] != version:
                world.updates[(cell_id, version)] += 1
            world.versions[cell_id] = version
            emit(CellServing(cell_id, version))
        emit(PublicationEnded(version))


async def kill(scheduler: JobScheduler) -> None:
    """What ``kill -9`` does to a scheduler: from now on it writes nothing and says nothing."""
    assert scheduler._journal is not None
    scheduler._journal._db.close()
    scheduler._journal._lock.close()
    for task in (*scheduler._workers, *scheduler._hands.tasks):
        task.cancel()
    if scheduler._server is not None:
        await scheduler._server.stop(grace=None)
    await asyncio.gather(*scheduler._workers, *scheduler._hands.tasks, return_exceptions=True)


class Lives:
    """A job that goes through as many schedulers as a test wants."""

    def __init__(self, world: LastingWorld, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.now_s = 1000.0
        self.num_lives = 0
        self.addresses: set[str] = set()

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    async def begin(self) -> JobScheduler:
        """The next scheduler, started."""
        self.num_lives += 1
        scheduler = JobScheduler(
            self.world.job,
            LastingPerformer(self.world),
            job_dir=str(self.folder),
            start_id="one start",
            grpc_token="t",
            clock=self._clock,
        )
        self.addresses.add(await scheduler.start())
        return scheduler

    async def live(self, num_performed: int | None = None) -> dict[str, object]:
        """Let one scheduler work: to the job's end, or until ``num_performed`` more actions were performed."""
        scheduler = await self.begin()
        goal = None if num_performed is None else self.world.num_performed + num_performed
        async with asyncio.timeout(60):
            while not scheduler._done.is_set() and (goal is None or self.world.num_performed < goal):  # noqa: ASYNC110
                await asyncio.sleep(0)
        status = await scheduler.wait_done(0)
        if status["done"]:
            await scheduler.close()
        else:
            with contextlib.suppress(asyncio.CancelledError):
                await kill(scheduler)
        return status
