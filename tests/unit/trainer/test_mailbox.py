"""Commands reach the ranks in order and survive the death of ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.common.errors import ConfigError, TrainingError
from services.trainer.commands import (
    Accumulate,
    MarkBest,
    MicroStepRef,
    Order,
    Publish,
    SaveCheckpoint,
    Stop,
    SumReport,
    TrainStep,
    Update,
)
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


async def test_ranks_that_share_their_micro_steps_all_take_all_of_them() -> None:
    mailbox = Mailbox(timeout_s=60, shares_micro_steps=True)
    ranks = [await Rank(mailbox, "a", rank).register(world_size=2) for rank in range(2)]
    answer = submit(mailbox, step(1))
    assert [(await rank.do("report")).claims for rank in ranks] == [(0, 1, 2), (0, 1, 2)]
    assert await answer == "report"


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


async def test_equal_commands_join_whether_in_flight_or_queued() -> None:
    mailbox = Mailbox(timeout_s=60)
    answers = [submit(mailbox, command) for command in (step(1), SaveCheckpoint(1, 0), step(1), SaveCheckpoint(1, 0))]
    await asyncio.sleep(0)
    rank = await Rank(mailbox, "a").register()
    await rank.do("report")
    await rank.do("folder")
    assert [await answer for answer in answers] == ["report", "folder", "report", "folder"]
    assert (await mailbox.status()).num_waiting == 0


async def test_a_step_that_is_trained_is_answered_with_its_report_whatever_part_is_asked() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    micro_steps = (MicroStepRef("g0/0", "data"),)
    update = submit(mailbox, Update(1, 7, 0, 1.0, micro_steps))
    queued = submit(mailbox, Accumulate(1, 8, 0, 1.0, micro_steps))  # it becomes pointless while it waits
    await asyncio.sleep(0)
    await rank.do("report")
    assert [await update, await queued] == ["report", "report"]
    for command in (step(1), Accumulate(1, 9, 0, 1.0, micro_steps), Update(1, 9, 0, 1.0, micro_steps)):
        assert await asyncio.wait_for(mailbox.submit(command), 5) == "report"
    assert (await mailbox.note_groups(1, ["g0"])).report == "report"


async def test_checkpoint_mark_and_publication_done_last_are_answered_again() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    commands = (SaveCheckpoint(1, 0, True), MarkBest(1, 0.5), Publish(1))
    for number, command in enumerate(commands):
        answer = submit(mailbox, command)
        await rank.do(number)
        await answer
    for number, command in enumerate(commands):
        assert await asyncio.wait_for(mailbox.submit(command), 5) == number
    other = submit(mailbox, SaveCheckpoint(1, 1, True))
    await rank.do("another")
    assert await other == "another"


async def test_a_publication_is_made_again_by_new_ranks() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    answer = submit(mailbox, Publish(0))
    await rank.do("manifest")
    await answer
    rank = await Rank(mailbox, "b").register()
    answer = submit(mailbox, Publish(0))
    await rank.do("at another address")
    assert await answer == "at another address"


async def test_parts_of_a_step_that_was_begun_anew_are_not_done() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    refs = [(MicroStepRef(f"g0/{index}", "data"),) for index in range(3)]
    running, queued = (submit(mailbox, Accumulate(1, 1, 0, 1.0, refs[index])) for index in (0, 1))
    await asyncio.sleep(0)
    anew = submit(mailbox, Accumulate(1, 2, 0, 1.0, refs[2]))
    await rank.do("old sum")
    await rank.do("new sum")
    assert [await running, await anew] == ["old sum", "new sum"]
    with pytest.raises(TrainingError, match="begun anew"):
        await queued


async def test_an_updated_step_is_taken_again_whole() -> None:
    mailbox = Mailbox(timeout_s=60)
    rank = await Rank(mailbox, "a").register()
    answer = submit(mailbox, Update(1, 7, -1, 0.5, (MicroStepRef("g0/0", "a"), MicroStepRef("g0/1", "b"))))
    await rank.do("report")
    await answer
    rank = await Rank(mailbox, "b").register(start_step=0)
    order = await rank.next()
    assert isinstance(order.command, TrainStep)
    assert (order.command.step, order.command.temperature, order.command.micro_steps) == (1, 0.5, ("a", "b"))
    assert order.claims == (0, 1)


async def test_an_update_that_was_refused_is_no_step() -> None:
    mailbox = Mailbox(timeout_s=60)
    ranks = [await Rank(mailbox, "a", rank).register(world_size=2) for rank in range(2)]
    update = Update(1, 7, -1, 0.5, (MicroStepRef("g0/0", "a"), MicroStepRef("g0/1", "b")))
    answer = submit(mailbox, update)
    for number, rank in enumerate(ranks):
        await rank.done(await rank.next(), SumReport(1, 7, frozenset({f"g0/{number}"})))
    assert await answer == SumReport(1, 7, frozenset({"g0/0", "g0/1"}))  # what all ranks hold
    again = submit(mailbox, update)
    for rank in ranks:
        await rank.done(await rank.next(), "report")
    assert await again == "report"
