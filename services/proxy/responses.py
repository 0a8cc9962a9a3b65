"""How a call's pieces go to the harness over ASGI: as one body or as a stream, cut when the call is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.common.errors import (
    AccessError,
    ContextLengthError,
    JobError,
    NotFoundError,
    RequestError,
)
from services.proxy.calls import Emit, Piece
from services.proxy.dialects import DialectError, openai_chat
from services.proxy.types import CanonicalRequest

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1


class StreamCutError(Exception):
    """Raised out of the app behind a half-sent answer: the server then aborts the connection.

    A stream that ended politely would look like a whole answer.
    """


def refusal_of(error: Exception) -> DialectError:
    """The error answer for what befell a call before its answer began."""
    if isinstance(error, DialectError):
        return error
    if isinstance(error, AccessError):
        return openai_chat.invalid_api_key()
    if isinstance(error, ContextLengthError):
        return openai_chat.context_length_exceeded(error.num_prompt_tokens, error.max_model_len)
    if isinstance(error, RequestError):
        return openai_chat.error(400, error.message, param="messages")
    if isinstance(error, JobError | NotFoundError):  # lost on our side; the same request may work in a moment
        return openai_chat.overloaded()
    return openai_chat.server_error()


def error_response(refusal: DialectError) -> JSONResponse:
    """An error answer; one that may go away by itself says when to try again."""
    headers = {"retry-after": str(_RETRY_AFTER_S)} if refusal.status in (429, 503) else None
    return JSONResponse(refusal.body, refusal.status, headers)


class CallResponse(Response):
    """Runs a call and sends its answer. A harness that disconnects cancels the call."""

    def __init__(
        self, serve: Callable[[Emit], Awaitable[None]], request: CanonicalRequest, *, keep_alive_s: float
    ) -> None:
        self._serve = serve
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._created_s = int(time.time())
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producing = asyncio.create_task(self._produce())
        sending = asyncio.create_task(self._send_answer(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, leaving, producing):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sending

    async def _produce(self) -> None:
        try:
            await self._serve(self._pieces.put_nowait)
        except Exception as error:  # whatever befell the call: the sender answers for it
            if not isinstance(error, RequestError | AccessError):
                logger.warning("a call failed: %s", error, exc_info=not isinstance(error, JobError))
            self._pieces.put_nowait(error)

    async def _send_answer(self, send: Send) -> None:
        if self._request.stream:
            await self._send_stream(send)
        else:
            await self._send_body(send)

    async def _send_body(self, send: Send) -> None:
        while True:
            piece = await self._pieces.get()
            if isinstance(piece, Exception):
                await _send_response(error_response(refusal_of(piece)), send)
                return
            if piece.is_last:
                body = openai_chat.completion(
                    self._head(piece), piece.answer.text, piece.answer.finish_reason, _usage(piece)
                )
                await _send_response(JSONResponse(body), send)
                return

    async def _send_stream(self, send: Send) -> None:
        """The status goes out with the first piece, or with the first keep-alive if that comes before."""
        started = role_sent = False
        while True:
            piece = await self._next_piece()
            if isinstance(piece, Exception) and not started:
                await _send_response(error_response(refusal_of(piece)), send)
                return
            if isinstance(piece, Exception):
                raise StreamCutError("a call was lost in the middle of its answer") from piece
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                started = True
            if piece is None:
                await _send_text(send, openai_chat.KEEP_ALIVE)
                continue
            text = "" if role_sent else openai_chat.stream_head(self._head(piece))
            role_sent = True
            if piece.text:
                text += openai_chat.stream_text(self._head(piece), piece.text)
            if piece.is_last:
                usage = _usage(piece) if self._request.include_usage else None
                text += openai_chat.stream_tail(self._head(piece), piece.answer.finish_reason, usage)
            await _send_text(send, text, more=not piece.is_last)
            if piece.is_last:
                return

    async def _next_piece(self) -> Piece | Exception | None:
        """The next piece; None if the call has been silent for too long."""
        try:
            async with asyncio.timeout(self._keep_alive_s):  # wait_for of Python 3.11 can swallow a cancellation
                return await self._pieces.get()
        except TimeoutError:
            return None

    def _head(self, piece: Piece) -> openai_chat.Head:
        return openai_chat.Head(piece.ticket.call_id, self._created_s, self._request.model)


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _usage(piece: Piece) -> dict[str, Any]:
    answer = piece.answer
    return openai_chat.usage(piece.ticket.num_prompt_tokens, len(answer.token_ids), answer.num_cached_tokens)


async def _disconnected(receive: Receive) -> None:
    """Return when the harness has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_text(send: Send, text: str, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _send_response(response: Response, send: Send) -> None:
    headers = response.raw_headers
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})
