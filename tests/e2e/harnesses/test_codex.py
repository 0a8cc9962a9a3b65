"""Codex: Responses, streaming, with a subagent that its headers name."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trajectory.types import CallRole
from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, check_work, do_the_task, expected_roles, outlive_a_cut, run
from tests.e2e.harnesses.world import harness_world

pytestmark = pytest.mark.harness


async def test_codex_does_the_task_with_two_subagents(tmp_path: Path) -> None:
    recorded = await do_the_task(
        lambda world: clients.codex(world.url, world.key, TASK),
        Script(num_helpers=2, waits=True),
        tmp_path,
        api="Responses",
    )
    assert {call.agent_id for call in recorded.of_role(CallRole.MAIN)} == {""}
    helpers = {call.agent_id for call in recorded.of_role(CallRole.SUBAGENT)}
    assert len(helpers - {""}) == 2


async def test_codex_asks_again_for_a_cut_answer(tmp_path: Path) -> None:
    await outlive_a_cut(
        lambda world: clients.codex(world.url, world.key, TASK),
        Script(),
        tmp_path,
        api="Responses",
        call_timeout_s=4,
    )


async def test_codex_compacts_before_a_prompt_is_too_long(tmp_path: Path) -> None:
    """By the usage that it is told; an error for a prompt that is too long ends it. Each turn is past this limit, the
    first included, so there is a summary in front of every other one."""
    script = Script()
    async with harness_world(tmp_path, script) as world:
        limit = "model_auto_compact_token_limit = 1000"
        ended, _ = await run(clients.codex(world.url, world.key, TASK, limit), tmp_path, 120)
        num_summaries = len(script.main_steps) - 1
        recorded = world.check(num_conversations=len(script.main_steps) + num_summaries)
        assert recorded.roles == +expected_roles(script, num_summaries=num_summaries), world.describe()
    check_work(ended)


async def test_codex_ends_when_a_prompt_is_too_long(tmp_path: Path) -> None:
    async with harness_world(tmp_path, Script(), too_long=2) as world:
        ended, _ = await run(clients.codex(world.url, world.key, TASK), tmp_path, 60)
        assert len(world.check(num_conversations=1).calls) == 2
    assert "ran out of room" in ended.output
    assert ended.exit_code != 0
