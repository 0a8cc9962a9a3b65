"""The example harnesses ask again when an answer is lost, as every harness must: a proxy replica may die."""

from __future__ import annotations

import json
import runpy
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HARNESSES = Path(__file__).parents[3] / "examples" / "harness"
ANSWER = {"choices": [{"message": {"content": "aeiou"}}]}


@contextmanager
def model_that(*endings: int | str) -> Iterator[tuple[str, list[bytes]]]:
    """A model whose requests end so, in order: with a status, cut before the answer, or cut in it. Yields its base
    URL and the bodies that it got."""
    left, bodies = list(endings), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            ending = left.pop(0)
            self.close_connection = True
            if ending == "cut":
                return
            body = json.dumps(ANSWER).encode()
            self.send_response(200 if ending == "cut within" else int(ending))
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:-5] if ending == "cut within" else body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=["script", "one-command"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A harness's function that asks the model, without its pauses."""
    module = runpy.run_path(str(HARNESSES / request.param / "agent.py"))
    monkeypatch.setitem(module["fetch"].__globals__, "PAUSES_S", (0, 0, 0))
    monkeypatch.setenv("API_KEY", "key")
    monkeypatch.setenv("MODEL", "model")
    question = "Do it." if request.param == "script" else [{"role": "user", "content": "Do it."}]

    def ask_at(url: str) -> str:
        monkeypatch.setenv("BASE_URL", url)
        return str(module["ask"](question))

    return ask_at


def test_a_lost_or_deferred_answer_is_asked_for_again_with_the_same_request(ask: Any) -> None:
    with model_that("cut", "cut within", 503, 200) as (url, bodies):
        assert ask(url) == "aeiou"
    assert len(bodies) == 4
    assert len(set(bodies)) == 1


@pytest.mark.parametrize("status", [400, 401])
def test_a_refusal_is_final(ask: Any, status: int) -> None:
    with model_that(status) as (url, bodies), pytest.raises(urllib.error.HTTPError):
        ask(url)
    assert len(bodies) == 1


def test_a_model_that_never_answers_is_an_error(ask: Any) -> None:
    with model_that(429, 503, "cut", 500) as (url, bodies), pytest.raises(urllib.error.HTTPError):
        ask(url)
    assert len(bodies) == 4
