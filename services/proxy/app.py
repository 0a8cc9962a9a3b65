"""The proxy's HTTP side: a FastAPI app over ``Backends``."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from services.common.ids import JobId, RunId, group_of
from services.proxy.backends import Backends
from services.proxy.calls import CallServer
from services.proxy.config import ProxyConfig
from services.proxy.dialects import DialectError, openai_chat
from services.proxy.responses import CallResponse, error_response


def create_app(
    job_id: JobId,
    config: ProxyConfig,
    model_name: str,
    backends: Backends,
    lifespan: Any = None,
    keep_alive_s: float = 15.0,
) -> FastAPI:
    """The app. It is served under ``/{job_id}``; its own paths do not name the job.

    A stream that is silent for ``keep_alive_s`` carries a comment line, so that nothing on the way gives it up.
    """
    app = FastAPI(title="Tidegate proxy", openapi_url=None, lifespan=lifespan)
    calls = CallServer(job_id, backends, config.call_timeout_s)
    created_s = int(time.time())

    async def chat_completions(request: Request, run_key: str) -> Response:
        try:
            run_id = run_of_key(run_key)
            body = await _read_json(request, config.max_body_bytes)
            canonical = openai_chat.parse(body)
        except DialectError as refusal:
            return error_response(refusal)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        return CallResponse(
            lambda emit: calls.serve(run_id, run_key, canonical, emit), canonical, keep_alive_s=keep_alive_s
        )

    @app.post("/run/{key}/v1/chat/completions")
    async def run_chat_completions(key: str, request: Request) -> Response:
        return await chat_completions(request, key)

    @app.post("/v1/chat/completions")
    async def bearer_chat_completions(request: Request) -> Response:
        return await chat_completions(request, _bearer_key(request))

    @app.get("/run/{key}/v1/models")
    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(openai_chat.model_list([model_name], created_s))

    @app.get("/healthz")
    async def health() -> Response:
        table = backends.routes.table
        return JSONResponse({"status": "ok", "job_id": job_id, "epoch": table.epoch, "num_cells": len(table.cells)})

    @app.api_route("/{path:path}", methods=["HEAD", "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def anything_else(request: Request) -> Response:
        if request.method == "HEAD":  # some harnesses probe their base URL
            return Response()
        known = request.url.path.endswith(("/chat/completions", "/models"))
        return error_response(openai_chat.method_not_allowed() if known else openai_chat.not_found())

    return app


def run_of_key(key: str) -> RunId:
    """The run that a key ``RUN_ID.SECRET`` names. Raises the dialect's 401 for anything else."""
    run_id, separator, secret = key.rpartition(".")
    try:
        group_of(RunId(run_id))
    except ValueError:
        raise openai_chat.invalid_api_key() from None
    if not separator or not secret:
        raise openai_chat.invalid_api_key()
    return RunId(run_id)


def _bearer_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _read_json(request: Request, max_body_bytes: int) -> Any:
    """The body, never holding more than the limit. Raises ``DialectError`` (413, 400)."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_body_bytes:
        raise openai_chat.body_too_large(max_body_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_body_bytes:
            raise openai_chat.body_too_large(max_body_bytes)
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise openai_chat.error(400, "We could not parse the JSON body of your request.") from None
