"""The HTTP server of a proxy replica: uvicorn on a port that all replicas of a node share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import logging
import socket
import ssl
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.errors import ConfigError, JobError, MachineError
from services.proxy.config import ProxyConfig
from services.proxy.responses import is_no_cut

_BACKLOG = 2048
_IDLE_S = 120
"""An idle connection is kept longer than any client keeps it: who closes first must not be us, in a client's face."""
_MAX_HEAD_BYTES = 64 << 10
_DRAIN_S = 5
_LAST_WORDS_S = 3
"""How long shards may still be told of calls that a stop has cut."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A harness whose machine vanished is noticed after a minute, also while its call is silent."""


def reserve_port(host: str, port: int) -> socket.socket:
    """Reserve a port for listeners of this user until the socket is closed; 0 takes a free one.

    The socket never listens, so it gets no connection. It is bound while it shares the port with nobody, and only
    then lets listeners share: of two jobs that ask for one port, one is refused. Raises ``MachineError``.
    """
    placeholder = socket.socket()
    try:
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier job linger
        placeholder.bind((host, port))
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        placeholder.close()
        raise cannot_listen(host, port, error) from None
    return placeholder


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket on a port that other replicas may listen on too: the kernel spreads connections over them. Raises
    ``MachineError``."""
    listener = socket.socket()
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT, socket.SO_KEEPALIVE):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        for option, value in _KEEPALIVE:  # accepted sockets inherit them
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    return listener


def cannot_listen(
    host: str, port: int, error: OSError, host_key: str = "proxy.host", port_key: str = "proxy.port"
) -> MachineError:
    """The error for an address that cannot be bound; the keys are those of the configuration."""
    if port == 0 or error.errno != errno.EADDRINUSE:
        return MachineError(
            f"{host_key}: cannot listen on {host}:{port} ({error.strerror}).",
            f"Set {host_key} to an IPv4 address or a name of this machine.",
        )
    return MachineError(
        f"{port_key}: {host}:{port} cannot be used ({error.strerror}).",
        f"Free the port, or set {port_key} to another port, or to 0 for a free one.",
    )


def check_tls(config: ProxyConfig) -> None:
    """Raise ``ConfigError`` if the proxy is to speak TLS and its certificate or key cannot be used."""
    if not config.tls_cert:
        return
    for key, path in (("proxy.tls_cert", config.tls_cert), ("proxy.tls_key", config.tls_key)):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - the path as it stands in the message
                file.read(1)
        except OSError as error:
            raise ConfigError(
                f"{key}: cannot read {path}: {error.strerror}.", "Name a PEM file that this user may read."
            ) from None
    try:
        # a callback, for OpenSSL would ask the terminal for the password of an encrypted key
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"proxy.tls_cert {config.tls_cert} and proxy.tls_key {config.tls_key} cannot be used together: {reason}.",
            "Name a certificate in PEM form and its own private key, without a password.",
        ) from None


class HttpListener:
    """A server in a thread and an event loop of its own.

    What the handlers ask of Ray is asked by this process, not by whatever Ray task was running when it was started:
    nothing but a disconnect or a time limit cancels a call.
    """

    def __init__(self, app: Any, config: ProxyConfig) -> None:
        """``app`` is an ASGI app, its lifespan included; ``config.port`` is the real port."""
        self._address = (config.host, config.port)
        self._up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="proxy-http", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        settings = uvicorn.Config(
            app,
            loop="uvloop",
            http=_bounded_protocol(config),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # paths hold keys
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_DRAIN_S,
            ssl_certfile=config.tls_cert or None,
            ssl_keyfile=config.tls_key or None,
        )
        self._server = _Server(settings, self._up)
        logging.getLogger("uvicorn.error").addFilter(is_no_cut)

    def start(self, timeout_s: float = 120.0) -> None:
        """Return once connections are accepted. Raises ``MachineError`` if the port is taken, ``JobError``."""
        self._socket = listening_socket(*self._address)
        self._thread.start()
        try:
            self._up.result(timeout_s)
        except TimeoutError:
            raise JobError(f"the proxy's HTTP server was not up within {timeout_s:g} s.") from None

    def check(self, timeout_s: float = 5.0) -> None:
        """Raise ``JobError`` if the server ended, or its loop does not turn."""
        if self._loop is None or not self._thread.is_alive():
            raise JobError("the proxy's HTTP server ended.")
        turning = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            turning.result(timeout_s)
        except TimeoutError:
            raise JobError(f"the proxy's event loop did not turn for {timeout_s:g} s.") from None

    def stop(self) -> None:
        """Accept no more, give calls a few seconds to end, cut the rest. Blocks; may be called again."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_DRAIN_S + _LAST_WORDS_S + 2)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:  # uvicorn leaves by SystemExit if the app does not start
            if self._up.done():
                raise
            self._up.set_exception(JobError(f"the proxy's HTTP server did not start: {type(error).__name__}: {error}"))

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=_LAST_WORDS_S)


class _Server(uvicorn.Server):
    """uvicorn's, telling when it is up."""

    def __init__(self, config: uvicorn.Config, up: concurrent.futures.Future[None]) -> None:
        super().__init__(config)
        self._up = up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set_result(None)


_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def _bounded_protocol(config: ProxyConfig) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, with bounds on what it leaves to the client: the head of a request, how long that takes to
    come, and how long what is sent may lie unread."""

    class BoundedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._awaits_head, self._num_head_bytes = True, 0
            self._num_unread_bytes: int | None = None
            self._head_timer: asyncio.TimerHandle | None = None
            self._await_head()
            self._look_timer = self.loop.call_later(config.send_timeout_s, self._look)

        def connection_lost(self, exc: Exception | None) -> None:
            self._look_timer.cancel()
            self._head_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._awaits_head:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > _MAX_HEAD_BYTES:
                    self._refuse_head()
            elif self.cycle is not None and self.cycle.response_complete:  # the rest of a body that was refused
                self._await_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._awaits_head, self._num_head_bytes = True, 0
            self._await_head()

        def on_headers_complete(self) -> None:
            self._awaits_head = False
            self._head_came()
            super().on_headers_complete()

        def resume_writing(self) -> None:
            self._num_unread_bytes = None
            super().resume_writing()

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(config.body_timeout_s, self.transport.abort)

        def _refuse_head(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:  # pipelined behind a call in progress
                self.transport.abort()
                return
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

        def _head_came(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _look(self) -> None:
            """Leave a client that took nothing since the last look of what stands in its way."""
            before, self._num_unread_bytes = self._num_unread_bytes, None
            if self.flow.write_paused or self.transport.is_closing():
                self._num_unread_bytes = self.transport.get_write_buffer_size()
                if before is not None and self._num_unread_bytes >= before:
                    self.transport.abort()
                    return
            self._look_timer = self.loop.call_later(config.send_timeout_s, self._look)

    return BoundedProtocol
