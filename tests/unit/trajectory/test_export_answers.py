"""Answers told apart, purposes, agents and sampling through every file and over gRPC."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.common.grpc import serve
from services.proxy.types import CallPurpose, ParsedAnswer, ToolCall
from services.trajectory.atif import AgentName, atif_documents
from services.trajectory.client import TrajectoryClient
from services.trajectory.draw import Branch, draw_tree
from services.trajectory.encoding import CallRow
from services.trajectory.export import SCHEMA, ExportFilter, GroupFacts, ScoreFacts, rows_of_run
from services.trajectory.exporting import export_runs
from services.trajectory.files import Format, JsonlWriter, ParquetWriter, read_rows
from services.trajectory.imports import import_file
from services.trajectory.paths import Fate, RunCalls, calls_of_run
from services.trajectory.rebuild import RunBuilder
from services.trajectory.servicer import trajectory_service
from services.trajectory.source import StoreSource
from services.trajectory.types import CallRecord, CallRole, RunSummary
from tests.unit.trajectory.test_atif import check
from tests.unit.trajectory.test_draw import rows_for
from tests.unit.trajectory.test_export import summary_of
from tests.unit.trajectory.told_job import DONE, DONE_RAW, HELD, LOOKED, LOOKED_RAW, RUN, make_told_job
from tests.unit.trajectory.trees import make_call, unhurried

FIXTURES = Path(__file__).parents[2] / "fixtures" / "export"
TOKEN = "token-of-this-test"
FILES = (Format.JSONL, Format.PARQUET)
ARRAYS = ("prompt_ids", "output_ids", "logprobs")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and its exports."""
    folder = tmp_path_factory.mktemp("told")
    asyncio.run(make_told_job(folder / "job"))
    for kind in FILES:
        export(folder / "job", folder / f"out.{kind}", kind)
    return folder


def export(job: Path, out: Path, kind: Format = Format.JSONL) -> Path:
    export_runs(StoreSource(job), ExportFilter(), out, kind)
    return out


def calls_in(job: Path) -> tuple[RunSummary, list[CallRow]]:
    summary, rows = StoreSource(job).read_calls(RUN)
    return summary, list(rows)


def run_in(job: Path) -> RunCalls:
    summary, rows = calls_in(job)
    return calls_of_run(rows, summary.selection)


def facts(record: CallRecord) -> dict[str, Any]:
    """All fields of a call; arrays as lists."""
    found = {one.name: getattr(record, one.name) for one in fields(record)}
    return {**found, **{name: found[name].tolist() for name in ARRAYS}}


