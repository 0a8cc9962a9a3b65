"""Processes that write to a store until they are killed, for ``test_store_kill``."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from services.common.types import VersionSpan
from services.trajectory.config import TrajectoryConfig
from services.trajectory.encoding import CallRow
from services.trajectory.store import Store, StoreConfig
from tests.unit.trajectory.stores import make_row
from tests.unit.trajectory.world import ask, call, make_result, make_spec, open_shard

NUM_RUNS = 4
CALLS_OF_A_RUN = 5


def expected_row(run_id: str, index: int, parent: CallRow | None) -> CallRow:
    """The call of this number, always the same."""
    rng = np.random.default_rng([*run_id.encode(), index])
    ids = rng.integers(0, 50_000, rng.integers(1, 300)).astype(np.int32)
    logprobs = -rng.exponential(size=len(ids)).astype(np.float32)
    spans = (VersionSpan(3, len(ids)),)
    return make_row(index, parent, run_id, output_ids=ids, logprobs=logprobs, version_spans=spans)


def write_for_ever(config: StoreConfig, job_id: str, folder: str, generation: int, told: Connection) -> None:
    """Runs of many calls at once; each that is durable is told. Ended runs are sealed, old groups pruned as it goes."""
    store = Store(config, job_id, 0, Path(folder))
    telling = threading.Lock()

    def tell(text: str) -> None:
        with telling:
            told.send_bytes(text.encode())

    def tell_when_durable(row: CallRow, future: Future[bool]) -> None:
        if future.exception() is None and future.result():
            tell(row.record.call_id)

    for index in itertools.count(1_000 * generation):
        spec = make_spec(index, num_runs=NUM_RUNS)
        store.open_group(spec)
        parents: dict[str, CallRow | None] = dict.fromkeys(spec.run_ids)
        for number in range(CALLS_OF_A_RUN):
            futures = []
            for run_id in spec.run_ids:
                row = parents[run_id] = expected_row(run_id, number, parents[run_id])
                futures.append(store.submit(store.append_call, row))
                futures[-1].add_done_callback(lambda future, row=row: tell_when_durable(row, future))
            for future in futures:
                future.result()
        for run_id in spec.run_ids:
            store.finish_run(make_result(run_id, 1.0))
            store.seal_run(run_id, 0)


def call_for_ever(config: StoreConfig, job_id: str, folder: str, generation: int, told: Connection) -> None:
    """A shard whose runs make calls, each run one after the other; each call that it acknowledged is told."""

    async def work() -> None:
        shard = open_shard(Path(folder), config=TrajectoryConfig(store=config), max_model_len=1 << 30)
        spec = make_spec(num_runs=NUM_RUNS)
        await shard.open_group(spec)

        async def run(run_id: str) -> None:
            key = await shard.open_attempt(run_id, 0)
            while True:
                ticket = await call(shard, run_id, key, ask("start"), f"{os.getpid()}")
                told.send_bytes(f"{ticket.call_id} {os.getpid()}".encode())

        await asyncio.gather(*(run(run_id) for run_id in spec.run_ids))

    asyncio.run(work())
