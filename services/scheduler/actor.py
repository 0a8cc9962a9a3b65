"""The scheduler's shell: events go into the pure core one by one, its decisions are performed, results come back.

It decides nothing. One consumer feeds the core; each action is performed by a task of its own; an action that
fails becomes an event. It is written as a plain asynchronous class; in a cluster it is wired as a Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from services.common.errors import ConfigError, InvariantError, NotFoundError
from services.common.remote import one_line
from services.common.types import RouteTable
from services.scheduler.actions import Action, Decision, DropGroup, FinishJob, OpenGroup, ScoreGroup, StartRun
from services.scheduler.eventlog import EventLog
from services.scheduler.events import ActionFailed, CancelRequested, Event, PolicyRequested, Request, Tick
from services.scheduler.observe import Observer
from services.scheduler.options import JobOptions
from services.scheduler.performer import Performer
from services.scheduler.servicer import serve_scheduler
from services.scheduler.state import JobState
from services.scheduler.types import LoggedDecision, LoggedEvent, ResumeState, RunView

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Time between two ``Tick`` events."""
FINISH_TIMEOUT_S = 60.0
"""How long ``FinishJob`` waits for actions that are still being performed; then they are cancelled."""


class JobScheduler:
    """The scheduler of one job.

    ``start`` it, ``post`` a ``CellJoined`` for each cell, then ``wait_done``. The performer comes as an object, or as
    a factory that is called where the scheduler runs. ``job_dir`` gets ``events.jsonl``; empty: no file is written.
    """

    def __init__(
        self,
        options: JobOptions,
        performer: Performer | None = None,
        *,
        performer_factory: Callable[[], Performer] | None = None,
        resume: ResumeState | None = None,
        job_dir: str = "",
        grpc_host: str = "127.0.0.1",
        grpc_port: int = 0,
        grpc_token: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        made = performer_factory() if performer is None and performer_factory is not None else performer
        if made is None:
            raise ConfigError("the scheduler needs a performer.", "Pass performer or performer_factory.")
        self._performer: Performer = made
        self._options, self._resume = options, resume
        self._state = JobState(options, resume)
        self._observer = Observer(self._state)
        self._log_path = Path(job_dir) / "events.jsonl" if job_dir else None
        self._grpc_address = (grpc_host, grpc_port, grpc_token)
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[bool]] = set()
        self._opening: dict[str, asyncio.Task[bool]] = {}
        """Group id -> its ``OpenGroup``, while that is being performed."""
        self._workers: list[asyncio.Task[None]] = []

    # -- methods for the driver ---------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Start working; returns the address of the gRPC server."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._done = asyncio.Event()
        self._routes_changed = asyncio.Condition()
        self.log = EventLog(self._log_path)
        self.log.start(self._clock(), self._options, self._resume)
        host, port, token = self._grpc_address
        self._server, address = await serve_scheduler(self, host=host, port=port, token=token)
        self._workers = [asyncio.create_task(work()) for work in (self._consume, self._tick, self._attend)]
        return address

    async def post(self, event: Event) -> None:
        """Hand an event to the core."""
        self._emit(event)

    async def cancel(self, reason: str) -> None:
        """End the job in good order."""
        self._emit(CancelRequested(reason))

    async def progress(self) -> dict[str, Any]:
        """The state as JSON-ready data (``services.scheduler.views``)."""
        return self._state.snapshot()

    async def wait_done(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the job is over, at most ``timeout_s``: the snapshot, with ``done``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow a cancellation
                await self._done.wait()
        return {**self._state.snapshot(), "done": self._done.is_set()}

    async def close(self) -> None:
        """Stop the server and everything that still runs here."""
        for task in (*self._workers, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._workers, *self._tasks, return_exceptions=True)
        await self._end_watches()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None

    # -- methods for the servicer -------------------------------------------------------------------------------------

    def check_job(self, job_id: str) -> None:
        """Raise ``NotFoundError`` for another job's id. An empty id means this scheduler's job."""
        if job_id and job_id != self._options.job_id:
            raise NotFoundError(f"no job {job_id!r} here.", f"This is the scheduler of {self._options.job_id!r}.")

    def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()

    def runs(self, *, live_only: bool, limit: int) -> list[RunView]:
        """Newest groups first; all that are kept if ``limit`` is 0."""
        runs = self._state.runs(live_only=live_only)
        return runs[:limit] if limit > 0 else runs

    def decisions(self, limit: int) -> list[LoggedDecision]:
        return self.log.decisions(limit)

    async def request(self, request: Request) -> int:
        """Take in what a user asks for, or raise why it cannot be; returns the step from which it holds.

        (A policy holds from the next burst boundary on, anything else at once.)
        """
        refusal = self._state.refusal(request)
        if refusal is not None:
            raise refusal
        # nothing awaits in between: the state that grants the request is the one that takes it in
        try:
            decisions = self._handle(request)
        except Exception as error:
            decisions = self._fail(request, error)
        for decision in decisions:
            self._perform_soon(decision.action)
        await self._wake_watchers()
        snapshot = self._state.snapshot()
        is_policy = isinstance(request, PolicyRequested)
        return int(snapshot["policy"]["pending_from_step"] if is_policy else snapshot["step"])

    def watch_events(self, after_sequence: int) -> AsyncIterator[LoggedEvent]:
        return self.log.watch(after_sequence)

    async def watch_routes(self) -> AsyncIterator[RouteTable]:
        """The route table, then each newer one; a slow watcher gets only the newest. Ends with the job."""
        epoch = 0
        while True:
            table = self._state.routes()
            if table.epoch > epoch:
                epoch = table.epoch
                yield table
                continue
            if self._done.is_set() or self.log.is_closed:
                return
            async with self._routes_changed:
                await self._routes_changed.wait_for(lambda: self._has_news(epoch))  # noqa: B023

    def _has_news(self, epoch: int) -> bool:
        return self._state.cells.epoch > epoch or self._done.is_set() or self.log.is_closed

    # -- events into the core -----------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        """From any thread; events of one thread keep their order."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._emit(Tick())

    async def _attend(self) -> None:
        try:
            await self._performer.attend(self._emit)
        except Exception as error:
            logger.exception("nobody watches the cells any more")
            self._emit(CancelRequested(f"watching the cells failed: {one_line(error)}"))

    async def _consume(self) -> None:
        while not self._state.status.is_final:
            event = await self._queue.get()
            try:
                decisions = self._handle(event)
            except Exception as error:  # or nobody would take in events any more, and the job would hang
                decisions = self._fail(event, error)
            for decision in decisions:
                self._perform_soon(decision.action)
            await self._wake_watchers()

    def _handle(self, event: Event) -> list[Decision]:
        now_s = self._clock()
        decisions = self._state.handle(event, now_s)
        if decisions or not isinstance(event, Tick):
            self.log.append(now_s, event, decisions)
        self._observer.observe(event, decisions)
        return decisions

    def _fail(self, event: Event, error: Exception) -> list[Decision]:
        """The core is wrong about the world, or its log cannot be written: end the job loudly instead of hanging."""
        reason = f"{type(error).__name__} at {type(event).__name__}: {error}"
        if not isinstance(error, InvariantError):
            reason += f"\n{self._state.history()}"
        logger.error("the job ends: %s", reason, exc_info=error)
        decisions = self._state.fail(reason)
        with contextlib.suppress(OSError):  # the log may be what failed
            self.log.note(self._clock(), "CoreFailed", {"reason": reason}, decisions)
        return decisions

    async def _wake_watchers(self) -> None:
        await self.log.wake_watchers()
        async with self._routes_changed:
            self._routes_changed.notify_all()

    async def _end_watches(self) -> None:
        await self.log.close()
        await self._wake_watchers()

    # -- actions out of it --------------------------------------------------------------------------------------------

    def _perform_soon(self, action: Action) -> None:
        others = frozenset(self._tasks)
        before = self._opening.get(_group_of_action(action))
        task = asyncio.create_task(
            self._finish(action, others) if isinstance(action, FinishJob) else self._perform(action, before)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if isinstance(action, OpenGroup):
            group_id = action.spec.group_id
            self._opening[group_id] = task
            task.add_done_callback(lambda _: self._opening.pop(group_id, None))

    async def _perform(self, action: Action, before: asyncio.Task[bool] | None) -> bool:
        """Perform one action, after its group's ``OpenGroup`` (not at all if that failed: the core gives the group
        up). A failure becomes an event; returns whether there was none."""
        if before is not None and not await asyncio.shield(before):
            return False
        try:
            await self._performer.perform(action, self._emit)
        except Exception as error:
            reason = one_line(error)
            logger.warning("%s failed: %s", type(action).__name__, reason)
            self._emit(ActionFailed(action, reason))
            return False
        return True

    async def _finish(self, action: FinishJob, others: frozenset[asyncio.Task[bool]]) -> bool:
        """Perform ``FinishJob`` when all other actions are over, or were cancelled because they took too long."""
        try:
            if others:
                _, late = await asyncio.wait(others, timeout=FINISH_TIMEOUT_S)
                for task in late:
                    task.cancel()
            await self._performer.perform(action, self._emit)
        except Exception:
            logger.exception("the job is over (%s), but not everything could be finished", action.status)
        finally:
            self._done.set()
            await self._end_watches()
        return True


def _group_of_action(action: Action) -> str:
    return action.group_id if isinstance(action, StartRun | ScoreGroup | DropGroup) else ""
