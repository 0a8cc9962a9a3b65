from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.common.errors import MachineError, NotFoundError
from services.common.types import VersionSpan
from services.trajectory.encoding import CallRow
from services.trajectory.outcome import Outcome
from services.trajectory.store import GroupState, Store
from services.trajectory.store.objects import is_partial
from services.trajectory.store.reading import refs_in_use
from tests.services import PostgresServer, S3Server, s3_server
from tests.unit.trajectory.stores import RUN, Place, make_row
from tests.unit.trajectory.world import make_result, make_spec
from tests.waiting import wait_until


@pytest.fixture(params=["sqlite-folder", "sqlite-elsewhere", "sqlite-s3", "postgresql-folder", "postgresql-s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    database, _, objects = request.param.partition("-")
    found = Place(tmp_path / "store")
    if database == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("postgres")
        found.url = postgres.url()
    if objects == "s3":
        s3: S3Server = request.getfixturevalue("s3")
        found.blob_url = s3.url
    elif objects == "elsewhere":
        found.blob_url = (tmp_path / "else where").as_uri()
    yield found
    found.close()


def filled(place: Place, num_calls: int = 3, *, is_reachable: bool = True) -> tuple[Store, list[CallRow]]:
    """A store with one ended attempt of so many calls."""
    store = place.open()
    if is_reachable:
        store.seal_run(RUN, 0).result(30)  # behind the look for what an earlier store left, which would seal it too
    store.open_group(make_spec())
    rows: list[CallRow] = []
    for index in range(num_calls):
        rows.append(make_row(index, rows[-1] if rows else None))
        store.append_call(rows[-1])
    store.finish_run(make_result(RUN, 1.0))
    return store, rows


def refs_of(store: Store) -> set[str]:
    with store._reading() as db:
        return refs_in_use(db, store.scope)


def bits(row: CallRow) -> tuple[object, ...]:
    """All of a call, arrays by their bytes: NaN is not equal to itself."""
    record = row.record
    arrays = [row.new_prompt_ids, record.output_ids, record.logprobs]
    plain = replace(record, prompt_ids=_NO_IDS, output_ids=_NO_IDS, logprobs=_NO_LOGPROBS)
    fields = tuple(getattr(plain, name) for name in plain.__slots__ if getattr(plain, name) is not _NO_IDS)
    return (
        row.ordinal,
        row.num_prompt_tokens,
        row.num_shared_messages,
        row.shares_tools,
        repr(fields),
        *((one.dtype.str, one.tobytes()) for one in arrays),
    )


_NO_IDS = np.empty(0, dtype=np.int32)
_NO_LOGPROBS = np.empty(0, dtype=np.float32)


def test_a_sealed_run_reads_as_it_did_before(place: Place) -> None:
    store, rows = filled(place)
    before = place.reader().read_run(RUN)
    assert store.seal_run(RUN, 0).result(30) is True
    assert store.seal_run(RUN, 0).result(30) is False
    assert len(refs_of(store)) == len(store.objects.refs()) == 1
    summary, calls = place.reader().read_run(RUN)
    assert summary == before[0]
    assert repr(calls) == repr(before[1])
    assert list(map(bits, store.calls(RUN, 0))) == list(map(bits, rows))
    assert store.append_call(rows[0]) is False  # it is still known
    place.close()
    assert list(map(bits, place.open().calls(RUN, 0))) == list(map(bits, rows))


int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda ids: np.asarray(ids, dtype=np.int32))


@st.composite
def calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What differs between the calls of a run: arrays of any bits, among them NaN and -0, and any text."""
    text = st.text(st.characters(), max_size=8)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        output_ids: NDArray[np.int32] = draw(int32s)
        logprob_bits = draw(st.binary(min_size=4 * len(output_ids), max_size=4 * len(output_ids)))
        made.append(
            {
                "output_ids": output_ids,
                "logprobs": np.frombuffer(logprob_bits, dtype=np.float32),
                "version_spans": (VersionSpan(draw(st.integers(0, 9)), len(output_ids)),),
                "output_text": draw(text),
                "request": {"messages": [{"content": draw(text)}], "tools": []},
                "requested_sampling": {"stop": [draw(text)]},
                "agent_id": draw(text),
            }
        )
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_calls=calls(), new_ids=int32s)
def test_any_run_reads_back_bit_for_bit(place: Place, given_calls: list[dict[str, Any]], new_ids: Any) -> None:
    store = place.opened[0] if place.opened else place.open()
    store.open_group(make_spec())
    rows = [replace(make_row(at, **one), new_prompt_ids=new_ids) for at, one in enumerate(given_calls)]
    for row in rows:
        assert store.append_call(row)
    assert list(map(bits, store.calls(RUN, 0))) == list(map(bits, rows))
    store.finish_run(make_result(RUN, 1.0))
    assert store.seal_run(RUN, 0).result(30)
    assert list(map(bits, store.calls(RUN, 0))) == list(map(bits, rows))


def test_only_ended_attempts_with_calls_are_sealed(place: Place) -> None:
    store = place.open()
    store.open_group(make_spec())
    store.append_call(make_row(0))
    assert store.seal_run(RUN, 0).result(30) is False
    store.finish_run(make_result("g000000-r1", 1.0))
    assert store.seal_run("g000000-r1", 0).result(30) is False
    assert store.seal_run("g000009-r0", 0).result(30) is False
    assert store.objects.refs() == []


def test_each_attempt_has_an_object_of_its_own(place: Place) -> None:
    store, _ = filled(place, 1)
    store.open_attempt(RUN, 1, b"hash")
    store.append_call(make_row(5, attempt=1))
    store.finish_run(make_result(RUN, 0.0, attempt=1))
    assert [store.seal_run(RUN, attempt).result(30) for attempt in (0, 1)] == [True, True]
    reader = place.reader()
    texts = [reader.read_run(RUN, attempt)[1][0].output_text for attempt in (0, 1, None)]
    assert texts == ["answer 0", "answer 5", "answer 5"]


def test_what_nothing_refers_to_is_deleted_when_the_store_is_opened(place: Place) -> None:
    store, rows = filled(place)
    assert store.seal_run(RUN, 0).result(30)
    orphan = store.objects.new_ref("g000009-r0-a0")
    store.objects.write(orphan, b"left by a process that was killed before it could name the object")
    assert len(store.objects.refs()) == 2
    place.close()
    again = place.open()
    wait_until(lambda: again.objects.refs() == list(refs_of(again)), 20)
    assert list(map(bits, again.calls(RUN, 0))) == list(map(bits, rows))


def test_what_was_not_sealed_is_when_the_store_is_opened(place: Place) -> None:
    filled(place)
    place.close()
    again = place.open()
    wait_until(lambda: len(refs_of(again)) == 1, 20)


def test_the_objects_of_a_replaced_group_are_deleted(place: Place) -> None:
    store, _ = filled(place)
    assert store.seal_run(RUN, 0).result(30)
    store.open_group(make_spec())
    wait_until(lambda: store.objects.refs() == [], 20)
    assert store.calls(RUN, 0) == []


def test_a_group_that_is_replaced_while_it_is_sealed_keeps_its_new_calls(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = filled(place, 1)
    written, go_on = threading.Event(), threading.Event()
    write = store.objects.write

    def slow_write(ref: str, data: bytes) -> None:
        write(ref, data)
        written.set()
        assert go_on.wait(20)

    monkeypatch.setattr(store.objects, "write", slow_write)
    sealing = store.seal_run(RUN, 0)
    assert written.wait(20)
    store.open_group(make_spec())  # nothing of this waits for the object
    store.append_call(make_row(0, output_text="the new one"))
    store.finish_run(make_result(RUN, 1.0, Outcome.FINISHED))
    go_on.set()
    assert sealing.result(20) is False
    assert [row.record.output_text for row in store.calls(RUN, 0)] == ["the new one"]
    assert store.objects.refs() == []


def test_a_job_folder_can_be_moved_with_its_objects(tmp_path: Path) -> None:
    place = Place(tmp_path / "before")
    store, rows = filled(place)
    assert store.seal_run(RUN, 0).result(30)
    place.close()
    place.folder.rename(tmp_path / "after")
    moved = Place(tmp_path / "after")
    assert len(moved.reader().read_run(RUN)[1]) == len(rows)
    assert list(map(bits, moved.open().calls(RUN, 0))) == list(map(bits, rows))
    moved.close()


def test_half_an_object_is_never_read_and_does_not_stay(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store, _ = filled(place)
    assert store.seal_run(RUN, 0).result(30)
    place.close()
    (whole,) = (tmp_path / "blobs").rglob("*.parquet")
    half = whole.with_name(".partial-other.parquet")
    half.write_bytes(whole.read_bytes()[:100])
    again = place.open()
    wait_until(lambda: not half.exists(), 20)
    assert not any(map(is_partial, again.objects.refs()))
    assert whole.exists()
    place.close()


def test_a_damaged_or_lost_object_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store, _ = filled(place)
    assert store.seal_run(RUN, 0).result(30)
    (path,) = (tmp_path / "blobs").rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(MachineError, match="damaged"):
        place.reader().read_run(RUN)
    path.unlink()
    with pytest.raises(NotFoundError, match="gone"):
        place.reader().read_run(RUN)
    assert place.reader().list_runs()[0].num_calls == 3
    place.close()


def test_objects_that_cannot_be_reached_hold_up_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    place = Place(tmp_path, blob_url=S3Server(port).url)
    with caplog.at_level(logging.WARNING):
        store, rows = filled(place, is_reachable=False)
        store._sealer._first_retry_s = store._sealer._retry_in_s = 0.1
        sealing = store.seal_run(RUN, 0)
        wait_until(lambda: "cannot be reached" in caplog.text, 60)
    assert store.append_call(make_row(9, run_id="g000000-r1"))
    store.end_group("g000000", GroupState.DROPPED, "old")
    assert not sealing.done()
    assert list(map(bits, store.calls(RUN, 0))) == list(map(bits, rows))
    with s3_server(port):  # it comes back
        assert sealing.result(60)
        assert list(map(bits, store.calls(RUN, 0))) == list(map(bits, rows))
        place.close()


def test_closing_does_not_wait_for_objects_that_cannot_be_reached(tmp_path: Path) -> None:
    file = tmp_path / "no folder"
    file.write_text("")
    place = Place(tmp_path / "store", blob_url=(file / "objects").as_uri())
    store, _ = filled(place)
    sealing = store.seal_run(RUN, 0)
    place.close()
    assert sealing.cancelled()
    assert len(place.reader().read_run(RUN)[1]) == 3
