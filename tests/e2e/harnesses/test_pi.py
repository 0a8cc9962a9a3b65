"""pi, streaming, over all three APIs. It names no session and no agent, and has no subagents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harnesses import clients
from tests.e2e.harnesses.model import Script
from tests.e2e.harnesses.story import TASK, compact, do_the_task, outlive_a_cut

DIALECTS = ["openai-completions", "openai-responses", "anthropic-messages"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_does_the_task(tmp_path: Path, dialect: str) -> None:
    await do_the_task(
        lambda world: clients.pi(world.url, world.key, TASK, dialect), Script(), tmp_path, api=dialect, timeout_s=120
    )


@pytest.mark.harness
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_of_before_1_0_does_the_task(tmp_path: Path, dialect: str) -> None:
    await do_the_task(
        lambda world: clients.pi(world.url, world.key, TASK, dialect, "pi-0.73"),
        Script(),
        tmp_path,
        api=dialect,
        timeout_s=120,
    )


async def test_pi_without_reasoning_and_with_the_key_in_its_url(tmp_path: Path) -> None:
    await do_the_task(
        lambda world: clients.pi(f"{world.url}/run/{world.key}", "none", TASK, "openai-completions"),
        Script(reasons=False),
        tmp_path,
        api="openai-completions, key in the URL",
        timeout_s=120,
    )


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_takes_no_cut_answer_for_a_whole_one(tmp_path: Path, dialect: str) -> None:
    await outlive_a_cut(
        lambda world: clients.pi(world.url, world.key, TASK, dialect),
        Script(),
        tmp_path,
        api=dialect,
        call_timeout_s=1,
        timeout_s=120,
    )


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_compacts_when_a_prompt_is_too_long(tmp_path: Path, dialect: str) -> None:
    """It takes up the last turns as they were, which its summary does not count: one is made again."""
    settings = {"compaction": {"enabled": True, "reserveTokens": 1000, "keepRecentTokens": 60}}
    await compact(
        lambda world: clients.pi(world.url, world.key, TASK, dialect, settings=settings),
        Script(),
        tmp_path,
        api=dialect,
        num_conversations=3,
        num_main_calls=len(Script().main_steps) + 1,
        timeout_s=120,
    )
