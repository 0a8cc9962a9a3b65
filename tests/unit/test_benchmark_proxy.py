from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.proxy import (
    ANSWER_TOKENS,
    TURNS,
    Amounts,
    Loads,
    child,
    conversation,
    percentile,
    runs_of,
    script_of,
    tokens_per_s,
)
from benchmarks.proxy_history import NEW_TOKENS, GrowingRun, in_process_ms, record_of
from benchmarks.proxy_load import Load, LoadResult, Request, drive, from_json, generate, to_json
from benchmarks.proxy_world import Script, ScriptedCell
from services.proxy.dialects.openai_chat import OPENAI_CHAT
from services.proxy.session import Bridge
from services.rollout.types import GenerateRequest, Sampling
from services.trajectory.live import AttemptLog
from tests.unit.proxy.templates import renderer

PIECES = ("ab", "c ", "d\n")


@pytest.fixture
async def scripted() -> AsyncIterator[int]:
    """The port of a scripted upstream in a process of its own."""
    manager = child("benchmarks.proxy_upstream", list(PIECES))
    told = await asyncio.to_thread(manager.__enter__)
    yield told["port"]
    await asyncio.to_thread(manager.__exit__, None, None, None)


def requests(*bodies: dict[str, object]) -> tuple[Request, ...]:
    return tuple(Request("/v1/chat/completions", "k", json.dumps({"model": "m", **body})) for body in bodies)


async def test_generator_counts_what_follows_the_warm_up_and_reads_whole_answers(scripted: int) -> None:
    load = Load("127.0.0.1", scripted, (requests({}, {}, {"max_tokens": 2}), requests({}, {}, {})), num_warm_up=1)
    result = await generate(load)
    assert len(result.latencies_ms) == 4
    assert 0 < result.requests_per_s < 1e6
    assert json.loads(result.last_body)["choices"][0]["message"]["content"] == "abc "


async def test_generator_reads_a_stream_to_its_end(scripted: int) -> None:
    result = await generate(Load("127.0.0.1", scripted, (requests({"stream": True}),), num_warm_up=0))
    events = [line.removeprefix("data: ") for line in result.last_body.splitlines() if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(PIECES)
    assert events[-1] == "[DONE]"


async def test_an_answer_that_is_no_200_ends_the_load(scripted: int) -> None:
    broken = Request("/v1/chat/completions", "k", "{")
    with pytest.raises(RuntimeError, match="500"):
        await generate(Load("127.0.0.1", scripted, ((broken,),), num_warm_up=0))


async def test_load_goes_through_the_generators_process(scripted: int) -> None:
    load = Load("127.0.0.1", scripted, (requests({}, {}),), num_warm_up=1)
    assert from_json(to_json(load)) == load
    result = await asyncio.to_thread(drive, load)
    assert len(result.latencies_ms) == 1


def test_each_call_of_a_conversation_continues_the_one_before() -> None:
    using = renderer()
    script = script_of(using, ANSWER_TOKENS)
    answer, log, bridge = "".join(script.pieces), AttemptLog("g000000-r0", 0, b"key"), Bridge(using)
    assert using.encode(answer) == list(script.token_ids)
    parents = []
    for sent in conversation("k", 1, answer, ANSWER_TOKENS, stream=False):
        pending = log.begin(log.match(OPENAI_CHAT.parse(json.loads(sent.body), {}), bridge))
        parents.append(pending.parent_call_id)
        ids = np.asarray(script.token_ids, dtype=np.int32)
        log.complete(log.row(record_of(pending.call_id, answer, ids)))
    assert parents == [None, *(f"g000000-r0-a0-c{at}" for at in range(TURNS - 1))]


def test_no_conversation_is_sent_twice_and_there_are_keys_for_all() -> None:
    amounts = replace(Amounts(), clients=2, single_requests=10, requests=9, warm_up=3)
    keys = [f"key-{at}" for at in range(runs_of(10, 3) + 2 * runs_of(9, 3))]
    loads = Loads("h", 1, keys, Script((1,), ("a",)))
    sent = [loads.load(1, 10, amounts.warm_up), loads.load(2, 9, amounts.warm_up)]
    bodies = [request.body for load in sent for client in load.clients for request in client]
    assert len(set(bodies)) == len(bodies) == 13 + 2 * 12
    assert {request.key for load in sent for client in load.clients for request in client} == set(keys)


def test_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.99) == 99
    assert percentile(values[:10], 0.99) == 10
    assert percentile([3.0], 0.99) == 3


def test_tokens_of_all_streams_count() -> None:
    assert tokens_per_s(LoadResult([1.0] * 6, wall_s=3.0, num_bytes=0, last_body=""), 100) == 200


@pytest.mark.parametrize("hold_s", [0.0, 1.0])
async def test_scripted_cell_gives_the_same_answer_however_it_is_put_together(hold_s: float) -> None:
    cell = ScriptedCell((7, 8, 9), PIECES)
    request = GenerateRequest("c", "g000000-r0", Sampling(max_tokens=2), hold_s=hold_s)
    chunks = [chunk async for chunk in cell.generate(request, np.arange(3, dtype=np.int32))]
    assert [token for chunk in chunks for token in chunk.token_ids] == [7, 8]
    assert "".join(chunk.text for chunk in chunks) == "abc "
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) == (1 if hold_s else 2)


def test_history_has_a_figure_for_every_size_and_about_as_many_new_tokens() -> None:
    figures = in_process_ms(renderer(), {"small": 2_000, "larger": 8_000})
    for name in ("match_ms", "parse_ms"):
        assert all(took_ms > 0 for took_ms in figures[name].values())
        assert list(figures[name]) == ["small", "larger"]
    assert statistics.fmean(figures["new_tokens"].values()) > NEW_TOKENS


def test_growing_run_is_one_conversation() -> None:
    run = GrowingRun(renderer())
    run.grow_to(6_000)
    assert run.num_tokens >= 6_000
    assert len(run.log.tree.leaves()) == 1
