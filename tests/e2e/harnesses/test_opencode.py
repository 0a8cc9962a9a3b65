"""opencode, streaming, over all three APIs: a subagent whose session names its parent's, and a title beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trajectory.types import CallRole
from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, compact, do_the_task, outlive_a_cut

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("package", ["@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"])
async def test_opencode_does_the_task_with_two_subagents_and_a_title(tmp_path: Path, package: str) -> None:
    recorded = await do_the_task(
        lambda world: clients.opencode(world.url, world.key, TASK, package),
        Script(num_helpers=2),
        tmp_path,
        api=package,
        num_side_calls=1,
    )
    assert {call.agent_id for call in recorded.of_role(CallRole.MAIN)} == {""}
    helpers = {call.agent_id for call in recorded.of_role(CallRole.SUBAGENT)}
    assert len(helpers - {""}) == 2


@pytest.mark.parametrize("loses", [2, 3], ids=["in_its_reasoning", "behind_some_text"])
async def test_opencode_asks_again_for_a_cut_answer(tmp_path: Path, loses: int) -> None:
    """It keeps what it had of the cut answer as a message in front of the whole one."""
    await outlive_a_cut(
        lambda world: clients.opencode(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="@ai-sdk/openai-compatible",
        loses=loses,
        num_side_calls=1,
        call_timeout_s=4,
    )


async def test_opencode_compacts_when_a_prompt_is_too_long(tmp_path: Path) -> None:
    """What is summed up is in one message, so the script begins anew; the refusal is in the harness's exit code."""
    await compact(
        lambda world: clients.opencode(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="@ai-sdk/openai-compatible",
        num_conversations=4,
        num_main_calls=len(Script().main_steps) + 2,
        num_side_calls=1,
        exit_code=1,
    )
