"""What a proxy replica reaches: the trajectory shards, the cells, and the newest route table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import ray
import ray.exceptions

from services.common.errors import EngineError, JobError, RequestError, TidegateError
from services.common.ids import JobId, RunId, shard_of
from services.common.names import RAY_NAMESPACE, shard_actor
from services.common.types import RouteTable
from services.proxy.routing import EMPTY_TABLE, accept
from services.proxy.types import CanonicalRequest
from services.rollout.types import GenerateChunk, GenerateRequest
from services.trajectory.types import CallRecord, CallTicket, PartialAnswer, SharedAnswer

logger = logging.getLogger(__name__)


class Shard(Protocol):
    """The trajectory shard of a run."""

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        """Raises ``AccessError`` (unknown or expired key), ``RequestError`` (a call that cannot be served)."""
        ...

    async def append_call(self, record: CallRecord) -> None:
        """The call is durable on return."""
        ...

    async def abandon_call(
        self, call_id: str, reason: str, *, engine_lost: bool = False, partial: PartialAnswer | None = None
    ) -> None:
        """The call will not be completed. ``engine_lost``: no cell could, whatever the harness did. ``partial``: what
        the same request, made again, may go on behind."""
        ...

    async def shared_answer(self, run_id: str, call_id: str) -> SharedAnswer | None:
        """The answer of a call that another request made too, once there is one. None: nobody completes it; the
        request is to be matched again."""
        ...

    async def note_undelivered(self, call_id: str) -> None:
        """The answer of a stored call did not reach its harness."""
        ...

    async def renew_calls(self, call_ids: Sequence[str]) -> None:
        """These calls are still being generated."""
        ...

    async def count_tokens(self, run_id: str, key: str, request: CanonicalRequest) -> int:
        """The length of the prompt of a request. Raises what ``match_call`` raises."""
        ...


class Cell(Protocol):
    """The rollout side of a cell."""

    def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Raises ``EngineError`` when the cell is lost (the call can go on elsewhere), ``RequestError`` for a call
        that no cell can serve, ``JobError`` when the prompt is gone with the shard that made it."""
        ...

    async def abort(self, call_id: str) -> None: ...


class Backends(Protocol):
    """The outside world of a proxy replica."""

    def shard_for(self, run_id: RunId) -> Shard: ...

    def cell(self, actor_name: str) -> Cell: ...

    @property
    def routes(self) -> Routes: ...


class Routes:
    """The newest route table, and a way to wait for a newer one."""

    def __init__(self, table: RouteTable = EMPTY_TABLE) -> None:
        self._table = table
        self._changed = asyncio.Event()

    @property
    def table(self) -> RouteTable:
        return self._table

    def offer(self, table: RouteTable) -> None:
        """Take a table if it is newer, and wake those who wait."""
        kept = accept(self._table, table)
        if kept is not self._table:
            self._table = kept
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_newer(self, epoch: int, timeout_s: float) -> None:
        """Return once there is a table newer than ``epoch``, or after ``timeout_s``."""
        if self._table.epoch > epoch:
            return
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow a cancellation
                await self._changed.wait()
        except TimeoutError:
            return


