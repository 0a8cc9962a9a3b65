from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from services.common.errors import ConfigError, JobError, MachineError
from services.common.ids import JobId
from services.proxy.app import create_app
from services.proxy.config import ProxyConfig
from services.proxy.listener import HttpListener, check_tls, reserve_port
from services.proxy.parsing import PlainParser
from tests.unit.proxy.certificates import self_signed
from tests.unit.proxy.fakes import KEY, FakeBackends, FakeCell, FakeShard, word
from tests.waiting import wait_until

DEADLINE_S = 20.0
BIG = b"x" * (16 << 20)

Listen = Callable[..., tuple[HttpListener, str]]


class App:
    """A small server: it says who it is, answers slowly, or with more than anybody wants to read."""

    def __init__(self, name: str = "one") -> None:
        self.asgi = FastAPI(openapi_url=None)
        self.called = threading.Event()
        self.may_answer = threading.Event()
        self.was_cancelled = threading.Event()

        @self.asgi.get("/name")
        async def tell_name() -> PlainTextResponse:
            return PlainTextResponse(name)

        @self.asgi.get("/slow")
        async def slow() -> PlainTextResponse:
            self.called.set()
            try:
                while not self.may_answer.is_set():  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.was_cancelled.set()
                raise
            return PlainTextResponse("slow")

        @self.asgi.get("/big")
        async def big() -> StreamingResponse:
            async def pieces() -> AsyncIterator[bytes]:
                yield BIG

            return StreamingResponse(pieces())

        @self.asgi.post("/hang")
        async def hang(request: Request) -> None:
            self.called.set()
            self.may_answer.wait(DEADLINE_S)  # the whole loop stands


@pytest.fixture
def listen() -> Iterator[Listen]:
    """``listen(app, **config)`` gives a running listener and its URL."""
    with contextlib.ExitStack() as stack:

        def start(app: Any, **fields: Any) -> tuple[HttpListener, str]:
            if not fields.get("port"):
                fields["port"] = stack.enter_context(reserve_port("127.0.0.1", 0)).getsockname()[1]
            config = ProxyConfig(**fields)
            listener = HttpListener(app, config)
            listener.start()
            stack.callback(listener.stop)
            return listener, f"{'https' if config.tls_cert else 'http'}://127.0.0.1:{config.port}"

        yield start


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE_S)


def test_a_reserved_port_is_shared_by_listeners_and_refused_to_others(listen: Listen) -> None:
    with reserve_port("127.0.0.1", 0) as placeholder:
        port = placeholder.getsockname()[1]
        with pytest.raises(MachineError, match=rf"proxy\.port: 127\.0\.0\.1:{port} cannot be used"):
            reserve_port("127.0.0.1", port)
        for name in ("one", "two"):
            listen(App(name).asgi, port=port)
        names = {httpx.get(f"http://127.0.0.1:{port}/name").text for _ in range(40)}
        assert names == {"one", "two"}
        with pytest.raises(MachineError):
            reserve_port("127.0.0.1", port)


def test_a_port_can_be_reserved_again_as_soon_as_a_job_is_over(listen: Listen) -> None:
    with reserve_port("127.0.0.1", 0) as placeholder:
        port = placeholder.getsockname()[1]
        listener, url = listen(App().asgi, port=port)
        connections = [connect(url) for _ in range(3)]
        assert httpx.get(f"{url}/name").text == "one"
        listener.stop()  # it closes first, so its connections linger in TIME_WAIT
        for connection in connections:
            connection.close()
    reserve_port("127.0.0.1", port).close()


def test_a_listener_that_stops_leaves_the_port_to_the_others(listen: Listen) -> None:
    first, url = listen(App("one").asgi)
    listen(App("two").asgi, port=port_of(url))
    first.stop()
    assert {httpx.get(f"{url}/name").text for _ in range(20)} == {"two"}


def test_a_port_of_somebody_else_is_named(listen: Listen) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(MachineError, match=r"proxy\.port: .*cannot be used"):
            listen(App().asgi, port=taken.getsockname()[1])


def test_an_app_that_does_not_start_is_an_error_with_its_reason(listen: Listen) -> None:
    @contextlib.asynccontextmanager
    async def broken(_app: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no lifespan today")
        yield

    with pytest.raises(JobError, match="did not start"):
        listen(FastAPI(lifespan=broken))


def test_a_call_in_progress_may_end_while_a_listener_stops(listen: Listen) -> None:
    app = App()
    listener, url = listen(app.asgi)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(httpx.get(f"{url}/slow", timeout=DEADLINE_S).text))
    asking.start()
    assert app.called.wait(DEADLINE_S)
    stopping = threading.Thread(target=listener.stop)
    stopping.start()
    wait_until(lambda: _refuses(url))
    app.may_answer.set()
    for thread in (asking, stopping):
        thread.join(DEADLINE_S)
    assert answers == ["slow"]


def _refuses(url: str) -> bool:
    try:
        connect(url).close()
    except ConnectionRefusedError:
        return True
    return False


