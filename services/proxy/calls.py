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
from services.proxy.parsing import AnswerParser, AnswerReader, SlowReader
from services.proxy.routing import choose_cell
from services.proxy.types import CanonicalRequest, Choice, Delta, DeltaKind, ParsedAnswer, Usage
from services.rollout.types import GenerateChunk, GenerateRequest
from services.trajectory.types import CallRecord, CallTicket, PartialAnswer, SharedAnswer

logger = logging.getLogger(__name__)

_CLEANUP_TIMEOUT_S = 10.0
_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_STREAM_HOLD_S = 0.02
_BODY_HOLD_S = 1.0
"""A harness that does not stream sees nothing of the chunks; what is held is lost with a cell, and made again."""
_RENEWAL_S = 2.0
"""So often the shards hear which calls this replica still has. Twice as long is less than their
``LEASE_S``: one of a replica's messages may be late."""

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
    stop_string: str = ""
    """The stop string that ended it; empty: none did."""

    @classmethod
    def of(cls, partial: PartialAnswer | None) -> Answer:
        """An answer that goes on behind what there is of it."""
        if partial is None:
            return cls()
        return cls(
            token_ids=partial.output_ids.tolist(),
            logprobs=partial.logprobs.tolist(),
            texts=[partial.text],
            version_spans=list(partial.version_spans),
            cells=list(partial.cells),
        )

    @property
    def partial(self) -> PartialAnswer | None:
        """What there is of the answer, to go on behind it; None if that is nothing."""
        if not self.token_ids:
            return None
        return PartialAnswer(
            np.asarray(self.token_ids, dtype=np.int32),
            np.asarray(self.logprobs, dtype=np.float32),
            tuple(self.version_spans),
            self.text,
            tuple(self.cells),
        )

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
            self.finish_reason, self.stop_string = str(chunk.finish_reason), chunk.stop_string

    def _add_version(self, span: VersionSpan) -> None:
        if self.version_spans and self.version_spans[-1].version == span.version:
            span = VersionSpan(span.version, self.version_spans.pop().num_tokens + span.num_tokens)
        self.version_spans.append(span)


@dataclass(frozen=True, slots=True)
class Piece:
    """Of one answer, for the harness. The last piece comes only after the call is durable."""

    call_id: str
    choice: int
    deltas: tuple[Delta, ...]
    """What this piece adds."""
    usage: Usage
    """So far."""
    finished: Choice | None = None
    """The whole answer, in the last piece."""


Emit = Callable[[Piece], None]


@dataclass
class _Generation:
    """A call that this replica generates."""

    ticket: CallTicket
    request: CanonicalRequest
    answer: Answer
    reader: AnswerReader
    emit: Emit

    @property
    def usage(self) -> Usage:
        return Usage(self.ticket.num_prompt_tokens, len(self.answer.token_ids), self.answer.num_cached_tokens)

    def tell(self, text: str) -> None:
        """Send on what is certain of the answer with ``text`` behind it."""
        deltas = self.reader.feed(text)
        if deltas:
            self.emit(Piece(self.ticket.call_id, self.request.choice, tuple(deltas), self.usage))


