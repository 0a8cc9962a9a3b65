"""The scheduler's shell: events go into the pure core one by one, its decisions are performed, results come back.

It decides nothing. One consumer feeds the core; each event is in the journal before its decisions are performed; each
action is performed by a task of its own; an action that fails becomes an event. A scheduler that is made again after
its process died goes on from the journal. It is written as a plain asynchronous class; in a cluster it is wired as a
Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.common.errors import (
    ConfigError,
    InvariantError,
    JobError,
    MachineError,
    NotFoundError,
    RefusedError,
    TidegateError,
)
from services.common.remote import one_line
from services.common.types import RouteTable
from services.scheduler.actions import Decision, FinishJob
from services.scheduler.codec import encode
from services.scheduler.eventlog import EventLog
from services.scheduler.events import CancelRequested, Event, PolicyRequested, Request, Tick
from services.scheduler.hands import Hands, Mark
from services.scheduler.journal import JOURNAL_NAME, Journal
from services.scheduler.observe import Observer
from services.scheduler.options import JobOptions
from services.scheduler.performer import Performer
from services.scheduler.recovery import CORE_FAILED, SCHEDULER_RECOVERED, Replay, Todo
from services.scheduler.servicer import serve_scheduler
from services.scheduler.state import JobState
from services.scheduler.types import LoggedDecision, LoggedEvent, ResumeState, RunView
from services.trajectory.servicer import trajectory_service

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Time between two ``Tick`` events."""
BIND_TIMEOUT_S = 20.0
"""How long a scheduler that goes on tries to listen where it listened before."""
_BIND_POLL_S = 0.2
_GRPC_PORT = "grpc_port"


@dataclass(frozen=True, slots=True)
class _TakenIn:
    """An event on its way into the core."""

    event: Event
    done: asyncio.Future[None] | None = None
    """Resolved when it is in the journal, and what it led to is being performed."""