def test_health_fails_when_the_server_has_ended_or_hangs(listen: Listen) -> None:
    app = App()
    listener, url = listen(app.asgi)
    listener.check()
    asking = threading.Thread(target=lambda: httpx.post(f"{url}/hang", timeout=DEADLINE_S))
    asking.start()
    assert app.called.wait(DEADLINE_S)
    with pytest.raises(JobError, match=r"did not turn for 0\.2 s"):
        listener.check(timeout_s=0.2)
    app.may_answer.set()
    asking.join(DEADLINE_S)
    listener.check()
    listener.stop()
    with pytest.raises(JobError, match="ended"):
        listener.check()


def test_a_head_that_does_not_come_is_waited_for_in_vain(listen: Listen) -> None:
    _, url = listen(App().asgi, body_timeout_s=0.3)
    for begun in (b"", b"GET /name HTTP/1.1\r\nhost:", b"GET /name HTTP/1.1\r\nhost: x\r\n\r\nGET /na"):
        with connect(url) as silent:
            silent.sendall(begun)
            started_s = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while silent.recv(1 << 16):
                    pass
            assert time.monotonic() - started_s < DEADLINE_S / 2


def test_a_slow_answer_is_not_taken_for_a_slow_head(listen: Listen) -> None:
    app = App()
    _, url = listen(app.asgi, body_timeout_s=0.2)
    threading.Timer(0.6, app.may_answer.set).start()
    assert httpx.get(f"{url}/slow", timeout=DEADLINE_S).text == "slow"


def test_a_head_without_end_is_refused(listen: Listen) -> None:
    _, url = listen(App().asgi)
    with connect(url) as endless:
        endless.sendall(b"GET /name HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                endless.sendall(b"x-more: " + b"y" * 1000 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(1 << 16).startswith(b"HTTP/1.1 431 ")


def test_a_client_that_reads_nothing_is_left(listen: Listen) -> None:
    _, url = listen(App().asgi, send_timeout_s=0.3)
    with connect(url) as idle:
        idle.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: _num_established(port_of(url)) == 0, DEADLINE_S)


def test_a_client_that_reads_slowly_gets_all(listen: Listen) -> None:
    _, url = listen(App().asgi, send_timeout_s=2)
    got, started_s = 0, time.monotonic()
    with connect(url) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while piece := slow.recv(1 << 18):
            got += len(piece)
            time.sleep(max(0.0, started_s + 5 * got / len(BIG) - time.monotonic()))  # 5 s in all: two looks and more
    assert got > len(BIG)


def _num_established(port: int) -> int:
    """Connections of servers on a port that are open, by the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_the_official_client_speaks_tls_with_a_certificate_of_ones_own(listen: Listen, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    check_tls(ProxyConfig(tls_cert=str(cert), tls_key=str(key)))
    app = create_app(JobId("j"), ProxyConfig(), "m", FakeBackends(FakeShard(), a=FakeCell()), PlainParser())
    _, url = listen(app, tls_cert=str(cert), tls_key=str(key))
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=str(cert)))
    messages: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{url}/run/{KEY}/v1", api_key="x", http_client=trusting) as client:
        answer = client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "".join(word(index) for index in range(5))
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{url}/healthz")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url.replace('https', 'http')}/healthz")


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    other_cert, _ = self_signed(tmp_path, "other")
    _, locked_key = self_signed(tmp_path, "locked", password="secret")
    text = tmp_path / "text"
    text.write_text("no certificate")
    check_tls(ProxyConfig())

    def refused(words: str, cert: Path, key: Path) -> None:
        with pytest.raises(ConfigError, match=words):
            check_tls(ProxyConfig(tls_cert=str(cert), tls_key=str(key)))

    refused(r"proxy\.tls_cert: cannot read .*nowhere: No such file", tmp_path / "nowhere", key)
    refused(r"proxy\.tls_key: cannot read .*: Is a directory", cert, tmp_path)
    refused(r"cannot be used together: KEY_VALUES_MISMATCH", other_cert, key)
    refused(r"cannot be used together", text, key)
    refused(r"cannot be used together", cert, text)
    refused(r"cannot be used together", cert, locked_key)
    if os.geteuid() != 0:  # root reads everything
        key.chmod(0)
        refused(r"proxy\.tls_key: cannot read .*: Permission denied", cert, key)


def test_one_of_certificate_and_key_is_refused() -> None:
    with pytest.raises(ValueError, match="set both or neither"):
        ProxyConfig(tls_cert="cert.pem")


def test_keys_in_paths_are_not_logged(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, url = listen(App().asgi)
    assert httpx.get(f"{url}/run/{KEY}/nothing").status_code == 404
    with connect(url) as rude:
        rude.sendall(f"GET /run/{KEY} nonsense\r\n\r\n".encode())
        assert rude.recv(100).startswith(b"HTTP/1.1 400")
    told = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [line for line in told if KEY in line]
