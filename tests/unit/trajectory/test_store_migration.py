from __future__ import annotations

import json
import multiprocessing
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from services.common.errors import ConfigError, NotFoundError
from services.trajectory.outcome import Outcome
from services.trajectory.store import SCHEMA_VERSION, GroupState, RunFilter, Store, StoreConfig, list_runs, read_run
from services.trajectory.store.dialect import postgres_engine, postgres_url, sqlite_engine
from services.trajectory.store.migrate import migrate, migrate_store
from services.trajectory.store.schema import metadata
from tests.services import PostgresServer
from tests.unit.trajectory.stores import Place, make_row
from tests.unit.trajectory.world import make_spec

FIRST_SCHEMA = """
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY, task_name TEXT NOT NULL, version INTEGER NOT NULL, is_eval INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, opened_at_s REAL NOT NULL
);
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups ON DELETE CASCADE,
    position INTEGER NOT NULL, advantage REAL
);
CREATE INDEX runs_of_group ON runs (group_id, position);
CREATE TABLE attempts (
    run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
    key_hash BLOB, context_overflowed INTEGER NOT NULL DEFAULT 0, result TEXT,
    PRIMARY KEY (run_id, attempt)
);
CREATE TABLE calls (
    call_id TEXT PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE, attempt INTEGER NOT NULL,
    ordinal INTEGER NOT NULL, parent_call_id TEXT, num_prompt_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL, version_min INTEGER, version_max INTEGER,
    prompt BLOB NOT NULL, output BLOB NOT NULL, logprobs BLOB NOT NULL, request BLOB NOT NULL, rest TEXT NOT NULL
);
CREATE INDEX calls_of_attempt ON calls (run_id, attempt);
CREATE TABLE group_results (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, result TEXT NOT NULL);
CREATE TABLE trained_marks (group_id TEXT PRIMARY KEY REFERENCES groups ON DELETE CASCADE, step INTEGER NOT NULL);
PRAGMA user_version=1;
"""
"""What the first Tidegate made, word for word."""


def pack(numbers: list[float], dtype: str) -> bytes:
    """As the first Tidegate packed arrays: byte planes, compressed."""
    return zlib.compress(np.asarray(numbers, dtype=dtype).view(np.uint8).reshape(-1, 4).T.tobytes(), 1)


def make_first_store(path: Path) -> None:
    """Group b (trained) was dispatched before group a (ready), c is open; b's first run has two calls."""
    with sqlite3.connect(path) as db:
        db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA foreign_keys=ON; {FIRST_SCHEMA}")
        for at, (group_id, state) in enumerate([("gb", "ready"), ("ga", "ready"), ("gc", "open")]):
            db.execute("INSERT INTO groups VALUES (?, 'task', 4, 0, ?, 'why', ?)", (group_id, state, 100.0 + at))
            for position in range(2):
                row = (f"{group_id}-r{position}", group_id, position, 0.5 - position if state == "ready" else None)
                db.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", row)
        result = {"attempt": 1, "outcome": "finished", "reward": 0.75, "wall_s": 3.0, "harness_s": 2.0}
        result |= {"run_id": "gb-r0", "verifier_s": 1.0, "exit_code": 0, "detail": "done", "workspace": "w"}
        db.execute("INSERT INTO attempts VALUES ('gb-r0', 0, NULL, 1, NULL)")
        db.execute("INSERT INTO attempts VALUES ('gb-r0', 1, NULL, 0, ?)", (json.dumps(result),))
        db.execute("INSERT INTO attempts VALUES ('gc-r0', 0, ?, 0, NULL)", (b"hash",))
        for group_id in ("gb", "ga"):
            settled = {"group_id": group_id, "ready": True, "reason": "", "num_runs": 2, "num_counted": 2}
            settled |= {"num_targets": 5, "num_tokens": 9, "reward_mean": 0.5, "rewards": [0.25, 0.75]}
            values = (group_id, json.dumps(settled | {"version_min": 4}))
            db.execute("INSERT INTO group_results VALUES (?, ?)", values)
        db.execute("INSERT INTO trained_marks VALUES ('gb', 6)")
        messages = [{"role": "user", "content": "häh"}]
        for at, call_id in enumerate(["z", "y"]):  # the order of their ids is not that of the calls
            rest = {"version_spans": [[4 + at, 2]], "output_text": "hi", "finish_reason": "stop", "trainable": True}
            rest |= {"cells": ["cell-0"], "started_at_s": 1.0, "ended_at_s": 2.0, "requested_sampling": {}}
            rest |= {"num_shared_messages": at, "shares_tools": bool(at)}
            request = {"dialect": "openai_chat", "messages": messages, **({} if at else {"tools": []})}
            row = (call_id, "gb-r0", 1, at, "z" if at else None, 3 + 5 * at, 2, 4 + at, 4 + at)
            row += (pack([1, 2, 3], "<i4"), pack([7, 8 + at], "<i4"), pack([-0.5, -0.25], "<f4"))
            row += (zlib.compress(json.dumps(request, ensure_ascii=False).encode(), 6), json.dumps(rest))
            db.execute(f"INSERT INTO calls VALUES ({', '.join('?' * 14)})", row)
    db.close()


