"""The proxy of a job: its port, its address, its start and its end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from services.common.errors import JobError, MachineError
from services.common.ids import JobId
from services.common.names import RAY_NAMESPACE, SERVE_PREFIX, scheduler_actor, serve_application
from services.proxy.config import ProxyConfig, is_loopback
from services.proxy.deployment import ProxySettings, proxy_application
from services.proxy.listener import reserve_port
from services.proxy.routing import EMPTY_TABLE

_START_TIMEOUT_S = 180.0
_POLL_S = 0.1
_ANY_ADDRESS = ("0.0.0.0", "")


@dataclass(frozen=True, slots=True)
class ProxyPlace:
    """Where a job's proxy listens."""

    config: ProxyConfig
    """Its ``port`` is the one that was reserved."""
    node_ip: str
    """Of the node of this process, on which all replicas lie."""

    @property
    def harness_url(self) -> str:
        """What harnesses are given, before ``/run/KEY``."""
        return self.config.public_url.rstrip("/") or self._url(self.node_ip)

    @property
    def own_url(self) -> str:
        """How this process reaches it."""
        return self._url("127.0.0.1")

    def _url(self, any_address: str) -> str:
        host = any_address if self.config.host in _ANY_ADDRESS else self.config.host
        return f"{'https' if self.config.tls_cert else 'http'}://{host}:{self.config.port}"


@contextlib.contextmanager
def reserved_place(config: ProxyConfig) -> Iterator[ProxyPlace]:
    """Hold the proxy's port on this node for as long as the job lasts: its replicas come and go.

    Raises ``MachineError`` if the port is taken, or if runners on other nodes could not reach it.
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    node_ip = nodes[ray.get_runtime_context().get_node_id()]
    if is_loopback(config.host) and not config.public_url and len(set(nodes.values())) > 1:
        raise MachineError(
            f"proxy.host {config.host} is reachable from one node, and runs go to all {len(nodes)} of the cluster.",
            "Set proxy.host to 0.0.0.0 and proxy.admin_token to a long random string, or name a proxy.public_url.",
        )
    with reserve_port(config.host, config.port) as placeholder:
        port = placeholder.getsockname()[1]
        yield ProxyPlace(config.model_copy(update={"port": port}), node_ip)


@contextlib.contextmanager
def serve_running(*, own_cluster: bool) -> Iterator[None]:
    """Ray Serve without HTTP of its own, or as the cluster already has it.

    A cluster of one's own takes it down with it; in a shared one the last job shuts it down.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if _applications():
        _delete_orphans()
    try:
        serve.start(proxy_location="Disabled")
    except RuntimeError as error:
        raise MachineError(f"Ray Serve did not start: {error}.", "See its logs in Ray's session folder.") from error
    try:
        yield
    finally:
        if not own_cluster:
            with contextlib.suppress(Exception):  # the cluster may be gone already
                if not _applications():
                    serve.shutdown()


def start_proxy(settings: ProxySettings, place: ProxyPlace, timeout_s: float = _START_TIMEOUT_S) -> None:
    """Return once all replicas are up and one has answered, knowing the scheduler's routes. Raises ``JobError``."""
    deadline_s = time.monotonic() + timeout_s
    name = serve_application(settings.job_id)
    application = proxy_application(settings, place.node_ip)
    target = serve.RunTarget(application, name=name, route_prefix=None)
    try:
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except RuntimeError as error:
        raise _not_started(str(error)) from error
    _await_replicas(name, deadline_s)
    await_answer(settings.job_id, place, deadline_s)


def await_answer(job_id: JobId, place: ProxyPlace, deadline_s: float) -> None:
    """Return once the proxy answers and knows the scheduler's routes. ``deadline_s`` is of the monotonic clock. Raises
    ``JobError``."""
    # a certificate need not name the address under which this process finds the proxy
    with httpx.Client(verify=False, trust_env=False, timeout=10) as http:
        while True:
            try:
                found = http.get(f"{place.own_url}/healthz").json()
                if found["job_id"] == job_id and found["epoch"] > EMPTY_TABLE.epoch:
                    return
                told = f"it does not know the scheduler's routes yet, or belongs to another job: {found}"
            except (httpx.TransportError, ValueError, KeyError, TypeError) as error:
                told = f"{type(error).__name__}: {error}"
            _pause(deadline_s, f"{place.own_url}/healthz: {told}")


def end_proxy(job_id: JobId) -> None:
    """Stop the replicas. Serve may be gone by now."""
    with contextlib.suppress(Exception):
        serve.delete(serve_application(job_id))


def _await_replicas(name: str, deadline_s: float) -> None:
    while True:
        application = serve.status().applications.get(name)
        if application is not None and application.status == ApplicationStatus.RUNNING:
            return
        told = "" if application is None else _what_it_says(application)
        if application is not None and application.status == ApplicationStatus.DEPLOY_FAILED:
            raise _not_started(told)
        _pause(deadline_s, told or "its replicas are not up")


def _pause(deadline_s: float, told: str) -> None:
    if time.monotonic() > deadline_s:
        raise _not_started(told)
    time.sleep(_POLL_S)


def _not_started(told: str) -> JobError:
    return JobError(f"the proxy could not be started: {told}.", "See the logs of Ray Serve's replicas.")


def _what_it_says(application: Any) -> str:
    """The last line that a deployment has to say: of a constructor's error, the error itself."""
    messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


def _applications() -> list[str]:
    try:
        return list(serve.status().applications)
    except Exception:  # Serve has no narrower error for "not running"
        return []


def _delete_orphans() -> None:
    """Delete the proxies of jobs whose process was killed: all else of them died with it, and they hold ports."""
    for name in _applications():
        if not name.startswith(SERVE_PREFIX):
            continue
        try:
            ray.get_actor(scheduler_actor(JobId(name.removeprefix(SERVE_PREFIX))), RAY_NAMESPACE)
        except ValueError:
            end_proxy(JobId(name.removeprefix(SERVE_PREFIX)))
