"""The trajectory processor: ``python -m benchmarks.trajectory --json`` prints one object.

One synthetic run of 500 calls (``synthetic_run``) with a context of up to 1,000,000 tokens, a compaction and four
subagents is taken in by three ways of keeping tokens. Each gets every request with its whole history, as a harness
sends it, and ends with a prompt for the engine and with what training needs:

- ingest: Tidegate: match by digests, render and tokenise what is new, append to the tree (``AttemptLog``);
- re-render: the whole conversation is rendered and tokenised in every call, and a flat row of ids, mask and
  log-probabilities is made. Every 20th call is measured, and the run's time is that rate times its tokens;
- prefix match: the conversation is rendered as text, what is new behind the longest known prompt is tokenised (the
  last answer with it), the ids are matched with every kept row, and the row that begins them is extended.

``*_tokens_per_s`` are tokens of prompts and answers of all calls (so history counts in every call) by seconds;
``speedup`` and ``speedup_prefix_match`` are the ratios of the times. ``dedup_ratio`` is those tokens over the unique
ones, ``dedup_ratio_paths`` the tokens of all root-to-leaf paths over the unique ones. ``bytes_per_unique_token`` is all
that the run holds in memory but the 4 bytes of a sampled token's log-probability, by its unique tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.store_throughput import durable_calls
from benchmarks.synthetic_run import RunShape, SyntheticCall, synthetic_run
from services.common.models import resolve_model
from services.common.types import VersionSpan
from services.proxy.renderer import HfRenderer, load_renderer
from services.proxy.session import Bridge
from services.trajectory.live import AttemptLog
from services.trajectory.microstep import ScoredRun, forest_tokens
from services.trajectory.select import select
from services.trajectory.tree import common_prefix
from services.trajectory.types import CallRecord

SHAPE = RunShape()
SMALL_SHAPE = RunShape((6, 20), (3,), tool_chars=300, answer_chars=100)
PAPER_TIME_SHARE = {"1": 0.414, "5": 0.748, "none": 1.0}
"""QwenGyre: time of forward and backward against no limit."""
RERENDER_EVERY = 20


@dataclasses.dataclass
class Sampled:
    """A call as the engine answered it."""

    call: SyntheticCall
    output_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Ingest:
    """Tidegate's own way of a call, without network and store."""

    def __init__(self, renderer: HfRenderer) -> None:
        self.log = AttemptLog("g000000-r0", 0, b"key")
        self._bridge = Bridge(renderer)

    def take(self, sampled: Sampled) -> int:
        """Take in one call; the tokens of its prompt and answer."""
        matched = self.log.match(sampled.call.request, self._bridge)
        pending = self.log.begin(matched)
        num_output = len(sampled.output_ids)
        record = CallRecord(
            call_id=pending.call_id,
            run_id="g000000-r0",
            attempt=0,
            parent_call_id=None,
            request={},
            prompt_ids=np.empty(0, dtype=np.int32),
            output_ids=sampled.output_ids,
            logprobs=sampled.logprobs,
            version_spans=(VersionSpan(0, num_output),),
            output_text=sampled.call.answer,
            finish_reason="stop",
            trainable=True,
            cells=("cell-0",),
            started_at_s=0.0,
            ended_at_s=0.0,
        )
        self.log.complete(self.log.row(record))
        return pending.num_prompt_tokens + num_output


class Rerender:
    """Every call is rendered, tokenised and flattened as a whole."""

    def __init__(self, renderer: HfRenderer) -> None:
        self._renderer = renderer

    def take(self, sampled: Sampled) -> int:
        request = sampled.call.request
        ids = self._renderer.encode(self._renderer.render(request.messages, request.tools, True))
        return len(_row(np.asarray(ids, dtype=np.int32), sampled)[0])


class PrefixMatch:
    """Incremental rendering, and the longest common prefix of ids with every row that is kept.

    The answer of a call comes back as text in the next request, and is tokenised with what else is new in it.
    """

    def __init__(self, renderer: HfRenderer) -> None:
        self._renderer = renderer
        self._prompts: list[tuple[str, NDArray[np.int32]]] = []
        """The last prompt of each row: text and ids."""
        self._rows: list[tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]] = []

    def take(self, sampled: Sampled) -> int:
        request = sampled.call.request
        text = self._renderer.render(request.messages, request.tools, True)
        known = max(
            (at for at, (before, _) in enumerate(self._prompts) if text.startswith(before)),
            key=lambda at: len(self._prompts[at][0]),
            default=None,
        )
        before, before_ids = ("", np.empty(0, dtype=np.int32)) if known is None else self._prompts[known]
        new = self._renderer.encode(text[len(before) :])
        prompt = np.concatenate([before_ids, np.asarray(new, dtype=np.int32)])
        ids, mask, logprobs = _row(prompt, sampled)
        extended = next((at for at, row in enumerate(self._rows) if common_prefix(row[0], prompt) == len(row[0])), None)
        if extended is None:
            self._rows.append((ids, mask, logprobs))
            self._prompts.append((text, prompt))
        else:
            _, old_mask, old_logprobs = self._rows[extended]
            mask[: len(old_mask)], logprobs[: len(old_logprobs)] = old_mask, old_logprobs
            self._rows[extended] = ids, mask, logprobs
            self._prompts[extended] = text, prompt
        return len(ids)

    @property
    def num_rows(self) -> int:
        return len(self._rows)


