"""No input makes the proxy fail, hang, or answer in a form that no client knows.

A longer run: ``make test-proxy-fuzz``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from services.common.errors import TemplateError
from services.proxy.types import Message
from tests.unit.proxy import bodies
from tests.unit.proxy.bodies import CHAT, MESSAGES, PATHS, RESPONSES, any_json, spoilt_bodies, to_bytes
from tests.unit.proxy.live_world import LiveProxy
from tests.unit.proxy.templates import CHATML, STRICT_TOOLS, TOOLS_AND_REASONING, renderer
from tests.unit.proxy.wire import Wire, call_ids

NUM_EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "20"))
_CALLS_OF_A_RUN = 40
_BLOCK = re.compile(r"(?:: [^\n]*|(?:event: [^\n]+\n)?data: [^\n]+)")
_LAST_EVENTS = {
    CHAT: ('"[DONE]"',),
    RESPONSES: ("response.completed", "response.incomplete"),
    MESSAGES: ("message_stop",),
}


def fuzzed(share: float = 1.0) -> Any:
    """How much a test tries: ``share`` of the examples that are asked for."""
    return settings(
        max_examples=max(5, int(NUM_EXAMPLES * share)),
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(params=[CHATML, STRICT_TOOLS], ids=["chatml", "strict"], scope="module")
def any_proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveProxy]:
    with LiveProxy(tmp_path_factory.mktemp("fuzz"), request.param) as proxy:
        yield proxy
        hold_intact(proxy)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveProxy]:
    with LiveProxy(tmp_path_factory.mktemp("fuzz"), TOOLS_AND_REASONING) as proxy:
        yield proxy
        hold_intact(proxy)


# --- what must hold --------------------------------------------------------------------------------------------


def strict_json(text: str | bytes) -> Any:
    """JSON as other languages read it: no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_answer(proxy: LiveProxy, path: str, status: int, media_type: str, text: str) -> None:
    """Raise ``AssertionError`` unless this is what a client of a path can read."""
    assert proxy.faults.told == [], proxy.faults.told[0]
    assert status < 500, text
    if status >= 400:
        check_error(path, text)
    elif media_type.startswith("text/event-stream"):
        check_stream(path, text)
    else:
        assert isinstance(strict_json(text), dict)


def check_error(path: str, text: str) -> None:
    body = strict_json(text)
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert (body.get("type") == "error") == ("/v1/messages" in path)


def check_stream(path: str, text: str) -> None:
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    names = []
    for block in blocks:
        assert _BLOCK.fullmatch(block), block
        event, _, data = block.rpartition("data: ")
        if data == "[DONE]":
            names.append('"[DONE]"')
        elif data and not block.startswith(":"):
            told = strict_json(data)
            names.append(told.get("type", told.get("object")))
            assert event.removeprefix("event: ").strip() in ("", names[-1])
    last = next(last for known, last in _LAST_EVENTS.items() if path.partition("?")[0].endswith(known))
    assert names[-1] in last
    assert not set(last) & set(names[:-1])


