"""gRPC plumbing: servers with a token, health and reflection; channels with a token; errors as status codes."""

from __future__ import annotations

import functools
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.errors import (
    AccessError,
    ConfigError,
    InvariantError,
    MachineError,
    NotFoundError,
    RefusedError,
    TidegateError,
)

DEFAULT_DEADLINE_S = 30.0
"""Deadline of a unary call, unless the caller gives another."""

_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
    # a stream whose other end is gone without a word breaks within half a minute, also while it is silent
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_STATUS: dict[type[TidegateError], grpc.StatusCode] = {
    AccessError: grpc.StatusCode.UNAUTHENTICATED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
    InvariantError: grpc.StatusCode.FAILED_PRECONDITION,
    MachineError: grpc.StatusCode.UNAVAILABLE,
}


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without the token; health and reflection are open."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "missing or wrong token; send metadata 'authorization: Bearer TOKEN' (the token is in the job's "
                "folder, file grpc-token)",
            )

        self._refuse_unary = grpc.unary_unary_rpc_method_handler(refuse)
        self._refuse_stream = grpc.unary_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler_call_details.method.startswith(_OPEN_SERVICES):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return handler
        return self._refuse_stream if handler is not None and handler.response_streaming else self._refuse_unary


async def serve(
    add_servicers: Sequence[Callable[[grpc.aio.Server], None]],
    service_names: Sequence[str],
    *,
    host: str,
    port: int,
    token: str,
) -> tuple[grpc.aio.Server, str]:
    """Start a server; returns it with its address ``host:port``.

    ``add_servicers`` are calls of the generated ``add_XServicer_to_server`` (bound to a servicer);
    ``service_names`` their full names, for health and reflection. Raises ``MachineError`` if the port is taken.
    """
    if not token:
        raise ConfigError("a gRPC server needs a token.", "Set scheduler.grpc_token, or leave it to be made.")
    server = grpc.aio.server(interceptors=[_TokenInterceptor(token)], options=_OPTIONS)
    for add in add_servicers:
        add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for name in ("", *service_names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise MachineError(
            f"cannot listen on {host}:{port} ({error}).",
            "Free the port, or set grpc_port to another or to 0.",
        ) from error
    await server.start()
    return server, f"{host}:{bound}"


class _TokenUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str, deadline_s: float) -> None:
        self._token, self._deadline_s = token, deadline_s

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token, self._deadline_s), request)


class _TokenStream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token, None), request)


def _with_token(details: Any, token: str, deadline_s: float | None) -> grpc.aio.ClientCallDetails:
    metadata = [*(details.metadata or ()), ("authorization", f"Bearer {token}")]
    timeout = details.timeout if details.timeout is not None else deadline_s
    return grpc.aio.ClientCallDetails(
        details.method, timeout, grpc.aio.Metadata(*metadata), details.credentials, details.wait_for_ready
    )


def channel(address: str, token: str, deadline_s: float = DEFAULT_DEADLINE_S) -> grpc.aio.Channel:
    """A channel whose calls carry the token, and whose unary calls have a deadline unless they set their own."""
    return grpc.aio.insecure_channel(
        address, options=_OPTIONS, interceptors=[_TokenUnary(token, deadline_s), _TokenStream(token)]
    )


def errors_as_status(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a servicer's unary method: a ``TidegateError`` becomes its status code and message."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except TidegateError as error:
            await context.abort(_status_of(error), str(error))

    return wrapper


def stream_errors_as_status(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The same for a method that streams its answers."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for item in method(self, request, context):
                yield item
        except TidegateError as error:
            await context.abort(_status_of(error), str(error))

    return wrapper


def _status_of(error: TidegateError) -> grpc.StatusCode:
    for kind, code in _STATUS.items():
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_from_status(error: grpc.RpcError) -> TidegateError:
    """The error that a client raises for a failed call."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return MachineError(
            f"no answer ({code.name.lower()}: {details}).", "Is the job still running, and the address right?"
        )
    for kind, status in _STATUS.items():
        if code == status:
            return kind(details)
    return TidegateError(f"{code.name.lower()}: {details}")