class CallServer:
    """Serves calls. Holds no state of a run: every replica can serve every call."""

    def __init__(self, job_id: JobId, backends: Backends, parser: AnswerParser, call_timeout_s: float) -> None:
        self._job_id = job_id
        self._backends = backends
        self._parser = parser
        self._call_timeout_s = call_timeout_s
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._in_flight: dict[str, Shard] = {}
        """Calls in flight -> their shards."""
        self._renewing: asyncio.Task[None] | None = None

    async def serve(self, run_id: RunId, key: str, request: CanonicalRequest, emit: Emit) -> None:
        """Serve one call; its answer goes to ``emit`` in pieces. Cancelling it aborts the call and tells the shard.

        A request that another one makes too gets the answer of the same generation. Raises what ``match_call``
        raises, and ``CallFailedError`` when the call cannot be finished.
        """
        started_at_s, started_s = time.time(), time.monotonic()
        shard = self._backends.shard_for(run_id)
        with self._as_failed_call():
            async with asyncio.timeout(self._call_timeout_s) as deadline:
                ticket = await self._match(shard, run_id, key, request)
                while ticket.is_shared:
                    try:
                        shared = await shard.shared_answer(run_id, ticket.call_id)
                    except BaseException:
                        self.not_delivered(run_id, ticket.call_id)  # the shard may have given it already
                        raise
                    if shared is not None:
                        metric("tidegate_calls_shared_total").inc(1, job=str(self._job_id))
                        emit(_shared_piece(shared, request))
                        return
                    ticket = await self._match(shard, run_id, key, request)
        call = self._begin(ticket, request, emit)
        with self._noted_as_in_flight(ticket.call_id, shard), self._as_failed_call():
            deadline_s = deadline.when()
            try:
                async with asyncio.timeout_at(deadline_s) as deadline:
                    await self._generate(call)
                    deltas = call.reader.feed(call.answer.texts[-1])
                    # vLLM's parsers take minutes over some kilobytes that a model said again and again
                    in_thread = isinstance(call.reader, SlowReader)
                    ended = await asyncio.to_thread(call.reader.finish) if in_thread else call.reader.finish()
                    last_deltas, parsed = ended
            except BaseException as error:
                self._abandon(shard, call, error, is_late=deadline.expired())
                raise
            await self._store(shard, call, parsed, started_at_s)
        self._count(call, parsed, time.monotonic() - started_s)
        choice = Choice(request.choice, parsed, call.answer.finish_reason, call.answer.stop_string)
        emit(Piece(ticket.call_id, request.choice, (*deltas, *last_deltas), call.usage, choice))

    async def _store(self, shard: Shard, call: _Generation, parsed: ParsedAnswer, started_at_s: float) -> None:
        """Have a whole answer made durable, even if the harness goes away meanwhile."""
        storing = self._in_background(shard.append_call(_record(call, parsed, started_at_s)))
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await asyncio.shield(storing)
        except BaseException:
            storing.add_done_callback(lambda done: self._unanswered(shard, call.ticket.call_id, done))
            raise

    def _unanswered(self, shard: Shard, call_id: str, storing: asyncio.Task[None]) -> None:
        """Tell the shard of a whole answer that did not go out: the same request, made again, gets it if it was
        stored, and waits for nothing if it could not be."""
        error = None if storing.cancelled() else storing.exception()
        telling = shard.note_undelivered(call_id) if error is None else shard.abandon_call(call_id, _why(error))
        self._in_background(_quietly(telling))

    def not_delivered(self, run_id: RunId, call_id: str) -> None:
        """The harness went away before it had the whole answer of a stored call: if it asks again, it gets that."""
        self._in_background(_quietly(self._backends.shard_for(run_id).note_undelivered(call_id)))

    async def count_tokens(self, run_id: RunId, key: str, request: CanonicalRequest) -> int:
        """How many tokens the prompt of a request would have."""
        with self._as_failed_call():
            async with asyncio.timeout(self._call_timeout_s):
                return await self._backends.shard_for(run_id).count_tokens(run_id, key, request)

    def _begin(self, ticket: CallTicket, request: CanonicalRequest, emit: Emit) -> _Generation:
        answer = Answer.of(ticket.partial)
        call = _Generation(ticket, request, answer, self._parser.reader(request, ticket.call_id), emit)
        if ticket.partial is not None:
            metric("tidegate_calls_resumed_total").inc(1, job=str(self._job_id))
            call.tell(ticket.partial.text)
        return call

    def _abandon(self, shard: Shard, call: _Generation, error: BaseException, *, is_late: bool) -> None:
        """Tell the shard that a call will not be completed here, and what there is of it."""
        # tokens that a grammar forced cannot be gone on from: its state is not known behind them
        partial = call.answer.partial if call.ticket.sampling.json_schema is None else None
        engine_lost = is_late or call.answer.waits_for_cell
        abandoning = shard.abandon_call(call.ticket.call_id, _why(error), engine_lost=engine_lost, partial=partial)
        self._in_background(_quietly(abandoning))

    async def _match(self, shard: Shard, run_id: RunId, key: str, request: CanonicalRequest) -> CallTicket:
        """Match, and take the call back at the shard if the harness leaves before the ticket is here."""
        matching = asyncio.ensure_future(shard.match_call(run_id, key, request))
        try:
            return await asyncio.shield(matching)
        except asyncio.CancelledError as error:
            reason = _why(error)

            def take_back(done: asyncio.Future[CallTicket]) -> None:
                if not done.cancelled() and done.exception() is None:
                    ticket = done.result()
                    if not ticket.is_shared:
                        abandoning = shard.abandon_call(ticket.call_id, reason, partial=ticket.partial)
                        self._in_background(_quietly(abandoning))

            matching.add_done_callback(take_back)
            raise

    async def _generate(self, call: _Generation) -> None:
        """Stream from one cell after the other until the answer is finished. The last text is not told."""
        failed: dict[str, int] = {}  # cell id -> epoch of the table by which it was chosen
        retry_s = _RETRY_S
        while not call.answer.finish_reason:
            table = self._backends.routes.table
            excluded = [cell_id for cell_id, epoch in failed.items() if epoch >= table.epoch]
            route, reason = choose_cell(table, call.ticket.run_id, excluded)
            call.answer.waits_for_cell = route is None
            if route is None:
                logger.debug("call %s waits: %s", call.ticket.call_id, reason)
                await self._backends.routes.wait_newer(table.epoch, retry_s)
                retry_s = min(retry_s * 2, _MAX_RETRY_S)
                failed.clear()
                continue
            await self._generate_at(route, call)
            if not call.answer.finish_reason:
                failed[route.cell_id] = table.epoch

    async def _generate_at(self, route: CellRoute, call: _Generation) -> None:
        """Stream from one cell. Returns with no finish reason set if the call must go on elsewhere."""
        cell, ticket, answer = self._backends.cell(route.actor_name), call.ticket, call.answer
        hold_s = _STREAM_HOLD_S if call.request.stream else _BODY_HOLD_S
        request = GenerateRequest(ticket.call_id, ticket.run_id, ticket.sampling, tuple(answer.token_ids), hold_s)
        try:
            async with contextlib.aclosing(cell.generate(request, ticket.prompt_ref)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk, route.cell_id)
                    if answer.finish_reason:
                        return
                    if chunk.text:
                        call.tell(chunk.text)
                    if chunk.finish_reason == ABORTED:
                        return
            raise EngineError("its stream ended without a finish reason.")
        except EngineError as error:
            logger.warning("call %s moves away from %s: %s", ticket.call_id, route.cell_id, error)
        except BaseException:
            self._in_background(_quietly(cell.abort(ticket.call_id)))
            raise

    @contextlib.contextmanager
    def _noted_as_in_flight(self, call_id: str, shard: Shard) -> Iterator[None]:
        self._in_flight[call_id] = shard
        if self._renewing is None or self._renewing.done():
            self._renewing = self._in_background(self._renew())
        try:
            yield
        finally:
            del self._in_flight[call_id]

    async def _renew(self) -> None:
        """While calls are in flight, tell their shards so: a shard that hears nothing takes this replica for dead."""
        while self._in_flight:
            await asyncio.sleep(_RENEWAL_S)
            by_shard: dict[Shard, list[str]] = {}
            for call_id, shard in self._in_flight.items():
                by_shard.setdefault(shard, []).append(call_id)
            # a shard that hangs must not keep the others from hearing of their calls in time
            telling = (_quietly(shard.renew_calls(ids), _RENEWAL_S) for shard, ids in by_shard.items())
            await asyncio.gather(*telling)

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

    def _count(self, call: _Generation, parsed: ParsedAnswer, seconds: float) -> None:
        job, answer = str(self._job_id), call.answer
        metric("tidegate_calls_total").inc(1, job=job, dialect=call.request.dialect, finish_reason=answer.finish_reason)
        metric("tidegate_call_moves_total").inc(len(answer.cells) - 1, job=job)
        metric("tidegate_call_seconds").observe(seconds, job=job)
        metric("tidegate_prompt_tokens_total").inc(call.ticket.num_prompt_tokens, job=job)
        metric("tidegate_prompt_tokens_new_total").inc(call.ticket.num_new_tokens, job=job)
        metric("tidegate_output_tokens_total").inc(len(answer.token_ids), job=job)
        metric("tidegate_malformed_tool_calls_total").inc(parsed.num_malformed_calls, job=job)