def check_alive(proxy: LiveProxy) -> None:
    """The same proxy still answers a plain call, and what it answered is in the store."""
    said = f"call {len(proxy.model.requests)}"
    body = {"model": "m", "messages": [{"role": "user", "content": said}]}
    answer = proxy.http.post(f"/run/{proxy.key}{CHAT}", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "chat.completion"


def hold_intact(proxy: LiveProxy) -> None:
    """The run can be read, by others and by a shard that is made anew, and goes on."""
    known = {call.call_id for call in proxy.calls}
    assert known >= proxy_answers(proxy), "an answer that a client saw is not stored"
    proxy.restart_shard()
    check_alive(proxy)
    assert len(proxy.calls) == len(known) + 1
    assert proxy.faults.told == [], proxy.faults.told[0]


_seen: dict[str, set[str]] = {}


def proxy_answers(proxy: LiveProxy) -> set[str]:
    """Ids of the calls of this run whose answers a client saw."""
    return _seen.setdefault(f"{proxy.url}/{proxy.run_id}", set())


def tried(proxy: LiveProxy, path: str, content: bytes, headers: dict[str, str] | None = None) -> None:
    """Post a body; what comes back must be an answer or an error, and the proxy none the worse for it."""
    if len(proxy.model.requests) % _CALLS_OF_A_RUN == _CALLS_OF_A_RUN - 1:
        hold_intact(proxy)
        proxy.begin_run()
    note(f"POST {path} {content[:3000]!r}")
    answer = proxy.http.post(f"/run/{proxy.key}{path}", content=content, headers=headers)
    check_answer(proxy, path, answer.status_code, answer.headers.get("content-type", ""), answer.text)
    if answer.status_code == 200:
        proxy_answers(proxy).update(call_ids(answer.text))
    check_alive(proxy)


# --- bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_requests_that_use_all_of_a_dialect_are_answered(proxy: LiveProxy, path: str) -> None:
    for body in bodies.BODIES[path]:
        answer = proxy.http.post(f"/run/{proxy.key}{path}", json=body)
        check_answer(proxy, path, answer.status_code, answer.headers["content-type"], answer.text)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
@fuzzed(0.3)
@given(body=any_json)
def test_no_json_is_too_odd(proxy: LiveProxy, path: str, body: Any) -> None:
    tried(proxy, path, to_bytes(body))


@pytest.mark.parametrize("path", PATHS)
@fuzzed()
@given(data=st.data())
def test_no_body_is_too_spoilt(any_proxy: LiveProxy, path: str, data: st.DataObject) -> None:
    tried(any_proxy, path, to_bytes(data.draw(spoilt_bodies(path))))


@fuzzed(0.5)
@given(to=st.sampled_from(PATHS), data=st.data())
def test_a_body_of_another_dialect_is_answered_or_refused(proxy: LiveProxy, to: str, data: st.DataObject) -> None:
    of = data.draw(st.sampled_from([path for path in PATHS if path != to]))
    one, other = data.draw(st.sampled_from(bodies.BODIES[of])), data.draw(st.sampled_from(bodies.BODIES[to]))
    names = data.draw(st.sets(st.sampled_from(sorted(one))))
    tried(proxy, to, to_bytes({**other, **{name: one[name] for name in names}}))


@fuzzed(0.5)
@given(path=st.sampled_from(PATHS), data=st.data())
def test_bytes_that_are_hardly_json_are_refused(proxy: LiveProxy, path: str, data: st.DataObject) -> None:
    whole = to_bytes(data.draw(st.sampled_from(bodies.BODIES[path])))
    at, upto = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    tried(proxy, path, whole[:at] + data.draw(st.binary(max_size=8)) + whole[upto:])


# --- wire ------------------------------------------------------------------------------------------------------

_HEADER_NAMES = (
    *("x-stainless-retry-count", "x-codex-turn-metadata", "x-claude-code-session-id", "x-claude-code-agent-id"),
    *(
        "anthropic-version",
        "authorization",
        "x-api-key",
        "content-type",
        "accept-encoding",
        "accept",
        "expect",
        "range",
    ),
    *("x-session-id", "x-parent-session-id", "session_id", "thread-id", "x-openai-subagent", "user-agent", "upgrade"),
    *("x-claude-code-request-class", "content-encoding", "connection", "te", "origin", "if-none-match", "x-odd"),
)
_header_values = st.one_of(
    st.sampled_from(
        [
            *(
                b"",
                b"1",
                b"0",
                b"-1",
                b"9" * 5000,
                b"\xb2",
                b"{",
                b'{"session_id": {"a": []}, "thread_id": 5}',
                b"null",
            ),
            *(
                b'{"session_id": "\\ud800", "thread_id": "\\ud800"}',
                b"[" * 5000,
                b"Bearer",
                b"Bearer \xff\xfe",
                b"gzip",
            ),
            *(b"x" * 20_000, "é\u2028".encode(), b"Basic eDp5", b"websocket", b"close", b"100-continue", b"bytes=0-1"),
            *(
                b"application/x-www-form-urlencoded",
                b"text/plain; charset=utf-16",
                b"multipart/form-data",
                b"compaction",
            ),
        ]
    ),
    st.binary(max_size=30).map(lambda value: re.sub(rb"[\x00-\x1f\x7f]", b"", value).strip()),
)
_KEY = "KEY"
"""Stands for the run's key."""
_pieces_of_path = st.sampled_from(
    [
        *("run", _KEY, "v1", "chat", "completions", "responses", "messages", "count_tokens", "models", "healthz", ""),
        *(
            "..",
            ".",
            "%2e%2e",
            "%2F",
            "%00",
            "%ff%fe",
            "%E2%80%A8",
            "%",
            "%zz",
            "g000001-r0.x",
            "x" * 3000,
            "*",
            ";a=b",
        ),
    ]
)
_paths = st.one_of(
    st.sampled_from(
        [
            *(f"/run/{_KEY}{path}" for path in PATHS),
            *(f"{path}?beta=true" for path in PATHS),
            *(f"/run/{_KEY}/v1/models", "/v1/models/a/b%2Fc", f"/run/{_KEY}", "/", "//", "/?", f"/run/{_KEY}{CHAT}/"),
        ]
    ),
    st.lists(_pieces_of_path, max_size=7).map(lambda pieces: "/" + "/".join(pieces)),
    st.lists(_pieces_of_path, max_size=3).map(lambda pieces: f"/run/{_KEY}/v1/models/" + "/".join(pieces)),
)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "QUERY", "M-SEARCH")


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


