from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.trajectory.export import NOT_SAMPLED, SCHEMA, ExportFilter, GroupFacts, TrajectoryRow, rows_of_run
from services.trajectory.exporting import ExportReport, export_runs
from services.trajectory.files import (
    PARQUET_SCHEMA,
    Format,
    JsonlWriter,
    ParquetWriter,
    RowWriter,
    new_file,
    new_folder,
    read_rows,
)
from services.trajectory.microstep import ScoredRun, build_micro_steps
from services.trajectory.outcome import Outcome
from services.trajectory.paths import calls_of_run
from services.trajectory.rows import plain, row_of
from services.trajectory.select import select
from services.trajectory.source import StoreSource
from services.trajectory.tree import TrajectoryTree, TreeCall
from services.trajectory.types import RunSelection, RunSummary
from tests.unit.trajectory.stored_job import JOB_ID, RICH, make_job
from tests.unit.trajectory.test_draw import rows_for
from tests.unit.trajectory.trees import loss, make_call, tree_calls, unhurried


def summary_of(run_id: str = RICH, advantage: float = 0.5, selection: RunSelection | None = None) -> RunSummary:
    return RunSummary(
        run_id, "g000000", "task", 0, Outcome.FINISHED, 1.0, advantage, 1, 1, 1, 0, 0, 2.0, False, "", selection
    )


def export_rows(
    calls: Sequence[TreeCall], selection: RunSelection | None, advantage: float = 0.5
) -> list[TrajectoryRow]:
    run = calls_of_run(rows_for(calls), selection)
    summary = summary_of(advantage=advantage, selection=selection)
    return list(rows_of_run(JOB_ID, summary, run, GroupFacts(3, "ready")))


@dataclass(frozen=True)
class Selected:
    """A run with what was selected of it."""

    calls: list[TreeCall]
    scored: ScoredRun


@st.composite
def selected_runs(draw: st.DrawFn) -> Selected:
    calls = draw(tree_calls(max_calls=8))
    tree = TrajectoryTree()
    for call in calls:
        tree.append(call)
    limit = draw(st.sampled_from([1, 2, None]))
    selection = select(tree, {}, max_trajectories=limit, seed=draw(st.integers(0, 3)), run_id=RICH)
    return Selected(calls, ScoredRun(RICH, draw(st.floats(-2, 2)), tree, selection))


# -- rows -------------------------------------------------------------------------------------------------------------


@unhurried
@given(selected_runs())
def test_rows_give_exactly_the_loss_that_is_trained(given_run: Selected) -> None:
    scored = given_run.scored
    rows = export_rows(given_run.calls, scored.selection.report, scored.advantage)
    of_rows = math.fsum(
        row.target_weight * (row.advantage or 0.0) * (token + 1) * logprob
        for row in rows
        for token, logprob in zip(
            row.token_ids[row.target_mask].tolist(), row.logprobs[row.target_mask].tolist(), strict=True
        )
    )
    trained = build_micro_steps("g000000", [scored], 1 << 30)
    assert of_rows == pytest.approx(loss(trained), rel=1e-12, abs=1e-12)
    assert sum(int(row.target_mask.sum()) for row in rows) == scored.selection.num_targets


@unhurried
@given(selected_runs())
def test_each_row_holds_the_tokens_of_its_calls_and_nothing_of_a_prompt_is_a_target(given_run: Selected) -> None:
    by_id = {call.call_id: call for call in given_run.calls}
    rows = export_rows(given_run.calls, given_run.scored.selection.report)
    assert {call["call_id"] for row in rows for call in row.calls} == set(by_id)
    for row in rows:
        sampled = row.versions != NOT_SAMPLED
        assert not (row.target_mask & ~sampled).any()
        assert not row.logprobs[~sampled].any()
        ids = [
            token
            for part in row.calls
            for token in (*by_id[part["call_id"]].new_prompt_ids, *by_id[part["call_id"]].output_ids)
        ]
        assert row.token_ids.tolist() == ids
        for part in row.calls:
            call = by_id[part["call_id"]]
            where = slice(part["start"], part["start"] + len(call.output_ids))
            assert row.logprobs[where].tobytes() == call.logprobs.tobytes()
            assert not row.target_mask[where].any() or call.trainable


