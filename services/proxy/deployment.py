"""The proxy as a Ray Serve application."""

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
from services.scheduler.client import SchedulerClient

_MAX_ONGOING_CALLS = 4096
"""Of a replica; calls wait for cells, not for the proxy."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Everything a proxy replica is started with."""

    job_id: JobId
    config: ProxyConfig
    model_name: str
    """What ``/v1/models`` lists."""
    num_shards: int
    scheduler_address: str
    """``host:port`` of the scheduler's gRPC server."""
    scheduler_token: str
    model_path: str = ""
    """Folder of the model: it decides how answers are parsed. Empty: they are text."""


def proxy_application(settings: ProxySettings) -> serve.Application:
    """The Ray Serve application of a job's proxy; run it with ``route_prefix=/{job_id}``."""

    def build() -> FastAPI:
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
            yield
            following.cancel()

        return create_app(settings.job_id, settings.config, settings.model_name, backends, lifespan)

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="Proxy",
        num_replicas=settings.config.num_replicas,
        max_ongoing_requests=_MAX_ONGOING_CALLS,
        ray_actor_options={"num_cpus": 0},
        logging_config=LoggingConfig(enable_access_log=False),  # paths hold keys
    )
    application: serve.Application = deployment.bind()
    return application
