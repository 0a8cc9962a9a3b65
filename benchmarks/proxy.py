"""What the proxy costs: ``python -m benchmarks.proxy --json`` prints one object. ``docs/proxy-speed.md`` explains it.

- ``overhead_p50_ms``, ``overhead_p99_ms``: percentiles of a call's time through the deployed proxy, less the median
  time of calling the same cell directly; one client, a small request that is not streamed.
- ``requests_per_s``, ``litellm_requests_per_s``, ``vs_litellm``: eight clients, the same requests and answers, one
  worker each. Tidegate's engine is a cell actor, LiteLLM's a scripted HTTP server.
- ``stream_tokens_per_s``, ``litellm_stream_tokens_per_s``: eight streams of a long answer at once, all their tokens.
- ``match_ms``, ``parse_ms``, ``submit_ms``, ``call_ms`` by tokens of history (``proxy_history``).
- ``in_process``: the same proxy, shard and cell in one process: what is not there is what goes between processes.
- ``direct``: the time of the upstreams alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import proxy_history, proxy_litellm
from benchmarks.proxy_load import Load, LoadResult, Request, drive
from benchmarks.proxy_world import CELL, JOB, MODEL_NAME, Proxy, Script, deployed, ray_cluster, route_table
from services.common.models import default_cache_dir, resolve_model
from services.common.names import rollout_actor
from services.proxy.backends import RayBackends, Routes
from services.proxy.renderer import load_renderer
from services.rollout.types import GenerateRequest, Sampling

SYSTEM = "You are an agent that works in a shell. Answer with one command, and wait for its output. "
SENTENCE = "I look at the next file, and then I run the tests again to see whether anything else is broken.\n"
ANSWER_TOKENS = 32
STREAM_TOKENS = 1_000
TURNS = 8
"""Calls of one conversation, each with a key of its own."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    clients: int = 8
    single_requests: int = 800
    """Counted requests of the one client."""
    requests: int = 150
    """Counted requests of each of the clients."""
    litellm_requests: int = 60
    warm_up: int = 24
    """Requests of each client before those."""
    streams: int = 3
    """Counted streams of each client."""

    @property
    def num_runs(self) -> int:
        """Keys that Tidegate needs for all its loads."""
        each = (self.requests, self.streams)
        return runs_of(self.single_requests, self.warm_up) + self.clients * sum(runs_of(n, self.warm_up) for n in each)