@unhurried
@given(selected_runs())
def test_rows_come_back_from_json_exactly(given_run: Selected) -> None:
    for row in export_rows(given_run.calls, given_run.scored.selection.report):
        again = row_of(json.loads(json.dumps(plain(row))))
        assert plain(again) == plain(row)
        assert again.logprobs.tobytes() == row.logprobs.tobytes()
        assert again.token_ids.dtype == np.int32


def test_float32_logprobs_survive_json_bit_by_bit() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    logprobs = bits[np.isfinite(bits)]
    call = replace(make_call("a", None, [1], [2] * len(logprobs)), logprobs=logprobs)
    (row,) = export_rows([call], None)
    assert row_of(json.loads(json.dumps(plain(row)))).logprobs.tobytes() == row.logprobs.tobytes()


def test_a_target_on_two_selected_paths_is_masked_in_the_first() -> None:
    calls = [
        make_call("a", None, [1, 1], [5, 6]),
        make_call("b", "a", [2], [7], ordinal=1),
        make_call("c", "a", [3], [8, 9], ordinal=2),
    ]
    selection = RunSelection(2, 0, ("c", "b"), ("main", "main"), ("a", "b", "c"), 5, 0, 0, 0)  # type: ignore[arg-type]
    first, second = export_rows(calls, selection)
    assert (first.draw, second.draw) == (1, 0)
    assert first.target_mask.tolist() == [False, False, True, True, False, True]
    assert second.target_mask.tolist() == [False, False, False, False, False, True, True]
    assert (first.n_run, first.target_weight, first.num_prompt_tokens) == (5, 0.2, 2)


def test_runs_without_selection_have_no_target() -> None:
    (row,) = export_rows([make_call("a", None, [1], [5, 6])], None)
    assert not row.target_mask.any()
    assert (row.is_selected, row.n_run, row.target_weight) == (False, 0, 0.0)
    assert [part["fate"] for part in row.calls] == ["open"]


def test_a_run_without_calls_keeps_its_outcome_in_a_row_without_tokens() -> None:
    (row,) = rows_of_run(JOB_ID, summary_of(), calls_of_run([], None), GroupFacts())
    assert (row.outcome, row.num_trajectories, len(row.token_ids), row.messages) == ("finished", 0, 0, [])
    assert plain(row_of(plain(row))) == plain(row)


def test_a_reward_that_is_no_number_is_exported_as_none() -> None:
    summary = replace(summary_of(), reward=math.nan, advantage=math.inf)
    (row,) = rows_of_run(JOB_ID, summary, calls_of_run([], None), GroupFacts())
    assert (row.reward, row.advantage) == (None, None)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "job"
    asyncio.run(make_job(folder))
    return folder


def export(
    job: Path, out: Path, kind: Format = Format.JSONL, *, force: bool = False, **filters: object
) -> tuple[ExportReport, list[TrajectoryRow]]:
    report = export_runs(StoreSource(job), ExportFilter(**filters), out, kind, force=force)  # type: ignore[arg-type]
    return report, [] if kind is Format.ATIF else [row for _, row in read_rows(out)]


