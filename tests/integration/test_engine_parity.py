"""The engine computes what the trainer computes, before and after a large change of weights; a stale one is caught."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from services.common.errors import ConfigError, EngineError
from services.common.models import resolve_model
from services.common.types import CellState
from services.rollout.cell import RolloutCell
from services.rollout.config import EngineConfig
from services.rollout.engine import Engine
from services.rollout.types import Sampling
from tests.integration import stale_head
from tests.integration.calls import PROMPT, Answer, Pair, ask, paired, tiny_config
from tests.integration.publisher import logprobs
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

TEMPERATURE = 0.7
TOLERANCE = 1e-3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def untied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """The tiny model with a head of its own."""
    folder = tmp_path_factory.mktemp("models")
    tiny = resolve_model("tiny-qwen3", folder)
    config = AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3ForCausalLM(config).save_pretrained(folder / "untied")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "untied")
    async with paired(folder / "untied", tiny_config()) as pair:
        yield pair


async def _assert_parity(cell: RolloutCell, model: torch.nn.Module, version: int) -> list[float]:
    """The engine's log-probabilities of what it samples are Hugging Face's; returns them for one fixed call."""
    for index in range(3):
        sampling = Sampling(temperature=TEMPERATURE, max_tokens=24, seed=5)
        answer = await ask(cell, sampling, call_id=f"g000000-r{index}-a0-c0")
        expected = logprobs(model, [*PROMPT, *answer.ids], TEMPERATURE)[len(PROMPT) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert set(answer.versions()) == {version}
    return logprobs(model, PROMPT, TEMPERATURE)


async def _assert_parity_through_a_large_change(pair: Pair, version: int) -> None:
    before_model, after_model = pair.publisher.model(), pair.publisher.model(seed=1)
    first = await pair.cell.publish(pair.publisher.publish(version, before_model))
    assert (first.ok, first.reason) == (True, "")
    before = await _assert_parity(pair.cell, before_model, version)

    second = await pair.cell.publish(pair.publisher.publish(version + 1, after_model))
    assert (second.ok, second.reason, second.transport) == (True, "", "tcp")
    assert second.canary_abs_diff_max <= TOLERANCE
    assert second.size_bytes > 0
    after = await _assert_parity(pair.cell, after_model, version + 1)
    assert max(abs(x - y) for x, y in zip(before, after, strict=True)) > 1, "the change must be large to prove anything"


async def test_engine_and_trainer_agree_through_a_large_change_of_tied_weights(tied: Pair) -> None:
    await _assert_parity_through_a_large_change(tied, version=1000)


async def test_a_stale_packed_head_is_rejected_by_the_canary(tied: Pair, stale_head_marker: Path) -> None:
    assert (await tied.cell.publish(tied.publisher.publish(1002, tied.publisher.model()))).ok
    changed = tied.publisher.model(seed=2)
    manifest = tied.publisher.publish(1003, changed)

    with stale_head.forgetful(stale_head_marker):
        refused = await tied.cell.publish(manifest)

    assert not refused.ok
    assert refused.canary_abs_diff_max > 0.1
    assert "canary" in refused.reason
    assert "lm_head (packed copy)" in refused.reason, "reading the engine's tensors back shows it as well"
    status = await tied.cell.status()
    assert (status.state, status.version) == (CellState.STALE, 1002)
    answer = await ask(tied.cell, Sampling(max_tokens=4))
    assert (answer.ids, answer.finish_reason) == ([], "abort")

    assert (await tied.cell.publish(manifest)).ok
    await _assert_parity(tied.cell, changed, 1003)


async def test_a_tensor_that_is_missing_is_named(tied: Pair) -> None:
    model = tied.publisher.model(seed=4)
    manifest = tied.publisher.publish(1004, model)
    refused = await tied.cell.publish(dataclasses.replace(manifest, tensors=manifest.tensors[1:]))
    assert "model.embed_tokens.weight got nothing" in refused.reason
    assert (await tied.cell.publish(manifest)).ok
    await _assert_parity(tied.cell, model, 1004)


async def test_engine_and_trainer_agree_through_a_large_change_of_untied_weights(untied: Pair) -> None:
    await _assert_parity_through_a_large_change(untied, version=0)


async def test_a_kv_pool_beyond_the_memory_is_one_clear_error(untied: Pair) -> None:
    engine = Engine(EngineConfig(kv_cache_bytes=1 << 50), str(untied.model_path))
    with pytest.raises(EngineError, match="out of memory") as caught:
        await engine.start()
    assert "kv_cache_bytes" in caught.value.hint


async def test_an_unknown_engine_argument_is_named(untied: Pair) -> None:
    engine = Engine(EngineConfig(extra={"no_such_argument": 1}), str(untied.model_path))
    with pytest.raises(ConfigError, match="no_such_argument"):
        await engine.start()


async def test_an_engine_that_dies_is_loud(untied: Pair) -> None:
    answer = Answer()
    call = asyncio.create_task(ask(untied.cell, Sampling(max_tokens=900), answer=answer))
    await until(lambda: len(answer.ids) > 4)
    engines = [process for process in psutil.Process().children() if "EngineCore" in process.name()]
    max(engines, key=lambda process: process.create_time()).kill()
    with pytest.raises(EngineError):
        await asyncio.wait_for(call, 30)
    with pytest.raises(EngineError):
        await untied.cell.status()
    with pytest.raises(EngineError):
        await ask(untied.cell, Sampling(max_tokens=4))
