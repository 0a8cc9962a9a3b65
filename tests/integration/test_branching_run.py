"""A real harness in a real sandbox that delegates, compacts and retries: the tree, the selection and the export."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.rollout.types import GenerateChunk, GenerateRequest
from services.trajectory.config import TrajectoryConfig
from services.trajectory.export import ExportFilter
from services.trajectory.exporting import Format, export_runs
from services.trajectory.outcome import Outcome
from services.trajectory.paths import Fate, calls_of_run
from services.trajectory.source import StoreSource
from services.trajectory.types import CallRole
from tests.integration.outcome_world import GROUP, RUN, Model, World, outcome_world
from tests.unit.trajectory.world import END

HARNESS = '''\
import json, os, urllib.request

def ask(*contents):
    """The last content says what the model shall answer: what stands behind its first SAY:."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["BASE_URL"] + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]

agent, searcher = "You are an agent that edits code.", "You search files and report."
task = "Find every caller of parse_config and list the files. SAY:a.py and b.py call it"
asked = "fix it SAY:I ask a helper: " + task
delegating = ask(agent, asked)
report = ask(searcher, task)
ask(searcher, task, report, "look once more SAY:nothing more")
editing = ask(agent, asked, delegating, report + " SAY:I edit a.py")
wanted = "Summarise. SAY:The user wants parse_config renamed. a.py is done, b.py is still to be edited."
summary = ask(agent, asked, delegating, report + " SAY:I edit a.py", editing, wanted)
fresh = "Go on from this summary: " + summary + " SAY:b.py is done"
ask(agent, fresh)  # its answer is lost on the way
done = ask(agent, fresh)
ask(agent, fresh, done, "anything else? SAY:no")
open("answer.txt", "w").write("hello")
'''


class Echo(Model):
    """A cell whose model says what the last message tells it to."""

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        ids = [int(one) for one in prompt_ref]
        start = max(at for at, one in enumerate(ids) if one == 2)  # the last user message
        told = "".join(chr(one) for one in ids[start + 1 : ids.index(END, start)])
        for character in told.split("SAY:", 1)[1]:
            yield GenerateChunk((ord(character),), (-0.25,), character, self.version)
        yield GenerateChunk((END,), (-0.25,), "", self.version, "stop")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    config = TrajectoryConfig(max_trajectories=2)
    async with outcome_world(tmp_path, cell=Echo(), config=config) as made:
        yield made


async def test_a_run_that_branches_is_one_tree_whose_paths_are_taken_by_role(world: World, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "harness.py").write_text(HARNESS)
    result = await world.attempt(("python3", "/config/harness.py"))
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.5), result.detail
    group = await world.settled()
    assert group.ready

    (tmp_path / "trajectory").symlink_to(tmp_path / "store")
    source = StoreSource(tmp_path, "job-1")
    summary, rows = source.read_calls(RUN)
    run = calls_of_run(rows, summary.selection)
    main, main_summary, subagent = CallRole.MAIN, CallRole.MAIN_SUMMARY, CallRole.SUBAGENT
    assert [run.roles[row.record.call_id] for row in rows] == [
        *(main, subagent, subagent, main, main_summary, main, main, main),
    ]
    assert [run.fates[row.record.call_id] for row in rows] == [
        *(Fate.TARGET, Fate.LEFT_OUT, Fate.LEFT_OUT, Fate.TARGET, Fate.TARGET),
        *(Fate.SUPERSEDED, Fate.TARGET, Fate.TARGET),
    ]
    selection = summary.selection
    assert selection is not None
    assert selection.leaf_roles == (main, main_summary)
    assert selection.left_out == {subagent: sum(len(row.record.output_ids) for row in rows[1:3])}
    num_sampled = sum(len(row.record.output_ids) for row in rows)
    assert run.num_tokens - num_sampled == sum(run.num_fresh_tokens.values())

    out = tmp_path / "runs.jsonl"
    export_runs(source, ExportFilter(run_ids=(RUN,)), out, Format.JSONL)
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    masked = [[one for one, bit in zip(row["token_ids"], row["target_mask"], strict=True) if bit] for row in exported]
    texts = ["".join(chr(one) for one in ids if one != END) for ids in masked if ids]
    said = [row.record.output_text for row in rows if run.fates[row.record.call_id] is Fate.TARGET]
    assert sorted("".join(texts)) == sorted("".join(said))  # each sampled token is a target once, over all rows
    assert GROUP.group_id == exported[0]["group_id"]
