"""A call's way: match, choose a cell, stream from it, go on elsewhere if it is lost, store, answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.errors import EngineError, JobError
from services.common.ids import JobId, RunId
from services.common.metrics import metric
from services.common.types import CellRoute, VersionSpan
from services.proxy.backends import Backends, Shard
from services.proxy.routing import choose_cell
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateChunk, GenerateRequest
from services.trajectory.types import CallRecord, CallTicket

logger = logging.getLogger(__name__)

_CLEANUP_TIMEOUT_S = 10.0
_RETRY_S = 0.05
_MAX_RETRY_S = 1.0


ABORTED = "abort"
FINISHED = ("stop", "length")


class CallFailedError(JobError):
    """No cell could finish the call in time; the harness may try again."""


@dataclass
class Answer:
    """What the cells have produced for one call so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Of the prompt, at the cell that started the call."""
    finish_reason: str = ""
    waits_for_cell: bool = False
    """No cell can go on with the call now."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, chunk: GenerateChunk, cell_id: str) -> None:
        """Add a chunk; tokens of equal version in a row make one span. Raises ``EngineError`` for a broken one."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise EngineError(f"it sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} log-probabilities.")
        if chunk.finish_reason not in (None, ABORTED, *FINISHED):
            raise EngineError(f"it ended a call with the finish reason {chunk.finish_reason!r}.")
        if not self.token_ids:
            self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.texts.append(chunk.text)
        if chunk.token_ids:
            self._add_version(VersionSpan(chunk.version, len(chunk.token_ids)))
        finished = chunk.finish_reason in FINISHED
        if (chunk.token_ids or finished) and self.cells[-1:] != [cell_id]:
            self.cells.append(cell_id)
        if finished:
            self.finish_reason = str(chunk.finish_reason)

    def _add_version(self, span: VersionSpan) -> None:
        if self.version_spans and self.version_spans[-1].version == span.version:
            span = VersionSpan(span.version, self.version_spans.pop().num_tokens + span.num_tokens)
        self.version_spans.append(span)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text for the harness. The last piece comes only after the call is durable."""

    ticket: CallTicket
    answer: Answer
    """The whole answer so far."""
    text: str
    """What this piece adds."""
    is_last: bool = False


Emit = Callable[[Piece], None]


