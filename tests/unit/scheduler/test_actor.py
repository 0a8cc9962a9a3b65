"""The shell around the core: real gRPC on loopback, an ideal performer."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayTaskError

from services.common.errors import ConfigError, EngineError, RefusedError, TrainingError
from services.common.types import CellKind
from services.scheduler import hands
from services.scheduler.actions import Action, OpenGroup, SaveCheckpoint, ScoreGroup, StartRun, TrainStep
from services.scheduler.actor import JobScheduler
from services.scheduler.codec import decode
from services.scheduler.events import CellDrained, CellJoined, CellStale, Event, GroupScored, RunStarted
from services.scheduler.journal import read_journal
from services.scheduler.state import JobState
from tests.unit.scheduler.live import IdealPerformer
from tests.unit.scheduler.world import group_result, options

TOKEN = "token-of-this-test"


async def started(job, performer, tmp_path, **more) -> JobScheduler:
    scheduler = JobScheduler(job, performer, job_dir=str(tmp_path), grpc_token=TOKEN, **more)
    await scheduler.start()
    for index in range(job.num_cells):
        await scheduler.post(CellJoined(f"cell-{index}", 4, CellKind.CORE if index == 0 else CellKind.SATELLITE))
    return scheduler


@pytest.fixture
async def performer() -> IdealPerformer:
    return IdealPerformer()


async def test_a_job_runs_to_its_end(performer, tmp_path) -> None:
    job = options(steps=3, eval_task_names=("e0",), eval_every=2, eval_at_start=True, eval_at_end=True)
    scheduler = await started(job, performer, tmp_path)
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["done"]
    assert status["status"] == "finished"
    assert status["step"] == 3
    assert status["train_tokens"] == 21
    assert status["evaluation"]["last_step"] == 3
    assert performer.finish.status == "finished"
    assert performer.performed[-1] is performer.finish
    assert [(saved.step, saved.export) for saved in performer.did(SaveCheckpoint)] == [(2, True), (3, True)]
    assert status["evaluation"]["best_step"] == 0, "no later pass was better than the first"


async def test_wait_done_returns_at_its_timeout(performer, tmp_path) -> None:
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)
    assert not (await scheduler.wait_done(0.01))["done"]
    performer.hold.set()
    assert (await scheduler.wait_done(30))["done"]
    await scheduler.close()


async def test_the_journal_replays_to_the_same_decisions(performer, tmp_path) -> None:
    scheduler = await started(options(steps=4, steps_per_burst=2), performer, tmp_path)
    await scheduler.wait_done(30)
    await scheduler.close()
    records = list(read_journal(tmp_path))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    assert records[0].kind == "JobStarted"
    state = JobState(decode(records[0].payload["options"]))
    for record in records[1:]:
        decisions = state.handle(decode(record.payload), record.at_s)
        logged = [(decode(made.payload), made.reason) for made in record.decisions]
        assert [(decision.action, decision.reason) for decision in decisions] == logged
    assert state.status == "finished"


async def test_a_resumed_job_continues_the_journal_and_the_counts(performer, tmp_path) -> None:
    scheduler = await started(options(steps=2), performer, tmp_path)
    await scheduler.wait_done(30)
    await scheduler.close()
    saved = performer.did(SaveCheckpoint)[-1].resume
    assert saved.step == 2
    again = IdealPerformer()
    scheduler = await started(options(steps=4), again, tmp_path, resume=saved)
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "finished"
    assert [action.step for action in again.did(TrainStep)] == [3, 4]
    assert not {a.spec.group_id for a in again.did(OpenGroup)} & {a.spec.group_id for a in performer.did(OpenGroup)}
    records = list(read_journal(tmp_path))
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    assert [record.kind for record in records].count("JobStarted") == 2


async def test_a_posted_event_is_in_the_journal_on_return(performer, tmp_path) -> None:
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)
    kinds = [record.kind for record in read_journal(tmp_path)]
    assert kinds.count("CellJoined") == 2
    await scheduler.cancel("enough")
    assert "CancelRequested" in [record.kind for record in read_journal(tmp_path)]
    performer.hold.set()
    await scheduler.wait_done(30)
    await scheduler.close()


async def test_a_scheduler_that_was_not_started_says_so(performer, tmp_path) -> None:
    scheduler = JobScheduler(options(), performer, job_dir=str(tmp_path), grpc_token=TOKEN)
    with pytest.raises(RefusedError, match="not started"):
        await scheduler.wait_done(0)
    address = await scheduler.start()
    assert await scheduler.start() == address
    await scheduler.close()


async def test_a_failing_step_fails_the_job_with_its_reason(performer, tmp_path) -> None:
    performer.fails[TrainStep] = EngineError("the rank died.", "Look into its log.")
    scheduler = await started(options(), performer, tmp_path)
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "failed"
    assert "the rank died. Look into its log." in status["reason"]


class NoRunnerPerformer(IdealPerformer):
    """No run can be started; so no group has a counted run."""

    def answers(self, action: Action) -> list[Event]:
        if isinstance(action, ScoreGroup):
            return [GroupScored(group_result(action.group_id, ready=False, reason="no counted run"))]
        return super().answers(action)


async def test_runs_that_cannot_be_started_are_retried_then_lost(tmp_path) -> None:
    performer = NoRunnerPerformer()
    performer.fails[StartRun] = RuntimeError("no runner")
    scheduler = await started(options(max_lost_groups=1), performer, tmp_path)
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "failed"
    assert status["reason"] == "2 groups in a row were lost, max_lost_groups is 1; the last one: no counted run"
    assert status["retries"]["runner_loss"] >= 2 * 2 * 2
    assert status["water_level"] == 0


async def test_an_impossible_event_fails_the_job_with_the_history(performer, tmp_path) -> None:
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)
    await scheduler.post(CellDrained("cell-1"))
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "failed"
    assert "cell-1 completed a switch" in status["reason"]
    assert "CellJoined(cell_id='cell-1'" in status["reason"]
    assert performer.finish.status == "failed"


async def test_a_fault_of_the_core_itself_fails_the_job(performer, tmp_path) -> None:
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)
    await scheduler.post(RunStarted("not-an-id", 0))
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "failed"
    assert "ValueError" in status["reason"]


async def test_a_log_that_cannot_be_written_fails_the_job_instead_of_hanging_it(performer, tmp_path) -> None:
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)

    def refuse(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    scheduler.log.append = scheduler.log.note = refuse
    await scheduler.post(CellStale("cell-1", "broken by the test"))
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "failed"
    assert "No space left on device" in status["reason"]
    assert performer.finish.status == "failed"


async def test_an_error_of_another_process_is_told_without_its_traceback(performer, tmp_path) -> None:
    error = TrainingError("the rank died.", "Look into its log.")
    performer.fails[TrainStep] = RayTaskError("submit", "Traceback ...\n  File ...", error).as_instanceof_cause()
    scheduler = await started(options(), performer, tmp_path)
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["reason"] == "training failed: the rank died. Look into its log."


async def test_cancel_ends_the_job_and_saves_what_was_trained(performer, tmp_path) -> None:
    scheduler = await started(options(steps=1000, checkpoint_every=10_000), performer, tmp_path)
    async with asyncio.timeout(30):
        async for event in scheduler.watch_events(0):
            if event.kind == "StepTrained" and event.payload["step"] >= 2:
                break
    await scheduler.cancel("enough")
    status = await scheduler.wait_done(30)
    await scheduler.close()
    assert status["status"] == "cancelled"
    assert status["reason"] == "enough"
    [saved] = performer.did(SaveCheckpoint)
    assert saved.step == status["step"]


async def test_an_action_that_hangs_does_not_keep_the_job_from_ending(performer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hands, "FINISH_TIMEOUT_S", 0.05)
    performer.hold.clear()
    scheduler = await started(options(), performer, tmp_path)
    await scheduler.post(CellDrained("cell-1"))
    assert (await scheduler.wait_done(30))["done"]
    await scheduler.close()


def test_a_scheduler_without_a_performer_is_refused() -> None:
    with pytest.raises(ConfigError, match="performer"):
        JobScheduler(options())
