"""Performs the scheduler's actions on the real cluster: shards, runners, cells, the training ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from services.common.errors import MachineError, TidegateError
from services.common.ids import CellId, JobId, RunId, make_cell_id, shard_of, spread_of
from services.common.metrics import metric
from services.common.names import RAY_NAMESPACE, mailbox_actor, rollout_actor, runner_actor, shard_actor
from services.common.remote import one_line
from services.common.types import CellKind, CellRole
from services.job.cells import Cells, Emit, comes_back
from services.job.commit import Commit, write_commit
from services.job.config import JobConfig, public_config, training_cells
from services.job.recorder import Recorder
from services.rollout.scoring.base import longest_scoring_s
from services.rollout.types import RunResult, RunSpec, Task, UpdateResult
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
from services.scheduler.events import (
    BestMarked,
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellLost,
    CellServing,
    CellStale,
    CellUpdating,
    CheckpointSaved,
    GroupScored,
    HarnessEnded,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
    TrainingFailed,
    TrainingProgressed,
)
from services.scheduler.performer import Recovered
from services.scheduler.types import ReadyGroup
from services.trainer.commands import MarkBest as MarkOnRanks
from services.trainer.commands import MicroStepAt, Publish
from services.trainer.commands import SaveCheckpoint as SaveOnRanks
from services.trainer.step import Listener, Portion
from services.trainer.team import TrainingTeam
from services.trainer.types import WeightManifest
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult, GroupSpec

logger = logging.getLogger(__name__)

_POLL_TIMEOUT_S = 60.0
_SHARD_TIMEOUT_S = 600.0
_RUN_MARGIN_S = 120.0  # what an attempt takes besides its harness and its scoring
_PUBLISH_MARGIN_S = 30.0  # so that a cell's own deadline comes first


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the job's parts are."""

    job_id: JobId
    config: JobConfig
    folder: str
    proxy_url: str
    """What harnesses are given, before ``/run/KEY``."""
    grpc_token: str
    train_tasks: tuple[Task, ...]
    heldout_tasks: tuple[Task, ...]
    num_runners: int
    ready: tuple[ReadyGroup, ...] = ()
    """Groups that a resumed job starts with."""


