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
from tests.e2e.harnesses.model import FINAL, TASK, Script
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


async def do_the_task(
    client: Callable[[World], Client],
    script: Script,
    folder: Path,
    *,
    api: str,
    num_side_calls: int = 0,
    timeout_s: float = 120,
) -> tuple[Ended, Recorded]:
    """From the first request to the last: the work is done, said to be done, and recorded as it went."""
    async with harness_world(folder, script) as world:
        made = client(world)
        began_s = time.monotonic()
        ended = await start(made, folder, timeout_s=timeout_s)
        seconds = time.monotonic() - began_s
        num_agents = 2 if script.can_delegate else 1
        recorded = world.check(num_conversations=num_agents + num_side_calls)
        expected = Counter({CallRole.MAIN: len(script.main_steps)})
        expected += Counter({CallRole.SUBAGENT: NUM_SUB_CALLS if script.can_delegate else 0})
        expected += Counter({CallRole.SIDE: num_side_calls})
        assert recorded.roles == expected, world.describe()
        assert len(world.cell.generated) == len(recorded.calls), "no call was made twice or in vain"
    check_work(ended)
    assert ended.exit_code == 0, ended
    REPORT.append(row(made.name, api, recorded, seconds))
    return ended, recorded


def check_work(ended: Ended) -> None:
    """The files are there, and the harness passed the model's last words on."""
    for name, content in DONE.items():
        assert ended.file(name) == content, f"{name}\n{ended}"
    assert FINAL in ended.output, ended


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


__all__ = ["DONE", "HEADER", "REPORT", "TASK", "check_work", "do_the_task", "row"]
