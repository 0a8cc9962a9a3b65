"""How many calls the trajectory store makes durable in a second."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np

from services.common.types import VersionSpan
from services.trajectory.encoding import CallRow
from services.trajectory.store import Store, StoreConfig
from services.trajectory.types import CallRecord, GroupSpec


def durable_calls(
    folder: Path,
    config: StoreConfig | None = None,
    *,
    num_calls: int = 2_000,
    num_in_flight: int = 64,
    num_new_tokens: int = 200,
    num_output_tokens: int = 300,
) -> dict[str, float]:
    """Append calls of ``num_in_flight`` runs at once, as many shards' clients would, to a store in an empty folder.

    ``calls_per_s``: each acknowledged once it is on the disk. ``single_ms``: median of one call that is alone.
    """
    store = Store(config or StoreConfig(), "benchmark", 0, folder)
    try:
        run_ids = tuple(f"g000000-r{index}" for index in range(num_in_flight))
        store.open_group(GroupSpec("g000000", "task", run_ids, 0))
        for run_id in run_ids:
            store.open_attempt(run_id, 0, b"")
        rng = np.random.default_rng(0)
        num_rows = num_calls + 20
        rows = [_row(rng, run_ids[at % num_in_flight], at, num_new_tokens, num_output_tokens) for at in range(num_rows)]
        single_s = [_timed(store, row) for row in rows[num_calls:]]
        room = threading.Semaphore(num_in_flight)
        futures: list[Future[bool]] = []
        started_s = time.perf_counter()
        for row in rows[:num_calls]:
            room.acquire()
            futures.append(store.submit(store.append_call, row))
            futures[-1].add_done_callback(lambda _: room.release())
        wait(futures)
        wall_s = time.perf_counter() - started_s
        if not all(future.result() for future in futures):
            raise AssertionError("a call was not stored")
    finally:
        store.close()
    return {"calls_per_s": num_calls / wall_s, "single_ms": 1_000 * statistics.median(single_s)}


def _timed(store: Store, row: CallRow) -> float:
    started_s = time.perf_counter()
    store.append_call(row)
    return time.perf_counter() - started_s


def _row(rng: np.random.Generator, run_id: str, index: int, num_new_tokens: int, num_output_tokens: int) -> CallRow:
    text = " ".join(f"word{rng.integers(1_000)}" for _ in range(num_output_tokens // 2))
    record = CallRecord(
        call_id=f"{run_id}-a0-c{index}",
        run_id=run_id,
        attempt=0,
        parent_call_id=None,
        request={"dialect": "openai_chat", "messages": [{"role": "user", "content": text}], "tools": []},
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=rng.integers(0, 150_000, num_output_tokens).astype(np.int32),
        logprobs=-rng.exponential(size=num_output_tokens).astype(np.float32),
        version_spans=(VersionSpan(0, num_output_tokens),),
        output_text=text,
        finish_reason="stop",
        trainable=True,
        cells=("cell-0",),
        started_at_s=0.0,
        ended_at_s=1.0,
    )
    new_ids = rng.integers(0, 150_000, num_new_tokens).astype(np.int32)
    return CallRow(record, index, num_new_tokens, new_ids, 0, shares_tools=False)