class ClusterPerformer:
    """The ``Performer`` of a live job. Lives in the scheduler's actor; one coroutine an action."""

    def __init__(self, surroundings: Surroundings, find_actor: Callable[[str], Any] | None = None) -> None:
        """``find_actor`` finds actors by name (None: in the job's Ray cluster)."""
        self._find_actor = find_actor or _actor
        self._at = surroundings
        self._config = surroundings.config
        job_id = surroundings.job_id
        self._folder = Path(surroundings.folder)
        num_shards = self._config.trajectory.num_shards
        self._shards = [self._find_actor(shard_actor(job_id, index)) for index in range(num_shards)]
        self._runners = [self._find_actor(runner_actor(job_id, index)) for index in range(surroundings.num_runners)]
        self._mailbox = self._find_actor(mailbox_actor(job_id, make_cell_id(0)))
        self._team = self._make_team()
        cell_ids = [make_cell_id(index) for index in range(self._config.rollout.cells.num_cells)]
        self._cells = Cells(
            {cell_id: self._find_actor(rollout_actor(job_id, cell_id)) for cell_id in cell_ids},
            surroundings.grpc_token,
            self._config.rollout.engine.start_timeout_s,
            kind_of=self._kind_of,
            lost=self._team.leave,
        )
        self._specs: dict[str, GroupSpec] = {group.spec.group_id: group.spec for group in surroundings.ready}
        self._manifest: WeightManifest | None = None
        self._recorder = Recorder(self._folder, job_id, self._config.output.wandb_project, public_config(self._config))
        self._aborted: set[tuple[str, int]] = set()
        """Attempts that were aborted while they were on their way to a runner."""
        self._lost_attempts: set[tuple[str, int]] = set()
        """Attempts whose runner died while there was no scheduler."""
        self._on_their_way: set[tuple[str, int]] = set()
        self._emit: Emit = lambda event: None
        self._tasks: set[asyncio.Task[None]] = set()

    async def perform(self, action: Action, emit: Emit) -> None:
        """Perform one action; its results are emitted as events."""
        match action:
            case OpenGroup():
                await self._open_group(action)
            case StartRun():
                await self._run(action, emit)
            case ScoreGroup(group_id):
                await self._score(group_id, emit)
            case DropGroup(group_id, reason):
                self._specs.pop(group_id, None)
                await _of_shard(self._shard(group_id).drop_group.remote(group_id, reason))
            case SwitchCell():
                await self._switch(action, emit)
            case TrainStep():
                await self._train(action, emit)
            case PublishWeights():
                await self._publish(action, emit)
            case SaveCheckpoint():
                await self._save(action, emit)
            case MarkBest(step, reward_mean):
                await self._mailbox.submit.remote(MarkOnRanks(step, reward_mean))
                emit(BestMarked(step))
            case RecordEvaluation():
                rewards = {task.task_name: task.rewards for task in action.tasks}
                self._recorder.evaluated(action.version, rewards, self._config.eval.pass_reward)
            case AbortRuns(attempts):
                self._aborted.update(self._on_their_way.intersection(attempts))
                await asyncio.gather(*(runner.cancel.remote(list(attempts)) for runner in self._runners))
            case FinishJob():
                await self._team.close()
                self._recorder.close()

    async def attend(self, emit: Emit) -> None:
        """Watch every cell until cancelled: bring it up, notice its death, bring it up again."""
        self._emit = emit
        await self._cells.attend(emit)

    async def recover(self, recovered: Recovered) -> None:
        """Take up a job whose scheduler died: what a performer remembers, and an end to runs that are nobody's."""
        self._specs = {spec.group_id: spec for spec in recovered.groups}
        self._cells.recover(recovered.cells)
        for cell_id in recovered.training:
            self._team.join(cell_id)
        for result in recovered.scored:
            self._recorder.group_scored(result)
        attempts = list(recovered.attempts)
        held = await asyncio.gather(*(self._keep_only(runner, attempts) for runner in self._runners))
        self._lost_attempts = set(recovered.started).difference(*held)

    async def _keep_only(self, runner: Any, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                held: list[tuple[str, int]] = await runner.keep_only.remote(attempts)
                return held
        except (RayError, TimeoutError):  # it is being restarted: nothing runs there
            return []

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _shard(self, group_id: str) -> Any:
        return self._shards[self._shard_index(group_id)]

    def _shard_index(self, group_id: str) -> int:
        return shard_of(RunId(f"{group_id}-r0"), len(self._shards))

    async def _open_group(self, action: OpenGroup) -> None:
        self._specs[action.spec.group_id] = action.spec
        await _of_shard(self._shard(action.spec.group_id).open_group.remote(action.spec))

    async def _run(self, action: StartRun, emit: Emit) -> None:
        attempt = (action.run_id, action.attempt)
        shard = self._shard(action.group_id)
        self._on_their_way.add(attempt)
        try:
            key = await _of_shard(shard.open_attempt.remote(*attempt))
        finally:
            self._on_their_way.discard(attempt)
        if not key:  # it ended and was recorded; the scheduler died before it knew
            emit(RunStarted(*attempt))
            recorded: RunResult = await _of_shard(shard.attempt_result.remote(*attempt))
            emit(RunEnded(*attempt, recorded.outcome, recorded.reward, recorded.detail))
            return
        if attempt in self._aborted:
            self._aborted.discard(attempt)
            emit(RunStarted(*attempt))
            result, lost_runner = _lost(action, Outcome.CANCELLED, "aborted before its harness was started", 0.0), None
        elif attempt in self._lost_attempts:
            self._lost_attempts.discard(attempt)
            result, lost_runner = _lost(action, Outcome.RUNNER_LOSS, "its runner died with the scheduler", 0.0), None
        else:
            result, lost_runner = await self._run_on_a_runner(action, key, emit)
        await _of_shard(shard.close_attempt.remote(*attempt))
        outcome: Outcome = await _of_shard(shard.finish_run.remote(result))
        self._runner_of(*attempt).forget.remote([attempt])
        if lost_runner is not None:
            await comes_back(lost_runner)  # its slot is not free before; further attempts would meet the same end
        emit(RunEnded(*attempt, outcome, result.reward, result.detail))

    async def _run_on_a_runner(self, action: StartRun, key: str, emit: Emit) -> tuple[RunResult, Any]:
        """How the attempt ended, and the runner if it died meanwhile."""
        tasks = self._at.heldout_tasks if action.is_eval else self._at.train_tasks
        spec = RunSpec(
            run_id=action.run_id,
            attempt=action.attempt,
            task=tasks[action.task_index],
            base_url=f"{self._at.proxy_url}/run/{key}",
            api_key=key,
            model_name=self._config.name,
            run_dir=str(self._folder / "attempts" / f"{action.run_id}-a{action.attempt}"),
        )
        runner = self._runner_of(action.run_id, action.attempt)
        started = time.monotonic()
        scoring_s = longest_scoring_s(self._config.rollout.scoring, spec.task)
        timeout_s = spec.task.agent_timeout_s + scoring_s + _RUN_MARGIN_S
        lost_runner = None
        try:
            async with asyncio.timeout(timeout_s):
                running = runner.run.remote(spec)
                emit(RunStarted(action.run_id, action.attempt))  # not before it is on its way to the runner
                noting = asyncio.ensure_future(_note_scoring(runner, action, emit))
                try:
                    return await running, None
                finally:
                    noting.cancel()
        except RayError as error:
            reason = f"the runner died: {one_line(error)}"
            lost_runner = runner if isinstance(error, RayActorError) else None
        except TimeoutError:
            reason = f"the runner gave no answer within {timeout_s:g} s"
            runner.cancel.remote([(action.run_id, action.attempt)])
        return _lost(action, Outcome.RUNNER_LOSS, reason, time.monotonic() - started), lost_runner

    def _runner_of(self, run_id: str, attempt: int) -> Any:
        """The runner of an attempt, always the same one: who asks again finds it there."""
        return self._runners[spread_of(RunId(run_id), attempt, len(self._runners))]

    async def _score(self, group_id: str, emit: Emit) -> None:
        result: GroupResult = await _of_shard(self._shard(group_id).finish_group.remote(group_id))
        is_eval = self._specs[group_id].is_eval
        if is_eval or not result.ready:
            self._specs.pop(group_id, None)
        if not is_eval:
            self._recorder.group_scored(result)
        emit(GroupScored(result))

    # -- cells --------------------------------------------------------------------------------------------------------

    def _kind_of(self, cell_id: CellId) -> CellKind:
        if cell_id == self._team.core_id:
            return CellKind.CORE
        return CellKind.STANDALONE if self._team.why_dead(cell_id) else CellKind.SATELLITE

    async def _switch(self, action: SwitchCell, emit: Emit) -> None:
        client = await self._cells.client(action.cell_id)
        if action.role is CellRole.TRAIN:
            if reason := await self._team.check(action.cell_id):
                await self._serve_only(action.cell_id, reason, emit)
                return
            _, num_aborted = await client.drain(action.timeout_s)
            self._team.join(action.cell_id)
            emit(CellDrained(action.cell_id, num_aborted))
        else:
            self._team.leave(action.cell_id)
            await client.admit()
            emit(CellAdmitted(action.cell_id))

    async def _publish(self, action: PublishWeights, emit: Emit) -> None:
        if self._manifest is None or self._manifest.version != action.version:
            self._manifest = await self._mailbox.submit.remote(Publish(action.version))
        manifest = self._manifest
        assert manifest is not None
        for cell_id in action.cell_ids:
            emit(CellUpdating(cell_id, action.version))
            try:
                timeout_s = self._config.rollout.cells.update_timeout_s + _PUBLISH_MARGIN_S
                result = await self._cells.update(cell_id, manifest, timeout_s)
            except TidegateError as error:
                emit(CellStale(cell_id, str(error)))
                continue
            self._note_update(action.version, result)
            if not result.ok:
                self._manifest = None  # the publisher may have been restarted: the next try asks it again
            emit(CellServing(cell_id, action.version) if result.ok else CellStale(cell_id, result.reason))
        emit(PublicationEnded(action.version))

    def _note_update(self, version: int, result: UpdateResult) -> None:
        self._recorder.weights_updated(
            version,
            cell=result.cell_id,
            ok=result.ok,
            reason=result.reason,
            seconds=result.seconds,
            size_bytes=result.size_bytes,
            transport=result.transport,
            canary_abs_diff_max=result.canary_abs_diff_max,
        )
        labels = {"job": self._at.job_id, "cell": result.cell_id}
        metric("tidegate_publish_seconds").observe(result.seconds, **labels)
        metric("tidegate_publish_bytes_total").inc(result.size_bytes, transport=result.transport, **labels)

    # -- training -----------------------------------------------------------------------------------------------------

    def _make_team(self) -> TrainingTeam:
        job_id, trainer = self._at.job_id, self._config.trainer
        return TrainingTeam(
            make_cell_id(0),
            {cell_id: self._find_actor(mailbox_actor(job_id, cell_id)) for cell_id in training_cells(self._config)},
            self._micro_steps_of,
            num_ranks=trainer.num_workers,
            timeout_s=trainer.step_timeout_s,
            lost=self._on_training_side_lost,
        )

    async def _micro_steps_of(self, group_id: str) -> list[MicroStepAt]:
        num_micro_steps: int = await _of_shard(self._shard(group_id).num_micro_steps.remote(group_id))
        name = shard_actor(self._at.job_id, self._shard_index(group_id))
        return [MicroStepAt(name, group_id, index) for index in range(num_micro_steps)]

    def _on_training_side_lost(self, cell_id: str, reason: str) -> None:
        task = asyncio.ensure_future(self._serve_only(cell_id, reason, self._emit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_only(self, cell_id: str, reason: str, emit: Emit) -> None:
        """A satellite without a training side goes on as a cell that always serves: its rollout side is well."""
        logger.warning("%s serves rollout only from now on: %s", cell_id, reason)
        emit(CellLost(cell_id, f"its training side is gone: {reason}", may_return=True))
        try:
            client = await self._cells.client(cell_id)
            await client.admit()
            status = await client.status()
        except TidegateError as error:  # whoever attends to the cell sees it too
            logger.warning("%s cannot serve either: %s", cell_id, error)
            return
        emit(CellJoined(cell_id, status.slots, self._kind_of(CellId(cell_id))))

    async def _train(self, action: TrainStep, emit: Emit) -> None:
        portion = Portion(
            step=action.step,
            version=action.version if action.version == action.step - 1 else -1,
            temperature=self._config.rollout.sampling.temperature,
            group_ids=action.group_ids,
            is_last=action.num_missing == 0,
        )
        listener = Listener(
            progressed=lambda num_unclaimed: emit(TrainingProgressed(action.step, num_unclaimed)),
            failed=lambda reason: emit(TrainingFailed(reason)),
        )
        try:
            trained = await self._team.train(portion, listener)
        except (RayError, TidegateError) as error:
            emit(TrainingFailed(one_line(error)))
            return
        if trained is None:
            return
        for shard in self._shards:
            await _of_shard(shard.mark_trained.remote(list(trained.group_ids), action.step))
        specs = [self._specs.pop(group_id, None) for group_id in trained.group_ids]
        staleness = [action.step - 1 - spec.version for spec in specs if spec is not None]
        report = trained.report
        self._recorder.step_trained(report, version=action.version, staleness_steps=staleness)
        emit(StepTrained(action.step, report.num_tokens, report.num_targets, report.seconds))

    async def _save(self, action: SaveCheckpoint, emit: Emit) -> None:
        command = SaveOnRanks(action.step, action.resume.version, action.export, action.kept_steps)
        checkpoint = await self._mailbox.submit.remote(command)
        write_commit(self._folder, Commit(Path(checkpoint).name, action.resume))
        emit(CheckpointSaved(action.step))
        # the checkpoint stands: nothing waits for a shard that is away, and the next checkpoint tells it again
        noting = [_of_shard(shard.note_checkpoint.remote(action.step)) for shard in self._shards]
        for failure in await asyncio.gather(*noting, return_exceptions=True):
            if isinstance(failure, Exception) and not isinstance(failure, RayError | TidegateError):
                raise failure


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=RAY_NAMESPACE)


async def _of_shard(answer: Awaitable[Any]) -> Any:
    """A shard's answer. Raises ``MachineError`` at the deadline: nothing may wait for a shard that hangs."""
    try:
        async with asyncio.timeout(_SHARD_TIMEOUT_S):
            return await answer
    except TimeoutError:
        raise MachineError(
            f"a trajectory shard gave no answer within {_SHARD_TIMEOUT_S:g} s.",
            "See its log, and whether the disk of output.dir answers.",
        ) from None


async def _note_scoring(runner: Any, action: StartRun, emit: Emit) -> None:
    with contextlib.suppress(RayError):  # whoever waits for the attempt's result sees it too
        if await runner.harness_ended.remote(action.run_id, action.attempt):
            emit(HarnessEnded(action.run_id, action.attempt))


def _lost(action: StartRun, outcome: Outcome, reason: str, wall_s: float) -> RunResult:
    """The result of an attempt of which no runner tells."""
    return RunResult(
        run_id=action.run_id,
        attempt=action.attempt,
        outcome=outcome,
        reward=None,
        wall_s=wall_s,
        harness_s=0.0,
        verifier_s=0.0,
        exit_code=None,
        detail=reason,
    )
