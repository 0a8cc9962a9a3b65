"""A database that goes away under the store, and comes back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from services.common.errors import MachineError
from services.trajectory.store import Store
from services.trajectory.store.dialect import postgres_url
from tests.services import PostgresServer
from tests.unit.trajectory.stores import RUN, Place, make_row
from tests.unit.trajectory.world import make_spec


@pytest.fixture
def place(tmp_path: Path, postgres: PostgresServer) -> Iterator[Place]:
    found = Place(tmp_path, postgres.new_database())
    yield found
    found.close()


def backend_of(store: Store) -> int:
    query = sa.text("SELECT pg_backend_pid()")
    return int(store.submit(lambda: store.commits.connection.execute(query).scalar_one()).result(30))


def stored_ids(place: Place) -> list[str]:
    return [one.call_id for one in place.reader().read_run(RUN)[1]]


def test_a_connection_lost_while_nothing_was_written_goes_unnoticed(place: Place, postgres: PostgresServer) -> None:
    store = place.open()
    store.open_group(make_spec())
    postgres.execute(f"SELECT pg_terminate_backend({backend_of(store)}, 5000)")
    assert store.append_call(make_row(0))
    assert stored_ids(place) == [f"{RUN}-a0-c0"]


def test_operations_before_a_lost_connection_are_run_again(place: Place, postgres: PostgresServer) -> None:
    store = place.open()
    store.open_group(make_spec())
    backend = backend_of(store)
    kills: list[int] = []

    def kill_once() -> None:
        if not kills:
            kills.append(backend)
            postgres.execute(f"SELECT pg_terminate_backend({backend}, 5000)")

    gate = threading.Event()
    futures: list[Future[object]] = [store.submit(lambda: gate.wait(10))]
    futures.append(store.submit(store.append_call, make_row(0)))
    futures.append(store.submit(kill_once))
    futures.append(store.submit(store.append_call, make_row(1)))
    gate.set()
    assert [future.result(30) for future in futures] == [True, True, None, True]
    assert stored_ids(place) == [f"{RUN}-a0-c0", f"{RUN}-a0-c1"]


def lose_commit(store: Store, server: PostgresServer, *, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next commit's connection broken, before the server commits or before it can say so."""
    commit = store._engine.dialect.do_commit
    backend = backend_of(store)

    def lose(connection: Any) -> None:
        monkeypatch.undo()
        if not before:
            commit(connection)
        server.execute(f"SELECT pg_terminate_backend({backend}, 5000)")
        connection.execute("SELECT 1")  # meets the broken connection

    monkeypatch.setattr(store._engine.dialect, "do_commit", lose)


@pytest.mark.parametrize("before", [True, False])
def test_the_database_is_asked_what_became_of_a_commit(
    place: Place, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    store = place.open()
    store.open_group(make_spec())
    for index in range(0, 6, 2):
        lose_commit(store, postgres, before=before, monkeypatch=monkeypatch)
        gate = threading.Event()
        first = store.submit(lambda gate=gate: gate.wait(10))
        futures = [store.submit(store.append_call, make_row(number)) for number in (index, index + 1)]
        gate.set()
        assert [first.result(30), *(future.result(30) for future in futures)] == [True] * 3
        assert store.append_call(make_row(index)) is False
    assert stored_ids(place) == [f"{RUN}-a0-c{index}" for index in range(6)]


def test_a_commit_of_which_nobody_knows_fails(
    place: Place, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open()
    store.open_group(make_spec())
    lose_commit(store, postgres, before=True, monkeypatch=monkeypatch)
    with pytest.MonkeyPatch.context() as forgetful:
        forgetful.setattr("services.trajectory.store.group_commit.is_committed", lambda connection, name: None)
        with pytest.raises(MachineError) as caught:
            store.append_call(make_row(0))
    assert "does not know" in caught.value.hint
    assert store.append_call(make_row(0))  # here it was not stored
    assert stored_ids(place) == [f"{RUN}-a0-c0"]


def test_a_restart_of_the_database_is_waited_for(tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        place = Place(tmp_path, server.url())
        store = place.open()
        store.open_group(make_spec())
        for at, how in enumerate((signal.SIGINT, signal.SIGQUIT)):
            assert store.append_call(make_row(2 * at))
            server.stop(how)
            waiting = store.submit(store.append_call, make_row(2 * at + 1))
            server.start()
            assert waiting.result(30)
        assert stored_ids(place) == [f"{RUN}-a0-c{index}" for index in range(4)]
        place.close()
    finally:
        server.close()


def test_a_database_that_stays_away_fails_what_was_waiting_together(tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        place = Place(tmp_path, server.url())
        store = place.open(reconnect_timeout_s=0.5)
        store.open_group(make_spec())
        server.stop()
        futures = [store.submit(store.append_call, make_row(index)) for index in range(50)]
        errors = [future.exception(10) for future in futures]  # not 50 times the timeout
        assert all(isinstance(error, MachineError) for error in errors)
        server.start()
        assert store.append_call(make_row(0))
        place.close()
    finally:
        server.close()


def test_a_writer_whose_lock_was_taken_meanwhile_writes_no_more(
    place: Place, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trajectory.store.dialect._LOCK_TIMEOUT_S", 0.2)
    store = place.open()
    store.open_group(make_spec())
    postgres.execute(f"SELECT pg_terminate_backend({backend_of(store)}, 5000)")
    second = Store(place.config(), place.job_id, 0, place.folder)
    with pytest.raises(MachineError, match="another process writes"):
        store.append_call(make_row(0))
    assert second.append_call(make_row(1))
    second.close()
    assert store.append_call(make_row(2))
    assert stored_ids(place) == [f"{RUN}-a0-c1", f"{RUN}-a0-c2"]


def test_the_url_of_any_client_is_understood() -> None:
    for url in ("postgresql://me@host/db", "postgres://me@host/db", "postgresql+psycopg://me@host/db"):
        assert postgres_url(url).render_as_string() == "postgresql+psycopg://me@host/db"
