"""Claude Code: Anthropic Messages, streaming, with a subagent that its headers name."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trajectory.types import CallRole
from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, do_the_task

pytestmark = pytest.mark.harness


async def test_claude_code_does_the_task_with_a_subagent(tmp_path: Path) -> None:
    _, recorded = await do_the_task(
        lambda world: clients.claude_code(world.url, world.key, TASK),
        Script(can_delegate=True),
        tmp_path,
        api="Anthropic Messages",
    )
    assert {call.agent_id for call in recorded.of_role(CallRole.MAIN)} == {""}
    assert "" not in {call.agent_id for call in recorded.of_role(CallRole.SUBAGENT)}
