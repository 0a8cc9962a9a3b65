from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.common.types import VersionSpan
from services.trajectory.outcome import CallTrouble, Outcome
from services.trajectory.store import (
    GroupState,
    RunFilter,
    Store,
    StoreConfig,
    list_runs,
    open_reader,
    read_run,
    reader_of_job,
)
from services.trajectory.types import CallRole, RunSelection
from tests.services import PostgresServer
from tests.unit.trajectory.stores import RUN, Place, make_group_result, make_row
from tests.unit.trajectory.world import make_result, make_spec


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        found.url = server.url()
    yield found
    found.close()


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()


# -- what is kept --


def test_calls_come_back_as_they_were_with_their_whole_prompts(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 0, b"hash")
    first = make_row(0)
    second = make_row(1, first, agent_id="helper")
    assert [store.append_call(row) for row in (first, second, second)] == [True, True, False]
    _, calls = place.reader().read_run(RUN)
    assert [one.call_id for one in calls] == [first.record.call_id, second.record.call_id]
    assert calls[1].prompt_ids.tolist() == [*range(5), *first.record.output_ids.tolist(), *range(1, 6)]
    assert calls[1].prompt_ids.dtype == np.int32
    assert calls[1].logprobs.tobytes() == second.record.logprobs.tobytes()
    assert calls[1].request == second.record.request
    assert [one.agent_id for one in calls] == ["", "helper"]
    assert store.calls(RUN, 0)[1].num_shared_messages == 1


def test_runs_are_listed_by_what_became_of_them(store: Store, place: Place) -> None:
    store.open_group(make_spec(0))
    store.open_group(make_spec(1, is_eval=True))
    store.open_attempt(RUN, 0, b"hash")
    store.append_call(make_row(0))
    store.finish_run(make_result(RUN, 0.5, Outcome.HARNESS_TIMEOUT))
    summaries = place.reader().list_runs()
    assert [one.run_id for one in summaries] == ["g000000-r0", "g000000-r1", "e000001-r0", "e000001-r1"]
    first = summaries[0]
    assert (first.outcome, first.reward, first.num_calls, first.wall_s) == (Outcome.HARNESS_TIMEOUT, 0.5, 1, 2.0)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.version_min, first.version_max) == (5, 8, 3, 3)
    assert (summaries[1].outcome, summaries[1].num_calls, summaries[1].version_min) == (None, 0, None)

    def ids(filters: RunFilter) -> list[str]:
        return [one.run_id for one in place.reader().list_runs(filters)]

    assert ids(RunFilter(outcome=Outcome.HARNESS_TIMEOUT)) == [RUN]
    assert ids(RunFilter(unfinished=True, is_eval=False)) == ["g000000-r1"]
    assert ids(RunFilter(unfinished=False)) == [RUN]
    assert ids(RunFilter(is_eval=True, limit=1)) == ["e000001-r1"]
    assert ids(RunFilter(group_id="g000000", task_name="task")) == ["g000000-r0", "g000000-r1"]
    assert ids(RunFilter(limit=0)) == []
    assert [one.run_id for one in store.summaries(RunFilter(limit=1))] == ["e000001-r1"]


def test_a_run_is_summed_up_by_its_newest_attempt(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 0, b"hash")
    first = make_row(0, version_spans=(VersionSpan(5, 3), VersionSpan(4, 5)))
    store.append_call(first)
    store.append_call(make_row(1, first, version_spans=(VersionSpan(6, 8),)))
    (summary, _) = place.reader().list_runs()
    assert (summary.num_calls, summary.num_prompt_tokens, summary.num_output_tokens) == (2, 5 + 5 + 8 + 5, 16)
    assert (summary.version_min, summary.version_max) == (4, 6)
    store.finish_run(make_result(RUN, 0.0, Outcome.ENGINE_LOSS))
    store.open_attempt(RUN, 1, b"other")
    store.append_call(make_row(0, attempt=1, version_spans=(), output_ids=np.empty(0, np.int32)))
    store.finish_run(make_result(RUN, 0.25, attempt=1))
    (summary, _) = place.reader().list_runs()
    assert (summary.attempt, summary.num_calls, summary.reward, summary.version_min) == (1, 1, 0.25, None)
    assert len(place.reader().read_run(RUN, 0)[1]) == 2
    assert place.reader().run_result(RUN, 0) == make_result(RUN, 0.0, Outcome.ENGINE_LOSS)
    assert place.reader().run_result(RUN) == make_result(RUN, 0.25, attempt=1)
    assert place.reader().run_result("g000000-r1") is None


