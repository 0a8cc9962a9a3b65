from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given

from services.common.errors import ConfigError
from services.trajectory import imports
from services.trajectory.export import ExportFilter
from services.trajectory.exporting import export_runs
from services.trajectory.files import Format, read_rows
from services.trajectory.imports import import_file
from services.trajectory.paths import calls_of_run
from services.trajectory.rebuild import RunBuilder
from services.trajectory.rows import RunCheck
from services.trajectory.source import StoreSource
from services.trajectory.store import RunFilter
from tests.unit.trajectory.stored_job import JOB_ID, RICH, make_job
from tests.unit.trajectory.test_draw import rows_for
from tests.unit.trajectory.test_export import Selected, export_rows, selected_runs
from tests.unit.trajectory.trees import unhurried


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and its exports."""
    folder = tmp_path_factory.mktemp("exported")
    asyncio.run(make_job(folder / "job"))
    for kind in (Format.JSONL, Format.PARQUET):
        export(folder / "job", folder / f"out.{kind}", kind)
    return folder


def export(job: Path, out: Path, kind: Format = Format.JSONL) -> Path:
    export_runs(StoreSource(job), ExportFilter(), out, kind)
    return out


def rewritten(source: Path, target: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    """A JSONL export in which something is changed."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    change(rows)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return target


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_what_was_imported_is_exported_again_byte_for_byte(exported: Path, tmp_path: Path, name: str) -> None:
    report = import_file(exported / name, tmp_path / "imported")
    assert (report.num_groups, report.num_runs, report.num_calls, report.job_ids) == (4, 8, 29, [JOB_ID])
    again = export(tmp_path / "imported", tmp_path / "again.jsonl")
    assert again.read_bytes() == (exported / "out.jsonl").read_bytes()


def test_imported_runs_are_read_like_any_others(exported: Path, tmp_path: Path) -> None:
    import_file(exported / "out.jsonl", tmp_path / "imported")
    before, after = StoreSource(exported / "job"), StoreSource(tmp_path / "imported")
    assert after.job_id == JOB_ID
    assert after.list_runs(RunFilter()) == before.list_runs(RunFilter())
    (summary, calls), (_, stored) = after.read_calls(RICH), before.read_calls(RICH)
    for one, other in zip(calls, stored, strict=True):
        assert one.record.request == other.record.request
        assert one.new_prompt_ids.tolist() == other.new_prompt_ids.tolist()
        assert one.record.logprobs.tobytes() == other.record.logprobs.tobytes()
        assert one.record.version_spans == other.record.version_spans
        assert (one.ordinal, one.num_shared_messages) == (other.ordinal, other.num_shared_messages)
    run, same = (calls_of_run(rows, summary.selection) for rows in (calls, stored))
    assert (run.fates, run.roles, run.num_tokens) == (same.fates, same.roles, same.num_tokens)


def test_an_import_extends_a_store(exported: Path, tmp_path: Path) -> None:
    into = tmp_path / "both"
    one = rewritten(exported / "out.jsonl", tmp_path / "one", lambda rows: keep_group(rows, "g000000"))
    other = rewritten(exported / "out.jsonl", tmp_path / "other", lambda rows: keep_group(rows, "g000001"))
    import_file(one, into)
    import_file(other, into)
    assert [run.group_id for run in StoreSource(into).list_runs(RunFilter())] == ["g000000"] * 2 + ["g000001"] * 2
    with pytest.raises(ConfigError, match="has the group g000000 already, and 1 more"):
        import_file(exported / "out.jsonl", into)
    assert len(StoreSource(into).list_runs(RunFilter())) == 4


def keep_group(rows: list[dict[str, Any]], group_id: str) -> None:
    rows[:] = [row for row in rows if row["group_id"] == group_id]


