from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.trajectory.atif import AgentName, atif_documents
from services.trajectory.encoding import CallRow
from services.trajectory.export import ExportFilter, ScoreFacts
from services.trajectory.exporting import export_runs
from services.trajectory.files import Format
from services.trajectory.paths import calls_of_run
from services.trajectory.source import StoreSource
from services.trajectory.types import RunSelection
from tests.unit.trajectory.stored_job import RICH, make_job
from tests.unit.trajectory.test_draw import rows_for, selected
from tests.unit.trajectory.test_export import summary_of
from tests.unit.trajectory.trees import make_call

SCHEMA = json.loads((Path(__file__).parents[2] / "fixtures" / "atif" / "atif-v1.7.schema.json").read_text())


def check(document: dict[str, Any]) -> None:
    """The schema, and what it cannot say."""
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    for one in (document, *document.get("subagent_trajectories", ())):
        assert [step["step_id"] for step in one["steps"]] == list(range(1, len(one["steps"]) + 1))
        for step in one["steps"]:
            known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            results = step.get("observation", {}).get("results", ())
            assert {result["source_call_id"] for result in results if "source_call_id" in result} <= known
            if "timestamp" in step:
                datetime.fromisoformat(step["timestamp"])
    ids = [one["trajectory_id"] for one in document.get("subagent_trajectories", ())]
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("atif")
    asyncio.run(make_job(folder / "job"))
    agent = AgentName("mini-swe-agent", "2.1", "policy")
    export_runs(StoreSource(folder / "job"), ExportFilter(), folder / "out", Format.ATIF, agent=agent)
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "out").iterdir())}


def call_steps(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for one in (document, *document.get("subagent_trajectories", ())):
        yield from (step for step in one["steps"] if "metrics" in step)


def test_every_document_is_as_the_format_wants_it(documents: dict[str, dict[str, Any]]) -> None:
    assert len(documents) == 9  # a run without a call has none
    for document in documents.values():
        check(document)
    assert documents[f"{RICH}.json"]["agent"]["name"] == "mini-swe-agent"


def test_each_call_of_a_run_is_an_uncopied_step_exactly_once(documents: dict[str, dict[str, Any]]) -> None:
    steps = [step for name, one in documents.items() if name.startswith(RICH) for step in call_steps(one)]
    own = [step["extra"]["call_id"] for step in steps if not step.get("is_copied_context")]
    assert sorted(own) == [f"{RICH}-a0-c{at}" for at in range(8)]
    assert len(steps) > len(own)
    targets = sum(len(step["metrics"]["completion_token_ids"]) for step in steps if step["extra"]["is_target"])
    assert targets == documents[f"{RICH}.json"]["extra"]["n_run"] > 0


def test_what_goes_on_behind_a_compaction_is_a_continuation(documents: dict[str, dict[str, Any]]) -> None:
    first, *rest = (document for name, document in documents.items() if name.startswith(RICH) and "cont" not in name)
    assert not rest
    names = []
    document = first
    while "continued_trajectory_ref" in document:
        names.append(document["continued_trajectory_ref"])
        document = documents[names[-1]]
    assert names == [f"{RICH}.cont-1.json", f"{RICH}.cont-2.json"]
    assert first["steps"][2]["message"].startswith("I delegate")
    assert document["steps"][2]["message"] == "abandoned answer", "what a retry left behind comes last"
    assert documents[names[0]]["steps"][1]["message"].startswith("go on from this: ")
    roles = {one["extra"]["role"] for one in first["subagent_trajectories"]}
    assert roles == {"subagent", "main_summary"}


def test_answers_of_tools_are_observations_of_the_step_that_called_them() -> None:
    (first, second) = rows_for([make_call("a", None, [1], [2]), make_call("b", "a", [3], [4], ordinal=1)])
    tool_call = {"call_id": "t1", "name": "bash", "arguments": {"command": "ls"}}
    history = [
        *first.record.request["messages"],
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [tool_call], "tool_call_id": ""},
        {"role": "tool", "content": "a file", "reasoning": "", "tool_calls": [], "tool_call_id": "t1"},
        {"role": "tool", "content": "of nobody", "reasoning": "", "tool_calls": [], "tool_call_id": "t9"},
    ]
    tools = [{"name": "bash", "parameters": {}}]
    rows = [first, with_request(second, {"messages": history, "tools": tools})]
    (document,) = documents_of(rows, selected("b", "a", "b", num_targets=2)).values()
    check(document)
    user, agent, last = document["steps"]
    assert (user["source"], agent["reasoning_content"], last["message"]) == ("user", "hm", "x")
    assert agent["tool_calls"] == [{"tool_call_id": "t1", "function_name": "bash", "arguments": {"command": "ls"}}]
    assert agent["observation"]["results"] == [{"content": "a file", "source_call_id": "t1"}, {"content": "of nobody"}]
    assert (agent["metrics"]["completion_token_ids"], agent["extra"]["call_id"]) == ([2], "a")
    assert document["agent"]["tool_definitions"] == [{"type": "function", "function": tools[0]}]


def with_request(row: CallRow, request: dict[str, Any]) -> CallRow:
    return replace(row, record=replace(row.record, request=request))


def documents_of(rows: list[CallRow], selection: RunSelection | None) -> dict[str, dict[str, Any]]:
    run = calls_of_run(rows, selection)
    return atif_documents(summary_of(selection=selection), run, AgentName(), ScoreFacts())


def test_only_selected_paths_are_exported_where_that_is_asked_for() -> None:
    calls = [make_call("a", None, [1], [2]), make_call("b", None, [9], [3], ordinal=1)]
    selection = selected("b", "b", num_targets=1)
    run = calls_of_run(rows_for(calls), selection)
    found = atif_documents(summary_of(selection=selection), run, AgentName(), ScoreFacts(), selected_only=True)
    ((_, document),) = found.items()
    assert [step["extra"]["call_id"] for step in call_steps(document)] == ["b"]
    assert atif_documents(summary_of(), calls_of_run([], None), AgentName(), ScoreFacts()) == {}