def test_runs_of_all_shards_are_listed_in_order_of_dispatch(store: Store, place: Place) -> None:
    other = place.open(1)
    store.open_group(make_spec(1))
    other.open_group(make_spec(0))
    assert [one.group_id for one in place.reader().list_runs()] == ["g000001"] * 2 + ["g000000"] * 2
    assert [one.spec.group_id for one in place.reader().groups()] == ["g000001", "g000000"]
    assert place.reader().read_run("g000000-r1")[1] == []
    assert [one.spec.group_id for one in other.live_groups()] == ["g000000"]
    assert [one.group_id for one in store.summaries(RunFilter())] == ["g000001"] * 2


def test_what_is_not_there_is_not_found(store: Store, place: Place, tmp_path: Path) -> None:
    for look in (place.reader().read_run, place.reader().run_result, place.reader().group):
        with pytest.raises(NotFoundError):
            look(RUN)
    with pytest.raises(NotFoundError):
        list_runs(str(tmp_path / "elsewhere"))
    with pytest.raises(NotFoundError):
        store.finish_run(make_result(RUN, 1.0))


def test_only_untrained_groups_that_may_be_trained_are_live(store: Store, place: Place) -> None:
    for index in range(5):
        store.open_group(make_spec(index))
    for index in range(3):
        result = make_group_result(f"g00000{index}", ready=index != 2)
        store.finish_group(result, {f"g00000{index}-r0": (1.0, None)})
    store.mark_trained(["g000000"], 4)
    store.end_group("g000003", GroupState.DROPPED, "too old")
    assert [one.spec.group_id for one in store.live_groups()] == ["g000001", "g000004"]
    assert store.live_groups()[0].result == make_group_result("g000001")
    assert store.live_groups()[1].spec == make_spec(4)
    trained = store.trained_group("g000000")
    assert trained is not None
    assert trained.result == make_group_result("g000000")
    assert store.trained_group("g000001") is None
    store.clear_marks_above(4)
    assert len(store.live_groups()) == 2
    store.clear_marks_above(3)
    assert [one.spec.group_id for one in store.live_groups()] == ["g000000", "g000001", "g000004"]
    store.end_group("g000002", GroupState.DROPPED, "given up")
    assert store.group_result("g000002") == make_group_result("g000002", ready=False)
    assert [one.spec.group_id for one in place.reader().groups(GroupState.LOST)] == ["g000002"]


def test_a_settled_run_keeps_its_advantage_and_what_was_selected_of_it(store: Store, place: Place) -> None:
    selection = RunSelection(
        5, 7, ("c3", "c1"), (CallRole.MAIN, CallRole.SUBAGENT), ("c1", "c3"), 20, 3, 2, 1, {CallRole.SUBAGENT: 3}
    )
    store.open_group(make_spec())
    store.finish_group(make_group_result("g000000"), {RUN: (-0.5, selection), "g000000-r1": (0.5, None)})
    summaries = place.reader().list_runs()
    assert [(one.advantage, one.selection) for one in summaries] == [(-0.5, selection), (0.5, None)]
    assert place.reader().group("g000000").result == make_group_result("g000000")


def test_runs_of_a_group_that_is_given_up_are_cancelled(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 1, b"hash")
    store.finish_run(make_result("g000000-r1", 1.0))
    store.end_group("g000000", GroupState.CANCELLED, "the job\x00 stopped")
    first, second = place.reader().list_runs()
    assert (first.outcome, first.attempt, second.outcome) == (Outcome.CANCELLED, 1, Outcome.FINISHED)
    assert place.reader().group("g000000").state is GroupState.CANCELLED


def test_a_group_that_is_dispatched_again_replaces_what_there_was(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 0, b"hash")
    store.append_call(make_row(0))
    store.mark_trained(["g000000"], 3)
    store.open_group(make_spec(num_runs=1))
    assert [(one.run_id, one.num_calls) for one in place.reader().list_runs()] == [(RUN, 0)]
    assert place.reader().read_run(RUN)[1] == []
    assert [one.spec for one in store.live_groups()] == [make_spec(num_runs=1)]
    store.open_attempt(RUN, 0, b"hash")
    assert store.append_call(make_row(0))


def test_keys_are_kept_until_the_attempt_ends(store: Store) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 0, b"\x00\xffhash")

    def newest() -> tuple[int, bytes | None, CallTrouble | None]:
        attempt = store.live_groups()[0].attempts[RUN]
        assert attempt is not None
        return attempt.attempt, attempt.key_hash, attempt.trouble

    assert newest() == (0, b"\x00\xffhash", None)
    store.open_attempt(RUN, 1, b"second")
    assert newest() == (1, b"second", None)
    store.note_trouble(RUN, 1, CallTrouble.ENGINE_LOST)
    store.close_attempt(RUN, 1)
    assert newest() == (1, None, CallTrouble.ENGINE_LOST)
    store.finish_run(make_result(RUN, 1.0, attempt=0))  # late news of an earlier attempt
    assert newest() == (1, None, CallTrouble.ENGINE_LOST)
    store.note_trouble(RUN, 1, None)
    assert newest() == (1, None, None)


