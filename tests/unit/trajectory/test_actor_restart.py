"""A shard whose process is gone, and the one that Ray makes in its place on the same store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ContextLengthError, NotFoundError, TurnLimitError
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import Outcome
from services.trajectory.store import read_run
from tests.unit.trajectory.world import answer, ask, call, make_result, make_spec, open_shard

RUN = "g000000-r0"
Restart = Callable[..., Awaitable[TrajectoryShard]]


@pytest.fixture
async def restarted(tmp_path: Path) -> AsyncIterator[Restart]:
    """Makes the shard anew. Nothing of the one before it goes over but its store."""
    shards: list[TrajectoryShard] = []

    async def restart(**options: Any) -> TrajectoryShard:
        for shard in shards:
            await shard.close()
        shards.append(open_shard(tmp_path, key_secret="of the job", **options))
        return shards[-1]

    yield restart
    for shard in shards:
        await shard.close()


async def test_an_answer_that_comes_two_restarts_late_is_not_taken_for_that_of_another_call(
    restarted: Restart, tmp_path: Path
) -> None:
    shard = await restarted()
    await shard.open_group(make_spec())
    key = await shard.open_attempt(RUN, 0)
    first = await call(shard, RUN, key, ask("a"), "b")
    tickets = []
    for content in ("one", "two", "three"):
        tickets.append(await shard.match_call(RUN, key, ask("a", "b", content)))
        shard = await restarted()
    tickets.append(await shard.match_call(RUN, key, ask("a", "b", "four")))
    assert len({ticket.call_id for ticket in tickets}) == 4
    for late in tickets[:3]:
        with pytest.raises(NotFoundError):
            await shard.append_call(answer(late, "late"))
    await shard.append_call(answer(tickets[3], "in time"))
    _, calls = read_run(str(tmp_path), RUN)
    assert [(one.call_id, one.output_text) for one in calls] == [
        (first.call_id, "b"),
        (tickets[3].call_id, "in time"),
    ]
    assert calls[1].prompt_ids.tolist() == tickets[3].prompt_ref.tolist()


@pytest.mark.parametrize("dies_before", [False, True], ids=["dies after the result", "dies before the result"])
@pytest.mark.parametrize("recorded", [Outcome.CONTEXT_LIMIT, Outcome.TURN_LIMIT, Outcome.ENGINE_LOSS])
async def test_what_befell_the_last_call_outlives_the_shard(
    restarted: Restart, recorded: Outcome, dies_before: bool
) -> None:
    config = TrajectoryConfig(max_calls=2)
    shard = await restarted(config=config, max_model_len=30)
    await shard.open_group(make_spec())
    key = await shard.open_attempt(RUN, 0)
    await call(shard, RUN, key, ask("a"), "b")
    if recorded is Outcome.CONTEXT_LIMIT:
        with pytest.raises(ContextLengthError):
            await shard.match_call(RUN, key, ask("a" * 40))
    elif recorded is Outcome.TURN_LIMIT:
        await call(shard, RUN, key, ask("a", "b", "c"), "d")
        with pytest.raises(TurnLimitError):
            await shard.match_call(RUN, key, ask("a", "b", "c", "d", "e"))
    else:
        ticket = await shard.match_call(RUN, key, ask("a", "b", "c"))
        await shard.abandon_call(ticket.call_id, "TimeoutError", engine_lost=True)
    told = make_result(RUN, 1.0, Outcome.FINISHED)
    if dies_before:
        shard = await restarted(config=config, max_model_len=30)
    assert await shard.finish_run(told) is recorded
    shard = await restarted(config=config, max_model_len=30)
    assert await shard.finish_run(told) is recorded
    assert (await shard.attempt_result(RUN, 0)).outcome is recorded
    assert (await shard.run_summaries())[0].outcome is recorded
