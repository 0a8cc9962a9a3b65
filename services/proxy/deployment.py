"""The proxy as a Ray Serve application without HTTP of Serve's own: every replica listens by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from services.common.ids import JobId
from services.common.types import RouteTable
from services.proxy.app import create_app
from services.proxy.backends import RayBackends, Routes, follow_routes
from services.proxy.config import ProxyConfig
from services.proxy.listener import HttpListener
from services.proxy.parsing import PlainParser
from services.proxy.parsing.load import load_parser
from services.proxy.routing import EMPTY_TABLE
from services.scheduler.client import SchedulerClient

_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
"""After three checks in a row that failed or took this long, Serve replaces a replica; a dead one at the first."""
_STOP_TIMEOUT_S = 12.0
_ROUTES_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Everything a proxy replica is started with."""

    job_id: JobId
    config: ProxyConfig
    """Its ``port`` is the real one, its paths are absolute."""
    model_name: str
    """What ``/v1/models`` lists."""
    num_shards: int
    scheduler_address: str
    """``host:port`` of the scheduler's gRPC server."""
    scheduler_token: str
    model_path: str = ""
    """Folder of the model: it decides how answers are parsed. Empty: they are text."""


class ProxyReplica:
    """One replica: an HTTP server on the job's port. Serve starts it, asks for its health, and replaces it."""

    def __init__(self, settings: ProxySettings) -> None:
        """Returns once it accepts connections. Raises ``MachineError`` if the port is taken."""
        self._listener = HttpListener(_make_app(settings), settings.config)
        self._listener.start()

    def check_health(self) -> None:
        """Raises ``JobError`` if the server ended or hangs."""
        self._listener.check()

    def __del__(self) -> None:
        if hasattr(self, "_listener"):
            self._listener.stop()


def proxy_application(settings: ProxySettings, node_ip: str) -> serve.Application:
    """The Ray Serve application of a job's proxy, without a route. All replicas lie on one node, for they share its
    port."""
    deployment = serve.deployment(
        ProxyReplica,
        name="Proxy",
        num_replicas=settings.config.num_replicas,
        ray_actor_options={"num_cpus": 0, "resources": {f"node:{node_ip}": 0.001}},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_TIMEOUT_S,
        logging_config=LoggingConfig(enable_access_log=False),  # paths hold keys
    )
    application: serve.Application = deployment.bind(settings)
    return application


def _make_app(settings: ProxySettings) -> FastAPI:
    routes = Routes()
    backends = RayBackends(settings.job_id, settings.num_shards, routes)

    async def watch() -> AsyncIterator[RouteTable]:
        client = SchedulerClient(settings.scheduler_address, settings.scheduler_token)
        try:
            async for table in client.watch_routes():
                yield table
        finally:
            await client.close()

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(follow_routes(routes, watch))
        # whoever listens gets calls: others take them until it knows where to; without a scheduler they wait anywhere
        await routes.wait_newer(EMPTY_TABLE.epoch, _ROUTES_TIMEOUT_S)
        await asyncio.to_thread(backends.find_actors)
        yield
        following.cancel()

    parser = load_parser(settings.model_path, settings.config) if settings.model_path else PlainParser()
    return create_app(settings.job_id, settings.config, settings.model_name, backends, parser, lifespan)
