"""Answers under a JSON schema: they satisfy it, come whole, and no schema harms the engine."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import pytest_asyncio

from services.common.errors import RequestError
from services.proxy.parsing.schema import required_schema
from services.proxy.types import CanonicalRequest, ToolChoice, ToolMode
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from tests.integration.calls import PROMPT, Pair, ask

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "done": {"type": "boolean"}},
    "required": ["color", "done"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "minItems": 500, "items": {"type": "integer"}}
TOOLS = (
    {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
)


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _serving(tied: Pair) -> None:
    await _publish(tied)


async def _publish(tied: Pair) -> int:
    version = (await tied.cell.status()).version + 1
    result = await tied.cell.publish(tied.publisher.publish(version, tied.publisher.model(seed=version)))
    assert result.ok
    return version


def masked(schema: object, **more: object) -> Sampling:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Sampling(**{"temperature": 1.0, "max_tokens": 600, "seed": 1, "json_schema": text, **more})  # type: ignore[arg-type]


async def chunks_of(tied: Pair, sampling: Sampling, call_id: str = "g000000-r0-a0-c0") -> list[GenerateChunk]:
    request = GenerateRequest(call_id, "g000000-r0", sampling)
    return [chunk async for chunk in tied.cell.generate(request, np.asarray(PROMPT, dtype=np.int32))]


async def test_an_answer_satisfies_its_schema_and_comes_whole(tied: Pair) -> None:
    (chunk,) = await chunks_of(tied, masked(SCHEMA))
    assert chunk.finish_reason == "stop"
    value = json.loads(chunk.text)
    assert value["color"] in ("red", "blue")
    assert isinstance(value["done"], bool)
    assert len(chunk.token_ids) == len(chunk.logprobs) > 1
    assert max(chunk.logprobs) <= 0.0


async def test_a_forced_tool_is_called(tied: Pair) -> None:
    one_call = ToolChoice(ToolMode.REQUIRED, is_parallel=False)
    schema = required_schema(CanonicalRequest("openai_chat", "m", (), tools=TOOLS, tool_choice=one_call))
    assert schema is not None
    answer = await ask(tied.cell, masked(schema))
    (call,) = json.loads(answer.text)
    assert call["name"] in ("paint", "stop")
    if call["name"] == "paint":
        assert call["parameters"]["color"] in ("red", "blue")


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        '{"type": "nothing"}',
        '{"$ref": "#/$defs/none"}',
        '{"type": "string", "pattern": "("}',
        '{"type": "object", "properties": 3}',
        '{"type": "array", "minItems": 500}',  # found out only when it is compiled, in the engine's own process
        "",
        "[" * 2000 + "]" * 2000,
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused_and_harms_nothing(tied: Pair, schema: str) -> None:
    with pytest.raises(RequestError):
        await ask(tied.cell, masked(schema))
    assert (await ask(tied.cell, masked(SCHEMA))).finish_reason == "stop"
    assert (await tied.cell.status()).num_calls == 0


async def test_an_update_lets_it_begin_again_with_the_new_weights(tied: Pair) -> None:
    tasks = [
        asyncio.create_task(chunks_of(tied, masked(ENDLESS, max_tokens=400), f"g000000-r{index}-a0-c0"))
        for index in range(2)
    ]
    before = (await tied.cell.status()).generated_tokens
    await until_generated(tied, before + 20)
    version = await _publish(tied)
    for (chunk,) in await asyncio.gather(*tasks):
        assert (chunk.version, chunk.finish_reason, len(chunk.token_ids)) == (version, "length", 400)
        assert chunk.text == tied.tokenizer.decode(chunk.token_ids, skip_special_tokens=True)
        assert chunk.text.lstrip().startswith("[")


async def until_generated(tied: Pair, num_tokens: int) -> None:
    async with asyncio.timeout(30):
        while (await tied.cell.status()).generated_tokens < num_tokens:  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.01)


async def test_a_drained_cell_gives_it_back_with_no_token(tied: Pair) -> None:
    task = asyncio.create_task(chunks_of(tied, masked(ENDLESS, max_tokens=900)))
    before = (await tied.cell.status()).generated_tokens
    await until_generated(tied, before + 10)
    assert await tied.cell.drain(timeout_s=0) == (0, 1)
    (chunk,) = await task
    assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ((), "", "abort")
    await tied.cell.admit()


async def test_it_cannot_go_on_behind_tokens(tied: Pair) -> None:
    with pytest.raises(RequestError, match="cannot go on"):
        await ask(tied.cell, masked(SCHEMA), generated=(5, 6))


async def test_the_last_chunk_says_which_stop_string_ended_an_answer(tied: Pair) -> None:
    free = Sampling(temperature=0.0, max_tokens=60)
    text = "".join(chunk.text for chunk in await chunks_of(tied, free))
    stop = text[20:24]
    chunks = await chunks_of(tied, Sampling(temperature=0.0, max_tokens=60, stop=("\x00", stop)))
    assert [chunk.stop_string for chunk in chunks] == [""] * (len(chunks) - 1) + [stop]
    assert chunks[-1].finish_reason == "stop"
    assert {chunk.stop_string for chunk in await chunks_of(tied, free)} == {""}
    generated = tuple(token for chunk in chunks for token in chunk.token_ids)
    request = GenerateRequest("g000000-r0-a0-c0", "g000000-r0", Sampling(stop=(stop,)), generated)
    (again,) = [chunk async for chunk in tied.cell.generate(request, np.asarray(PROMPT, dtype=np.int32))]
    assert (again.finish_reason, again.stop_string) == ("stop", stop)