def _why(error: BaseException) -> str:
    """A reason for the shard's record. A cancelled task means a harness that went away, or the time limit."""
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


async def _quietly(work: Coroutine[Any, Any, None], timeout_s: float = _CLEANUP_TIMEOUT_S) -> None:
    """Clean-up that may fail: the other side may be what was lost."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except Exception as error:  # the call has already failed; its outcome does not depend on this
        logger.debug("clean-up of a call failed: %s: %s", type(error).__name__, error)


def _shared_piece(shared: SharedAnswer, request: CanonicalRequest) -> Piece:
    """The whole answer of a stored call as one piece."""
    record = shared.record
    parsed = record.answer or ParsedAnswer(record.output_text)
    deltas = [Delta(DeltaKind.REASONING, parsed.reasoning), Delta(DeltaKind.TEXT, parsed.text)]
    told = [delta for delta in deltas if delta.text]
    told += [Delta(DeltaKind.TOOL_CALL, tool_call=call) for call in parsed.tool_calls]
    usage = Usage(shared.num_prompt_tokens, len(record.output_ids))
    choice = Choice(request.choice, parsed, record.finish_reason, record.stop_string)
    return Piece(record.call_id, request.choice, tuple(told), usage, choice)


def _record(call: _Generation, parsed: ParsedAnswer, started_at_s: float) -> CallRecord:
    """The call as it is stored. Of the prompt and the request nothing is sent: the shard still has them."""
    ticket, answer = call.ticket, call.answer
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
        sampling=ticket.sampling,
        answer=None if parsed == ParsedAnswer(answer.text) else parsed,
        stop_string=answer.stop_string,
    )
