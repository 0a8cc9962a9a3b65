"""Tool calls and reasoning on their way through the proxy: the official client gets them, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.proxy.parsing.vllm_parser import VllmParser, VllmParsers
from services.rollout.types import GenerateChunk, GenerateRequest
from tests.unit.proxy.conftest import JOB, Serve
from tests.unit.proxy.fakes import FakeBackends, FakeCell, FakeShard
from tests.unit.proxy.formats import CALLS, TOOLS, WRITERS, marked_tokenizer

ANSWER = f"<think>\nI look first.\n</think>\n\nLet me see.\n{WRITERS['hermes'](CALLS)}"
CUT = ANSWER[: -len("</tool_call>") - 5]


@dataclass
class ScriptedCell(FakeCell):
    """Says a text, three characters a token."""

    text: str = ANSWER

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        for start in range(0, len(self.text), 3):
            reason = self.finish_reason if start + 3 >= len(self.text) else None
            yield GenerateChunk((start,), (-0.5,), self.text[start : start + 3], 1, reason)


@pytest.fixture(scope="module")
def parser() -> VllmParser:
    vllm = VllmParsers("", "hermes", "qwen3", lambda _path: marked_tokenizer())
    return VllmParser(vllm, "hermes", "qwen3")


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": list(TOOLS), **more}


async def test_the_official_client_gets_reasoning_text_and_calls(serve: Serve, parser: VllmParser) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=ScriptedCell(finish_reason="stop")), parser) as server:
        whole = (await server.openai().chat.completions.create(**ask())).choices[0]
        async with server.openai().chat.completions.stream(**ask()) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "\n\nLet me see.\n"
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == list(CALLS)
    first, second = (record.answer for record in shard.records)
    assert first is not None
    assert second is not None
    assert first.reasoning == second.reasoning == "\nI look first.\n"
    assert [call.arguments for call in first.tool_calls] == [arguments for _, arguments in CALLS]


async def test_a_call_that_was_cut_is_text_and_counted(serve: Serve, parser: VllmParser) -> None:
    before = _num_malformed()
    async with serve(FakeBackends(FakeShard(), a=ScriptedCell(text=CUT)), parser) as server:
        choice = (await server.openai().chat.completions.create(**ask())).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == CUT.partition("</think>")[2]
    assert _num_malformed() == before + 2


def _num_malformed() -> float:
    return REGISTRY.get_sample_value("tidegate_malformed_tool_calls_total", {"job": str(JOB)}) or 0.0
