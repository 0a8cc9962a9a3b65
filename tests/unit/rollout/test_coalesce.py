from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from services.common.errors import EngineError
from services.rollout.coalesce import coalesced
from services.rollout.types import GenerateChunk


def chunk(token: int, version: int = 1, reason: str | None = None) -> GenerateChunk:
    return GenerateChunk((token,), (-float(token),), f"<{token}>", version, reason, token)


async def source(*chunks: GenerateChunk, gates: dict[int, asyncio.Event] | None = None, fails: bool = False):  # type: ignore[no-untyped-def]
    for index, one in enumerate(chunks):
        if gates and index in gates:
            await gates[index].wait()
        yield one
    if fails:
        raise EngineError("it is lost.")


async def all_of(chunks: AsyncGenerator[GenerateChunk, None]) -> list[GenerateChunk]:
    return [one async for one in chunks]


async def test_what_comes_at_once_is_one_chunk() -> None:
    (one,) = await all_of(coalesced(source(chunk(1), chunk(2), chunk(3, reason="stop")), 30.0))
    assert one == GenerateChunk((1, 2, 3), (-1.0, -2.0, -3.0), "<1><2><3>", 1, "stop", 3)


@pytest.mark.parametrize("hold_s", [0.0, 0.001, 30.0])
async def test_versions_are_kept_apart_in_their_order(hold_s: float) -> None:
    given = [chunk(1, 1), chunk(2, 2), chunk(3, 1), chunk(4, 1, "length")]
    out = await all_of(coalesced(source(*given), hold_s))
    assert [(one.version, one.token_ids) for one in out if one.version == 2] == [(2, (2,))]
    assert [token for one in out for token in one.token_ids] == [1, 2, 3, 4]
    assert out[-1].finish_reason == "length"


async def test_a_slow_source_is_held_no_longer_than_it_may() -> None:
    gate = asyncio.Event()
    chunks = coalesced(source(chunk(1), chunk(2, reason="stop"), gates={1: gate}), 0.01)
    first = await anext(chunks)
    assert first.token_ids == (1,)  # though the second has not come
    gate.set()
    assert [one.token_ids for one in await all_of(chunks)] == [(2,)]


async def test_what_was_held_comes_before_an_error() -> None:
    chunks = coalesced(source(chunk(1), chunk(2), fails=True), 30.0)
    assert (await anext(chunks)).token_ids == (1, 2)
    with pytest.raises(EngineError):
        await anext(chunks)


async def test_the_source_is_closed_with_it() -> None:
    closed = asyncio.Event()

    async def endless():  # type: ignore[no-untyped-def]
        try:
            yield chunk(1)
            await asyncio.Event().wait()
        finally:
            closed.set()

    chunks = coalesced(endless(), 0.001)
    async with contextlib.aclosing(chunks):
        await anext(chunks)
    assert closed.is_set()