def test_every_run_is_exported_with_its_group(job: Path, tmp_path: Path) -> None:
    report, rows = export(job, tmp_path / "out.jsonl")
    assert (report.num_runs, report.num_trajectories, report.skipped) == (8, 11, [])
    assert [row.run_id for row in rows[:5]] == [RICH] * 5
    assert {row.job_id for row in rows} == {JOB_ID}
    states = {row.group_id: (row.group.state, row.group.loss_reason, row.group.trained_step) for row in rows}
    assert states == {
        "g000000": ("ready", "", 7),
        "g000001": ("lost", "equal_rewards", None),
        "e000002": ("lost", "held_out", None),
        "g000003": ("open", "", None),
    }
    roles = [row.role for row in rows[:5]]
    assert sorted(roles) == ["main", "main", "main", "main_summary", "subagent"]
    targets = sum(int(row.target_mask.sum()) for row in rows if row.run_id == RICH)
    assert report.num_targets == sum(int(row.target_mask.sum()) for row in rows)
    assert targets == rows[0].n_run > 0
    assert rows[0].messages[-1] == {"role": "assistant", "content": "abandoned answer"}


def test_parquet_and_jsonl_hold_the_same(job: Path, tmp_path: Path) -> None:
    _, as_json = export(job, tmp_path / "out.jsonl")
    _, as_parquet = export(job, tmp_path / "out.parquet", Format.PARQUET)
    assert [plain(row) for row in as_json] == [plain(row) for row in as_parquet]


def test_any_reader_of_parquet_sees_typed_columns(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    export(job, out, Format.PARQUET)
    file = pq.ParquetFile(out)
    types = {field.name: str(field.type) for field in file.schema_arrow}
    assert types["token_ids"] == "list<element: int32>"
    assert types["logprobs"] == "list<element: float>"
    assert types["target_mask"] == "list<element: bool>"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.schema_arrow.metadata[b"tidegate.schema"] == SCHEMA.encode()
    table = file.read(["reward", "messages", "target_mask"]).to_pylist()
    assert table[0]["messages"][0]["content"] == "you are the main agent"


def test_the_docs_name_every_column_and_field_of_a_call() -> None:
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    calls = PARQUET_SCHEMA.field("calls").type.value_type
    names = [*PARQUET_SCHEMA.names, *(calls.field(at).name for at in range(calls.num_fields))]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("filters", "run_ids"),
    [
        ({"run_ids": (RICH,)}, {RICH}),
        ({"group_id": "g000001"}, {"g000001-r0", "g000001-r1"}),
        ({"outcome": "unfinished"}, {"g000003-r0", "g000003-r1"}),
        ({"outcome": "verifier_failure"}, {"e000002-r1"}),
        ({"min_reward": 0.6}, {RICH}),
        ({"no_eval": True, "min_reward": 0.5}, {RICH, "g000001-r0", "g000001-r1"}),
        ({"selected_only": True}, {RICH, "g000000-r1"}),
    ],
)
def test_filters_take_what_they_say(job: Path, tmp_path: Path, filters: dict[str, object], run_ids: set[str]) -> None:
    _, rows = export(job, tmp_path / "out.jsonl", **filters)
    assert {row.run_id for row in rows} == run_ids
    if filters.get("selected_only"):
        assert all(row.is_selected for row in rows)
        assert sum(int(row.target_mask.sum()) for row in rows if row.run_id == RICH) == rows[0].n_run


