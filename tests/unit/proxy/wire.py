"""HTTP by hand: what no well-behaved client sends, and what the bytes of an answer say."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from typing import Any

from tests.unit.proxy.bodies import CHAT, RESPONSES

DEADLINE_S = 20.0
_CALL_ID = re.compile(r'"id": ?"(?:chatcmpl-|resp_|msg_)(g[0-9]+-r[^"]*)"')


class Wire:
    """A connection. What it sends is nobody's business."""

    def __init__(self, address: tuple[str, int], receive_bytes: int = 0) -> None:
        """``receive_bytes``: how much the kernel takes in for one who does not read; 0: as usual."""
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(address)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def post(self, path: str, body: Any) -> None:
        content = json.dumps(body).encode()
        self.head("POST", path, [("content-length", str(len(content)).encode())])
        self.socket.sendall(content)

    def head(self, method: str, target: str, headers: list[tuple[str, bytes]]) -> None:
        lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
        self.socket.sendall(f"{method} {target} HTTP/1.1\r\nhost: x\r\n".encode() + lines + b"\r\n")

    def answer(self, method: str = "POST") -> tuple[int, dict[str, str], str]:
        """Status, headers and text; status 0 if the connection was closed without one."""
        answer = http.client.HTTPResponse(self.socket, method=method)
        try:
            answer.begin()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        except (ConnectionError, http.client.HTTPException):
            return 0, {}, ""

    def rest(self) -> bytes:
        """All that still comes, until the other side closes."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := self.socket.recv(1 << 16):
                received += piece
        return received


def call_ids(text: str) -> list[str]:
    """The calls that an answer names as its own."""
    return _CALL_ID.findall(text)


def events_of(text: str) -> list[Any]:
    """The data of a stream's events, without the end mark of Chat Completions."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_answer(dialect: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """The call of an answer, and the answer as a harness sends it back: of a body, or of a stream put together."""
    is_body = text.startswith("{")
    if dialect == RESPONSES:
        items = json.loads(text)["output"] if is_body else events_of(text)[-1]["response"]["output"]
    elif dialect == CHAT:
        items = [json.loads(text)["choices"][0]["message"] if is_body else _chat_message(events_of(text))]
    else:
        content = json.loads(text)["content"] if is_body else _blocks(events_of(text))
        items = [{"role": "assistant", "content": content}]
    return call_ids(text)[0], [_known(item) for item in items]


def _known(item: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    return {name: value for name, value in item.items() if value not in (None, "") or name == "text"}


def _chat_message(chunks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                calls[call["index"]]["function"][name] += call["function"].get(name) or ""
    return message


def _blocks(events: list[Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            arguments += delta.get("partial_json", "")
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
    return blocks