def test_text_that_no_database_takes_does_no_harm(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    odd = "a\x00b \ud83d c"
    row = make_row(0, output_text=odd, request={"messages": [{"content": odd}], "tools": []})
    assert store.append_call(row)
    store.finish_run(replace(make_result(RUN, 1.0), detail=odd))
    summary, (call,) = place.reader().read_run(RUN)
    assert (call.output_text, call.request["messages"][0]["content"]) == (odd, odd)
    assert summary.detail == "a\N{REPLACEMENT CHARACTER}b ? c"
    result = place.reader().run_result(RUN)
    assert result is not None
    assert result.detail == odd


# -- who may read and write --


def test_a_store_has_one_writer(store: Store, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trajectory.store.dialect._LOCK_TIMEOUT_S", 0.2)
    with pytest.raises(MachineError, match="another process writes"):
        Store(place.config(), place.job_id, 0, place.folder)
    store.close()
    place.open()


def test_a_store_that_cannot_be_read_is_the_machines_fault(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.open()
    store.open_group(make_spec())
    with contextlib.closing(sqlite3.connect(tmp_path / "shard-0.sqlite3")) as db:
        db.execute("ALTER TABLE calls RENAME TO gone")
    with pytest.raises(MachineError, match="could not be read") as error:
        store.calls(RUN, 0)
    assert error.value.hint
    place.close()


def test_a_closed_store_takes_nothing(store: Store) -> None:
    store.close()
    with pytest.raises(MachineError, match="closed"):
        store.open_group(make_spec())


def test_the_folder_of_a_job_leads_to_its_store(tmp_path: Path, postgres: PostgresServer) -> None:
    for url in ("", f"sqlite:///{tmp_path / 'files'}", postgres.url()):
        job = tmp_path / f"job{len(url)}"
        place = Place(job / "trajectory", url)
        place.open().open_group(make_spec())
        place.close()
        assert len(reader_of_job(job).list_runs()) == 2
        assert read_run(str(job / "trajectory"), RUN)[0].run_id == RUN


@pytest.mark.parametrize(
    "options",
    [
        {"url": "postgresql://me:secret@host/db"},
        {"url": "postgresql://host/db?user=me&password=secret"},
        {"blob_url": "s3://key:secret@bucket/prefix"},
    ],
)
def test_secrets_are_kept_out_of_the_configuration(options: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="leave the password out"):
        StoreConfig(**options)


def test_jobs_of_one_database_never_meet(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.new_database()
    with pytest.raises(NotFoundError):
        open_reader(url)
    places = [Place(tmp_path / job_id, url, job_id=job_id) for job_id in ("one", "two")]
    stores = [place.open() for place in places]
    for at, store in enumerate(stores):
        store.open_group(make_spec(num_runs=at + 1))
        store.append_call(make_row(at))
    stores[0].end_group("g000000", GroupState.DROPPED, "old")
    stores[0].mark_trained(["g000000"], 9)
    stores[0].clear_marks_above(0)
    assert [len(store.live_groups()) for store in stores] == [0, 1]
    with pytest.raises(ConfigError, match="one, two"):
        open_reader(url)
    for at, place in enumerate(places):
        assert len(place.reader().list_runs()) == at + 1
        assert [call.output_text for call in place.reader().read_run(RUN)[1]] == [f"answer {at}"]
        place.close()


@pytest.mark.parametrize("url", ["mysql://host/db", "nonsense", "s3://bucket", "/a/folder"])
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="postgresql://"):
        StoreConfig(url=url)
    with pytest.raises(ValidationError, match="s3://"):
        StoreConfig(blob_url="https://host/objects")
    if "://" in url:
        with pytest.raises(ConfigError, match="postgresql://"):
            open_reader(url)


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    config = StoreConfig(url=f"postgresql://me@/db?host={tmp_path}", reconnect_timeout_s=0.1)
    with pytest.raises(MachineError, match="cannot be reached"):
        Store(config, "job", 0, tmp_path)
    with pytest.raises(MachineError, match="cannot be reached") as caught:
        open_reader(f"postgresql://me:secret@/db?host={tmp_path}")
    assert "secret" not in str(caught.value)


def test_a_finished_store_can_be_read_where_nothing_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.open().open_group(make_spec())
    place.close()
    tmp_path.chmod(0o555)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    try:
        assert len(list_runs(str(tmp_path))) == 2
        assert {path.name for path in tmp_path.iterdir()} == {"shard-0.sqlite3", "shard-0.lock", "store.json"}
    finally:
        tmp_path.chmod(0o755)


def test_a_reader_that_stays_in_its_view_holds_up_no_writer(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    with place.reader()._view_of(RUN) as (db, _):
        store.append_call(make_row(0))
        assert db.execute(sa.text("SELECT COUNT(*) FROM calls WHERE job_id = :job"), {"job": _job(place)}).scalar() == 0
    assert len(place.reader().read_run(RUN)[1]) == 1


def _job(place: Place) -> str:
    return "" if place.is_sqlite else place.job_id


# -- group commit --


def test_one_operation_that_fails_does_not_fail_its_neighbours(store: Store, place: Place) -> None:
    store.open_group(make_spec())
    gate = threading.Event()

    def half_done() -> None:
        store.append_call(make_row(7))
        raise RuntimeError("afterwards")

    first = store.submit(lambda: gate.wait(10))  # the rest gathers behind it and shares a commit
    good = store.submit(store.append_call, make_row(0))
    missing = store.submit(store.finish_run, make_result("g000009-r0", 1.0))
    broken = store.submit(half_done)
    wrong = store.submit(store.append_call, make_row(3, run_id="g000009-r0"))  # of no group: the database refuses it
    again = store.submit(store.append_call, make_row(0))
    last = store.submit(store.append_call, make_row(1))
    gate.set()
    assert first.result(10)
    assert (good.result(10), again.result(10), last.result(10)) == (True, False, True)
    assert isinstance(missing.exception(10), NotFoundError)
    assert isinstance(broken.exception(10), RuntimeError)
    assert isinstance(wrong.exception(10), NotFoundError)
    assert [one.call_id for one in place.reader().read_run(RUN)[1]] == [f"{RUN}-a0-c0", f"{RUN}-a0-c1"]


def test_many_operations_share_a_commit_and_one_waits_for_nobody(place: Place) -> None:
    store = place.open(commit_interval_ms=60_000)
    store.open_group(make_spec())
    started_s = time.monotonic()
    store.append_call(make_row(0))
    assert time.monotonic() - started_s < 30.0  # nothing else was waiting: the interval is not waited for
    commits: list[int] = []
    store.commits._on_commit = lambda seconds, num_operations: commits.append(num_operations)
    gate = threading.Event()
    futures = [store.submit(lambda: gate.wait(10))]
    futures += [store.submit(store.append_call, make_row(index)) for index in range(1, 51)]
    gate.set()
    assert all(future.result(10) for future in futures)
    assert sum(commits) == 51
    assert len(commits) <= 2


def test_an_operation_sees_what_the_transaction_holds(store: Store) -> None:
    store.open_group(make_spec())

    def append_and_count() -> int:
        store.append_call(make_row(0))
        return len(store.calls(RUN, 0))

    assert store.submit(append_and_count).result(10) == 1


def test_a_full_disk_fails_what_does_not_fit_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path)
    store = place.open()
    store.open_group(make_spec())
    assert store.append_call(make_row(0))
    ids = np.random.default_rng(0).integers(0, 2**31, 100_000).astype(np.int32)
    large = make_row(1, output_ids=ids, logprobs=ids.view(np.float32))

    def connect_to_a_full_disk() -> sa.Connection:
        connection = store._connect()
        connection.connection.driver_connection.execute("PRAGMA max_page_count=40")  # type: ignore[union-attr]
        return connection

    with pytest.MonkeyPatch.context() as full:
        full.setattr(store.commits, "_open_connection", connect_to_a_full_disk)
        store.submit(store.commits._drop_connection).exception(10)
        with pytest.raises(MachineError, match="full") as caught:
            store.append_call(large)
        assert "Nothing of this was stored" in caught.value.hint
        assert store.append_call(make_row(2))
        store.commits._drop_connection()
    assert store.append_call(large)
    assert [one.call_id for one in place.reader().read_run(RUN)[1]] == [f"{RUN}-a0-c{index}" for index in (0, 2, 1)]
    place.close()


def test_a_cancelled_operation_is_left_out(store: Store) -> None:
    gate = threading.Event()
    first = store.submit(lambda: gate.wait(10))
    late = store.submit(store.open_group, make_spec())
    assert late.cancel()
    gate.set()
    assert first.result(10)
    assert store.live_groups() == []


def test_closing_finishes_what_was_submitted(place: Place) -> None:
    store = place.open()
    futures = [store.submit(store.open_group, make_spec(index)) for index in range(20)]
    store.close()
    assert [future.exception() for future in futures] == [None] * 20
    assert len(place.reader().list_runs()) == 40


def test_thousands_of_runs_are_listed_at_once(place: Place) -> None:
    store = place.open()

    def fill() -> None:
        for index in range(1_000):
            store.open_group(make_spec(index, num_runs=10))

    store.submit(fill).result(60)
    reader = place.reader()
    started_s = time.thread_time()
    assert len(reader.list_runs()) == 10_000
    assert time.thread_time() - started_s < 2.0
    assert [one.run_id for one in reader.list_runs(RunFilter(limit=2))] == ["g000999-r8", "g000999-r9"]
