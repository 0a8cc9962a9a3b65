"""The scripted engine of the proxy benchmark, over HTTP: ``python -m benchmarks.proxy_upstream``.

An OpenAI-compatible server that reads a request, and answers it at once with the same answer each time, whole or
token by token. The first line of its standard input is a JSON list, the answer's tokens as text; it prints its port,
and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ScriptedServer:
    """An ASGI app whose every answer is ``pieces``, one a token; a request may ask for fewer by ``max_tokens``."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = list(pieces)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["method"] != "POST":
            await _answer(send, {"object": "list", "data": [{"id": "policy", "object": "model"}]})
            return
        request = json.loads(bytes(body))
        pieces = self._pieces[: request.get("max_tokens") or len(self._pieces)]
        if request.get("stream"):
            await _stream(send, request["model"], pieces)
        else:
            await _answer(send, _completion(request["model"], pieces))


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": int(time.time()), "model": model}


def _completion(model: str, pieces: Sequence[str]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(pieces)}
    usage = {"prompt_tokens": 100, "completion_tokens": len(pieces), "total_tokens": 100 + len(pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {**_head(model, "chat.completion"), "choices": [choice], "usage": usage}


async def _answer(send: Send, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _stream(send: Send, model: str, pieces: Sequence[str]) -> None:
    head = _head(model, "chat.completion.chunk")
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces:
        await _send_chunk(send, head, {"content": piece}, None)
        await asyncio.sleep(0)
    await _send_chunk(send, head, {}, "stop")
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send_chunk(send: Send, head: dict[str, Any], delta: dict[str, Any], finish_reason: str | None) -> None:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    data = f"data: {json.dumps({**head, 'choices': choices})}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def serve_until_closed(app: Any, told: dict[str, Any]) -> None:
    """Serve on a free loopback port; print ``told`` with the port as one line of JSON; end with standard input."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False, lifespan="off")
    server = _Server(config, told)

    def end_with_input() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=end_with_input, daemon=True).start()
    await server.serve()


class _Server(uvicorn.Server):
    """uvicorn's, telling where it is."""

    def __init__(self, config: uvicorn.Config, told: dict[str, Any]) -> None:
        super().__init__(config)
        self._told = told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps({**self._told, "port": self.servers[0].sockets[0].getsockname()[1]}), flush=True)


def main() -> None:
    """Entry point."""
    pieces = json.loads(sys.stdin.readline())
    asyncio.run(serve_until_closed(ScriptedServer(pieces), {}))


if __name__ == "__main__":
    main()
