"""The proxy, its shard and its cell in one process, for comparison: ``python -m benchmarks.proxy_in_process``.

What the deployed proxy costs beyond this is what goes between its processes. The first line of standard input is a
JSON object (``InProcess``); it prints its port and keys, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.proxy_upstream import serve_until_closed
from benchmarks.proxy_world import (
    JOB,
    MODEL_NAME,
    ScriptedCell,
    group_of_runs,
    route_table,
    shard_arguments,
)
from services.common.ids import RunId
from services.proxy.app import create_app
from services.proxy.backends import Cell, Routes, Shard
from services.proxy.config import ProxyConfig
from services.proxy.parsing import PlainParser
from services.trajectory.actor import TrajectoryShard


@dataclass(frozen=True, slots=True)
class InProcess:
    """What the process is told."""

    token_ids: list[int]
    pieces: list[str]
    model_path: str
    folder: str
    num_runs: int


class OneProcess:
    """``Backends`` without a network."""

    def __init__(self, shard: Any, cell: Any) -> None:
        self._shard, self._cell = shard, cell
        self.routes = Routes(route_table())

    def shard_for(self, run_id: RunId) -> Shard:
        return cast(Shard, self._shard)

    def cell(self, actor_name: str) -> Cell:
        return cast(Cell, self._cell)


async def serve(told: InProcess) -> None:
    shard = TrajectoryShard(*shard_arguments(told.folder, told.model_path, len(told.token_ids)))
    spec = group_of_runs(told.num_runs)
    await shard.open_group(spec)
    keys = await asyncio.gather(*(shard.open_attempt(run_id, 0) for run_id in spec.run_ids))
    backends = OneProcess(shard, ScriptedCell(told.token_ids, told.pieces))
    app = create_app(JOB, ProxyConfig(), MODEL_NAME, backends, PlainParser())
    await serve_until_closed(app, {"keys": keys})
    await shard.close()


def main() -> None:
    """Entry point."""
    asyncio.run(serve(InProcess(**json.loads(sys.stdin.readline()))))


if __name__ == "__main__":
    main()