def test_filters_that_cannot_be_meant_are_refused(job: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no outcome 'crash'") as error:
        ExportFilter(outcome="crash")
    assert "harness_crash" in error.value.hint
    with pytest.raises(ConfigError, match="nan"):
        ExportFilter(min_reward=math.nan)
    with pytest.raises(ConfigError, match="no run g000009-r0"):
        export(job, tmp_path / "out.jsonl", run_ids=("g000009-r0",))
    with pytest.raises(NotFoundError, match="no run is as the filters want it"):
        export(job, tmp_path / "out.jsonl", min_reward=2.0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_replaced_by_force_only(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(ConfigError, match="exists"):
        export(job, out)
    assert out.read_text() == "precious"
    export(job, out, force=True)
    assert out.read_text() != "precious"
    with pytest.raises(ConfigError, match="is a folder"):
        export(job, tmp_path, force=True)


def test_a_folder_that_is_no_export_is_never_replaced(job: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="no folder of an export"):
        export(job, tmp_path / "work", Format.ATIF, force=True)
    export(job, tmp_path / "out", Format.ATIF)
    export(job, tmp_path / "out", Format.ATIF, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "work"]


def test_an_id_that_leads_out_of_the_folder_is_refused(job: Path, tmp_path: Path) -> None:
    class Hostile(StoreSource):
        def read_calls(self, run_id: str, attempt: int | None = None):  # type: ignore[no-untyped-def]
            summary, rows = super().read_calls(run_id, attempt)
            return replace(summary, run_id=f"../{run_id}"), rows

    with pytest.raises(ConfigError, match="names no file"):
        export_runs(Hostile(job), ExportFilter(), tmp_path / "out", Format.ATIF)
    assert not list(tmp_path.iterdir())


def test_an_output_without_a_folder_is_refused(job: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        export(job, tmp_path / "missing" / "out.jsonl")


@pytest.mark.parametrize("kind", list(Format))
def test_an_export_that_fails_leaves_nothing_behind(job: Path, tmp_path: Path, kind: Format) -> None:
    class Failing(StoreSource):
        def read_calls(self, run_id: str, attempt: int | None = None):  # type: ignore[no-untyped-def]
            if run_id == "g000001-r1":
                raise MachineError("the disk is gone.")
            return super().read_calls(run_id, attempt)

    with pytest.raises(MachineError, match="the disk is gone"):
        export_runs(Failing(job), ExportFilter(), tmp_path / "out", kind)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_said_so(tmp_path: Path) -> None:
    for opened in (new_file, new_folder):
        with pytest.raises(MachineError, match="No space left"), opened(tmp_path / "out", force=False):
            raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_gone_meanwhile_are_named(job: Path, tmp_path: Path) -> None:
    class Pruned(StoreSource):
        def read_calls(self, run_id: str, attempt: int | None = None):  # type: ignore[no-untyped-def]
            if run_id == "g000001-r1":
                raise NotFoundError("its calls were deleted.")
            return super().read_calls(run_id, attempt)

    report = export_runs(Pruned(job), ExportFilter(), tmp_path / "out.jsonl", Format.JSONL)
    assert (report.num_runs, report.skipped) == (7, ["g000001-r1"])


def test_progress_is_told_run_by_run(job: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    export_runs(
        StoreSource(job),
        ExportFilter(),
        tmp_path / "out.jsonl",
        Format.JSONL,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 8) for done in range(1, 9)]


@pytest.mark.parametrize("writer", [JsonlWriter, ParquetWriter])
def test_numbers_that_are_none_do_not_stop_an_export(tmp_path: Path, writer: type[RowWriter]) -> None:
    (call,) = rows_for([make_call("a", None, [1], [5])])
    request = {**call.record.request, "tools": [{"name": "odd", "limit": math.nan}]}
    odd = replace(call, record=replace(call.record, request=request))
    opened = writer(tmp_path / "out")  # type: ignore[call-arg]
    opened.write(list(rows_of_run(JOB_ID, summary_of(), calls_of_run([odd], None), GroupFacts())))
    opened.close()
    ((_, row),) = read_rows(tmp_path / "out")
    assert row.tools[0]["name"] == "odd"


@pytest.mark.parametrize(("writer", "text"), [(JsonlWriter, "half \ud83d"), (ParquetWriter, "half ?")])
def test_lone_surrogates_of_a_harness_do_not_stop_an_export(tmp_path: Path, writer: type[RowWriter], text: str) -> None:
    (call,) = rows_for([make_call("a", None, [1], [5])])
    odd = replace(call, record=replace(call.record, output_text="half \ud83d"))
    opened = writer(tmp_path / "out")  # type: ignore[call-arg]
    opened.write(list(rows_of_run(JOB_ID, summary_of(), calls_of_run([odd], None), GroupFacts())))
    opened.close()
    ((_, row),) = read_rows(tmp_path / "out")
    assert row.messages[-1]["content"] == text
