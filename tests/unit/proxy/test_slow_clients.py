"""Clients that send or take too slowly, or too much: none of them holds the proxy, its memory or a cell."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.rollout.types import GenerateChunk, GenerateRequest
from tests.unit.proxy.bodies import BODIES, CHAT, COUNT_TOKENS, MESSAGES, PATHS, RESPONSES
from tests.unit.proxy.live_world import ANSWERS, DEADLINE_S, LiveProxy, Model
from tests.unit.proxy.test_official_clients import VENDORS, Vendor, says
from tests.unit.proxy.wire import Wire
from tests.waiting import wait_until

TEXT = ANSWERS[0]
MAX_BODY_BYTES = 1 << 20
CALLS = (CHAT, RESPONSES, MESSAGES)
_PIECE = "x" * 100_000
_NUM_PIECES = 80
"""More than the kernel takes in for a client that does not read."""
_ANSWER_BYTES = len(_PIECE) * _NUM_PIECES

Start = Callable[..., LiveProxy]
_T = TypeVar("_T")


class Flood(Model):
    """Answers with more than anybody takes, and then goes on for ever."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        for _ in range(_NUM_PIECES):
            await asyncio.sleep(0)
            yield GenerateChunk((3,), (-0.5,), _PIECE, self.version)
        await asyncio.Event().wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(**config)`` gives a running proxy."""
    started: list[LiveProxy] = []

    def begin(model: Model | None = None, **config: Any) -> LiveProxy:
        model = model or Model(lambda prompt: TEXT)
        proxy = LiveProxy(tmp_path, model=model, **config)
        started.append(proxy.__enter__())
        return proxy

    yield begin
    for proxy in started:
        proxy.__exit__()
        assert proxy.faults.told == [], proxy.faults.told[0]


def check_refused(path: str, status: int, text: str, statuses: tuple[int, ...]) -> None:
    """An error in the form of the path's dialect."""
    assert status in statuses, text
    body = json.loads(text)
    assert body["error"]["message"]
    assert (body.get("type") == "error") == (path in (MESSAGES, COUNT_TOKENS))


# --- clients that send slowly --------------------------------------------------------------------------------------


def test_a_body_that_comes_a_byte_at_a_time_is_refused(start: Start) -> None:
    proxy = start(body_timeout_s=0.3)
    framings = (("content-length", b"1000", b"{"), ("transfer-encoding", b"chunked", b"1\r\n{\r\n"))
    asked = [(path, *framing) for path in PATHS for framing in framings]
    with ThreadPoolExecutor(len(asked)) as threads:
        for (path, *_), answer in zip(asked, threads.map(lambda one: _send_slowly(proxy, *one), asked), strict=True):
            check_refused(path, *answer, (408,))
    assert proxy.model.requests == []


def _send_slowly(proxy: LiveProxy, path: str, name: str, value: bytes, byte: bytes) -> tuple[int, str]:
    """Send a byte now and then until there is an answer; its status and text."""
    with Wire(proxy.address) as wire:
        wire.head("POST", f"/run/{proxy.key}{path}", [(name, value)])
        wire.socket.settimeout(0.02)
        started_s = time.monotonic()
        while time.monotonic() - started_s < DEADLINE_S:
            wire.socket.sendall(byte)
            try:
                wire.socket.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                continue
        wire.socket.settimeout(DEADLINE_S)
        status, _, text = wire.answer()
    return status, text


def test_clients_that_are_still_sending_count_as_calls(start: Start) -> None:
    """So what they hold in memory has a bound."""
    proxy = start(max_ongoing_calls=3)
    path = f"/run/{proxy.key}{CHAT}"
    wires = [Wire(proxy.address) for _ in range(3)]
    for wire in wires:
        wire.head("POST", path, [("content-length", b"1000")])
        wire.socket.sendall(b"{")

    def status() -> int:
        return proxy.http.post(path, json=BODIES[CHAT][0]).status_code

    wait_until(lambda: status() == 429, DEADLINE_S)
    for wire in wires:
        wire.socket.close()
    wait_until(lambda: status() == 200, DEADLINE_S)


# --- clients that send too much ------------------------------------------------------------------------------------


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peak_growth_bytes(work: Callable[[], _T]) -> tuple[int, _T]:
    """By how much this process, the proxy in it, grew at most; and what ``work`` gave."""
    gc.collect()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    given = work()
    return tracemalloc.get_traced_memory()[1] - before, given


