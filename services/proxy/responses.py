"""How a call's pieces go to the harness over ASGI: as one body or as a stream, cut when the call is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.common.errors import (
    AccessError,
    ContextLengthError,
    JobError,
    NotFoundError,
    RequestError,
    TurnLimitError,
)
from services.proxy.calls import Emit, Piece
from services.proxy.dialects import RETRIED, AnswerStream, Dialect, Head, InvalidRequestError, Refusal, RefusalKind
from services.proxy.types import CanonicalRequest, Choice, Usage

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1


class StreamCutError(Exception):
    """Raised out of the app behind a half-sent answer: the server then aborts the connection.

    A stream that ended politely would look like a whole answer.
    """


def is_no_cut(record: logging.LogRecord) -> bool:
    """A filter for the server's log: it takes a cut for a fault of the app, with a traceback. What befell the call is
    logged where it did."""
    return not (record.exc_info and isinstance(record.exc_info[1], StreamCutError))


class RequestRefusedError(Exception):
    """A request gets an error instead of an answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.kind)
        self.refusal = refusal


def refusal_of(error: Exception) -> Refusal:
    """What befell a call before its answer began, in no dialect's words."""
    if isinstance(error, RequestRefusedError | InvalidRequestError):
        return error.refusal
    if isinstance(error, AccessError):
        return Refusal(RefusalKind.INVALID_KEY)
    if isinstance(error, ContextLengthError):
        return Refusal(
            RefusalKind.CONTEXT_LENGTH,
            num_prompt_tokens=error.num_prompt_tokens,
            max_model_len=error.max_model_len,
        )
    if isinstance(error, TurnLimitError):
        return Refusal(RefusalKind.TURN_LIMIT, error.message)
    if isinstance(error, RequestError):
        return Refusal(RefusalKind.INVALID_REQUEST, error.message, param="messages")
    if isinstance(error, RecursionError):
        return Refusal(RefusalKind.INVALID_REQUEST, "The JSON body of your request is nested too deeply.")
    if isinstance(error, JobError | NotFoundError):  # lost on our side; the same request may work in a moment
        return Refusal(RefusalKind.OVERLOADED)
    return Refusal(RefusalKind.SERVER_ERROR)


def error_response(dialect: Dialect, refusal: Refusal) -> JSONResponse:
    """An error answer; one that may go away by itself says when to try again."""
    answer = dialect.error(refusal)
    headers = {"retry-after": str(_RETRY_AFTER_S)} if refusal.kind in RETRIED else None
    return JSONResponse(answer.body, answer.status, headers)


class CallResponse(Response):
    """Runs the calls of a request, one for each choice, and sends their answers.

    A harness that disconnects cancels them. ``refuse`` makes the error of a call that came to nothing;
    ``not_delivered`` is told each completed call whose answer was not sent to its end, ``ended`` once that all is over.
    """

    def __init__(
        self,
        dialect: Dialect,
        request: CanonicalRequest,
        *,
        serve: Callable[[CanonicalRequest, Emit], Awaitable[None]],
        refuse: Callable[[Refusal], Response],
        not_delivered: Callable[[str], None],
        ended: Callable[[], None],
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._serve = serve
        self._refuse = refuse
        self._not_delivered = not_delivered
        self._ended = ended
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._created_s = int(time.time())
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._finished: dict[str, Piece] = {}
        """Calls that are complete -> their last pieces."""
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        requests = [replace(self._request, choice=choice) for choice in range(self._request.num_choices)]
        producing = [asyncio.create_task(self._produce(request)) for request in requests]
        sending = asyncio.create_task(self._send_answer(send))
        leaving = asyncio.create_task(_disconnected(receive))
        is_delivered = False
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                is_delivered = self._is_complete
        finally:
            for task in (sending, leaving, *producing):
                task.cancel()
            self._ended()
            if not is_delivered:
                for call_id in self._finished:
                    self._not_delivered(call_id)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sending

    async def _produce(self, request: CanonicalRequest) -> None:
        try:
            await self._serve(request, self._take)
        except Exception as error:  # whatever befell the call: the sender answers for it
            self._pieces.put_nowait(error)
            if not isinstance(error, RequestError | AccessError):
                logger.warning("a call failed: %s", error, exc_info=not isinstance(error, JobError))

    def _take(self, piece: Piece) -> None:
        if piece.finished is not None:
            self._finished[piece.call_id] = piece
        self._pieces.put_nowait(piece)

    @property
    def _is_complete(self) -> bool:
        return len(self._finished) == self._request.num_choices

    async def _send_answer(self, send: Send) -> None:
        if self._request.stream:
            await self._send_stream(send)
        else:
            await self._send_body(send)

    async def _send_body(self, send: Send) -> None:
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                await self._send_response(self._refuse(refusal_of(piece)), send)
                return
            if piece.finished is not None and self._is_complete:
                body = self._dialect.body(self._head(piece), self._choices(), self._usage())
                await self._send_response(JSONResponse(body), send)
                return

    async def _send_stream(self, send: Send) -> None:
        """The status goes out with the first piece, or with the first keep-alive if that comes before."""
        is_started, num_finished = False, 0
        stream: AnswerStream | None = None
        while num_finished < self._request.num_choices:
            piece = await self._next_piece()
            if isinstance(piece, Exception) and not is_started:
                await self._send_response(self._refuse(refusal_of(piece)), send)
                return
            if isinstance(piece, Exception):
                raise StreamCutError("a call was lost in the middle of its answer") from piece
            if not is_started:
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                is_started = True
            if piece is None:
                await self._send_text(send, self._dialect.keep_alive)
                continue
            text = ""
            if stream is None:
                stream = self._dialect.stream(self._head(piece))
                text = stream.begin(replace(piece.usage, num_output_tokens=0))
            text += "".join(stream.delta(piece.choice, delta) for delta in piece.deltas)
            num_finished += piece.finished is not None
            is_last = num_finished == self._request.num_choices
            if is_last:
                text += stream.end(self._choices(), self._usage())
            await self._send_text(send, text, more=not is_last)

    async def _next_piece(self) -> Piece | Exception | None:
        """The next piece; None if the call has been silent for too long."""
        try:
            async with asyncio.timeout(self._keep_alive_s):  # wait_for of Python 3.11 can swallow a cancellation
                return await self._pieces.get()
        except TimeoutError:
            return None

    def _head(self, piece: Piece) -> Head:
        return Head(piece.call_id, self._created_s, self._request)

    def _choices(self) -> list[Choice]:
        choices = [piece.finished for piece in self._finished.values() if piece.finished is not None]
        return sorted(choices, key=lambda choice: choice.index)

    def _usage(self) -> Usage:
        """The prompt is counted once, however many choices were made of it."""
        usages = [piece.usage for piece in self._finished.values()]
        return Usage(
            num_prompt_tokens=usages[0].num_prompt_tokens,
            num_output_tokens=sum(usage.num_output_tokens for usage in usages),
            num_cached_tokens=usages[0].num_cached_tokens,
            num_reasoning_tokens=sum(usage.num_reasoning_tokens for usage in usages),
        )

    async def _send_text(self, send: Send, text: str, more: bool = True) -> None:
        await self._send(send, {"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def _send_response(self, response: Response, send: Send) -> None:
        headers = response.raw_headers
        await self._send(send, {"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send(send, {"type": "http.response.body", "body": response.body, "more_body": False})

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        """Send, but not for ever: a client that reads nothing may not hold an answer in memory."""
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError:
            raise StreamCutError(f"the client read nothing for {self._send_timeout_s:g} s") from None


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _disconnected(receive: Receive) -> None:
    """Return when the harness has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
