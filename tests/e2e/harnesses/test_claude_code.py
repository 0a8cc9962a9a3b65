"""Claude Code: Anthropic Messages, streaming, with a subagent that its headers name."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trajectory.types import CallRole
from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, compact, do_the_task, outlive_a_cut

pytestmark = pytest.mark.harness


async def test_claude_code_does_the_task_with_two_subagents(tmp_path: Path) -> None:
    recorded = await do_the_task(
        lambda world: clients.claude_code(world.url, world.key, TASK),
        Script(num_helpers=2),
        tmp_path,
        api="Anthropic Messages",
    )
    assert {call.agent_id for call in recorded.of_role(CallRole.MAIN)} == {""}
    helpers = {call.agent_id for call in recorded.of_role(CallRole.SUBAGENT)}
    assert len(helpers - {""}) == 2


async def test_claude_code_asks_again_for_a_cut_answer(tmp_path: Path) -> None:
    await outlive_a_cut(
        lambda world: clients.claude_code(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="Anthropic Messages",
        call_timeout_s=4,
    )


async def test_claude_code_compacts_when_a_prompt_is_too_long(tmp_path: Path) -> None:
    await compact(
        lambda world: clients.claude_code(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="Anthropic Messages",
        too_long=2,
        num_conversations=2,
        num_main_calls=len(Script().main_steps),
    )
