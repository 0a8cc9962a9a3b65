"""Requests that are made again, through the real proxy and the real shard: one generation, whatever was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from services.proxy.backends import Shard
from services.proxy.dialects.openai_chat import OPENAI_CHAT
from services.rollout.types import Sampling
from services.trajectory import call_desk, sharing
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.store import read_run
from services.trajectory.types import CallRecord, GroupSpec
from tests.unit.proxy.conftest import Serve, Server, chat
from tests.unit.proxy.fakes import RUN, FakeBackends, FakeCell, FakeShard, word
from tests.unit.proxy.templates import CHATML, renderer
from tests.waiting import until

WHOLE = "".join(word(index) for index in range(5))
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class World:
    shard: TrajectoryShard
    cell: FakeCell
    key: str
    folder: Path
    server: Server

    async def ask(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        path = f"/run/{self.key}/v1/chat/completions"
        return await self.server.http.post(path, json=chat(**body), headers=headers)

    async def cut(self, after: int, **body: Any) -> None:
        """A request whose client goes away when the cell has made some tokens of it."""
        assert self.cell.stepping is not None
        num_before, num_abandoned = len(self.cell.requests), len(self.cell.aborted)
        asking = asyncio.create_task(self.ask(**body))
        await until(lambda: len(self.cell.requests) > num_before)
        for _ in range(after):
            self.cell.stepping.release()
        await until(lambda: self.cell.stepping is not None and self.cell.stepping._value == 0)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: len(self.cell.aborted) > num_abandoned)

    @property
    def calls(self) -> list[CallRecord]:
        return read_run(str(self.folder), RUN)[1]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.fixture
async def world(serve: Serve, tmp_path: Path) -> AsyncIterator[World]:
    shard = TrajectoryShard(
        "job-1", 0, TrajectoryConfig(), str(tmp_path), "", Sampling(max_tokens=5), 400, renderer=renderer(CHATML)
    )
    await shard.open_group(GroupSpec("g000001", "task", (RUN, "g000001-r1"), version=0))
    key = await shard.open_attempt(RUN, 0)
    cell = FakeCell(stepping=asyncio.Semaphore(0))
    backends = FakeBackends(FakeShard(), a=cell)
    backends.shard_for = lambda run_id: cast(Shard, shard)  # type: ignore[method-assign]
    async with serve(backends) as server:
        yield World(shard, cell, key, tmp_path, server)
    await shard.close()


def let_run(world: World) -> None:
    assert world.cell.stepping is not None
    for _ in range(100):
        world.cell.stepping.release()


async def test_concurrent_duplicates_share_one_generation(world: World) -> None:
    asking = [
        asyncio.create_task(world.ask(stream=stream, max_tokens=limit)) for stream, limit in ((False, 9), (False, 7))
    ]
    await until(lambda: len(world.cell.requests) == 1)
    let_run(world)
    answers = [text_of(await one) for one in asking]
    assert answers == [WHOLE, WHOLE]
    assert len(world.cell.requests) == 1
    assert len(world.calls) == 1


async def test_choices_of_one_request_are_samples_of_their_own(world: World) -> None:
    let_run(world)
    answer = (await world.ask(n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15
    assert [call.request["choice"] for call in world.calls] == [0, 1, 2]
    streamed = (await world.ask(n=2, stream=True)).text
    assert streamed.count('"finish_reason":"length"') == 2
    assert streamed.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_made_again_after_a_cut_goes_on_where_it_was_cut(world: World, stream: bool) -> None:
    await world.cut(2, stream=stream)
    let_run(world)
    assert text_of(await world.ask()) == WHOLE
    assert [len(request.generated_ids) for request in world.cell.requests] == [0, 2]
    (call,) = world.calls
    assert call.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert call.trainable


async def test_an_answer_that_did_not_arrive_is_given_again(world: World) -> None:
    let_run(world)
    first = await world.shard.match_call(RUN, world.key, _request())
    await world.shard.abandon_call(first.call_id, "test")
    assert text_of(await world.ask()) == WHOLE
    (call,) = world.calls
    await world.shard.note_undelivered(call.call_id)
    again = await world.ask(stream=True)
    assert again.status_code == 200
    assert word(4) in again.text
    assert len(world.cell.requests) == 1
    assert text_of(await world.ask()) == WHOLE  # that one arrived: the next asks for another sample
    assert len(world.cell.requests) == 2


async def test_a_client_that_says_it_tries_again_gets_the_same_answer(world: World) -> None:
    let_run(world)
    assert text_of(await world.ask()) == WHOLE
    assert text_of(await world.ask(headers=RETRY)) == WHOLE
    assert len(world.cell.requests) == 1
    assert len(world.calls) == 1


async def test_a_call_lost_with_its_replica_is_made_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (call_desk, sharing):
        monkeypatch.setattr(module, "LEASE_S", 0.2)
    await world.shard.match_call(RUN, world.key, _request())  # by a replica that was killed then
    let_run(world)
    assert text_of(await world.ask()) == WHOLE
    assert len(world.cell.requests) == 1


async def test_a_call_that_no_cell_could_finish_in_time_is_gone_on_with(serve: Serve, world: World) -> None:
    world.cell.hangs_after = 2
    let_run(world)
    impatient = FakeBackends(FakeShard(), a=world.cell)
    impatient.shard_for = lambda run_id: cast(Shard, world.shard)  # type: ignore[method-assign]
    async with serve(impatient, call_timeout_s=0.5) as server:
        refused = await server.http.post(f"/run/{world.key}/v1/chat/completions", json=chat())
        await until(lambda: len(world.cell.aborted) == 1)
    assert refused.status_code == 503
    world.cell.hangs_after = None
    assert text_of(await world.ask(headers=RETRY)) == WHOLE
    assert len(world.cell.requests[-1].generated_ids) == 2
    assert len(world.calls) == 1


def _request() -> Any:
    return OPENAI_CHAT.parse(chat(), {})
