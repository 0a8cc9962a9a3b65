"""A job's folder with a store: runs with compaction, subagent, retry and a long conversation, settled by a shard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from services.proxy.types import CanonicalRequest, Message
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import Outcome
from tests.unit.trajectory.world import ask, call, make_result, make_spec, open_shard, run_to_end

JOB_ID = "job-of-this-test"
RICH = "g000000-r0"
SUMMARY = "so far: the files were read, the failing test is understood, its fix is still to be written"
DELEGATED = "look through the folder with the documentation and report which pages name the option"
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def request(*messages: Message, tools: tuple[dict[str, object], ...] = (TOOL,)) -> CanonicalRequest:
    return CanonicalRequest("openai_chat", "policy", messages, tools=tools)


def conversation(system: str, *contents: str) -> tuple[Message, ...]:
    return (
        Message("system", system),
        *(Message("assistant" if at % 2 else "user", content) for at, content in enumerate(contents)),
    )


async def rich_run(shard: TrajectoryShard, run_id: str = RICH) -> None:
    """Main conversation with two ways on and a retry; a subagent; a compaction, and what went on from it."""
    key = await shard.open_attempt(run_id, 0)

    async def say(request: CanonicalRequest, text: str, **changes: object) -> None:
        await call(shard, run_id, key, request, text, **changes)

    main = "you are the main agent"
    await say(request(*conversation(main, "fix the test")), "abandoned answer")
    await say(request(*conversation(main, "fix the test")), f"I delegate: {DELEGATED}")
    await say(request(*conversation("you are a subagent", DELEGATED), tools=()), "two pages name it")
    history = ["fix the test", f"I delegate: {DELEGATED}", "two pages name it"]
    await say(request(*conversation(main, *history)), "now the code", version=4)
    await say(request(*conversation(main, *history, "now the code", "one way")), "first way", version=4)
    await say(request(*conversation(main, *history, "now the code", "another way")), "second way\U0001f600", version=5)
    await say(
        request(*conversation(main, *history, "now the code", "another way", "second way\U0001f600", "sum it up")),
        SUMMARY,
        version=5,
    )
    await say(request(*conversation(main, f"go on from this: {SUMMARY}")), "all is done", version=5)
    await shard.close_attempt(run_id, 0)
    scored = replace(make_result(run_id, 1.0), evaluated_ref="commit 3f2a", score_details={"tests": {"passed": 3}})
    await shard.finish_run(scored)


async def long_run(shard: TrajectoryShard, run_id: str, num_calls: int) -> None:
    """A straight conversation."""
    key = await shard.open_attempt(run_id, 0)
    contents = ["go"]
    for at in range(num_calls):
        await call(shard, run_id, key, ask(*contents), f"answer {at}")
        contents += [f"answer {at}", f"and {at}"]
    await shard.close_attempt(run_id, 0)
    await shard.finish_run(make_result(run_id, 0.0))


def _write_job(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["/opt/harness/mini-swe-agent", "run"]
    config = {"name": "policy", "rollout": {"harness": {"command": command}}}
    (folder / "job.json").write_text(json.dumps({"job_id": JOB_ID, "config": config}))


async def make_job(folder: Path, *, max_trajectories: int | None = 3, close: bool = True) -> TrajectoryShard:
    """Four groups: a ready one (rich and long run), one lost for equal rewards, a held-out one, an unfinished one."""
    _write_job(folder)
    config = TrajectoryConfig(max_trajectories=max_trajectories)
    shard = open_shard(folder / "trajectory", config=config)
    for index, is_eval in enumerate((False, False, True, False)):
        await shard.open_group(make_spec(index, is_eval=is_eval))
    await rich_run(shard)
    await long_run(shard, "g000000-r1", 12)
    for run_id in ("g000001-r0", "g000001-r1", "e000002-r0"):
        await run_to_end(shard, run_id, 0.5)
    await run_to_end(shard, "e000002-r1", None, Outcome.VERIFIER_FAILURE)
    for group_id in ("g000000", "g000001", "e000002"):
        await shard.finish_group(group_id)
    key = await shard.open_attempt("g000003-r0", 0)
    await call(shard, "g000003-r0", key, ask("do it"), "still at it")
    await shard.mark_trained(["g000000"], 7)
    if close:
        await shard.close()
    return shard