def check_migrated(folder: Path, store: Store) -> None:
    summaries = list_runs(str(folder))
    assert [one.run_id for one in summaries] == ["gb-r0", "gb-r1", "ga-r0", "ga-r1", "gc-r0", "gc-r1"]
    first = summaries[0]
    assert (first.attempt, first.outcome, first.reward, first.wall_s) == (1, Outcome.FINISHED, 0.75, 3.0)
    assert (first.num_calls, first.num_prompt_tokens, first.num_output_tokens) == (2, 3 + 8, 4)
    assert (first.version_min, first.version_max, first.advantage, first.detail) == (4, 5, 0.5, "done")
    assert [one.run_id for one in list_runs(str(folder), RunFilter(outcome=Outcome.FINISHED))] == ["gb-r0"]
    _, (call, after) = read_run(str(folder), "gb-r0")
    assert (call.call_id, call.output_ids.tolist(), call.logprobs.tolist()) == ("z", [7, 8], [-0.5, -0.25])
    assert after.prompt_ids.tolist() == [1, 2, 3, 7, 8, 1, 2, 3]
    assert [one["content"] for one in after.request["messages"]] == ["häh", "häh"]
    assert (after.request["tools"], after.agent_id) == ([], "")
    assert [one.spec.group_id for one in store.live_groups()] == ["ga", "gc"]
    attempt = store.live_groups()[1].attempts["gc-r0"]
    assert attempt is not None
    assert (attempt.key_hash, attempt.trouble) == (b"hash", None)
    trained = store.trained_group("gb")
    assert trained is not None
    assert trained.result is not None
    assert (trained.result.rewards, trained.result.loss_reason, trained.state) == ((0.25, 0.75), None, GroupState.READY)
    store.clear_marks_above(5)
    assert [one.spec.group_id for one in store.live_groups()] == ["gb", "ga", "gc"]


def test_a_store_of_the_first_schema_is_migrated_when_it_is_written_to(tmp_path: Path) -> None:
    make_first_store(tmp_path / "shard-0.sqlite3")
    place = Place(tmp_path)
    check_migrated(tmp_path, place.open())
    place.close()
    with sqlite3.connect(tmp_path / "shard-0.sqlite3") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert not db.execute("PRAGMA foreign_key_check").fetchall()
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    db.close()
    assert tables == {"groups", "runs", "attempts", "calls", "alembic_version", "sqlite_sequence"}
    store = place.open()
    store.open_group(make_spec())
    assert store.append_call(make_row(0))
    place.close()


def test_readers_refuse_the_first_schema_and_say_how_to_migrate(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.sqlite3"
    make_first_store(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="schema version 1") as caught:
        list_runs(str(tmp_path))
    assert path.read_bytes() == before
    command = caught.value.hint.partition("python ")[2].replace("FOLDER_OR_URL", str(tmp_path)).split()
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    assert done.stdout == f"{path} has the schema version {SCHEMA_VERSION}\n"
    assert len(list_runs(str(tmp_path))) == 6


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.sqlite3"
    make_first_store(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE attempts SET result = 'no JSON' WHERE run_id = 'gb-r0'")
        before = list(db.iterdump())
    db.close()
    with pytest.raises(ConfigError, match="malformed JSON"):
        migrate_store(str(tmp_path))
    with sqlite3.connect(path) as db:
        assert list(db.iterdump()) == before
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 99])
def test_a_store_of_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "shard-0.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={version}")
        db.execute("CREATE TABLE groups (x)")
    db.close()
    before = path.read_bytes()
    attempts = (
        lambda: Store(StoreConfig(), "job", 0, tmp_path),
        lambda: list_runs(str(tmp_path)),
        lambda: migrate_store(str(tmp_path)),
    )
    for attempt in attempts:
        with pytest.raises(ConfigError, match=f"schema version {version}"):
            attempt()
    assert path.read_bytes() == before


def test_a_database_of_a_newer_schema_is_refused(tmp_path: Path, postgres: PostgresServer) -> None:
    place = Place(tmp_path, postgres.new_database())
    place.open().open_group(make_spec())
    place.close()
    engine = postgres_engine(postgres_url(place.url), read_only=False)
    with engine.begin() as db:
        db.execute(sa.text("UPDATE alembic_version SET version_num = '0099'"))
    for attempt in (place.open, place.reader):
        with pytest.raises(ConfigError, match="schema version 99"):
            attempt()


def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.sqlite3"
    path.write_bytes(b"something else entirely" * 100)
    for attempt in (lambda: Store(StoreConfig(), "job", 0, tmp_path), lambda: list_runs(str(tmp_path))):
        with pytest.raises(ConfigError):
            attempt()
    assert path.read_bytes() == b"something else entirely" * 100
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE addresses (x)")
    db.close()
    with pytest.raises(ConfigError, match="no run store"):
        Store(StoreConfig(), "job", 0, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    if request.param == "sqlite":
        yield sqlite_engine(tmp_path / "shard-0.sqlite3", read_only=False)
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        yield postgres_engine(postgres_url(server.new_database()), read_only=False)


def test_the_revisions_make_the_tables_that_the_code_uses(engine: sa.Engine) -> None:
    migrate(engine, "a store")
    migrate(engine, "a store")
    with engine.connect() as db:
        assert compare_metadata(MigrationContext.configure(db, opts={"compare_type": True}), metadata) == []


def test_shards_may_make_the_tables_at_the_same_time(tmp_path: Path, postgres: PostgresServer) -> None:
    place = Place(tmp_path, postgres.new_database())
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool, ThreadPoolExecutor(3) as threads:
        elsewhere = pool.apply_async(migrate_store, (place.url,))
        for store in threads.map(place.open, range(3)):
            assert store.live_groups() == []
        elsewhere.get(60)
    place.close()


def test_a_folder_without_a_store_is_told(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError, match="no store"):
            migrate_store(str(folder))
