from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from services.common.types import RouteTable
from services.proxy.backends import Routes, follow_routes
from services.proxy.routing import choose_cell
from services.scheduler.client import SchedulerClient
from tests.unit.scheduler.lasting import LastingWorld, Lives, kill
from tests.unit.scheduler.world import options
from tests.waiting import until


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


async def test_routes_come_again_from_a_scheduler_that_was_killed(tmp_path: Path) -> None:
    """Over gRPC as in a proxy replica: while there is no scheduler the last table holds, also over many tries."""
    lives = Lives(LastingWorld(options(steps=50, max_staleness_steps=50), 0), tmp_path)
    scheduler = await lives.begin()
    [address] = lives.addresses
    routes, num_tries = Routes(), 0

    async def watch() -> AsyncIterator[RouteTable]:
        client = SchedulerClient(address, "t")
        try:
            async for table in client.watch_routes():
                yield table
        finally:
            await client.close()

    async def sleep(seconds: float) -> None:
        nonlocal num_tries
        num_tries += 1
        await asyncio.sleep(0.01)

    following = asyncio.create_task(follow_routes(routes, watch, sleep=sleep))
    await until(lambda: any(cell.version >= 0 for cell in routes.table.cells))
    await kill(scheduler)
    await until(lambda: num_tries > 1)
    before, num_tries = routes.table, 0
    choice = choose_cell(before, "g000000-r0")  # of whatever cells it listed when the scheduler died
    await until(lambda: num_tries > 20)
    assert routes.table == before
    assert choose_cell(routes.table, "g000000-r0") == choice
    again = await lives.begin()
    assert lives.addresses == {address}
    await until(lambda: routes.table.epoch > before.epoch)
    following.cancel()
    await asyncio.wait([following])
    await kill(again)
