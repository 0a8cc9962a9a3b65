"""Calls to a rollout cell, collected for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from services.common.ids import CellId, JobId
from services.common.types import VersionSpan
from services.rollout.cell import RolloutCell
from services.rollout.config import CellsConfig, EngineConfig, RolloutConfig
from services.rollout.engine import engine_env
from services.rollout.types import GenerateRequest, Sampling
from tests.integration.publisher import Publisher

TOKEN = "token"
PROMPT = tuple(range(100, 140))


@dataclass
class Answer:
    """Everything that a call's chunks said so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str | None = None

    def versions(self) -> list[int]:
        """The version of each token."""
        return [span.version for span in self.spans for _ in range(span.num_tokens)]


async def ask(
    cell: RolloutCell,
    sampling: Sampling,
    *,
    call_id: str = "g000000-r0-a0-c0",
    prompt: Sequence[int] = PROMPT,
    generated: Sequence[int] = (),
    answer: Answer | None = None,
) -> Answer:
    """Make a call and collect it, into ``answer`` if one is given."""
    answer = answer if answer is not None else Answer()
    request = GenerateRequest(call_id, call_id.rpartition("-a")[0], sampling, tuple(generated))
    async for chunk in cell.generate(request, np.asarray(prompt, dtype=np.int32)):
        assert answer.finish_reason is None, "a chunk behind the last one"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        answer.ids += chunk.token_ids
        answer.logprobs += chunk.logprobs
        answer.text += chunk.text
        answer.finish_reason = chunk.finish_reason
        if answer.spans and answer.spans[-1].version == chunk.version:
            answer.spans[-1] = VersionSpan(chunk.version, answer.spans[-1].num_tokens + len(chunk.token_ids))
        elif chunk.token_ids:
            answer.spans.append(VersionSpan(chunk.version, len(chunk.token_ids)))
    return answer


def tiny_config(**engine: Any) -> RolloutConfig:
    return RolloutConfig(
        engine=EngineConfig(max_model_len=1024, max_num_seqs=8, kv_cache_bytes=32 << 20, **engine),
        cells=CellsConfig(slots_per_cell=8),
    )


@dataclass
class Pair:
    """A cell with an engine, and a publisher of the same model."""

    cell: RolloutCell
    publisher: Publisher
    tokenizer: Any
    model_path: Path


@asynccontextmanager
async def paired(model_path: Path, config: RolloutConfig, **environment: str) -> AsyncIterator[Pair]:
    """A started cell, STALE as every new one, with its publisher."""
    with engine_environment(config, **environment), Publisher(model_path) as publisher:
        cell = RolloutCell(JobId("test"), CellId("cell-0"), config, str(model_path), TOKEN)
        await cell.start()
        try:
            yield Pair(cell, publisher, AutoTokenizer.from_pretrained(model_path), model_path)
        finally:
            await cell.stop()


@contextmanager
def engine_environment(config: RolloutConfig, **further: str) -> Iterator[None]:
    """The environment that a job gives its cells, for as long as an engine lives in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**engine_env(config, 0), **further}.items():
            patch.setenv(name, value)
        yield