class CallServer:
    """Serves calls. Holds no state of a run: every replica can serve every call."""

    def __init__(self, job_id: JobId, backends: Backends, call_timeout_s: float) -> None:
        self._job_id = job_id
        self._backends = backends
        self._call_timeout_s = call_timeout_s
        self._background_tasks: set[asyncio.Task[None]] = set()

    async def serve(self, run_id: RunId, key: str, request: CanonicalRequest, emit: Emit) -> None:
        """Serve one call; its text goes to ``emit`` in pieces. Cancelling it aborts the call and tells the shard.

        Raises what ``match_call`` raises, and ``CallFailedError`` when the call cannot be finished.
        """
        started_at_s, started_s = time.time(), time.monotonic()
        shard = self._backends.shard_for(run_id)
        answer = Answer()
        with self._as_failed_call():
            async with asyncio.timeout(self._call_timeout_s) as deadline:
                ticket = await self._match(shard, run_id, key, request)
                try:
                    await self._generate(ticket, answer, emit)
                except BaseException as error:
                    engine_lost = deadline.expired() or answer.waits_for_cell
                    abandoning = shard.abandon_call(ticket.call_id, _why(error), engine_lost=engine_lost)
                    self._in_background(_quietly(abandoning))
                    raise
        # from here on the answer is whole: it is stored even if the harness goes away meanwhile
        storing = self._in_background(shard.append_call(_record(ticket, answer, started_at_s)))
        with self._as_failed_call():
            async with asyncio.timeout(self._call_timeout_s):
                await asyncio.shield(storing)
        self._count(ticket, request, answer, time.monotonic() - started_s)
        emit(Piece(ticket, answer, answer.texts[-1], is_last=True))

    async def _match(self, shard: Shard, run_id: RunId, key: str, request: CanonicalRequest) -> CallTicket:
        """Match, and take the call back at the shard if the harness leaves before the ticket is here."""
        matching = asyncio.ensure_future(shard.match_call(run_id, key, request))
        try:
            return await asyncio.shield(matching)
        except asyncio.CancelledError as error:
            reason = _why(error)

            def take_back(done: asyncio.Future[CallTicket]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._in_background(_quietly(shard.abandon_call(done.result().call_id, reason)))

            matching.add_done_callback(take_back)
            raise

    async def _generate(self, ticket: CallTicket, answer: Answer, emit: Emit) -> None:
        """Stream from one cell after the other until the answer is finished. The last text is not emitted."""
        failed: dict[str, int] = {}  # cell id -> epoch of the table by which it was chosen
        retry_s = _RETRY_S
        while not answer.finish_reason:
            table = self._backends.routes.table
            excluded = [cell_id for cell_id, epoch in failed.items() if epoch >= table.epoch]
            route, reason = choose_cell(table, ticket.run_id, excluded)
            answer.waits_for_cell = route is None
            if route is None:
                logger.debug("call %s waits: %s", ticket.call_id, reason)
                await self._backends.routes.wait_newer(table.epoch, retry_s)
                retry_s = min(retry_s * 2, _MAX_RETRY_S)
                failed.clear()
                continue
            await self._generate_at(route, ticket, answer, emit)
            if not answer.finish_reason:
                failed[route.cell_id] = table.epoch

    async def _generate_at(self, route: CellRoute, ticket: CallTicket, answer: Answer, emit: Emit) -> None:
        """Stream from one cell. Returns with no finish reason set if the call must go on elsewhere."""
        cell = self._backends.cell(route.actor_name)
        request = GenerateRequest(ticket.call_id, ticket.run_id, ticket.sampling, tuple(answer.token_ids))
        try:
            async with contextlib.aclosing(cell.generate(request, ticket.prompt_ref)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk, route.cell_id)
                    if answer.finish_reason:
                        return
                    if chunk.text:
                        emit(Piece(ticket, answer, chunk.text))
                    if chunk.finish_reason == ABORTED:
                        return
            raise EngineError("its stream ended without a finish reason.")
        except EngineError as error:
            logger.warning("call %s moves away from %s: %s", ticket.call_id, route.cell_id, error)
        except BaseException:
            self._in_background(_quietly(cell.abort(ticket.call_id)))
            raise

    @contextlib.contextmanager
    def _as_failed_call(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise CallFailedError(
                f"a call was not finished within {self._call_timeout_s:g} s.",
                "See the states of the cells; raise proxy.call_timeout_s if they are only slow.",
            ) from error

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of its own, which a cancelled request does not take down."""
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        return task

    def _count(self, ticket: CallTicket, request: CanonicalRequest, answer: Answer, seconds: float) -> None:
        job = str(self._job_id)
        metric("tidegate_calls_total").inc(1, job=job, dialect=request.dialect, finish_reason=answer.finish_reason)
        metric("tidegate_call_moves_total").inc(len(answer.cells) - 1, job=job)
        metric("tidegate_call_seconds").observe(seconds, job=job)
        metric("tidegate_prompt_tokens_total").inc(ticket.num_prompt_tokens, job=job)
        metric("tidegate_prompt_tokens_new_total").inc(ticket.num_new_tokens, job=job)
        metric("tidegate_output_tokens_total").inc(len(answer.token_ids), job=job)


def _why(error: BaseException) -> str:
    """A reason for the shard's record. A cancelled task means a harness that went away, or the time limit."""
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """Clean-up that may fail: the other side may be what was lost."""
    try:
        async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
            await work
    except Exception as error:  # the call has already failed; its outcome does not depend on this
        logger.debug("clean-up of a call failed: %s: %s", type(error).__name__, error)


def _record(ticket: CallTicket, answer: Answer, started_at_s: float) -> CallRecord:
    """The call as it is stored. Of the prompt and the request nothing is sent: the shard still has them."""
    return CallRecord(
        call_id=ticket.call_id,
        run_id=ticket.run_id,
        attempt=ticket.attempt,
        parent_call_id=ticket.parent_call_id,
        request={},
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=np.asarray(answer.token_ids, dtype=np.int32),
        logprobs=np.asarray(answer.logprobs, dtype=np.float32),
        version_spans=tuple(answer.version_spans),
        output_text=answer.text,
        finish_reason=answer.finish_reason,
        trainable=ticket.trainable,
        cells=tuple(answer.cells),
        started_at_s=started_at_s,
        ended_at_s=time.time(),
    )
