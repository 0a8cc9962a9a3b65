"""Commands reach the ranks in order and survive the death of ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.errors import ConfigError, TrainingError
from services.trainer.commands import Order, Publish, SaveCheckpoint, Stop, TrainStep
from services.trainer.mailbox import Mailbox


def step(number: int, num_micro_steps: int = 3) -> TrainStep:
    return TrainStep(number, -1, 1.0, tuple(f"m{number}-{i}" for i in range(num_micro_steps)))


class Rank:
    """A training rank's side of the mailbox."""

    def __init__(self, mailbox: Mailbox, group: str, rank: int = 0) -> None:
        self._mailbox, self._group, self._rank = mailbox, group, rank

    async def register(self, world_size: int = 1, start_step: int = 0) -> Rank:
        await self._mailbox.register(self._group, self._rank, world_size, start_step)
        return self

    async def next(self) -> Order:
        return await asyncio.wait_for(self._mailbox.next(self._group, self._rank), 5)

    async def done(self, order: Order, result: Any = None) -> bool:
        return await self._mailbox.done(self._group, self._rank, order.order_id, result)

    async def failed(self, order: Order, error: Exception) -> None:
        await self._mailbox.failed(self._group, order.order_id, error)

    async def do(self, result: Any = None) -> Order:
        order = await self.next()
        assert await self.done(order, result)
        return order


def submit(mailbox: Mailbox, command: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(mailbox.submit(command))


async def test_commands_are_answered_in_order() -> None:
    mailbox = Mailbox(timeout_s=60)
    first, second = submit(mailbox, step(1)), submit(mailbox, Publish(1))
    await asyncio.sleep(0)
    rank = await Rank(mailbox, "a").register()
    order = await rank.do("report")
    assert (order.command, order.claims, order.num_claims) == (step(1), (0, 1, 2), 3)
    assert await first == "report"
    assert not second.done()
    assert (await rank.do("manifest")).command == Publish(1)
    assert await second == "manifest"


async def test_micro_steps_are_shared_out_round_robin_and_all_ranks_must_finish() -> None:
    mailbox = Mailbox(timeout_s=60)
    answer = submit(mailbox, step(1, 5))
    ranks = [Rank(mailbox, "a", rank) for rank in range(2)]
    await ranks[0].register(world_size=2)
    early = asyncio.create_task(ranks[0].next())
    await asyncio.sleep(0)
    assert not early.done()  # nothing is handed out before the whole group is there
    await ranks[1].register(world_size=2)
    orders = [await early, await ranks[1].next()]
    assert [order.claims for order in orders] == [(0, 2, 4), (1, 3)]
    await ranks[1].done(orders[1], "of rank 1")
    assert not answer.done()
    await ranks[0].done(orders[0], "of rank 0")
    assert await answer == "of rank 0"


async def test_command_in_flight_is_handed_out_again_when_the_ranks_die() -> None:
    mailbox = Mailbox(timeout_s=60)
    answer = submit(mailbox, step(1))
    await asyncio.sleep(0)
    old = await Rank(mailbox, "a").register()
    lost = await old.next()
    new = await Rank(mailbox, "b").register()
    assert not await old.done(lost, "too late")  # the old group is fenced
    assert (await old.next()).command == Stop()
    order = await new.do("again")
    assert order.order_id != lost.order_id
    assert order.claims == (0, 1, 2)
    assert await answer == "again"


async def test_steps_after_the_checkpoint_are_taken_again_first() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    for command in (step(1), step(2), SaveCheckpoint(2, 2), step(3), step(4)):
        answer = submit(mailbox, command)
        await rank.do()
        await answer
    answer = submit(mailbox, step(5))
    await rank.next()
    rank = await Rank(mailbox, "b").register(start_step=2)
    assert (await rank.do("old report")).command == step(3)
    rank = await Rank(mailbox, "c").register(start_step=2)  # dies again while it catches up
    assert [(await rank.do()).command for _ in range(2)] == [step(3), step(4)]
    assert not answer.done()
    assert (await rank.do("report")).command == step(5)
    assert await answer == "report"


async def test_error_of_a_rank_reaches_the_caller_and_the_next_command_is_done() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    answer = submit(mailbox, step(1))
    await rank.failed(await rank.next(), ConfigError("too long", "shorten it"))
    with pytest.raises(ConfigError, match="too long"):
        await answer
    answer = submit(mailbox, Publish(0))
    await rank.do("manifest")
    assert await answer == "manifest"


async def test_ranks_that_cannot_catch_up_end_the_training() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    answer = submit(mailbox, step(1))
    await rank.do()
    await answer
    answer = submit(mailbox, step(2))
    rank = await Rank(mailbox, "b").register(start_step=0)
    await rank.failed(await rank.next(), ValueError("broken"))
    with pytest.raises(TrainingError, match="catch up"):
        await answer


async def test_ranks_that_hang_while_they_catch_up_end_the_training() -> None:
    mailbox = Mailbox(timeout_s=0.05)
    rank = await Rank(mailbox, "a").register()
    answer = submit(mailbox, step(1))
    await rank.do()
    await answer
    rank = await Rank(mailbox, "b").register(start_step=0)
    assert (await rank.next()).command == step(1)  # and nothing comes of it
    with pytest.raises(TrainingError, match="catch up"):
        await asyncio.wait_for(mailbox.submit(step(2)), 5)


async def test_command_past_its_deadline_fails() -> None:
    mailbox = Mailbox(timeout_s=0.05)
    await Rank(mailbox, "a").register()
    with pytest.raises(TrainingError, match="longer than"):
        await asyncio.wait_for(mailbox.submit(step(1)), 5)


async def test_close_fails_what_waits_and_what_comes() -> None:
    mailbox = Mailbox(timeout_s=60)
    waiting = [submit(mailbox, step(1)), submit(mailbox, step(2))]
    await asyncio.sleep(0)
    await mailbox.close("the ranks failed 3 times")
    for answer in waiting:
        with pytest.raises(TrainingError, match="3 times"):
            await answer
    with pytest.raises(TrainingError, match="3 times"):
        await mailbox.submit(step(3))
    rank = await Rank(mailbox, "a").register()
    assert (await rank.next()).command == Stop()
