"""Qwen Code, streaming, over all three APIs. Nothing that it sends names a session or an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, compact, do_the_task, outlive_a_cut

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("auth_type", ["openai", "openai-responses", "anthropic"])
async def test_qwen_code_does_the_task_with_two_subagents_known_by_content(tmp_path: Path, auth_type: str) -> None:
    recorded = await do_the_task(
        lambda world: clients.qwen_code(world.url, world.key, TASK, auth_type),
        Script(num_helpers=2),
        tmp_path,
        api=auth_type,
    )
    assert {call.agent_id for call in recorded.calls} == {""}


async def test_qwen_code_has_a_cut_answer_gone_on_with(tmp_path: Path) -> None:
    """It shows the beginning that it has and asks for the rest, then makes one message of both: what was sampled
    before the cut is in no stored call, and the message is new to the tree."""
    await outlive_a_cut(
        lambda world: clients.qwen_code(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="openai",
        call_timeout_s=4,
        num_left_behind=1,
    )


async def test_qwen_code_compacts_when_a_prompt_is_too_long(tmp_path: Path) -> None:
    """The turn behind the summary stands alone: the one after it has other reminders in its first message."""
    await compact(
        lambda world: clients.qwen_code(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="openai",
        num_conversations=3,
        num_main_calls=len(Script().main_steps),
    )