@unhurried
@given(selected_runs())
def test_calls_are_made_again_from_any_rows(run: Selected) -> None:
    selection = run.scored.selection.report
    rows = export_rows(run.calls, selection)
    check, builder = RunCheck(), RunBuilder(rows[0])
    for row in rows:
        check.take(row)
        builder.take(row)
    check.end()
    rebuilt = builder.run()
    for made, stored in zip(rebuilt.calls, rows_for(run.calls), strict=True):
        assert made.record.parent_call_id == stored.record.parent_call_id
        assert made.num_prompt_tokens == stored.num_prompt_tokens
        assert made.new_prompt_ids.tolist() == stored.new_prompt_ids.tolist()
        assert made.record.output_ids.tolist() == stored.record.output_ids.tolist()
        assert made.record.version_spans == stored.record.version_spans
        assert made.record.request == stored.record.request
    assert rebuilt.selection is not None
    assert set(rebuilt.selection.target_call_ids) == set(selection.target_call_ids)
    assert rebuilt.selection.leaf_call_ids == selection.leaf_call_ids


# -- what is refused --------------------------------------------------------------------------------------------------


def drop_logprob(rows: list[dict[str, Any]]) -> None:
    rows[2]["logprobs"].pop()


def set_nan(rows: list[dict[str, Any]]) -> None:
    rows[2]["logprobs"][40] = float("nan")


def set_infinite(rows: list[dict[str, Any]]) -> None:
    rows[2]["logprobs"][40] = 1e300


