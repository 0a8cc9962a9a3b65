"""The trajectory shard: the call logs of its runs, from the first request to the micro-steps of their group."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from services.common.errors import (
    InvariantError,
    NotFoundError,
    TidegateError,
)
from services.common.ids import JobId
from services.common.metrics import metric
from services.proxy.renderer import load_renderer
from services.proxy.session import Renderer
from services.rollout.types import RunResult, Sampling
from services.trajectory.call_desk import CallDesk
from services.trajectory.config import TrajectoryConfig
from services.trajectory.groups import LiveGroup, LiveGroups, new_group, stored_group
from services.trajectory.keys import hash_of, key_of
from services.trajectory.live import AttemptLog
from services.trajectory.microstep import build_micro_step, cut_group
from services.trajectory.outcome import Outcome
from services.trajectory.settle import FinalRun, Settlement, settle_group, settle_outcome
from services.trajectory.store import GroupState, RunFilter, Store
from services.trajectory.types import (
    GroupResult,
    GroupSpec,
    RunSummary,
)

logger = logging.getLogger(__name__)

_TRAINED_GROUPS_KEPT = 4


class TrajectoryShard(CallDesk):
    """Keeps the calls of its runs and makes micro-steps of them. The one writer of its store.

    Tokenising and writing run in threads of their own, so the event loop stays free.
    """

    def __init__(
        self,
        job_id: str,
        index: int,
        config: TrajectoryConfig,
        store_dir: str,
        model_path: str,
        sampling: Sampling,
        max_model_len: int,
        as_ref: Callable[[Any], Any] | None = None,
        *,
        drop_equal_rewards: bool = True,
        eval_sampling: Sampling | None = None,
        key_secret: str = "",
        renderer: Renderer | None = None,
    ) -> None:
        """Open the store and take up what it holds of unfinished and untrained groups.

        ``as_ref`` turns a prompt into what a ticket carries (None: the array itself). ``eval_sampling`` holds for
        held-out groups (None: ``sampling``). The keys of attempts are made of ``key_secret``, so that a shard that is
        made again gives the same ones (empty: a random one). ``renderer`` replaces that of ``model_path``.
        """
        store = Store(config.store, job_id, index, store_dir)
        groups = LiveGroups((one.spec.group_id, stored_group(one)) for one in store.live_groups())
        made = renderer or load_renderer(model_path)
        super().__init__(JobId(job_id), config, store, groups, made, sampling, eval_sampling, max_model_len, as_ref)
        self._key_secret = (key_secret or secrets.token_hex(32)).encode()
        self._drop_equal_rewards = drop_equal_rewards
        self._is_closed = False
        self._pruning = asyncio.Lock()
        self._trained: dict[str, LiveGroup] = {}
        """The trained groups that were asked for last: all their micro-steps will be."""

    # -- groups and attempts --

    async def open_group(self, spec: GroupSpec) -> None:
        """Take in a group. Opening it again changes nothing.

        What the store has of a dropped, lost or cancelled group of the same id is deleted: a job that is resumed
        gives the ids of groups that its checkpoint does not know to new ones.
        """
        group = self._groups.get(spec.group_id)
        if group is not None:
            if group.spec != spec:
                raise InvariantError(f"group {spec.group_id} is open already", f"as {group.spec}, now {spec}")
            return
        await self._commit(self._store.open_group, spec)
        self._groups[spec.group_id] = new_group(spec)

    async def open_attempt(self, run_id: str, attempt: int) -> str:
        """Start an attempt of a run; the key that its calls must carry until ``close_attempt``.

        Opening an unfinished attempt again changes nothing: its harness goes on under the same key. The key of an
        attempt whose result is recorded is empty (see ``attempt_result``).
        """
        run = self._groups.open_run(run_id)
        key = key_of(self._key_secret, run_id, attempt)
        async with run.lock:
            log = run.log
            if log is None or log.attempt < attempt:
                log = AttemptLog(run_id, attempt, None)
            elif log.attempt > attempt:
                raise InvariantError(f"attempt {attempt} of run {run_id} is over", f"the newest is {log.attempt}")
            elif run.result is not None:
                return ""
            elif log.key_hash == hash_of(key):
                return key
            await self._commit(self._store.open_attempt, run_id, attempt, hash_of(key))
            if run.log is not None and run.log is not log:
                run.log.close()
                self._store.seal_run(run_id, run.log.attempt)
            log.key_hash = hash_of(key)
            run.is_loaded = run.is_loaded or run.log is not log
            run.log, run.result = log, None
        return key

    async def attempt_result(self, run_id: str, attempt: int) -> RunResult:
        """How an attempt ended, as it is recorded. ``NotFoundError`` while it is not."""
        run = self._groups.find_run(run_id)
        if run is None or run.result is None or run.result.attempt != attempt:
            raise NotFoundError(f"attempt {attempt} of run {run_id} has no result here.", "It goes on, or is gone.")
        return run.result

    async def close_attempt(self, run_id: str, attempt: int) -> None:
        """Make the attempt's key invalid; calls in flight come too late. Closing twice changes nothing."""
        run = self._groups.find_run(run_id)
        log = run.log if run is not None else None
        if run is None or log is None or log.attempt != attempt or not log.is_open:
            return
        log.close()
        async with run.lock:
            await self._commit(self._store.close_attempt, run_id, attempt)

    async def finish_run(self, result: RunResult) -> Outcome:
        """Record how an attempt ended; the outcome as recorded. Said again it changes nothing.

        It is ``CONTEXT_LIMIT`` where the harness ended or crashed because its last call no longer fitted,
        ``TURN_LIMIT`` where it was one too many, and ``ENGINE_LOSS`` where no cell could complete it.
        """
        run = self._groups.find_run(result.run_id)
        if run is not None and self._groups.is_settled(result.run_id):
            return run.result.outcome if run.result is not None else result.outcome  # it counted as it was
        if run is None:  # its group was dropped meanwhile: recorded, nothing more
            await self._commit(self._store.finish_run, result)
            return result.outcome
        async with run.lock:
            if run.result is not None and run.result.attempt == result.attempt:
                return run.result.outcome
            log = run.log
            is_newest = log is None or log.attempt <= result.attempt
            if log is not None and log.attempt == result.attempt:
                log.close()
                result = replace(result, outcome=settle_outcome(result.outcome, log.trouble))
            await self._commit(self._store.finish_run, result)
            self._store.seal_run(result.run_id, result.attempt)
            if is_newest:
                run.result = result
                if log is None or log.attempt != result.attempt:  # it ended before an attempt was opened
                    run.log, run.is_loaded = AttemptLog(result.run_id, result.attempt, None), True
        return result.outcome

    async def finish_group(self, group_id: str) -> GroupResult:
        """Settle a group whose runs are all final. Asking again gives the same answer."""
        group = self._groups.get(group_id)
        if group is None:
            stored = await asyncio.to_thread(self._store.group_result, group_id)
            if stored is None:
                raise NotFoundError(f"no group {group_id} on this shard.", "Open it first.")
            return stored
        async with group.lock:
            return group.result or await self._settle(group)

    async def num_micro_steps(self, group_id: str) -> int:
        """How many micro-steps a ready group is cut into."""
        return len((await self._pieces(group_id)).pieces)

    async def micro_step(self, group_id: str, index: int) -> Any:
        """One micro-step of a ready group, the same one each time; as ``as_ref`` makes it.

        It is answered again when the group was trained already: whoever asks may not have heard of it.
        """
        group = await self._pieces(group_id)
        async with group.lock:
            if index not in group.given:
                name, piece = f"{group_id}-m{index}", group.pieces[index]
                step = await asyncio.to_thread(build_micro_step, name, group_id, piece)
                group.given[index] = step if self._as_ref is None else self._as_ref(step)
        return group.given[index]

    async def _pieces(self, group_id: str) -> LiveGroup:
        """A ready group, cut. ``NotFoundError`` for any other."""
        group = self._groups.get(group_id) or await self._trained_group(group_id)
        if group is None or group.result is None or not group.result.ready:
            raise NotFoundError(f"group {group_id} is not ready to be trained.", "See the answer of finish_group.")
        async with group.lock:
            if not group.pieces:
                if group.scored is None:  # it was settled by a shard that is gone; selection comes out the same
                    group.scored = (await self._settlement(group, drop_equal_rewards=False)).runs
                limit = self._config.micro_step_tokens
                group.pieces = await asyncio.to_thread(cut_group, group.scored, limit)
        return group

    async def _trained_group(self, group_id: str) -> LiveGroup | None:
        if group_id not in self._trained:
            stored = await asyncio.to_thread(self._store.trained_group, group_id)
            if stored is None:
                return None
            self._trained.setdefault(group_id, stored_group(stored))
            while len(self._trained) > _TRAINED_GROUPS_KEPT:
                del self._trained[next(iter(self._trained))]
        return self._trained.get(group_id)

    async def mark_trained(self, group_ids: Sequence[str], step: int) -> None:
        """Note that groups were trained by optimizer step ``step``, and let go of their trees."""
        await self._commit(self._store.mark_trained, group_ids, step)
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    async def note_checkpoint(self, step: int) -> None:
        """Note that a checkpoint holds all that was trained up to ``step``: older calls may be deleted, if the job's
        retention says so. Returns at once."""
        self._task(self._prune(step))

    async def drop_group(self, group_id: str, reason: str) -> None:
        """Give a group up: its keys are dead, it will not be trained. Its calls stay readable in the store."""
        group = self._groups.pop(group_id, None)
        for run in group.runs.values() if group is not None else ():
            if run.log is not None:
                run.log.close()
        await self._commit(self._store.end_group, group_id, GroupState.DROPPED, reason)
        self._seal(group)

    async def recover(self, trained_step: int) -> list[GroupResult]:
        """Take up a job from the checkpoint of ``trained_step``: the groups that are ready to be trained.

        Marks of later steps are cleared, for the weights of those steps are gone: their groups are ready again.
        Groups that were complete but not settled are settled; incomplete ones are recorded as cancelled.
        """
        await self._commit(self._store.clear_marks_above, trained_step)
        stored_groups = await asyncio.to_thread(self._store.live_groups)
        self._groups, self._trained = LiveGroups(), {}
        ready = []
        for group in map(stored_group, stored_groups):
            group_id = group.spec.group_id
            if not group.is_complete:
                reason = "the job stopped before all runs of the group had ended"
                await self._commit(self._store.end_group, group_id, GroupState.CANCELLED, reason)
                self._seal(group)
                continue
            self._groups[group_id] = group
            result = await self.finish_group(group_id)
            if result.ready:
                ready.append(result)
        return ready

    async def run_summaries(self, group_id: str | None = None, limit: int | None = None) -> list[RunSummary]:
        """This shard's runs in order of dispatch: those of a group, or the last ``limit``."""
        return await asyncio.to_thread(self._store.summaries, RunFilter(group_id=group_id, limit=limit))

    async def close(self) -> None:
        """Finish what is being written and close the store. Closing twice changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._store.close)
        self._tokenizer.shutdown()

    # -- inside --

    async def _settle(self, group: LiveGroup) -> GroupResult:
        settlement = await self._settlement(group, drop_equal_rewards=self._drop_equal_rewards)
        result = settlement.result
        await self._commit(self._store.finish_group, result, settlement.settled)
        group.result, group.scored = result, settlement.runs
        if not result.ready and self._groups.get(group.spec.group_id) is group:
            del self._groups[group.spec.group_id]
        labels = {"job": self._job_id, "reason": result.loss_reason or "ready"}
        metric("tidegate_groups_settled_total").inc(1, **labels)
        metric("tidegate_left_out_tokens_total").inc(result.num_left_out, job=self._job_id)
        return result

    def _seal(self, group: LiveGroup | None) -> None:
        """Have the calls of a group that was given up moved into objects, as those of ended runs are."""
        for run in group.runs.values() if group is not None else ():
            if run.log is not None:
                self._store.seal_run(run.run_id, run.log.attempt)

    async def _settlement(self, group: LiveGroup, *, drop_equal_rewards: bool) -> Settlement:
        for run in group.runs.values():
            async with run.lock:
                await self._load(run)
        final: list[FinalRun] = group.final_runs()
        seed = self._sampling.seed or 0
        return await asyncio.to_thread(
            settle_group, group.spec, final, self._config, drop_equal_rewards=drop_equal_rewards, seed=seed
        )

    async def _prune(self, durable_step: int) -> None:
        async with self._pruning:
            try:
                report = await asyncio.to_thread(self._store.prune, time.time(), durable_step)
            except TidegateError as error:  # the next checkpoint tries again
                logger.warning("old calls could not be deleted: %s", error)
                return
        if report.group_ids:
            logger.info("deleted the calls of %d groups, %d bytes", len(report.group_ids), report.freed_bytes)