@pytest.mark.usefixtures("traced")
def test_a_body_beyond_the_limit_is_never_held(start: Start) -> None:
    proxy = start(max_body_bytes=MAX_BODY_BYTES)
    piece = b" " * (1 << 16)
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)

    def send_for_ever(path: str) -> tuple[int, str]:
        with Wire(proxy.address) as wire:
            wire.head("POST", f"/run/{proxy.key}{path}", [("transfer-encoding", b"chunked")])
            wire.socket.settimeout(0.2)
            with contextlib.suppress(OSError):  # it takes no more
                for _ in range(20 * MAX_BODY_BYTES // len(piece)):
                    wire.socket.sendall(chunk)
            wire.socket.settimeout(DEADLINE_S)
            status, _, text = wire.answer()
        return status, text

    def announce(path: str) -> tuple[int, str]:
        with Wire(proxy.address) as wire:
            wire.head("POST", f"/run/{proxy.key}{path}", [("content-length", b"99999999999")])
            status, _, text = wire.answer()
        return status, text

    for path in PATHS:
        growth_bytes, (status, text) = peak_growth_bytes(partial(send_for_ever, path))
        assert growth_bytes < 4 * MAX_BODY_BYTES
        if status:  # one that goes on sending may find the connection reset instead
            check_refused(path, status, text, (413,))
        growth_bytes, answer = peak_growth_bytes(partial(announce, path))
        assert growth_bytes < MAX_BODY_BYTES
        check_refused(path, *answer, (413,))


# --- clients that do not take what they asked for ------------------------------------------------------------------


def test_a_client_that_never_reads_is_cut_and_its_call_aborted(start: Start) -> None:
    proxy = start(Flood(), send_timeout_s=0.3)
    for path in CALLS:
        num_aborted = len(proxy.model.aborted)
        with Wire(proxy.address, receive_bytes=1 << 12) as wire:
            wire.post(f"/run/{proxy.key}{path}", {**BODIES[path][0], "stream": True})
            wait_until(partial(_is_longer, proxy.model.aborted, num_aborted), DEADLINE_S)
            end = wire.rest()[-200:]
        assert not any(last in end for last in (b"[DONE]", b"message_stop", b"response.completed"))
    assert proxy.calls == []


def _is_longer(known: list[str], num_before: int) -> bool:
    return len(known) > num_before


@pytest.mark.usefixtures("traced")
def test_many_clients_that_never_read_hold_their_answers_and_no_more(start: Start) -> None:
    num_clients = 6
    proxy = start(Flood(), send_timeout_s=1.0)

    def ask_and_leave() -> None:
        wires = [Wire(proxy.address, receive_bytes=1 << 12) for _ in range(num_clients)]
        for number, wire in enumerate(wires):
            said = [{"role": "user", "content": f"hi {number}"}]
            wire.post(f"/run/{proxy.key}{CHAT}", {"model": "m", "messages": said, "stream": True})
        wait_until(lambda: len(proxy.model.aborted) == num_clients, DEADLINE_S)
        for wire in wires:
            wire.socket.close()

    before, _ = tracemalloc.get_traced_memory()
    assert peak_growth_bytes(ask_and_leave)[0] < 2 * num_clients * _ANSWER_BYTES

    def is_free() -> bool:
        """But for the text that each cut answer goes on behind if it is asked for again."""
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before < 1.2 * num_clients * _ANSWER_BYTES

    wait_until(is_free, DEADLINE_S)


# --- many at once, and silence -------------------------------------------------------------------------------------


def test_more_calls_than_a_replica_takes_are_told_when_to_come_again(start: Start) -> None:
    proxy = start(Model(lambda prompt: TEXT, stepping=asyncio.Semaphore(0)), max_ongoing_calls=2)
    with ThreadPoolExecutor() as threads:
        busy = [threads.submit(proxy.http.post, f"/run/{proxy.key}{CHAT}", json=body) for body in BODIES[CHAT][::2]]
        wait_until(lambda: len(proxy.model.requests) == 2, DEADLINE_S)
        for path in CALLS:
            for stream in (False, True):
                refused = proxy.http.post(f"/run/{proxy.key}{path}", json={**BODIES[path][0], "stream": stream})
                check_refused(path, refused.status_code, refused.text, (429,))
                assert refused.headers["retry-after"] == "1"
        proxy.let_run()
        assert [one.result(DEADLINE_S).status_code for one in busy] == [200, 200]
    assert proxy.http.post(f"/run/{proxy.key}{CHAT}", json=BODIES[CHAT][0]).status_code == 200


def test_what_keeps_a_silent_stream_alive_is_skipped_by_the_vendors_clients(start: Start) -> None:
    model = Model(lambda prompt: TEXT, stepping=asyncio.Semaphore(0))
    proxy = start(model, keep_alive_s=0.05)
    with ThreadPoolExecutor(len(VENDORS)) as threads:
        asking = [threads.submit(_read, vendor(proxy)) for vendor in VENDORS]
        wait_until(lambda: len(model.requests) == len(VENDORS), DEADLINE_S)
        for num_pieces in (0, 3, 3, 100):
            time.sleep(0.2)  # silence is what is tested
            proxy.let_run(num_pieces)
        for one in asking:
            assert "".join(one.result(DEADLINE_S)) == TEXT


def _read(asking: Vendor) -> list[str]:
    return list(asking.pieces(says(type(asking).__name__)))
