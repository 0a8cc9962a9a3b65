"""Qwen Code: Chat Completions, streaming. Nothing that it sends names a session or an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, do_the_task

pytestmark = pytest.mark.harness


async def test_qwen_code_does_the_task_with_a_subagent_known_by_content(tmp_path: Path) -> None:
    _, recorded = await do_the_task(
        lambda world: clients.qwen_code(world.url, world.key, TASK),
        Script(can_delegate=True),
        tmp_path,
        api="Chat Completions",
    )
    assert {call.agent_id for call in recorded.calls} == {""}