def change(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[2].update(fields)


def change_call(**fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[2]["calls"][0].update(fields)


def change_token(name: str, at: int, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows[2][name].__setitem__(at, value)


@pytest.mark.parametrize(
    ("damage", "place", "reason"),
    [
        (drop_logprob, "line 3", "different lengths"),
        (set_nan, "line 3", "NaN is not a finite number"),
        (set_infinite, "line 3", r"logprobs\[40\] is not a finite number"),
        (change(outcome="victory"), "line 3", "outcome.*not one of finished"),
        (change(role="hero"), "line 3", "role.*not one of main"),
        (change(schema="other/1"), "line 3", "its schema is 'other/1'"),
        (change(reward="much"), "line 3", "reward"),
        (change(surprise=1), "line 3", "surprise"),
        (change(run_id="../../g000000-r0"), "line 3", "run_id: .*pattern"),
        (change_call(call_id="\x1b[2J"), "line 3", "call_id: .*pattern"),
        (change(n_run=4), "line 3", "n_run is 4"),
        (change(target_weight=0.5), "line 3", "target_weight"),
        (change(reward=0.25), "line 3", "reward differs"),
        (change(trajectory=1), "line 3", "trajectory 1 twice"),
        (change(group_id="g000001"), "line 3", "group_id differs"),
        (change_token("token_ids", 0, -5), "line 3", "token_ids has numbers outside"),
        (change_token("token_ids", 0, 1.5), "line 3", "token_ids is no list of whole numbers"),
        (change_token("token_ids", 0, "a"), "line 3", "token_ids is no list of whole numbers"),
        (
            lambda rows: rows[3]["token_ids"].__setitem__(0, 9),
            "line 4",
            "call .* is another one than in an earlier row",
        ),
        (change_token("target_mask", 0, 1), "line 3", "target"),
        (change_token("versions", 0, 3), "line 3", "versions do not stand"),
        (change_token("logprobs", 0, -1.0), "line 3", "not sampled has a log-probability"),
        (change_call(start=2), "line 3", "versions do not stand|does not follow"),
        (change_call(num_messages=99), "line 3", "99 messages"),
        (change_call(request="{"), "line 3", "no JSON object"),
        (change_call(finish_reason="tired"), "line 3", "finish_reason"),
        (lambda rows: rows.append(rows[0]), "line 13", "stands apart"),
        (
            lambda rows: rows.remove(next(row for row in rows if 1 in row["target_mask"])),
            "line 4",
            "targets in its rows",
        ),
        (lambda rows: rows[-1].update(is_eval=True), "line 12", "described in another way"),
        (lambda rows: rows[-1].update(is_eval="yes"), "line 12", "is_eval"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_written(
    exported: Path, tmp_path: Path, damage: Callable[[list[dict[str, Any]]], object], place: str, reason: str
) -> None:
    file = rewritten(exported / "out.jsonl", tmp_path / "broken.jsonl", damage)
    with pytest.raises(ConfigError, match=f"broken.jsonl, {place}: .*({reason})") as error:
        import_file(file, tmp_path / "imported")
    assert "Nothing was imported" in error.value.hint
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no rows"),
        ("{", "line 1: it is no JSON"),
        ("[" * 100_000, "line 1: it is no JSON"),
        ("[]", "no JSON object"),
        ("PAR1 and no more", "Parquet"),
    ],
)
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        import_file(file, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing.jsonl: No such file"):
        import_file(tmp_path / "missing.jsonl", tmp_path / "imported")


def test_a_broken_row_of_a_parquet_file_is_named(exported: Path, tmp_path: Path) -> None:
    table = pq.read_table(exported / "out.parquet")
    outcomes = table.column("outcome").to_pylist()
    outcomes[4] = "victory"
    at = table.schema.get_field_index("outcome")
    file = tmp_path / "broken.parquet"
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(outcomes)), file)
    with pytest.raises(ConfigError, match=r"broken\.parquet, row 5: outcome"):
        import_file(file, tmp_path / "imported")
    pq.write_table(table.drop_columns(["versions"]), file)
    with pytest.raises(ConfigError, match="no column versions"):
        import_file(file, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_an_import_that_fails_while_writing_leaves_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file passes all checks, then cannot be read to its end a second time."""
    reads = iter((False, True))

    def unreliable(path: Path):  # type: ignore[no-untyped-def]
        fails = next(reads)
        for at, row in enumerate(read_rows(path)):
            if fails and at == 8:
                raise ConfigError("the file changed.")
            yield row

    into = tmp_path / "imported"
    import_file(rewritten(exported / "out.jsonl", tmp_path / "one", lambda rows: keep_group(rows, "g000003")), into)
    monkeypatch.setattr(imports, "read_rows", unreliable)
    other = rewritten(exported / "out.jsonl", tmp_path / "other", lambda rows: rows.__delitem__(slice(-2, None)))
    with pytest.raises(ConfigError, match="the file changed"):
        import_file(other, into)
    assert [path.name for path in (into / "trajectory").iterdir() if not path.name.startswith("shard-0.")] == []
    assert {run.group_id for run in StoreSource(into).list_runs(RunFilter())} == {"g000003"}


def test_a_folder_whose_runs_are_in_a_database_is_refused(exported: Path, tmp_path: Path) -> None:
    store = tmp_path / "job" / "trajectory"
    store.mkdir(parents=True)
    (store / "store.json").write_text('{"url": "postgresql://somebody@db/runs", "job_id": "job"}')
    with pytest.raises(ConfigError, match="stored elsewhere"):
        import_file(exported / "out.jsonl", tmp_path / "job")
    assert [path.name for path in store.iterdir()] == ["store.json"]


def test_an_attempt_keeps_its_number(exported: Path, tmp_path: Path) -> None:
    def number(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["attempt"] = 2

    import_file(rewritten(exported / "out.jsonl", tmp_path / "file", number), tmp_path / "imported")
    source = StoreSource(tmp_path / "imported")
    assert {run.attempt for run in source.list_runs(RunFilter())} == {2}
    assert len(source.read_calls(RICH, 2)[1]) == 8
    assert source.read_calls(RICH, 1)[1] == []


def test_a_place_that_cannot_be_written_is_refused(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        import_file(exported / "out.jsonl", tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot write"):
        import_file(exported / "out.jsonl", tmp_path / "file" / "below")
