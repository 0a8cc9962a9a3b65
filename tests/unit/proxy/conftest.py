from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from services.common.ids import JobId
from services.proxy.app import create_app
from services.proxy.config import ProxyConfig
from services.proxy.parsing import AnswerParser, PlainParser
from tests.unit.proxy.fakes import KEY, FakeBackends
from tests.waiting import until

JOB = JobId("job-1")
DEADLINE_S = 20.0


class Server:
    """A proxy on a loopback port, with clients for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)

    def openai(self, key: str = KEY) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/run/{key}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
        )

    async def post(self, key: str = KEY, **more: Any) -> httpx.Response:
        return await self.http.post(f"/run/{key}/v1/chat/completions", json=chat(**more))


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Server]]


@contextlib.asynccontextmanager
async def _serve(backends: FakeBackends, parser: AnswerParser | None = None, **config: Any) -> AsyncIterator[Server]:
    app = create_app(JOB, ProxyConfig(**config), "model-x", backends, parser or PlainParser())
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, ws="none", log_level="warning", access_log=False, log_config=None)
    )
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    proxy = Server(f"http://127.0.0.1:{port}")
    try:
        yield proxy
    finally:
        await proxy.http.aclose()
        server.should_exit = True
        await serving


@pytest.fixture
def serve() -> Serve:
    """``async with serve(backends) as server``."""
    return _serve
