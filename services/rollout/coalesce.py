"""Chunks of an answer put together, so that a stream of them costs its reader less."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

from services.rollout.types import GenerateChunk


def joined(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """Neighbouring chunks of one version as one; only the last may have a finish reason."""
    return GenerateChunk(
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        text="".join(chunk.text for chunk in chunks),
        version=chunks[-1].version,
        finish_reason=chunks[-1].finish_reason,
        num_cached_tokens=max(chunk.num_cached_tokens for chunk in chunks),
        stop_string=chunks[-1].stop_string,
    )


async def coalesced(chunks: AsyncGenerator[GenerateChunk, None], hold_s: float) -> AsyncGenerator[GenerateChunk, None]:
    """The same tokens in fewer chunks: each waits for ``hold_s``, and what comes meanwhile is put together with it.

    With a finish reason, another version or an error what was held is given at once. The source is closed with this.
    """
    if hold_s <= 0:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk
        return
    held: list[GenerateChunk] = []
    some, urgent = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    held.append(chunk)
                    some.set()
                    if chunk.finish_reason is not None or chunk.version != held[0].version:
                        urgent.set()
        finally:
            some.set()
            urgent.set()

    reading = asyncio.create_task(read())
    try:
        while held or not reading.done():
            await some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    await urgent.wait()
            some.clear()
            urgent.clear()
            taken, held[:] = held[:], []
            for _, same in itertools.groupby(taken, key=lambda chunk: chunk.version):
                yield joined(list(same))
            await asyncio.sleep(0)  # a source that has ended is done now
        await reading
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reading
