"""The proxy with the real trajectory shard: what a harness sees complete is stored, and later prompts build on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from services.proxy.backends import Shard
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.store import read_run
from services.trajectory.types import GroupSpec
from tests.unit.proxy.conftest import Serve
from tests.unit.proxy.fakes import RUN, FakeBackends, FakeCell, FakeShard
from tests.unit.proxy.templates import CHATML, renderer

ANSWER = "```bash\necho blue > x\n```"
IM_END = 2


class Model(FakeCell):
    """A cell whose model always answers the same, token by token, and ends its turn."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        self.prompts.append(prompt_ref)
        using = renderer(CHATML)
        for token in using.encode(ANSWER):
            yield GenerateChunk((token,), (-0.1,), using.decode([token]), self.version)
        yield GenerateChunk((IM_END,), (-0.1,), "", self.version, "stop")


@pytest.fixture
async def shard(tmp_path: Path) -> AsyncIterator[TrajectoryShard]:
    made = TrajectoryShard(
        "job-1", 0, TrajectoryConfig(), str(tmp_path), "", Sampling(max_tokens=64), 400, renderer=renderer(CHATML)
    )
    yield made
    await made.close()


async def test_second_call_is_built_on_the_tokens_of_the_first(
    serve: Serve, shard: TrajectoryShard, tmp_path: Path
) -> None:
    await shard.open_group(GroupSpec("g000001", "task", (RUN, "g000001-r1"), version=0))
    key = await shard.open_attempt(RUN, 0)
    model = Model()
    backends = FakeBackends(FakeShard(), a=model)
    backends.shard_for = lambda run_id: cast(Shard, shard)  # type: ignore[method-assign]
    messages: Any = [{"role": "user", "content": "make x"}]

    async with serve(backends) as server:
        client = server.openai(key)
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": "the output was empty"}]
        second = await client.chat.completions.create(
            model="m", messages=messages, temperature=0.3, extra_body={"wibble": 1}
        )
        messages += [{"role": "user", "content": "a file " * 400}]
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(model="m", messages=messages)
        await shard.close_attempt(RUN, 0)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=messages[:1])

    using = renderer(CHATML)
    first_prompt, second_prompt = (prompt.tolist() for prompt in model.prompts)
    assert second_prompt[: len(first_prompt)] == first_prompt
    assert using.decode(second_prompt) == (
        "<|im_start|>user\nmake x<|im_end|>\n<|im_start|>assistant\n" + ANSWER + "<|im_end|>\n"
        "<|im_start|>user\nthe output was empty<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(second_prompt)
    assert second.usage.completion_tokens == len(using.encode(ANSWER)) + 1
    assert too_long.value.code == "context_length_exceeded"
    (summary,) = [run for run in await shard.run_summaries() if run.run_id == RUN]
    assert summary.num_calls == 2
    _, calls = read_run(str(tmp_path), RUN)
    assert calls[1].requested_sampling == {"temperature": 0.3}
    assert calls[1].request["unused_fields"] == ["wibble"]
    assert [message["content"] for message in calls[1].request["messages"]] == [
        "make x",
        ANSWER,
        "the output was empty",
    ]