def _row(
    prompt: NDArray[np.int32], sampled: Sampled
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    """A flat training row: ids, target mask, log-probabilities."""
    ids = np.concatenate([prompt, sampled.output_ids])
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(prompt) :] = True
    logprobs = np.zeros(len(ids), dtype=np.float32)
    logprobs[len(prompt) :] = sampled.logprobs
    return ids, mask, logprobs


def sample(calls: Sequence[SyntheticCall], renderer: HfRenderer) -> list[Sampled]:
    end = next(iter(renderer.end_of_turn))
    sampled = []
    for call in calls:
        output_ids = np.asarray([*renderer.encode(call.answer), end], dtype=np.int32)
        sampled.append(Sampled(call, output_ids, np.full(len(output_ids), -0.5, dtype=np.float32)))
    return sampled


def timed(take: Callable[[Sampled], int], calls: Sequence[Sampled]) -> tuple[list[float], list[int]]:
    """Seconds of processor time and tokens of each call: what else the machine does counts in none of the ways."""
    seconds, tokens = [], []
    gc.collect()
    gc.disable()  # a collection in the middle would be counted to one call
    try:
        for call in calls:
            started_s = time.process_time()
            tokens.append(take(call))
            seconds.append(time.process_time() - started_s)
    finally:
        gc.enable()
    return seconds, tokens


def rates(calls: Sequence[Sampled], renderer: HfRenderer) -> tuple[dict[str, Any], Ingest]:
    """The three ways, on the same run. The two that are compared call by call go twice, and the better time counts."""
    ingest = Ingest(renderer)
    seconds, tokens = timed(ingest.take, calls)
    prefix_match = PrefixMatch(renderer)
    prefix_seconds, prefix_tokens = timed(prefix_match.take, calls)
    again, _ = timed(Ingest(renderer).take, calls)
    prefix_again, _ = timed(PrefixMatch(renderer).take, calls)
    best = [min(pair) for pair in zip(seconds, again, strict=True)]
    prefix_best = [min(pair) for pair in zip(prefix_seconds, prefix_again, strict=True)]
    num_paths = len(ingest.log.tree.leaves())
    if prefix_tokens != tokens or prefix_match.num_rows != num_paths:
        raise SystemExit("the ways disagree on the tokens of a call, or on the paths of the run")
    rerender_s, rerendered = timed(Rerender(renderer).take, calls[RERENDER_EVERY - 1 :: RERENDER_EVERY])
    rerender_rate = sum(rerendered) / sum(rerender_s)
    longest = max(tokens)
    return {
        "num_calls": len(calls),
        "longest_context_tokens": longest,
        "ingest_tokens_per_s": sum(tokens) / sum(best),
        "ingest_ms_per_call_at_tokens": {
            "10k": _ms_near(10_000, 0.5, tokens, best),
            "1M" if longest > 900_000 else str(longest): _ms_near(longest, 0.03, tokens, best),
        },
        "prefix_match_ms_per_call_at_tokens": {
            "10k": _ms_near(10_000, 0.5, tokens, prefix_best),
            "1M" if longest > 900_000 else str(longest): _ms_near(longest, 0.03, tokens, prefix_best),
        },
        "rerender_tokens_per_s": rerender_rate,
        "prefix_match_tokens_per_s": sum(tokens) / sum(prefix_best),
        "speedup": sum(tokens) / rerender_rate / sum(best),
        "speedup_prefix_match": sum(prefix_best) / sum(best),
        "dedup_ratio": sum(tokens) / ingest.log.tree.num_tokens,
    }, ingest


