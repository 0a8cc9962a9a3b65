from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.common.types import RouteTable
from services.proxy.backends import Routes, follow_routes


def table(epoch: int) -> RouteTable:
    return RouteTable(epoch, ())


async def test_waiting_ends_with_a_newer_table_only() -> None:
    routes = Routes(table(3))
    waiting = asyncio.create_task(routes.wait_newer(3, timeout_s=20))
    await asyncio.sleep(0)
    routes.offer(table(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    routes.offer(table(4))
    await waiting
    await routes.wait_newer(3, timeout_s=20)
    assert routes.table.epoch == 4


async def test_routes_are_followed_through_ends_and_errors_with_growing_pauses() -> None:
    routes = Routes()
    pauses: list[float] = []
    scripts: list[list[RouteTable | Exception]] = [
        [table(1), table(2), ConnectionError("gone")],
        [ConnectionError("still gone")],
        [ConnectionError("still gone")],
        [table(1)],  # late news, then a polite end
        [table(7)],
    ]

    async def watch() -> AsyncIterator[RouteTable]:
        for step in scripts.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if not scripts:
            raise asyncio.CancelledError
        if len(scripts) in (1, 2, 3):
            assert routes.table.epoch == 2  # the last table holds

    following = asyncio.create_task(follow_routes(routes, watch, retry_s=1.0, max_retry_s=3.0, sleep=sleep))
    await asyncio.wait({following})
    assert following.cancelled()
    assert routes.table.epoch == 7
    assert pauses == [1.0, 2.0, 3.0, 1.0, 1.0]
