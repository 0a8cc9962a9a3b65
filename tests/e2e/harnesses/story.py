"""A harness does the task through the live proxy, and everything that must hold then is checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.install_harnesses import NPM_HARNESSES
from services.trajectory.types import CallRole
from tests.e2e.harnesses.clients import Client, Ended, start
from tests.e2e.harnesses.model import FINAL, HELPERS, TASK, Script
from tests.e2e.harnesses.world import Recorded, World, harness_world

DONE = {"tide.txt": "one\ntwo\n", "count.txt": "2\n", "odd.txt": 'a <b> & "c"\n', "sub.txt": "sub\n"}
"""The agent's work."""
NUM_SUB_CALLS = 3
_MINI_REQUIREMENTS = Path(__file__).parents[3] / "examples" / "harness" / "mini-swe-agent" / "requirements.txt"


@dataclass(frozen=True)
class Told:
    """One row of the report."""

    harness: str
    api: str
    roles: Mapping[CallRole, int]
    num_conversations: int
    num_prompt_tokens: int
    num_new_tokens: int
    """Prompt tokens that no earlier call had."""
    num_output_tokens: int
    seconds: float

    def __str__(self) -> str:
        roles = " + ".join(f"{number} {role}" for role, number in self.roles.items())
        return (
            f"| {self.harness} | {version(self.harness)} | {self.api} | {roles} | {self.num_conversations} | "
            f"{self.num_prompt_tokens:,} | {self.num_new_tokens:,} | {self.num_output_tokens:,} | {self.seconds:.1f} |"
        )


REPORT: list[Told] = []
HEADER = """\
| harness | version | API | calls by role | conversations | prompt tokens | of them new | sampled tokens | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def version(name: str) -> str:
    """The version in which a harness is installed."""
    if name in NPM_HARNESSES:
        return NPM_HARNESSES[name].version
    pins = dict(line.split("==") for line in _MINI_REQUIREMENTS.read_text().split() if "==" in line)
    return pins["mini-swe-agent"]


def expected_roles(script: Script, num_side_calls: int = 0, num_summaries: int = 0) -> Counter[CallRole]:
    """The calls of a task that goes as the script has it."""
    return Counter(
        {
            CallRole.MAIN: len(script.main_steps),
            CallRole.MAIN_SUMMARY: num_summaries,
            CallRole.SUBAGENT: NUM_SUB_CALLS * script.num_helpers,
            CallRole.SIDE: num_side_calls,
        }
    )


async def do_the_task(
    client: Callable[[World], Client],
    script: Script,
    folder: Path,
    *,
    api: str,
    num_side_calls: int = 0,
    timeout_s: float = 240,
) -> Recorded:
    """From the first request to the last: the work is done, said to be done, and recorded as it went."""
    async with harness_world(folder, script) as world:
        ended, seconds = await run(client(world), folder, timeout_s)
        recorded = world.check(num_conversations=1 + script.num_helpers + num_side_calls)
        assert recorded.roles == +expected_roles(script, num_side_calls), world.describe()
        assert len(world.cell.generated) == len(recorded.calls), "no call was made twice or in vain"
    check_work(ended)
    for word in HELPERS[: script.num_helpers]:
        assert ended.file(f"{word}.txt") == f"{word}\n"
    REPORT.append(row(client(world).name, api, recorded, seconds))
    return recorded


async def outlive_a_cut(
    client: Callable[[World], Client],
    script: Script,
    folder: Path,
    *,
    api: str,
    loses: int = 2,
    num_side_calls: int = 0,
    is_streaming: bool = True,
    num_left_behind: int = 0,
    call_timeout_s: float = 2,
    timeout_s: float = 240,
) -> Recorded:
    """A cell is lost for good in the middle of an answer. The harness asks again, and nothing is sampled twice."""
    async with harness_world(folder, script, loses=loses, call_timeout_s=call_timeout_s) as world:
        ended, seconds = await run(client(world), folder, timeout_s)
        recorded = world.check(num_conversations=1 + num_side_calls, num_left_behind=num_left_behind)
        failed = [one for one in world.model_posts() if one.status != 200 or not one.is_whole]
        assert [(one.status == 200, one.is_whole) for one in failed] == [(is_streaming, not is_streaming)]
        assert recorded.roles == +expected_roles(script, num_side_calls), world.describe()
    check_work(ended)
    REPORT.append(row(client(world).name, f"{api}, after a cut answer", recorded, seconds))
    return recorded


async def compact(
    client: Callable[[World], Client],
    script: Script,
    folder: Path,
    *,
    api: str,
    num_conversations: int,
    num_main_calls: int,
    too_long: int = 3,
    num_side_calls: int = 0,
    exit_code: int = 0,
    timeout_s: float = 240,
) -> Recorded:
    """A prompt is too long. The harness has a summary made, and goes on from that."""
    async with harness_world(folder, script, too_long=too_long) as world:
        ended, seconds = await run(client(world), folder, timeout_s)
        recorded = world.check(num_conversations=num_conversations)
        expected = expected_roles(script, num_side_calls, num_summaries=1)
        expected[CallRole.MAIN] = num_main_calls
        assert recorded.roles == +expected, world.describe()
        refused = [one.status for one in world.model_posts() if one.status != 200]
        assert refused == [400]
    check_work(ended, exit_code)
    REPORT.append(row(client(world).name, f"{api}, with a compaction", recorded, seconds))
    return recorded


async def run(client: Client, folder: Path, timeout_s: float) -> tuple[Ended, float]:
    """How a harness ended, and after how many seconds."""
    began_s = time.monotonic()
    ended = await start(client, folder, timeout_s=timeout_s)
    return ended, time.monotonic() - began_s


def check_work(ended: Ended, exit_code: int = 0) -> None:
    """The files are there, and the harness passed the model's last words on."""
    for name, content in DONE.items():
        assert ended.file(name) == content, f"{name}\n{ended}"
    assert FINAL in ended.output, ended
    assert ended.exit_code == exit_code, ended


def row(harness: str, api: str, recorded: Recorded, seconds: float) -> Told:
    """A row of the report."""
    by_id = {call.call_id: call for call in recorded.calls}
    num_prompt = sum(len(call.prompt_ids) for call in recorded.calls)
    parents = [by_id[call.parent_call_id] for call in recorded.calls if call.parent_call_id is not None]
    num_known = sum(len(parent.prompt_ids) + len(parent.output_ids) for parent in parents)
    return Told(
        harness=harness,
        api=api,
        roles=recorded.roles,
        num_conversations=len(recorded.openings),
        num_prompt_tokens=num_prompt,
        num_new_tokens=num_prompt - num_known,
        num_output_tokens=sum(len(call.output_ids) for call in recorded.calls),
        seconds=seconds,
    )


__all__ = ["DONE", "HEADER", "REPORT", "TASK", "check_work", "compact", "do_the_task", "outlive_a_cut", "row"]
