"""mini-swe-agent, not streaming, through LiteLLM over all three APIs. It names no session, and has no subagents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, do_the_task, outlive_a_cut

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


DIALECTS = pytest.mark.parametrize(
    ("model", "model_class"),
    [("openai/policy", "litellm"), ("openai/policy", "litellm_response"), ("anthropic/policy", "litellm")],
    ids=["chat", "responses", "anthropic"],
)


@DIALECTS
async def test_mini_does_the_task(tmp_path: Path, model: str, model_class: str) -> None:
    await do_the_task(
        lambda world: clients.mini(world.url, world.key, TASK, model, model_class),
        Script(finish_command=SUBMIT),
        tmp_path,
        api=f"{model}, {model_class}",
        timeout_s=120,
    )


@pytest.mark.harness
@DIALECTS
async def test_mini_asks_again_for_an_answer_that_was_lost(tmp_path: Path, model: str, model_class: str) -> None:
    await outlive_a_cut(
        lambda world: clients.mini(world.url, world.key, TASK, model, model_class),
        Script(finish_command=SUBMIT),
        tmp_path,
        api=f"{model}, {model_class}",
        is_streaming=False,
    )
