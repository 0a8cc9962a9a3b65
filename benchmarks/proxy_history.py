"""What the length of a conversation costs a call: 500 new tokens behind up to a million."""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray

from benchmarks.proxy_load import Load, Request, drive
from benchmarks.proxy_world import JOB, MODEL_NAME, Prompts, Proxy, Script, ScriptedCell, route_table
from services.common.names import RAY_NAMESPACE
from services.common.types import VersionSpan
from services.proxy.backends import RayBackends, Routes
from services.proxy.dialects.openai_chat import OPENAI_CHAT
from services.proxy.session import Bridge
from services.proxy.types import CanonicalRequest, Message
from services.rollout.types import GenerateRequest, Sampling
from services.trajectory.live import AttemptLog
from services.trajectory.types import CallRecord

SIZES = {"1k": 1_000, "10k": 10_000, "100k": 100_000, "1M": 1_000_000}
NEW_TOKENS = 500
REPETITIONS = 15
PATH = "/v1/chat/completions"
_WORDS = (
    "the",
    "test",
    "of",
    "parser",
    "fails",
    "with",
    "an",
    "error",
    "in",
    "line",
    "and",
    "we",
    "run",
    "it",
    "again",
    "to",
    "see",
    "if",
    "index",
    "or",
    "token",
    "is",
    "wrong",
)
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("bash", "edit", "search")
]


class History:
    """A conversation that grows by an answer and a command's output of about 500 tokens each."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.messages: list[dict[str, str]] = [
            {"role": "system", "content": "You work in a shell, one command at a time."},
            {"role": "user", "content": self.text()},
        ]

    def text(self) -> str:
        """Words that the tokenizer makes about ``NEW_TOKENS`` tokens of."""
        return " ".join(_WORDS[at] for at in self._rng.integers(0, len(_WORDS), NEW_TOKENS - 10))

    def body(self, last: str | None = None) -> str:
        """The JSON of the next request; ``last`` stands for the newest message."""
        messages = self.messages if last is None else [*self.messages[:-1], {"role": "user", "content": last}]
        return json.dumps({"model": MODEL_NAME, "messages": messages, "tools": _TOOLS, "max_tokens": 32})

    def grow(self, answer: str) -> None:
        self.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": self.text()}]


class GrowingRun:
    """The run of a history at a shard, without network and store."""

    def __init__(self, renderer: Any) -> None:
        self.history = History()
        self.log = AttemptLog("g000000-r0", 0, b"key")
        self.bridge = Bridge(renderer)
        self.num_tokens = 0
        self._messages: list[Message] = []
        self._tools = OPENAI_CHAT.parse(json.loads(self.history.body()), {}).tools
        self._renderer = renderer
        self._end = next(iter(renderer.end_of_turn))

    def grow_to(self, num_tokens: int) -> None:
        """Make calls until the prompt and answer of the last have so many tokens."""
        while self.num_tokens < num_tokens:
            answer = self.history.text()
            new = self.history.messages[len(self._messages) :]
            self._messages += [Message(one["role"], one["content"]) for one in new]
            request = CanonicalRequest(OPENAI_CHAT.name, MODEL_NAME, tuple(self._messages), self._tools)
            pending = self.log.begin(self.log.match(request, self.bridge))
            output_ids = np.asarray([*self._renderer.encode(answer), self._end], dtype=np.int32)
            self.log.complete(self.log.row(record_of(pending.call_id, answer, output_ids)))
            self.num_tokens = pending.num_prompt_tokens + len(output_ids)
            self.history.grow(answer)


def record_of(call_id: str, answer: str, output_ids: Any) -> CallRecord:
    return CallRecord(
        call_id=call_id,
        run_id="g000000-r0",
        attempt=0,
        parent_call_id=None,
        request={},
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=output_ids,
        logprobs=np.full(len(output_ids), -0.5, dtype=np.float32),
        version_spans=(VersionSpan(0, len(output_ids)),),
        output_text=answer,
        finish_reason="stop",
        trainable=True,
        cells=("cell-0",),
        started_at_s=0.0,
        ended_at_s=0.0,
    )


def in_process_ms(renderer: Any, sizes: dict[str, int]) -> dict[str, dict[str, float]]:
    """``match_ms`` and ``parse_ms`` by history: medians of processor time, which other processes do not lengthen.

    Every repetition is a request of its own, freshly parsed, that goes on from the same call with other words.
    """
    run = GrowingRun(renderer)
    match_ms, parse_ms, new_tokens = {}, {}, {}
    for name, num_tokens in sizes.items():
        run.grow_to(num_tokens)
        gc.collect()
        gc.disable()  # a collection would be counted to whatever it interrupts
        matches, parses = [], []
        for _ in range(REPETITIONS):
            body = bytearray(run.history.body(run.history.text()).encode())
            took_ms, request = timed(_parse, body)
            parses.append(took_ms)
            took_ms, matched = timed(run.log.match, request, run.bridge)
            matches.append(took_ms)
            if matched.call is None or matched.prompt.is_false_fork:
                raise SystemExit(f"the request behind {num_tokens} tokens continues no call")
            new_tokens[name] = matched.prompt.num_new_tokens
        gc.enable()
        match_ms[name], parse_ms[name] = statistics.median(matches), statistics.median(parses)
    return {"match_ms": match_ms, "parse_ms": parse_ms, "new_tokens": new_tokens}


def _parse(body: bytearray) -> CanonicalRequest:
    return OPENAI_CHAT.parse(json.loads(body.decode()), {})


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Milliseconds of processor time, and what came of it."""
    started_s = time.process_time()
    result = work(*arguments)
    return 1e3 * (time.process_time() - started_s), result


