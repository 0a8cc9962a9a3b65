"""The rollout side of a cell: one engine, the calls in flight, and the weights it serves.

A call outlives what happens to the cell. When weights are published, every call in the engine is aborted there with
the tokens that it has, waits, and is submitted again behind its prompt and those tokens: its KV is computed anew by
the new weights, and each token carries the version that made it. When the cell drains or its weights turn out wrong,
the call ends with 'abort', and the proxy lets it go on elsewhere from the same tokens.

An answer under a grammar is the exception. vLLM starts a grammar with the first token that it samples, so it cannot go
on behind tokens that were made before: such a call begins again, with no token. It can, because its tokens leave the
cell only when all are there, in one chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from numpy.typing import NDArray

from services.common.errors import ContextLengthError, EngineError, RequestError, TidegateError
from services.common.ids import CellId, JobId
from services.rollout.cell_state import (
    AdmissionClosed,
    AdmissionOpened,
    EngineDied,
    Event,
    Standing,
    UpdateFailed,
    UpdateStarted,
    UpdateVerified,
    advance,
    count_slots,
)
from services.rollout.coalesce import coalesced, joined
from services.rollout.config import RolloutConfig
from services.rollout.engine import Engine, EngineOutput, WorkerUpdate
from services.rollout.servicer import serve_cell
from services.rollout.text_stream import TextStream
from services.rollout.types import CellStatus, GenerateChunk, GenerateRequest, UpdateResult
from services.trainer.types import Canary, WeightManifest

_HEALTH_EVERY_S = 0.5
_FAREWELL_S = 1.0  # callers of a dead engine get their errors before the process goes
_CONTEXTS_KEPT = 256

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call:
    """A call in flight."""

    request: GenerateRequest
    prompt_ids: list[int]
    text: TextStream
    output_ids: list[int]
    """Tokens so far, those of other cells included."""
    in_engine: str | None = None
    """Id of its request in the engine, while there is one."""
    ended: bool = False
    """Whether it was told to end with the tokens it has."""


@dataclass
class _Canary:
    abs_diff_max: float
    complaint: str = ""


@dataclass
class _Totals:
    prompt_tokens: int = 0
    generated_tokens: int = 0
    contexts: deque[int] = field(default_factory=lambda: deque(maxlen=_CONTEXTS_KEPT))


class RolloutCell:
    """The rollout side of a cell. An async Ray actor in a job; a plain object in one event loop elsewhere."""

    def __init__(self, job_id: JobId, cell_id: CellId, config: RolloutConfig, model_path: str, grpc_token: str) -> None:
        self._job_id, self._cell_id, self._config, self._grpc_token = job_id, cell_id, config, grpc_token
        self._engine = Engine(config.engine, model_path, config.cells.grpc_host)
        self._standing = Standing()
        self._changed = asyncio.Condition()
        self._calls: set[_Call] = set()
        self._totals = _Totals()
        self._publishing = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._server: grpc.aio.Server | None = None
        self._address = ""
        self._watch: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Start the engine and the gRPC server; returns the server's address. A second call only returns it.

        The cell is STALE, with version -1, until weights were published to it and verified. Raises ``EngineError`` if
        the engine does not start, or died since.
        """
        async with self._starting:
            self._check_alive()
            if self._server is None:
                await self._engine.start()
                self._server, self._address = await serve_cell(self, self._config.cells.grpc_host, self._grpc_token)
                self._watch = asyncio.create_task(self._watch_engine())
        return self._address

    async def stop(self) -> None:
        """End the engine and the server; calls in flight end with 'abort'."""
        if self._watch is not None:
            self._watch.cancel()
        await self._change(AdmissionClosed())
        await self._end_calls(self._calls)
        if self._server is not None:
            await self._server.stop(grace=None)
        await asyncio.to_thread(self._engine.shutdown)

    async def status(self) -> CellStatus:
        """What the cell says of itself. Raises ``EngineError`` once its engine is dead."""
        self._check_alive()
        slots = count_slots(self._config.cells.slots_per_cell, self._engine.num_kv_tokens, tuple(self._totals.contexts))
        return CellStatus(
            cell_id=self._cell_id,
            state=self._standing.state,
            version=self._standing.version,
            admitting=self._standing.admitting,
            num_calls=len(self._calls),
            slots=slots,
            reason=self._standing.reason,
            generated_tokens=self._totals.generated_tokens,
            prompt_tokens=self._totals.prompt_tokens,
            rss_bytes=self._engine.rss_bytes(),
        )

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            if self._engine.dead:
                await self._bury()
                return

    async def _bury(self) -> None:
        """The engine is gone: tell every caller, then end the actor, so that the job starts another."""
        if self._standing.dead:
            return
        await self._change(EngineDied("the engine's process ended"))
        _log.error("%s: %s", self._cell_id, self._standing.reason)
        if _in_actor():
            # not exit_actor(): that is an orderly end, after which Ray does not start the actor again
            asyncio.get_running_loop().call_later(_FAREWELL_S, os._exit, 1)

    def _check_alive(self) -> None:
        if self._standing.dead:
            raise EngineError(f"{self._cell_id}: {self._standing.reason}.", "Its last words are in the cell's log.")

    async def _change(self, event: Event) -> None:
        async with self._changed:
            self._standing = advance(self._standing, event)
            self._changed.notify_all()

    # -- calls --------------------------------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, prompt_ids: NDArray[np.int32]
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Sample an answer to ``prompt_ids`` int32 ``[n]``, behind ``request.generated_ids``.

        The last chunk has a finish reason: 'stop', 'length', or 'abort' if the cell cannot finish (or cannot begin)
        the call; with a JSON schema in one chunk. Raises ``EngineError`` if the engine is dead, ``ContextLengthError``
        if the prompt is too long, ``RequestError`` for a schema that the engine cannot enforce.
        """
        self._check_alive()
        if not self._standing.takes_calls:
            yield self._last_chunk("abort")
            return
        call = self._admit(request, np.asarray(prompt_ids).tolist())  # a loop over a million takes 0.1 s
        self._calls.add(call)
        try:
            is_masked = request.sampling.json_schema is not None
            chunks = self._serve_masked(call) if is_masked else coalesced(self._serve(call), request.hold_s)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        finally:
            self._calls.discard(call)
            self._totals.contexts.append(len(call.prompt_ids) + len(call.output_ids))
            async with self._changed:
                self._changed.notify_all()

    def _admit(self, request: GenerateRequest, prompt_ids: list[int]) -> _Call:
        if len(prompt_ids) >= self._engine.max_model_len:
            raise ContextLengthError(len(prompt_ids), self._engine.max_model_len)
        if request.sampling.json_schema is not None and request.generated_ids:
            raise RequestError("an answer under a JSON schema cannot go on behind tokens of another cell.")
        text = TextStream(self._engine.decode, request.sampling.stop)
        for token in request.generated_ids:
            text.feed(token)  # what it returns was emitted by the cell that made the token
        self._totals.prompt_tokens += len(prompt_ids)
        return _Call(request, prompt_ids, text, list(request.generated_ids))

    async def _serve(self, call: _Call) -> AsyncGenerator[GenerateChunk, None]:
        is_first = True
        while True:
            if (reason := self._finished(call)) is not None:
                yield self._last_chunk(reason, call.text.finish(), call.text.stop_string)
                return
            if not await self._may_continue(call):
                yield self._last_chunk("abort")
                return
            version = self._standing.version
            outputs = self._sample(call)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    chunk = self._chunk(call, output, version, is_first)
                    is_first = False
                    if chunk.token_ids or chunk.finish_reason:
                        yield chunk
                    if chunk.finish_reason is not None:
                        return

    async def _serve_masked(self, call: _Call) -> AsyncGenerator[GenerateChunk, None]:
        while await self._may_continue(call):
            call.output_ids.clear()
            call.text = TextStream(self._engine.decode, call.request.sampling.stop)
            version = self._standing.version
            chunks: list[GenerateChunk] = []
            outputs = self._sample(call)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    chunks.append(self._chunk(call, output, version, is_first=not chunks))
                    if chunks[-1].finish_reason is not None:
                        yield joined(chunks)
                        return
        yield self._last_chunk("abort")

    async def _may_continue(self, call: _Call) -> bool:
        """Wait while the cell is updating; whether the call can then be sampled here."""
        async with self._changed:
            await self._changed.wait_for(lambda: call.ended or not self._standing.calls_wait)
        self._check_alive()
        return self._standing.may_generate and not call.ended

    def _finished(self, call: _Call) -> str | None:
        """The finish reason of a call that needs no more tokens: a cell may have died between the last and its news."""
        output_ids = call.output_ids
        if call.text.stopped or (output_ids and output_ids[-1] in self._engine.stop_ids):
            return "stop"
        has_room = len(call.prompt_ids) + len(output_ids) < self._engine.max_model_len
        return None if has_room and len(output_ids) < call.request.sampling.max_tokens else "length"

    async def _sample(self, call: _Call) -> AsyncGenerator[EngineOutput, None]:
        """One stay of a call in the engine."""
        sampling = call.request.sampling
        behind = [*call.prompt_ids, *call.output_ids]
        max_tokens = min(sampling.max_tokens - len(call.output_ids), self._engine.max_model_len - len(behind))
        seed = call_seed(sampling.seed, call.request.call_id, len(call.output_ids))
        call.in_engine = self._engine.new_request_id(call.request.call_id)
        outputs = self._engine.generate(
            call.in_engine, behind, sampling.temperature, max_tokens, seed, sampling.json_schema
        )
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        except EngineError:
            if self._engine.dead:
                await self._bury()
            raise
        finally:
            call.in_engine = None

    def _chunk(self, call: _Call, output: EngineOutput, version: int, is_first: bool) -> GenerateChunk:
        """The part of an engine's output that belongs to the answer: all, or up to the end of a stop string."""
        text, num_tokens = "", 0
        for token in output.token_ids:
            call.output_ids.append(token)
            num_tokens += 1
            text += call.text.feed(token)
            if call.text.stopped:
                break
        self._totals.generated_tokens += num_tokens
        finish_reason = "stop" if call.text.stopped else output.finish_reason
        if finish_reason == "abort":
            finish_reason = None  # the loop decides whether it waits, goes on or ends
        if finish_reason is not None:
            text += call.text.finish()
        return GenerateChunk(
            token_ids=output.token_ids[:num_tokens],
            logprobs=output.logprobs[:num_tokens],
            text=text,
            version=version,
            finish_reason=finish_reason,
            num_cached_tokens=min(output.num_cached_tokens, len(call.prompt_ids)) if is_first else 0,
            stop_string=call.text.stop_string,
        )

    def _last_chunk(self, finish_reason: str, text: str = "", stop_string: str = "") -> GenerateChunk:
        return GenerateChunk((), (), text, self._standing.version, finish_reason, stop_string=stop_string)

    async def abort(self, call_id: str) -> None:
        """End a call with the tokens it has; unknown ones are ignored."""
        await self._end_calls({call for call in self._calls if call.request.call_id == call_id})

    async def _end_calls(self, calls: set[_Call]) -> None:
        async with self._changed:
            for call in calls:
                call.ended = True
            self._changed.notify_all()
        await self._leave_engine(set(calls))

    async def _leave_engine(self, calls: set[_Call]) -> None:
        """Abort the requests of calls in the engine. What they had sampled still reaches their callers."""
        for request_id in [call.in_engine for call in calls if call.in_engine is not None]:
            await self._engine.abort(request_id)

    # -- commands -----------------------------------------------------------------------------------------------------

    async def admit(self) -> None:
        """Take calls (again)."""
        self._check_alive()
        await self._change(AdmissionOpened())

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Take no new calls and wait for those in flight; at the deadline the rest end with 'abort'.

        Returns the numbers of calls that finished and that were aborted.
        """
        self._check_alive()
        await self._change(AdmissionClosed())
        present = set(self._calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not self._calls & present)
        late = self._calls & present
        await self._end_calls(late)
        return len(present) - len(late), len(late)

    async def publish(self, manifest: WeightManifest) -> UpdateResult:
        """Pull, load and verify published weights. Never raises for weights that fail: the result says why.

        Verified means: every tensor arrived with the checksum it was sent with, the engine's own tensors read back
        equal to them, and the engine gives the canary the trainer's log-probabilities. A cell whose weights fail is
        STALE; it takes the next publication as any other. A version that it serves already is answered at once.
        """
        async with self._publishing:
            self._check_alive()
            if manifest.version < self._standing.version:
                reason = f"version {manifest.version} is older than {self._standing.version}, which it has"
                return self._result(manifest, started_s=time.monotonic(), reason=reason)
            if manifest.version == self._standing.version and self._standing.may_generate:
                return self._result(manifest, started_s=time.monotonic())  # whoever asks has not heard of it
            return await self._publish(manifest)

    async def _publish(self, manifest: WeightManifest) -> UpdateResult:
        started_s = time.monotonic()
        await self._change(UpdateStarted(manifest.version))
        workers: list[WorkerUpdate] = []
        canary = _Canary(-1.0)
        complaints: list[str] = []
        try:
            async with asyncio.timeout(self._config.cells.update_timeout_s):
                await self._leave_engine(set(self._calls))
                await self._engine.pause()
                workers = await self._engine.update_weights(manifest)
                complaints = [worker.error for worker in workers if worker.error]
                await self._engine.reset_prefix_cache()
                if all(worker.loaded for worker in workers):
                    await self._engine.resume()
                    canary = await self._sing(manifest.canary)
                    complaints += [canary.complaint] if canary.complaint else []
        except TimeoutError:
            complaints.append(f"the update took longer than {self._config.cells.update_timeout_s:g} s")
        except TidegateError as error:
            complaints.append(str(error))
        except asyncio.CancelledError:  # whoever asked is gone; calls that wait must not wait for ever
            await self._change(UpdateFailed("the update was interrupted"))
            raise
        except Exception as error:  # vLLM's utility calls raise bare exceptions; this is one failed update
            complaints.append(f"the engine failed ({type(error).__name__}: {error})")
        if self._engine.dead:
            await self._bury()
        reason = "; ".join(complaints)
        if not self._standing.dead:
            await self._change(UpdateFailed(reason) if reason else UpdateVerified(manifest.version))
        return self._result(manifest, started_s, reason, workers, canary)

    async def _sing(self, canary: Canary) -> _Canary:
        """Compare the engine's log-probabilities of the canary with the trainer's."""
        if len(canary.token_ids) < 2 or len(canary.logprobs) != len(canary.token_ids) - 1:
            return _Canary(-1.0, "the canary needs two tokens or more, and one log-probability less than tokens")
        heard = await self._engine.score(canary.token_ids)
        differences = np.abs(np.asarray(heard) - np.asarray(canary.logprobs))
        abs_diff_max = float(differences.max())
        tolerance = self._config.cells.canary_tolerance
        if abs_diff_max <= tolerance:
            return _Canary(abs_diff_max)
        return _Canary(
            abs_diff_max,
            f"canary: the engine's log-probabilities differ from the trainer's by {abs_diff_max:.3g}, above "
            f"{tolerance:.3g} (the engine computes with other weights; for a 16-bit engine raise "
            "rollout.cells.canary_tolerance)",
        )

    def _result(
        self,
        manifest: WeightManifest,
        started_s: float,
        reason: str = "",
        workers: Sequence[WorkerUpdate] = (),
        canary: _Canary | None = None,
    ) -> UpdateResult:
        if reason:
            _log.warning("%s refused version %d: %s", self._cell_id, manifest.version, reason)
        for worker in workers:
            _log.info("%s, version %d: %s", self._cell_id, manifest.version, worker)
        return UpdateResult(
            cell_id=self._cell_id,
            version=manifest.version,
            ok=not reason,
            reason=reason,
            seconds=time.monotonic() - started_s,
            size_bytes=manifest.size_bytes if workers else 0,
            transport=next((worker.transport for worker in workers if worker.transport), manifest.transport),
            canary_abs_diff_max=canary.abs_diff_max if canary is not None else -1.0,
        )


def call_seed(seed: int | None, call_id: str, num_generated: int) -> int | None:
    """The engine's seed for one stay of a call: other calls, and the same call further on, draw other numbers."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{call_id}/{num_generated}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _in_actor() -> bool:
    import ray

    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