def _ms_near(wanted: int, tolerance: float, tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Median milliseconds of the calls of about so many tokens; None if the run has none."""
    near = [took for size, took in zip(tokens, seconds, strict=True) if abs(size - wanted) <= tolerance * wanted]
    return 1e3 * statistics.median(near) if near else None


def sizes(calls: Sequence[Sampled], renderer: HfRenderer) -> dict[str, float]:
    """What the run holds in memory."""
    gc.collect()
    tracemalloc.start()
    ingest = Ingest(renderer)
    for call in calls:
        ingest.take(call)
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tree = ingest.log.tree
    num_sampled = sum(len(segment.token_ids) for segment in tree.segments if segment.is_sampled)
    num_paths_tokens = sum(tree.segments[leaf].end for leaf in tree.leaves())
    return {
        "unique_tokens": tree.num_tokens,
        "bytes_per_unique_token": (size_bytes - 4 * num_sampled) / tree.num_tokens,
        "bytes_per_unique_prompt_token": (size_bytes - 8 * num_sampled) / (tree.num_tokens - num_sampled),
        "dedup_ratio_paths": num_paths_tokens / tree.num_tokens,
    }


def selection(log: AttemptLog) -> dict[str, float]:
    """Milliseconds of one selection, roles included."""
    times = []
    for _ in range(5):
        started_s = time.process_time()
        select(log.tree, log.roles, max_trajectories=5, seed=0, run_id=log.run_id)
        times.append(time.process_time() - started_s)
    return {"select_ms": 1e3 * min(times)}


def jmax(renderer: HfRenderer, num_runs: int) -> dict[str, Any]:
    """Tokens that are trained, and that one forward pass over the tree reads, for limits on the paths of a run.

    The mix of runs is made up (1 to 3 main parts, 5 subagents in the mean, at most 12): the paper's is not published.
    """
    rng = random.Random(0)
    shapes = [
        RunShape(
            tuple(rng.randint(8, 16) for _ in range(rng.randint(1, 3))),
            tuple(rng.randint(3, 8) for _ in range(min(12, int(rng.expovariate(1 / 5))))),
            tool_chars=600,
            answer_chars=300,
        )
        for _ in range(num_runs)
    ]
    logs = []
    for number, shape in enumerate(shapes):
        ingest = Ingest(renderer)
        for call in sample(list(synthetic_run(shape, number)), renderer):
            ingest.take(call)
        logs.append(ingest.log)
    totals: dict[str, tuple[int, int]] = {}
    for name, limit in (("1", 1), ("5", 5), ("none", None)):
        trained = forward = 0
        for number, log in enumerate(logs):
            chosen = select(log.tree, log.roles, max_trajectories=limit, seed=number, run_id=log.run_id)
            trained += chosen.num_targets
            forward += forest_tokens([ScoredRun(log.run_id, 1.0, log.tree, chosen)])
        totals[name] = trained, forward
    return {
        name: {
            "train_tokens_share": trained / totals["none"][0],
            "forward_tokens_share": forward / totals["none"][1],
            "paper_time_share": PAPER_TIME_SHARE[name],
        }
        for name, (trained, forward) in totals.items()
    }


def live_runs(renderer: HfRenderer, num_runs: int) -> dict[str, float]:
    """Memory of runs that have made their first call, each from a request of its own."""
    firsts = [sample([next(synthetic_run(RunShape(), seed))], renderer)[0] for seed in range(num_runs)]
    gc.collect()
    tracemalloc.start()
    runs = [Ingest(renderer) for _ in firsts]
    for run, first in zip(runs, firsts, strict=True):
        run.take(first)
    gc.collect()
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "bytes_per_live_run": size_bytes / num_runs,
        "tokens_per_live_run": statistics.fmean(run.log.tree.num_tokens for run in runs),
    }


def store_rate(num_calls: int) -> dict[str, float]:
    """Calls that 64 runs append to the store of one shard, each acknowledged when it is on the disk. Wall time."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-store-") as folder:  # /tmp may be memory
        measured = durable_calls(Path(folder), num_calls=num_calls)
    return {"store_calls_per_s_durable": measured["calls_per_s"], "store_single_call_ms": measured["single_ms"]}


def measure(*, small: bool = False) -> dict[str, Any]:
    """The benchmark's object."""
    renderer = load_renderer(str(resolve_model("tiny-qwen3" if small else "smollm2-135m")))
    calls = sample(list(synthetic_run(SMALL_SHAPE if small else SHAPE, seed=0)), renderer)
    figures, ingest = rates(calls, renderer)
    return {
        **figures,
        **sizes(calls, renderer),
        **selection(ingest.log),
        **live_runs(renderer, 20 if small else 1_000),
        **store_rate(200 if small else 4_000),
        "jmax": jmax(renderer, 4 if small else 40),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--small", action="store_true", help="a short run: seconds, for tests; no figures to compare")
    given = parser.parse_args()
    print(json.dumps(measure(small=given.small), indent=None if given.json else 2))


if __name__ == "__main__":
    main()