def rows_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_last_message_is_the_answer_as_its_harness_saw_it(told: Path) -> None:
    rows = {row["role"]: row for row in rows_in(told / "out.jsonl") if row["calls"]}
    assert rows["main"]["messages"][-1] == {
        "role": "assistant",
        "content": "Two files.",
        "reasoning_content": "a and b: two",
    }
    assert rows["subagent"]["messages"][-1]["tool_calls"] == [
        {"id": "call_3", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    ]
    assert rows["side"]["messages"][-1] == {"role": "assistant", "content": "Counting"}


def test_calls_keep_the_raw_text_beside_what_it_was_told_apart_into(told: Path) -> None:
    (row,) = [row for row in rows_in(told / "out.jsonl") if row["role"] == "main"]
    first, last = row["calls"]
    assert (first["output_text"], last["output_text"]) == (LOOKED_RAW, DONE_RAW)
    assert first["answer"]["reasoning_content"] == "what is there?", "its harness did not send it back"
    assert "reasoning_content" not in row["messages"][2]
    assert [call["id"] for call in first["answer"]["tool_calls"]] == ["call_1", "call_2"]
    assert (first["num_malformed_calls"], last["num_malformed_calls"]) == (1, 0)
    assert (first["stop_string"], last["stop_string"]) == ("", "</answer>")
    assert json.loads(last["sampling"])["max_tokens"] == 32
    assert json.loads(last["requested_sampling"]) == {"stop": ["</answer>"], "temperature": 0.1}


@pytest.mark.parametrize("kind", FILES)
def test_every_field_of_a_call_comes_back_from_a_file(told: Path, tmp_path: Path, kind: Format) -> None:
    import_file(told / f"out.{kind}", tmp_path / "imported")
    before, after = calls_in(told / "job")[1], calls_in(tmp_path / "imported")[1]
    assert [facts(row.record) for row in after] == [facts(row.record) for row in before]
    request = after[0].record.request
    assert (request["choice"], request["num_choices"], request["is_retry"]) == (1, 2, True)
    assert request["tool_choice"] == {"mode": "auto", "name": "", "is_parallel": False}
    assert (request["answer_form"], request["num_instructions"]) == ({"store": False}, 1)
    assert run_in(tmp_path / "imported").roles == run_in(told / "job").roles


@pytest.mark.parametrize("kind", FILES)
def test_what_was_imported_is_exported_again_byte_for_byte(told: Path, tmp_path: Path, kind: Format) -> None:
    import_file(told / f"out.{kind}", tmp_path / "imported")
    for again in FILES:
        out = export(tmp_path / "imported", tmp_path / f"again.{again}", again)
        if again is Format.JSONL:
            assert out.read_bytes() == (told / "out.jsonl").read_bytes()
        else:
            assert out.read_bytes() == (told / "out.parquet").read_bytes()


@pytest.mark.parametrize("kind", FILES)
def test_files_of_the_first_schema_are_taken_with_what_they_tell(tmp_path: Path, kind: Format) -> None:
    import_file(FIXTURES / f"schema-1.{kind}", tmp_path / "imported")
    first, title, *_ = [row.record for row in calls_in(tmp_path / "imported")[1]]
    assert (first.output_text, first.answer, first.sampling, first.stop_string) == (LOOKED_RAW, None, None, "")
    assert (first.agent_id, first.parent_agent_id, title.purpose) == ("root", "", CallPurpose.TURN)
    out = export(tmp_path / "imported", tmp_path / "out.jsonl")
    assert {row["schema"] for row in rows_in(out)} == {SCHEMA}
    (main,) = [row for _, row in read_rows(out) if row.role == "main" and row.is_selected]
    assert main.messages[-1] == {"role": "assistant", "content": DONE_RAW}
    import_file(out, tmp_path / "again")
    assert export(tmp_path / "again", tmp_path / "again.jsonl").read_bytes() == out.read_bytes()


def of_call(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row["calls"][0].update(changes)


def with_arguments(text: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": text}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (of_call(purpose="leisure"), "purpose: it is not one of turn"),
        (of_call(answer={"role": "user", "content": "x"}), "answer.role"),
        (of_call(answer={"role": "assistant"}), "answer.content"),
        (of_call(answer=with_arguments("[")), "arguments: it is no JSON object"),
        (of_call(answer=with_arguments("[1]")), "arguments: it is no JSON object"),
        (of_call(num_malformed_calls=-1), "num_malformed_calls"),
        (of_call(sampling="{"), "sampling: it is no sampling"),
        (of_call(sampling='{"temperature": "hot"}'), "sampling: it is no sampling"),
        (of_call(sampling='{"top_k": 3}'), "sampling: no sampling has top_k"),
        (lambda row: row["messages"].insert(0, with_arguments("{")), "arguments: it is no JSON object"),
    ],
)
def test_a_broken_answer_is_refused(
    told: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None], reason: str
) -> None:
    rows = rows_in(told / "out.jsonl")
    damage(rows[0])
    file = tmp_path / "broken.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 1: .*{reason}"):
        import_file(file, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_CALLS = st.lists(
    st.builds(ToolCall, _TEXT, _TEXT, st.dictionaries(st.text(max_size=3), _JSON, max_size=2)), max_size=2
)
_ANSWERS = st.none() | st.builds(ParsedAnswer, _TEXT, _TEXT, _CALLS.map(tuple), st.integers(0, 2))


@unhurried
@given(_ANSWERS)
def test_any_answer_comes_back_from_both_kinds_of_files(answer: ParsedAnswer | None) -> None:
    (call,) = rows_for([make_call("a", None, [1], [5])])
    rows = [replace(call, record=replace(call.record, answer=answer))]
    with tempfile.TemporaryDirectory() as folder:
        for writer in (JsonlWriter, ParquetWriter):
            file = Path(folder) / writer.__name__
            opened = writer(file)
            opened.write(list(rows_of_run("job", summary_of(), calls_of_run(rows, None), GroupFacts())))
            opened.close()
            ((_, row),) = read_rows(file)
            builder = RunBuilder(row)
            builder.take(row)
            assert builder.run().calls[0].record.answer == answer


# -- ATIF -------------------------------------------------------------------------------------------------------------


def test_steps_say_what_was_generated_under_the_ids_that_the_harness_uses(told: Path) -> None:
    summary, _ = calls_in(told / "job")
    documents = atif_documents(summary, run_in(told / "job"), AgentName(), ScoreFacts())
    (document,) = documents.values()
    check(document)
    looked, done = [step for step in document["steps"] if step["source"] == "agent"]
    assert (looked["message"], looked["reasoning_content"]) == (LOOKED.text, LOOKED.reasoning)
    assert [call["tool_call_id"] for call in looked["tool_calls"]] == ["toolu_1", "call_2"]
    assert [call["arguments"] for call in looked["tool_calls"]] == [call.arguments for call in LOOKED.tool_calls]
    assert [result.get("source_call_id") for result in looked["observation"]["results"]] == ["toolu_1", "call_2"]
    assert (done["message"], done["reasoning_content"]) == (DONE.text, DONE.reasoning)
    assert done["extra"]["stop_string"] == "</answer>"
    assert done["extra"]["sampling"]["max_tokens"] == HELD.max_tokens
    assert looked["extra"]["num_malformed_calls"] == 1
    embedded = {one["extra"]["role"]: one["steps"][-1] for one in document["subagent_trajectories"]}
    assert embedded["subagent"]["tool_calls"] == [
        {"tool_call_id": "call_3", "function_name": "bash", "arguments": {}},
    ]
    extra = embedded["side"]["extra"]
    assert (extra["purpose"], extra["agent_id"], extra["is_target"]) == ("side", "root", False)
    assert embedded["subagent"]["extra"]["parent_agent_id"] == "root"


def test_documents_hold_no_half_characters_which_strict_readers_refuse(told: Path, tmp_path: Path) -> None:
    export(told / "job", tmp_path / "out", Format.ATIF)
    (file,) = (tmp_path / "out").iterdir()
    document = pydantic_core.from_json(file.read_bytes())
    looked = next(step for step in document["steps"] if "tool_calls" in step)
    assert looked["tool_calls"][1]["arguments"] == {"command": "wc", "text": "?"}


# -- gRPC and the tree ------------------------------------------------------------------------------------------------


async def test_every_field_of_a_call_comes_over_grpc(told: Path) -> None:
    add, name = trajectory_service("job", told / "job")
    server, address = await serve([add], [name], host="127.0.0.1", port=0, token=TOKEN)
    client = TrajectoryClient(address, TOKEN)
    try:
        streamed = [row.record async for row in client.calls(RUN)]
        shape = await client.tree(RUN)
    finally:
        await client.close()
        await server.stop(grace=None)
    assert [facts(record) for record in streamed] == [facts(row.record) for row in calls_in(told / "job")[1]]
    assert [node.role for node in shape.nodes] == ["main", "side", "subagent", "main"]


def test_side_calls_are_branches_of_their_own_and_never_targets(told: Path) -> None:
    lines = draw_tree(run_in(told / "job")).lines
    assert {line.branch: [node.role for node in line.nodes] for line in lines} == {
        Branch.FIRST: [CallRole.MAIN, CallRole.MAIN],
        Branch.SIDE: [CallRole.SIDE],
        Branch.SUBAGENT: [CallRole.SUBAGENT],
    }
    (side,) = [line.nodes[0] for line in lines if line.branch is Branch.SIDE]
    assert side.fate is not Fate.TARGET
    assert side.draw is None
