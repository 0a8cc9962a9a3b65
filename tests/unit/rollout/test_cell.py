"""A weight update that does not come to its end leaves no call waiting and no cell updating."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.common.ids import CellId, JobId
from services.common.types import CellState
from services.rollout.cell import RolloutCell
from services.rollout.config import RolloutConfig
from services.rollout.engine import WorkerUpdate
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trainer.types import Canary, WeightManifest

REQUEST = GenerateRequest("g000000-r0-a0-c0", "g000000-r0", Sampling(max_tokens=4))


class FakeEngine:
    """An engine whose update waits for a gate, or fails."""

    def __init__(self) -> None:
        self.dead = False
        self.max_model_len = 100
        self.num_kv_tokens = 1000
        self.stop_ids: frozenset[int] = frozenset()
        self.loading = asyncio.Event()
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    def decode(self, token_ids: Any) -> str:
        return ""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def update_weights(self, manifest: WeightManifest) -> list[WorkerUpdate]:
        self.loading.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [WorkerUpdate(loaded=True, transport="tcp")]

    async def score(self, token_ids: Any) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    def rss_bytes(self) -> int:
        return 0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def cell(engine: FakeEngine) -> RolloutCell:
    cell = RolloutCell(JobId("job"), CellId("cell-1"), RolloutConfig(), "", "token")
    cell._engine = engine  # type: ignore[assignment]
    return cell


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "host:1", 0, 8, "tcp", (), Canary((1, 2, 3), (-1.0, -1.0)))


async def ask(cell: RolloutCell) -> list[GenerateChunk]:
    return [chunk async for chunk in cell.generate(REQUEST, np.arange(5, dtype=np.int32))]


async def test_an_interrupted_update_ends_the_calls_that_wait_for_it(cell: RolloutCell, engine: FakeEngine) -> None:
    publishing = asyncio.create_task(cell.publish(manifest(1)))
    await engine.loading.wait()
    waiting = asyncio.create_task(ask(cell))
    await asyncio.sleep(0)
    assert (await cell.status()).num_calls == 1
    publishing.cancel()
    (last,) = await asyncio.wait_for(waiting, 5)
    assert last.finish_reason == "abort"
    status = await cell.status()
    assert (status.state, status.reason) == (CellState.STALE, "the update was interrupted")
    engine.gate.set()
    assert (await cell.publish(manifest(1))).ok


async def test_an_engine_that_fails_in_an_unknown_way_is_a_failed_update(cell: RolloutCell, engine: FakeEngine) -> None:
    engine.error = RuntimeError("Call to collective_rpc method failed")
    engine.gate.set()
    refused = await cell.publish(manifest(1))
    assert not refused.ok
    assert "collective_rpc" in refused.reason
    assert (await cell.status()).state is CellState.STALE
    engine.error = None
    assert (await cell.publish(manifest(1))).ok


async def test_weights_that_it_serves_already_are_answered_at_once(cell: RolloutCell, engine: FakeEngine) -> None:
    """Whoever asks again has died in between: no call is interrupted for it."""
    engine.gate.set()
    assert (await cell.publish(manifest(1))).ok
    engine.error = RuntimeError("the engine is not asked")
    again = await cell.publish(manifest(1))
    assert (again.ok, again.version, again.size_bytes) == (True, 1, 0)
    assert (await cell.status()).state is CellState.SERVING