def runs_of(num_requests: int, num_warm_up: int) -> int:
    """Conversations of one client."""
    return -(-(num_requests + num_warm_up) // TURNS)


def script_of(renderer: Any, num_tokens: int) -> Script:
    """An answer of so many tokens."""
    ids = renderer.encode(SENTENCE * (1 + num_tokens // 10))[:num_tokens]
    return Script(tuple(ids), tuple(renderer.decode([one]) for one in ids))


def conversation(key: str, number: int, answer: str, max_tokens: int, *, stream: bool) -> Iterator[Request]:
    """The calls of one agent: each sends what was said before, and the output of its last command."""
    messages = [
        {"role": "system", "content": SYSTEM * 3},
        {"role": "user", "content": f"Task {number}: find out why the tests fail and mend the code. " * 2},
    ]
    for turn in range(TURNS):
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": max_tokens, "stream": stream}
        yield Request(proxy_history.PATH, key, json.dumps(body))
        output = f"{number}.{turn}: 3 passed, 1 failed in 0.{turn}s; see the log for what went wrong. " * 3
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": output}]


class Loads:
    """Makes loads for one server. No conversation is sent twice."""

    def __init__(self, host: str, port: int, keys: Sequence[str], script: Script) -> None:
        """``keys``: one for each conversation; a single one is used for all."""
        self._host, self._port, self._keys, self._script = host, port, keys, script
        self._num_conversations = 0

    def load(self, num_clients: int, num_requests: int, num_warm_up: int, *, stream: bool = False) -> Load:
        """``num_requests`` counted requests of each client."""
        num_tokens = STREAM_TOKENS if stream else ANSWER_TOKENS
        clients = []
        for _ in range(num_clients):
            requests: list[Request] = []
            while len(requests) < num_requests + num_warm_up:
                requests += self._conversation(num_tokens, stream=stream)
            clients.append(tuple(requests[: num_requests + num_warm_up]))
        return Load(self._host, self._port, tuple(clients), num_warm_up)

    def _conversation(self, num_tokens: int, *, stream: bool) -> Iterator[Request]:
        number = self._num_conversations
        self._num_conversations += 1
        key = self._keys[0] if len(self._keys) == 1 else self._keys[number]
        answer = "".join(self._script.pieces[:num_tokens])
        return conversation(key, number, answer, num_tokens, stream=stream)


@contextlib.contextmanager
def child(module: str, told: Any) -> Iterator[dict[str, Any]]:
    """A server process of the benchmark, which ends with this; what it says of itself."""
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
            if not said:
                raise SystemExit(f"{module} did not start")
            yield json.loads(said)
        finally:
            process.stdin.close()
            process.wait(60)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1)]


def spread(values_ms: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": statistics.median(values_ms), "p99_ms": percentile(values_ms, 0.99)}


def tokens_per_s(result: LoadResult, num_tokens: int) -> float:
    """Tokens of streams, all together."""
    return num_tokens * len(result.latencies_ms) / result.wall_s


async def direct_cell_ms(num_calls: int, num_warm_up: int) -> list[float]:
    """Milliseconds of calls of the cell's actor, as a replica makes them but with nothing around."""
    import numpy as np

    cell = RayBackends(JOB, 1, Routes(route_table())).cell(rollout_actor(JOB, CELL))
    prompt_ids = np.arange(400, dtype=np.int32)
    request = GenerateRequest("g000000-r0-a0-c0", "g000000-r0", Sampling(max_tokens=ANSWER_TOKENS), hold_s=1.0)
    times_ms = []
    for _ in range(num_warm_up + num_calls):
        started_s = time.perf_counter()
        async for _chunk in cell.generate(request, prompt_ids):
            pass
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return times_ms[num_warm_up:]


def http_figures(loads: Loads, amounts: Amounts, num_requests: int) -> dict[str, Any]:
    """One server under all loads."""
    one = drive(loads.load(1, amounts.single_requests, amounts.warm_up))
    many = drive(loads.load(amounts.clients, num_requests, amounts.warm_up))
    streams = drive(loads.load(amounts.clients, amounts.streams, 1, stream=True))
    return {
        **spread(one.latencies_ms),
        "requests_per_s": many.requests_per_s,
        "stream_tokens_per_s": tokens_per_s(streams, STREAM_TOKENS),
    }


def litellm_figures(script: Script, amounts: Amounts, scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """LiteLLM's figures, and those of the upstream behind it alone."""
    folder = proxy_litellm.environment(default_cache_dir())
    with child("benchmarks.proxy_upstream", list(script.pieces)) as upstream:
        port = upstream["port"]
        alone = http_figures(Loads("127.0.0.1", port, ["none"], script), amounts, amounts.requests)
        with proxy_litellm.serving(folder, MODEL_NAME, port, scratch) as proxy_port:
            loads = Loads("127.0.0.1", proxy_port, [proxy_litellm.KEY], script)
            fewer = replace(amounts, single_requests=amounts.single_requests // 4)
            return http_figures(loads, fewer, amounts.litellm_requests), alone


def in_process_figures(script: Script, model_path: str, amounts: Amounts, folder: Path) -> dict[str, Any]:
    told = {**asdict(script), "model_path": model_path, "folder": str(folder), "num_runs": amounts.num_runs}
    with child("benchmarks.proxy_in_process", told) as server:
        return http_figures(Loads("127.0.0.1", server["port"], server["keys"], script), amounts, amounts.requests)


def deployed_figures(proxy: Proxy, script: Script, amounts: Amounts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The deployed proxy's figures, and those of its cell alone."""
    rounds = 4
    loads = Loads(proxy.host, proxy.port, proxy.keys, script)
    direct_ms: list[float] = []
    through_ms: list[float] = []
    for _ in range(rounds):  # in turns: what else the machine does befalls both
        direct_ms += asyncio.run(direct_cell_ms(amounts.single_requests // rounds, amounts.warm_up))
        through_ms += drive(loads.load(1, amounts.single_requests // rounds, TURNS)).latencies_ms
    many = drive(loads.load(amounts.clients, amounts.requests, amounts.warm_up))
    streams = drive(loads.load(amounts.clients, amounts.streams, 1, stream=True))
    direct = spread(direct_ms)
    return {
        "overhead_p50_ms": statistics.median(through_ms) - direct["p50_ms"],
        "overhead_p99_ms": percentile(through_ms, 0.99) - direct["p50_ms"],
        **spread(through_ms),
        "requests_per_s": many.requests_per_s,
        "stream_tokens_per_s": tokens_per_s(streams, STREAM_TOKENS),
    }, direct


def measure(amounts: Amounts, sizes: dict[str, int], *, with_litellm: bool, with_in_process: bool) -> dict[str, Any]:
    """The benchmark's object."""
    started_s = time.perf_counter()
    model_path = str(resolve_model("smollm2-135m"))
    renderer = load_renderer(model_path)
    script = script_of(renderer, STREAM_TOKENS)
    answer: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-proxy-") as folder:  # /tmp may be memory
        scratch = Path(folder)
        litellm, upstream = litellm_figures(script, amounts, scratch) if with_litellm else ({}, {})
        in_process = in_process_figures(script, model_path, amounts, scratch / "one") if with_in_process else {}
        history = proxy_history.in_process_ms(renderer, sizes)
        with ray_cluster():
            history["submit_ms"] = proxy_history.submit_ms(script, sizes)
            with deployed(script, model_path, scratch / "deployed", amounts.num_runs + len(sizes)) as proxy:
                figures, direct_cell = deployed_figures(proxy, script, amounts)
                history["call_ms"] = proxy_history.call_ms(proxy, "".join(script.pieces[:ANSWER_TOKENS]), sizes)
    answer = {**figures, **history, "direct": {"cell": direct_cell, "http": upstream}, "in_process": in_process}
    if litellm:
        answer["litellm_requests_per_s"] = litellm["requests_per_s"]
        answer["litellm_stream_tokens_per_s"] = litellm["stream_tokens_per_s"]
        answer["litellm_p50_ms"] = litellm["p50_ms"]
        answer["vs_litellm"] = answer["requests_per_s"] / litellm["requests_per_s"]
    return {**answer, "seconds": time.perf_counter() - started_s}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-litellm", action="store_true", help="leave LiteLLM out; it is installed if need be")
    parser.add_argument("--no-in-process", action="store_true", help="leave the single process out")
    given = parser.parse_args()
    answer = measure(
        Amounts(), proxy_history.SIZES, with_litellm=not given.no_litellm, with_in_process=not given.no_in_process
    )
    print(json.dumps(answer, indent=None if given.json else 2))


if __name__ == "__main__":
    main()