class JobScheduler:
    """The scheduler of one job.

    ``start`` it, ``post`` a ``CellJoined`` for each cell, then ``wait_done``. The performer comes as an object, or as
    a factory that is called where the scheduler runs. ``job_dir`` gets the journal; empty: no file is written.

    ``start_id`` names this start of the job. A scheduler that is made again with the same one goes on where its
    journal ends, another one begins a new start in the same journal. Empty: always a new start.
    """

    def __init__(
        self,
        options: JobOptions,
        performer: Performer | None = None,
        *,
        performer_factory: Callable[[], Performer] | None = None,
        resume: ResumeState | None = None,
        job_dir: str = "",
        start_id: str = "",
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
        self._job_dir = Path(job_dir) if job_dir else None
        self._start_id = start_id or secrets.token_hex(8)
        self._grpc_address = (grpc_host, grpc_port, grpc_token)
        self._clock = clock
        self._starting = asyncio.Lock()
        self._address = ""
        self._journal: Journal | None = None
        self._server: grpc.aio.Server | None = None
        self._hands = Hands(made, self._emit, self._note_performed, self._note_finished)
        self._workers: list[asyncio.Task[None]] = []

    # -- methods for the driver ---------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Start working, or go on from the journal; returns the address of the gRPC server. Again: only returns it.

        Raises ``JobError`` if the journal cannot be gone on from, with the reason.
        """
        async with self._starting:
            if not self._address:
                try:
                    self._address = await self._start()
                except BaseException:
                    self._close_journal()
                    raise
        return self._address

    async def post(self, event: Event) -> None:
        """Hand an event to the core; on return it is in the journal."""
        self._check_started()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_TakenIn(event, done))
        await done

    async def cancel(self, reason: str) -> None:
        """End the job in good order."""
        await self.post(CancelRequested(reason))

    async def progress(self) -> dict[str, Any]:
        """The state as JSON-ready data (``services.scheduler.views``)."""
        self._check_started()
        return self._state.snapshot()

    async def wait_done(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the job is over, at most ``timeout_s``: the snapshot, with ``done``.

        Raises ``RefusedError`` from a scheduler that was made again and not started yet.
        """
        self._check_started()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow a cancellation
                await self._done.wait()
        return {**self._state.snapshot(), "done": self._done.is_set()}

    async def close(self) -> None:
        """Stop the server and everything that still runs here."""
        for task in (*self._workers, *self._hands.tasks):
            task.cancel()
        await asyncio.gather(*self._workers, *self._hands.tasks, return_exceptions=True)
        await self._end_watches()
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None
        self._close_journal()

    def _check_started(self) -> None:
        if not self._address:
            raise RefusedError("this scheduler is not started yet.", "Call start: it goes on from the job's journal.")

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # -- start, and start again ---------------------------------------------------------------------------------------

    async def _start(self) -> str:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_TakenIn | Mark] = asyncio.Queue()
        self._done = asyncio.Event()
        self._routes_changed = asyncio.Condition()
        journal = self._journal = Journal(self._job_dir) if self._job_dir is not None else None
        self.log = EventLog(journal)
        replay = self._replay(journal) if journal is not None else None
        if replay is None:
            self.log.start(self._clock(), self._start_id, self._options, self._resume)
        else:
            await self._go_on(replay)
        address = await self._serve(is_again=replay is not None)
        self._workers = [asyncio.create_task(self._consume()), asyncio.create_task(self._attend())]
        if replay is None:
            self._workers.append(asyncio.create_task(self._tick(TICK_S)))
            return address
        # attempts that were on their way when the process died have the time to start anew
        self._workers.append(asyncio.create_task(self._tick(self._options.run_start_timeout_s)))
        await self._perform_again(replay.todo())
        return address

    def _replay(self, journal: Journal) -> Replay | None:
        """The core as the journal has it; None if the journal has nothing of this start."""
        start = journal.newest_start()
        if start is None or start.payload.get("start_id") != self._start_id:
            return None
        replay = Replay(journal.performed(start.sequence - 1))
        for record in journal.records(start.sequence - 1):
            if difference := replay.take(record):
                raise JobError(
                    f"the scheduler cannot go on from {JOURNAL_NAME}: {difference}.",
                    "The journal was written by another version of Tidegate or is damaged; start the job again with "
                    "--resume: it goes on from its last checkpoint.",
                )
        return replay

    async def _go_on(self, replay: Replay) -> None:
        self._state = replay.state
        self._observer = Observer(self._state)
        await self._performer.recover(replay.recovered())
        again = [encode(one.action) for one in replay.todo()]
        self.log.note(self._clock(), SCHEDULER_RECOVERED, {"num_events": replay.num_events, "performed_again": again})
        logger.warning("went on from %d events; %d actions are performed again", replay.num_events, len(again))

    async def _serve(self, *, is_again: bool) -> str:
        """Serve gRPC, where it was served before if the job goes on: clients and proxies look there."""
        host, port, token = self._grpc_address
        journal = self._journal
        before = journal.read_meta(_GRPC_PORT) if journal is not None and is_again else ""
        deadline_s = time.monotonic() + (BIND_TIMEOUT_S if before else 0.0)
        job_dir, job_id = self._job_dir, self._options.job_id
        others = [] if job_dir is None else [trajectory_service(job_id, job_dir)]
        while True:
            try:
                self._server, address = await serve_scheduler(
                    self, host=host, port=int(before or port), token=token, others=others
                )
                break
            except MachineError:
                if time.monotonic() >= deadline_s:
                    raise
                await asyncio.sleep(_BIND_POLL_S)
        if journal is not None:
            journal.write_meta(_GRPC_PORT, address.rpartition(":")[2])
        return address

    async def _perform_again(self, todo: list[Todo]) -> None:
        for one in todo:
            self._hands.perform_soon(one.action, Mark(one.sequence, one.position))
        is_finishing = any(isinstance(one.action, FinishJob) for one in todo)
        if self._state.status.is_final and not is_finishing:
            await self._note_done()

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
        self._take_in(request)
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
        self._loop.call_soon_threadsafe(self._queue.put_nowait, _TakenIn(event))

    async def _tick(self, first_after_s: float) -> None:
        await asyncio.sleep(first_after_s)
        while True:
            self._emit(Tick())
            await asyncio.sleep(TICK_S)

    async def _attend(self) -> None:
        try:
            await self._performer.attend(self._emit)
        except Exception as error:
            logger.exception("nobody watches the cells any more")
            self._emit(CancelRequested(f"watching the cells failed: {one_line(error)}"))

    async def _consume(self) -> None:
        while True:
            item = await self._queue.get()
            if isinstance(item, Mark):
                self.log.mark_performed(item.sequence, item.position)
                continue
            self._take_in(item.event)
            if item.done is not None and not item.done.done():
                item.done.set_result(None)
            await self._wake_watchers()

    def _take_in(self, event: Event) -> None:
        """Feed the core, journal what it decided, begin to perform it. After the job's end nothing counts."""
        if self._state.status.is_final:
            return
        now_s = self._clock()
        try:
            sequence, decisions = self._handle(event, now_s)
        except Exception as error:  # or nobody would take in events any more, and the job would hang
            sequence, decisions = self._fail(event, now_s, error)
        for position, decision in enumerate(decisions):
            self._hands.perform_soon(decision.action, Mark(sequence, position))

    def _handle(self, event: Event, now_s: float) -> tuple[int, list[Decision]]:
        decisions = self._state.handle(event, now_s)
        sequence = 0
        if decisions or not isinstance(event, Tick):
            sequence = self.log.append(now_s, event, decisions)
        else:
            self.log.flush()
        self._observer.observe(event, decisions)
        return sequence, decisions

    def _fail(self, event: Event, now_s: float, error: Exception) -> tuple[int, list[Decision]]:
        """The core is wrong about the world, or its log cannot be written: end the job loudly instead of hanging."""
        reason = f"{type(error).__name__} at {type(event).__name__}: {error}"
        if not isinstance(error, InvariantError):
            reason += f"\n{self._state.history()}"
        logger.error("the job ends: %s", reason, exc_info=error)
        decisions = self._state.fail(reason)
        sequence = 0
        with contextlib.suppress(OSError, TidegateError):  # the log may be what failed
            payload = {"reason": reason, "event": encode(event), "event_at_s": now_s}
            sequence = self.log.note(self._clock(), CORE_FAILED, payload, decisions)
        return sequence, decisions

    async def _wake_watchers(self) -> None:
        await self.log.wake_watchers()
        async with self._routes_changed:
            self._routes_changed.notify_all()

    async def _end_watches(self) -> None:
        await self.log.close()
        await self._wake_watchers()

    # -- actions out of it --------------------------------------------------------------------------------------------

    def _note_performed(self, mark: Mark) -> None:
        # behind the events that came of it: whoever finds the mark in the journal finds them too
        self._loop.call_soon_threadsafe(self._queue.put_nowait, mark)

    async def _note_finished(self, mark: Mark) -> None:
        with contextlib.suppress(TidegateError):
            self.log.mark_performed(mark.sequence, mark.position)
            self.log.flush()
        await self._note_done()

    async def _note_done(self) -> None:
        self._done.set()
        await self._end_watches()