@fuzzed(2)
@given(
    method=st.sampled_from(_METHODS) | st.just("POST"),
    target=_paths,
    headers=st.lists(st.tuples(st.sampled_from(_HEADER_NAMES), _header_values), max_size=4),
    cuts=st.lists(st.integers(1, 200), max_size=4, unique=True),
    data=st.data(),
)
def test_no_request_is_too_odd(
    proxy: LiveProxy,
    method: str,
    target: str,
    headers: list[tuple[str, bytes]],
    cuts: list[int],
    data: st.DataObject,
) -> None:
    body = to_bytes(data.draw(st.sampled_from([one for path in PATHS for one in bodies.BODIES[path]])))
    content, sent = body, ("content-length", str(len(body)).encode())
    if cuts:
        content = chunked([body[at:upto] for at, upto in itertools.pairwise([0, *sorted(cuts), len(body)])])
        sent = ("transfer-encoding", b"chunked")
    target = target.replace(_KEY, proxy.key)
    note(f"{method} {target} {headers}")
    with Wire(proxy.address) as wire:
        wire.head(method, target, [*headers, ("x-api-key", proxy.key.encode()), sent])
        wire.socket.sendall(content)
        status, answered, text = wire.answer(method)
    check_alive(proxy)
    assert proxy.faults.told == [], proxy.faults.told[0]
    assert 200 <= status < 500, text
    if status == 400 and text == "Invalid HTTP request received.":
        return  # so broken that it is no request of any dialect
    if status in (426, 431) or method == "HEAD" or (status == 200 and not text):
        assert not text
    elif status == 200 and method == "GET":
        assert isinstance(strict_json(text), dict)
    elif status >= 400:
        assert isinstance(strict_json(text)["error"]["message"], str)
    else:
        check_answer(proxy, target, status, answered["content-type"], text)


@fuzzed()
@given(
    raw=st.binary(max_size=200)
    | st.tuples(
        st.sampled_from(
            [
                *(b"POST /v1/messages HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
                *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"GET http://x/ "),
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
                b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}",
                b"GET /healthz HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            ]
        ),
        st.binary(max_size=60),
    ).map(b"".join)
)
def test_bytes_that_are_no_http_leave_no_trace(proxy: LiveProxy, raw: bytes) -> None:
    answer = b""
    with Wire(proxy.address) as wire, contextlib.suppress(ConnectionError):
        wire.socket.sendall(raw)
        wire.socket.shutdown(socket.SHUT_WR)
        answer = wire.rest()
    check_alive(proxy)
    assert proxy.faults.told == [], proxy.faults.told[0]
    assert answer == b"" or re.match(rb"HTTP/1\.1 [1234]", answer), answer


# --- chat templates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{% for n in range(10 ** 7) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ ''.join(messages) }}",
        "{{ '%d' % 'x' }}",
        "{{ dict().popitem() }}",
        "{{ [].pop() }}",
        "{{ ''.index('x') }}",
        "{{ messages | nothing }}",
        "{{ (messages | first).content.__class__.__mro__ }}",
        "{% if %}",
    ],
)
def test_what_a_chat_template_cannot_render_is_refused(template: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        renderer(template).render([Message("user", "hi")], [], add_generation_prompt=True)
