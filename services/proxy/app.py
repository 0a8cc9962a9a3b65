"""The proxy's HTTP side: a FastAPI app over ``Backends``."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.common.errors import AccessError
from services.common.ids import JobId, RunId, group_of
from services.common.metrics import metric
from services.proxy.backends import Backends
from services.proxy.calls import CallServer
from services.proxy.config import ProxyConfig
from services.proxy.dialects import Dialect, InvalidRequestError, Refusal, RefusalKind, anthropic_answers
from services.proxy.dialects.anthropic import ANTHROPIC
from services.proxy.dialects.openai_chat import OPENAI_CHAT, model_list, model_object
from services.proxy.dialects.openai_responses import OPENAI_RESPONSES
from services.proxy.parsing import AnswerParser
from services.proxy.responses import CallResponse, RequestRefusedError, error_response, refusal_of
from services.proxy.types import CanonicalRequest

logger = logging.getLogger(__name__)

_ENDPOINTS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/v1/responses": OPENAI_RESPONSES,
    "/v1/messages": ANTHROPIC,
}
_COUNT_TOKENS = "/v1/messages/count_tokens"


def create_app(
    job_id: JobId,
    config: ProxyConfig,
    model_name: str,
    backends: Backends,
    parser: AnswerParser,
    lifespan: Any = None,
) -> FastAPI:
    """The app: a model server for harnesses, by three dialects. A run's key stands in the path or in a header."""
    app = FastAPI(title="Tidegate proxy", openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    gate = _Gate(job_id, config, CallServer(job_id, backends, parser, config.call_timeout_s))
    created_s = int(time.time())

    for path, dialect in _ENDPOINTS.items():
        _add_post(app, path, dialect, gate.call)
    _add_post(app, _COUNT_TOKENS, ANTHROPIC, gate.count_tokens)

    @app.get("/run/{key}/v1/models")
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        list_of = anthropic_answers.model_list if _is_anthropic(request) else model_list
        return JSONResponse(list_of([model_name], created_s))

    @app.get("/run/{key}/v1/models/{name:path}")
    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """Whatever name a harness has for the model, it is this one."""
        return JSONResponse((anthropic_answers.model_info if _is_anthropic(request) else model_object)(name, created_s))

    @app.get("/healthz")
    async def health() -> Response:
        table = backends.routes.table
        return JSONResponse({"status": "ok", "job_id": job_id, "epoch": table.epoch, "num_cells": len(table.cells)})

    @app.exception_handler(HTTPException)
    async def unroutable(request: Request, error: HTTPException) -> Response:
        if request.method == "HEAD":  # some harnesses probe their base URL
            return Response()
        if "upgrade" in request.headers:  # Codex tries a web socket first, and falls back at once when told so
            return Response(status_code=426)
        kind = RefusalKind.METHOD_NOT_ALLOWED if error.status_code == 405 else RefusalKind.NOT_FOUND
        is_anthropic = "/v1/messages" in request.url.path or _is_anthropic(request)
        return error_response(ANTHROPIC if is_anthropic else OPENAI_CHAT, Refusal(kind))

    return app


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _add_post(app: FastAPI, path: str, dialect: Dialect, handle: Callable[..., Awaitable[Response]]) -> None:
    async def by_path(key: str, request: Request) -> Response:
        return await handle(dialect, request, key)

    async def by_header(request: Request) -> Response:
        return await handle(dialect, request, header_key(request))

    app.add_api_route(f"/run/{{key}}{path}", by_path, methods=["POST"])
    app.add_api_route(path, by_header, methods=["POST"])


class _Gate:
    """What lies between HTTP and a call: the key, the body and its limits, and how many calls at once."""

    def __init__(self, job_id: JobId, config: ProxyConfig, calls: CallServer) -> None:
        self._job_id = job_id
        self._config = config
        self._calls = calls
        self._num_ongoing = 0

    async def call(self, dialect: Dialect, http: Request, key: str) -> Response:
        """Answer a model call."""
        if self._is_full:
            return self._error(dialect, Refusal(RefusalKind.RATE_LIMITED))
        self._num_ongoing += 1
        try:
            run_id, request = await self._read(http, key, dialect.parse)
        except BaseException as error:
            self._ended()
            if isinstance(error, Exception):  # whatever befell it: the client gets its dialect's error
                return self._refuse(dialect, error)
            raise
        return CallResponse(
            dialect,
            request,
            serve=lambda one, emit: self._calls.serve(run_id, key, one, emit),
            refuse=lambda refusal: self._error(dialect, refusal),
            not_delivered=lambda call_id: self._calls.not_delivered(run_id, call_id),
            ended=self._ended,
            keep_alive_s=self._config.keep_alive_s,
            send_timeout_s=self._config.send_timeout_s,
        )

    @property
    def _is_full(self) -> bool:
        return self._num_ongoing >= self._config.max_ongoing_calls

    def _ended(self) -> None:
        self._num_ongoing -= 1

    async def count_tokens(self, dialect: Dialect, http: Request, key: str) -> Response:
        """Answer Anthropic's question for the length of a prompt."""
        if self._is_full:
            return self._error(dialect, Refusal(RefusalKind.RATE_LIMITED))
        self._num_ongoing += 1
        try:
            run_id, request = await self._read(http, key, ANTHROPIC.parse_count)
            num_tokens = await self._calls.count_tokens(run_id, key, request)
        except Exception as error:
            return self._refuse(dialect, error)
        finally:
            self._ended()
        return JSONResponse(anthropic_answers.token_count(num_tokens))

    async def _read(
        self, http: Request, key: str, parse: Callable[[Any, Mapping[str, str]], CanonicalRequest]
    ) -> tuple[RunId, CanonicalRequest]:
        """The run of a key, and the body in canonical form."""
        run_id = run_of_key(key)
        body = await _read_json(http, self._config.max_body_bytes, self._config.body_timeout_s)
        return run_id, parse(body, http.headers)

    def _refuse(self, dialect: Dialect, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # nobody reads it
        refusal = refusal_of(error)
        if refusal.kind is RefusalKind.SERVER_ERROR:
            logger.error("a request could not be read", exc_info=error)
        return self._error(dialect, refusal)

    def _error(self, dialect: Dialect, refusal: Refusal) -> Response:
        metric("tidegate_refusals_total").inc(1, job=str(self._job_id), kind=refusal.kind)
        return error_response(dialect, refusal)


def run_of_key(key: str) -> RunId:
    """The run that a key ``RUN_ID.SECRET`` names. Raises ``AccessError`` for anything else."""
    run_id, separator, secret = key.rpartition(".")
    try:
        group_of(RunId(run_id))
    except ValueError:
        separator = ""
    if not separator or not secret:
        raise AccessError("this is no key of a run.", "A key is valid while its attempt runs.")
    return RunId(run_id)


def header_key(request: Request) -> str:
    """The key that a client of either vendor sends; empty if it sends none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _read_json(request: Request, max_body_bytes: int, timeout_s: float) -> Any:
    """The body, never holding more than the limit, nor waiting longer. Raises ``RequestRefusedError``."""
    too_large = RequestRefusedError(Refusal(RefusalKind.BODY_TOO_LARGE, max_body_bytes=max_body_bytes))
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestRefusedError(Refusal(RefusalKind.BODY_TIMEOUT)) from None
    try:
        return json.loads(_text(body))
    except (ValueError, RecursionError):
        raise InvalidRequestError("We could not parse the JSON body of your request.") from None


def _text(body: bytearray) -> str | bytes:
    """As text, which ``json`` reads twice as fast as bytes; what is no UTF-8 it must tell by itself."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return bytes(body)