async def follow_routes(
    routes: Routes,
    watch: Callable[[], AsyncIterator[RouteTable]],
    *,
    retry_s: float = 0.2,
    max_retry_s: float = 2.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Keep ``routes`` new for ever. While the scheduler is away the last table holds."""
    wait_s, reported = retry_s, ""
    while True:
        try:
            async for table in watch():
                routes.offer(table)
                wait_s, reported = retry_s, ""
            trouble = "the stream ended"
        except Exception as error:  # whatever befell the stream, the answer is to open it again
            trouble = f"{type(error).__name__}: {error}"
        if trouble != reported:  # once for each kind of trouble
            logger.warning("no news of routes (%s); keeping epoch %d", trouble, routes.table.epoch)
            reported = trouble
        await sleep(wait_s)
        wait_s = min(wait_s * 2, max_retry_s)


class RayBackends:
    """``Backends`` over Ray actors, found by name."""

    def __init__(self, job_id: JobId, num_shards: int, routes: Routes) -> None:
        self._job_id = job_id
        self._num_shards = num_shards
        self._routes = routes
        self._actors = _Actors()
        self._shards: dict[str, _RayShard] = {}

    @property
    def routes(self) -> Routes:
        return self._routes

    def shard_for(self, run_id: RunId) -> Shard:
        name = shard_actor(self._job_id, shard_of(run_id, self._num_shards))
        return self._shards.setdefault(name, _RayShard(self._actors, name))

    def cell(self, actor_name: str) -> Cell:
        return _RayCell(self._actors, actor_name)

    def find_actors(self) -> None:
        """Find the shards, and the cells of the newest table, before the first call needs them. Blocks."""
        shards = [shard_actor(self._job_id, index) for index in range(self._num_shards)]
        for name in [*shards, *(cell.actor_name for cell in self._routes.table.cells)]:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # gone: the first call will see to it
                self._actors.get(name)


class _Actors:
    """Handles by name. One that led to an error is looked up anew: the actor may have been made again."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Blocks where it is new. Raises ``ValueError`` if there is no such actor."""
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
        return self._handles[name]

    async def find(self, name: str) -> Any:
        """``get`` that lets the event loop turn: the first handle of a kind loads its code."""
        return self._handles.get(name) or await asyncio.to_thread(self.get, name)

    def forget(self, name: str) -> None:
        self._handles.pop(name, None)


class _RayShard:
    def __init__(self, actors: _Actors, name: str) -> None:
        self._actors = actors
        self._name = name

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        ticket: CallTicket = await self._ask("match_call", run_id, key, request)
        return ticket

    async def append_call(self, record: CallRecord) -> None:
        await self._ask("append_call", record)

    async def abandon_call(
        self, call_id: str, reason: str, *, engine_lost: bool = False, partial: PartialAnswer | None = None
    ) -> None:
        await self._ask("abandon_call", call_id, reason, engine_lost=engine_lost, partial=partial)

    async def shared_answer(self, run_id: str, call_id: str) -> SharedAnswer | None:
        shared: SharedAnswer | None = await self._ask("shared_answer", run_id, call_id)
        return shared

    async def note_undelivered(self, call_id: str) -> None:
        await self._ask("note_undelivered", call_id)

    async def renew_calls(self, call_ids: Sequence[str]) -> None:
        await self._ask("renew_calls", call_ids)

    async def count_tokens(self, run_id: str, key: str, request: CanonicalRequest) -> int:
        num_tokens: int = await self._ask("count_tokens", run_id, key, request)
        return num_tokens

    async def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return await getattr(await self._actors.find(self._name), method).remote(*arguments, **options)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except (ray.exceptions.RayError, ValueError) as error:
            self._actors.forget(self._name)
            raise JobError(f"the trajectory shard {self._name} does not answer ({type(error).__name__}).") from error


class _RayCell:
    def __init__(self, actors: _Actors, name: str) -> None:
        self._actors = actors
        self._name = name

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        try:
            method = (await self._actors.find(self._name)).generate.options(num_returns="streaming")
            # the ref is a top-level argument, so the cell gets the array and this process never does
            async for reference in method.remote(request, prompt_ref):
                yield await reference
        except ray.exceptions.RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, RequestError):
                raise cause from None  # no other cell would take it either
            if isinstance(cause, ray.exceptions.ObjectLostError):
                raise JobError(f"the prompt of call {request.call_id} is gone with its shard.", "Ask again.") from None
            raise EngineError(f"{self._name} failed a call: {type(cause).__name__}: {cause}") from None
        except (ray.exceptions.RayError, ValueError) as error:
            self._actors.forget(self._name)
            raise EngineError(f"{self._name} is lost ({type(error).__name__}).") from error

    async def abort(self, call_id: str) -> None:
        await (await self._actors.find(self._name)).abort.remote(call_id)


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    """What the actor raised, freed of Ray's wrapping."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else TidegateError(str(error))
