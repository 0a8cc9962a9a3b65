from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxy.types import CallPurpose
from services.trajectory.encoding import (
    CallRow,
    call_row,
    columns_of,
    group_result,
    payload_of,
    plain_text,
    result_json,
    run_result,
    run_selection,
    selection_json,
    with_prompts,
)
from services.trajectory.store.objects import object_of, payloads_of
from services.trajectory.types import CallRole, LossReason, RunSelection
from tests.unit.trajectory.stores import make_group_result, make_row
from tests.unit.trajectory.world import make_result


def read_back(row: CallRow, parent: CallRow | None = None) -> CallRow:
    columns = columns_of(row)
    return call_row(columns, payload_of(columns), parent)


@given(st.binary(max_size=200))
def test_arrays_keep_every_bit(data: bytes) -> None:
    data = data[: len(data) // 4 * 4]
    ids, logprobs = np.frombuffer(data, dtype=np.int32), np.frombuffer(data, dtype=np.float32)
    row = replace(make_row(0, output_ids=ids, logprobs=logprobs), new_prompt_ids=ids)
    for payload in (payload_of(columns_of(row)), payloads_of(object_of({"c": payload_of(columns_of(row))}))["c"]):
        found = (payload.prompt, payload.output, payload.logprobs)
        assert [one.tobytes() for one in found] == [data] * 3
        assert [one.dtype for one in found] == [np.int32, np.int32, np.float32]
    assert columns_of(row)["num_output_tokens"] == len(ids)


def test_a_request_is_stored_by_what_is_new_in_it() -> None:
    long = "a message that is told again with each request " * 20
    first = make_row(0, request={"messages": [{"content": long}], "tools": [{"name": long}]})
    request = {"messages": [{"content": long}, {"content": "more"}], "tools": [{"name": long}]}
    second = make_row(1, first, request=request)
    assert json.loads(payload_of(columns_of(second)).request) == {"messages": [{"content": "more"}]}
    assert read_back(second, read_back(first)).record.request == request


def test_who_made_a_call_and_what_for_is_stored_where_it_was_told() -> None:
    told = make_row(0, agent_id="agent-2", parent_agent_id="agent-1", purpose=CallPurpose.COMPACTION)
    record = read_back(told).record
    assert (record.agent_id, record.parent_agent_id) == ("agent-2", "agent-1")
    assert record.purpose is CallPurpose.COMPACTION
    untold = make_row(0)
    assert not {"agent_id", "parent_agent_id", "purpose"} & json.loads(payload_of(columns_of(untold)).rest).keys()
    assert read_back(untold).record.purpose is CallPurpose.TURN


def test_an_object_is_smaller_than_its_rows() -> None:
    """Calls of one run resemble each other: they are compressed together."""
    rng = np.random.default_rng(0)
    rows = [make_row(0)]
    for index in range(1, 60):
        ids = rng.integers(0, 50_000, 200).astype(np.int32)
        logprobs = -rng.exponential(size=200).astype(np.float32)
        rows.append(make_row(index, rows[-1], output_ids=ids, logprobs=logprobs, output_text="some words " * 30))
    columns = [columns_of(row) for row in rows]
    parts = ("prompt", "output", "logprobs", "request", "rest")
    in_rows = sum(len(one[name]) for one in columns for name in parts)
    assert len(object_of({one["call_id"]: payload_of(one) for one in columns})) < in_rows


def test_whole_prompts_are_made_of_their_parts() -> None:
    first = make_row(0)
    branches = [make_row(index, first) for index in (1, 2)]
    records = with_prompts([first, *branches])
    for record, row in zip(records[1:], branches, strict=True):
        expected = [*first.new_prompt_ids, *first.record.output_ids, *row.new_prompt_ids]
        assert record.prompt_ids.tolist() == expected
        assert len(record.prompt_ids) == row.num_prompt_tokens


def test_results_come_back_as_they_were() -> None:
    result = make_result("g000000-r0", None)
    assert run_result(result_json(result)) == result
    for ready in (True, False):
        settled = make_group_result("g000000", ready=ready)
        assert group_result(result_json(settled)) == settled


def test_group_results_of_before_there_were_loss_reasons_are_read() -> None:
    given = asdict(make_group_result("g000000", ready=False))
    assert given.pop("loss_reason") is LossReason.EQUAL_REWARDS
    del given["num_left_out"]
    assert group_result(json.dumps(given)).loss_reason is None


def test_a_selection_comes_back_as_it_was() -> None:
    selection = RunSelection(
        None, 1, ("b", "a"), (CallRole.MAIN_SUMMARY, CallRole.SUBAGENT), ("a",), 9, 8, 7, 6, {CallRole.MAIN: 8}
    )
    found = run_selection(selection_json(selection))
    assert found == selection
    assert isinstance(found.leaf_roles[0], CallRole)


@pytest.mark.parametrize(
    ("text", "plain"), [("häh 🌊", "häh 🌊"), ("a\x00b", "a\N{REPLACEMENT CHARACTER}b"), ("\ud83d", "?"), ("", "")]
)
def test_text_is_made_fit_for_any_database(text: str, plain: str) -> None:
    assert plain_text(text) == plain
