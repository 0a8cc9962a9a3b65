"""pi, streaming, over all three APIs. It names no session and no agent, and has no subagents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, do_the_task

DIALECTS = ["openai-completions", "openai-responses", "anthropic-messages"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_does_the_task(tmp_path: Path, dialect: str) -> None:
    await do_the_task(
        lambda world: clients.pi(world.url, world.key, TASK, dialect), Script(), tmp_path, api=dialect, timeout_s=60
    )


@pytest.mark.harness
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_of_before_1_0_does_the_task(tmp_path: Path, dialect: str) -> None:
    await do_the_task(
        lambda world: clients.pi(world.url, world.key, TASK, dialect, "pi-0.73"),
        Script(),
        tmp_path,
        api=dialect,
        timeout_s=60,
    )


async def test_pi_without_reasoning_and_with_the_key_in_its_url(tmp_path: Path) -> None:
    await do_the_task(
        lambda world: clients.pi(f"{world.url}/run/{world.key}", "none", TASK, "openai-completions"),
        Script(reasons=False),
        tmp_path,
        api="openai-completions, key in the URL",
        timeout_s=60,
    )