def submit_ms(script: Script, sizes: dict[str, int]) -> dict[str, float]:
    """From the whole prompt at the shard to the list of ints at the cell: the ticket's way to a replica (here: this
    process) and the call of the cell's actor, wall time. Small prompts travel with the ticket, others as object refs.
    """
    options = {"namespace": RAY_NAMESPACE, "num_cpus": 0, "max_concurrency": 10}
    name = f"{JOB}/submit"
    prompts = ray.remote(Prompts).options(**options).remote(max(sizes.values()) + NEW_TOKENS)
    actor = ray.remote(ScriptedCell).options(name=name, **options).remote(script.token_ids[:1], script.pieces[:1])

    async def measured(num_tokens: int) -> float:
        cell = RayBackends(JOB, 1, Routes(route_table())).cell(name)
        request = GenerateRequest("g000000-r0-a0-c0", "g000000-r0", Sampling(max_tokens=1))
        times_ms = []
        for _ in range(REPETITIONS + 3):
            made_at_s, prompt = await prompts.ticket.remote(num_tokens + NEW_TOKENS)
            async for _chunk in cell.generate(request, prompt[0] if isinstance(prompt, list) else prompt):
                pass
            times_ms.append(1e3 * (await actor.taken_at_s.remote() - made_at_s))
        return statistics.median(times_ms[3:])

    found = {size: asyncio.run(measured(num_tokens)) for size, num_tokens in sizes.items()}
    for one in (prompts, actor):
        ray.kill(one)
    return found


def call_ms(proxy: Proxy, answer: str, sizes: dict[str, int]) -> dict[str, float]:
    """A whole call through the deployed proxy behind so much history: HTTP, parsing, matching, the cell, the store;
    median wall time of calls that each go on from the one before. Uses the proxy's last keys, one a size."""
    found = {}
    for at, (size, num_tokens) in enumerate(sizes.items()):
        requests = [Request(PATH, proxy.keys[-1 - at], body) for body in _bodies(num_tokens, answer)]
        result = drive(Load(proxy.host, proxy.port, (tuple(requests),), 2))
        found[size] = statistics.median(result.latencies_ms)
    return found


def _bodies(num_tokens: int, answer: str) -> Iterator[str]:
    """A first request with the whole history, then requests that each go on from the one before."""
    history = History()
    for _ in range(num_tokens // (2 * NEW_TOKENS)):
        history.grow(history.text())
    for _ in range(8):
        yield history.body()
        history.grow(answer)
