"""The half of a trajectory shard that serves calls: from a request to a stored answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from services.common.errors import AccessError, ContextLengthError, InvariantError, TurnLimitError
from services.common.ids import JobId, RunId, group_of, run_of
from services.common.metrics import metric
from services.proxy.dialects import InvalidRequestError
from services.proxy.session import Bridge, Renderer
from services.proxy.types import CanonicalRequest
from services.rollout.types import Sampling
from services.trajectory.config import TrajectoryConfig
from services.trajectory.encoding import columns_of
from services.trajectory.groups import LiveGroups, LiveRun
from services.trajectory.live import AttemptLog, Matched
from services.trajectory.outcome import CallTrouble
from services.trajectory.records import check_record, continued_messages, holding_sampling
from services.trajectory.sharing import LEASE_S
from services.trajectory.store import Store
from services.trajectory.types import CallRecord, CallTicket, PartialAnswer, SharedAnswer, TokenIds

logger = logging.getLogger(__name__)

_TOKENIZER_THREADS = 4
"""So many runs' new texts are tokenised at once: one long prompt holds up no other run."""
_SMALL_CHARS = 1 << 12
_SMALL_TOKENS = 1 << 12
"""So little is worked on at once: handing it to a thread and back costs more than it frees the event loop."""
INLINE_PROMPT_BYTES = 1 << 16
"""Shorter prompts travel in the ticket itself: an object of their own costs more than their bytes."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CallDesk:
    """Matches the calls of live runs, and stores their answers. What else a shard does is its subclass's.

    Tokenising and writing run in threads of their own, so the event loop stays free.
    """

    def __init__(
        self,
        job_id: JobId,
        config: TrajectoryConfig,
        store: Store,
        groups: LiveGroups,
        renderer: Renderer,
        sampling: Sampling,
        eval_sampling: Sampling | None,
        max_model_len: int,
        as_ref: Callable[[Any], Any] | None,
    ) -> None:
        self._job_id = job_id
        self._config = config
        self._store = store
        self._groups = groups
        self._bridge = Bridge(renderer)
        self._sampling = sampling
        self._eval_sampling = eval_sampling or sampling
        self._max_model_len = max_model_len
        self._as_ref = as_ref
        self._tag = secrets.token_hex(4)
        self._is_thread_safe = renderer.is_thread_safe
        num_threads = _TOKENIZER_THREADS if renderer.is_thread_safe else 1
        self._tokenizer = ThreadPoolExecutor(num_threads, "tokenizer")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: dict[str, asyncio.Event] = {}
        """Calls in flight that further requests wait for."""

    async def match_call(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        """Build the prompt of a call on the stored ids of the call that it continues.

        Raises ``AccessError`` for a key that is not valid now, ``TurnLimitError`` if the run has made all its calls,
        ``ContextLengthError`` if the prompt leaves no room for one token, ``TemplateError`` if the chat template
        refuses the messages.
        """
        # a caller that goes away must not let another call in while this one is being matched
        return await asyncio.shield(self._task(self._match(run_id, key, request)))

    async def _match(self, run_id: str, key: str, request: CanonicalRequest) -> CallTicket:
        run, log = self._groups.authorise(run_id, key)
        async with run.lock:
            await self._load(run)
            request = await self._whole(log, request)
            matched = await self._matched(log, request)
            self._groups.authorise(run_id, key)  # the attempt may have been closed meanwhile
            same_call = matched.same_call_key
            shared_id = log.requests.shared_call(same_call, is_retry=request.is_retry)
            if shared_id is not None:
                return _shared_ticket(log, shared_id)
            try:
                self._check_turns(log)
                sampling = self._holding_sampling(log, matched)
            except TurnLimitError:
                await self._note_trouble(log, CallTrouble.TURN_LIMITED)
                raise
            except ContextLengthError:
                await self._note_trouble(log, CallTrouble.CONTEXT_OVERFLOWED)
                raise
            call = log.begin(matched)
            partial = log.requests.begin(same_call, call.call_id, time.monotonic())
            if log.trouble is not CallTrouble.ENGINE_LOST:  # that is over when a call is completed
                await self._note_trouble(log, None)
        prompt = matched.prompt
        if prompt.is_false_fork:
            metric("tidegate_false_forks_total").inc(1, job=self._job_id)
        return CallTicket(
            call_id=call.call_id,
            run_id=run_id,
            attempt=log.attempt,
            prompt_ref=self._prompt_ref(prompt.ids),
            num_prompt_tokens=call.num_prompt_tokens,
            num_new_tokens=prompt.num_new_tokens,
            parent_call_id=call.parent_call_id,
            sampling=sampling,
            trainable=not sampling.is_greedy and sampling.json_schema is None,
            partial=partial,
        )

    async def _whole(self, log: AttemptLog, request: CanonicalRequest) -> CanonicalRequest:
        """A request with the messages of the stored call that it stands behind, if it names one."""
        if not request.previous_call_id:
            return request
        rows = await asyncio.to_thread(self._store.calls, log.run_id, log.attempt)
        previous = next((row.record for row in rows if row.record.call_id == request.previous_call_id), None)
        if previous is None:
            raise InvalidRequestError(
                "Previous response with this id was not found: it is of another run, or was never completed.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return replace(request, messages=continued_messages(request, previous))

    async def count_tokens(self, run_id: str, key: str, request: CanonicalRequest) -> int:
        """The length of the prompt of a request, in tokens. Nothing is noted of it but how its messages begin.

        Raises ``AccessError`` and ``TemplateError`` as ``match_call`` does.
        """
        run, log = self._groups.authorise(run_id, key)
        async with run.lock:
            await self._load(run)
            matched = await self._matched(log, request)
        return len(matched.prompt.ids)

    async def shared_answer(self, run_id: str, call_id: str) -> SharedAnswer | None:
        """The answer of a call that another request made too, once it is stored. None: it will not be completed, and
        the request is to be matched again."""
        while True:
            run = self._groups.find_run(run_id)
            if run is None or run.log is None:
                return None
            answer = run.log.requests.take_answer(call_id)
            if answer is not None or not run.log.requests.is_in_flight(call_id):
                self._tell_ended(call_id)  # an attempt that was closed told nobody of its calls
                return answer
            if run.log.requests.is_lost(call_id, time.monotonic()):
                await self.abandon_call(call_id, "its proxy replica is lost")
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / 2):
                    await self._ended.setdefault(call_id, asyncio.Event()).wait()

    async def note_undelivered(self, call_id: str) -> None:
        """The answer of a stored call did not reach its harness: if it asks again, it gets that."""
        run = self._groups.find_run(run_of(call_id))
        if run is not None and run.log is not None:
            run.log.requests.note_undelivered(call_id)

    async def renew_calls(self, call_ids: Sequence[str]) -> None:
        """These calls are still being generated."""
        for call_id in call_ids:
            run = self._groups.find_run(run_of(call_id))
            if run is not None and run.log is not None:
                run.log.requests.renew([call_id], time.monotonic())

    async def append_call(self, record: CallRecord) -> None:
        """Store a completed call; it is durable on return. Appending it again changes nothing.

        ``prompt_ids``, ``parent_call_id`` and ``request`` of the record are not read: the shard has them. Raises
        ``InvariantError`` if its arrays do not fit together, ``AccessError`` if its attempt is closed.
        """
        # a caller that goes away must not leave the call in the store but not in the tree
        await asyncio.shield(self._task(self._append(record)))

    async def abandon_call(
        self, call_id: str, reason: str, *, engine_lost: bool = False, partial: PartialAnswer | None = None
    ) -> None:
        """Forget a call that will not be completed. Unknown ones are no error.

        ``engine_lost``: no cell could complete it. Unless a later call is completed, the run ended by that.
        ``partial``: what there is of its answer; the same request, made again, goes on behind it.
        """
        run = self._groups.find_run(run_of(call_id))
        if run is not None and run.log is not None and run.log.pending.pop(call_id, None) is not None:
            run.log.requests.abandon(call_id, partial)
            self._tell_ended(call_id)
            logger.info("call %s was abandoned: %s", call_id, reason)
            was_lost = run.log.trouble is CallTrouble.ENGINE_LOST
            if engine_lost or was_lost:
                await self._note_trouble(run.log, CallTrouble.ENGINE_LOST if engine_lost else None)

    # -- inside --

    def _prompt_ref(self, ids: TokenIds) -> Any:
        return ids if self._as_ref is None or ids.nbytes <= INLINE_PROMPT_BYTES else self._as_ref(ids)

    def _tell_ended(self, call_id: str) -> None:
        """Wake the requests that wait for a call."""
        ended = self._ended.pop(call_id, None)
        if ended is not None:
            ended.set()

    def _check_turns(self, log: AttemptLog) -> None:
        limit = self._config.max_calls
        if limit is not None and log.num_calls >= limit:
            raise TurnLimitError(limit)

    async def _note_trouble(self, log: AttemptLog, trouble: CallTrouble | None) -> None:
        """Keep why the last call was not completed, durably: the run may end by it, after this shard."""
        if log.trouble is not trouble:
            log.trouble = trouble
            await self._commit(self._store.note_trouble, log.run_id, log.attempt, trouble)

    def _holding_sampling(self, log: AttemptLog, matched: Matched) -> Sampling:
        is_eval = self._groups[group_of(RunId(log.run_id))].spec.is_eval
        return holding_sampling(
            self._eval_sampling if is_eval else self._sampling,
            matched.request,
            num_prompt_tokens=len(matched.prompt.ids),
            max_model_len=self._max_model_len,
            call_id=log.next_call_id,
        )

    async def _append(self, record: CallRecord) -> None:
        run = self._groups.find_run(record.run_id)
        if run is None:
            raise AccessError(f"run {record.run_id} is over.", "Its group was dropped or trained meanwhile.")
        async with run.lock:
            await self._load(run)
            log = run.log
            if log is not None and record.call_id in log.tree:
                return
            if log is None or log.attempt != record.attempt or not log.is_open:
                raise AccessError(
                    f"attempt {record.attempt} of run {record.run_id} is closed.", "No harness waits for it."
                )
            check_record(record)
            row = log.row(record)
            is_small = len(row.new_prompt_ids) + len(record.output_ids) <= _SMALL_TOKENS
            columns = columns_of(row) if is_small else await asyncio.to_thread(columns_of, row)
            if not await self._commit(self._store.append_encoded, columns):
                raise InvariantError(f"the store holds another call {record.call_id}", f"attempt {log.attempt}")
            log.complete(row)
            self._tell_ended(record.call_id)
            await self._note_trouble(log, None)

    async def _load(self, run: LiveRun) -> None:
        """Have the stored calls of a run's newest attempt in hand. The run's lock is held."""
        if not run.is_loaded and run.log is not None:
            run.load(await asyncio.to_thread(self._store.calls, run.run_id, run.log.attempt), self._tag)

    async def _commit(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Have the store do something; it is durable on return. What comes at one time shares a commit."""
        return await asyncio.wrap_future(self._store.submit(method, *args, **kwargs))

    async def _matched(self, log: AttemptLog, request: CanonicalRequest) -> Matched:
        if self._is_thread_safe and _is_small(request):
            return log.match(request, self._bridge)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizer, log.match, request, self._bridge)

    def _task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_small(request: CanonicalRequest) -> bool:
    """Whether a request is matched and rendered in a moment. Tools are long, as a rule."""
    messages = request.messages
    return not request.tools and len(messages) <= 16 and sum(len(one.content) for one in messages) <= _SMALL_CHARS


def _shared_ticket(log: AttemptLog, call_id: str) -> CallTicket:
    """What a request gets whose call another one made: only that call's id says something."""
    return CallTicket(call_id, log.run_id, log.attempt, None, 0, 0, None, Sampling(), False, is_shared=True)
