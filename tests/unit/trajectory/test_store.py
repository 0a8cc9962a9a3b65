from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import ConfigError, MachineError, NotFoundError
from services.trajectory.encoding import CallRow
from services.trajectory.outcome import Outcome
from services.trajectory.store import SCHEMA_VERSION, GroupState, RunFilter, Store, StoreConfig, list_runs, read_run
from services.trajectory.types import CallTicket, GroupResult
from tests.unit.trajectory.world import SAMPLING, answer, ask, call, data_of, make_result, make_spec, open_shard

RUN = "g000000-r0"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(StoreConfig(), "job", 0, tmp_path)
    yield opened
    opened.close()


def make_row(index: int, parent: CallRow | None = None) -> CallRow:
    parent_call_id = None if parent is None else parent.record.call_id
    ticket = CallTicket(f"{RUN}-a0-c{index}", RUN, 0, None, 0, 0, parent_call_id, SAMPLING, True)
    new_ids = np.arange(index, index + 5, dtype=np.int32)
    start = 0 if parent is None else parent.num_prompt_tokens + len(parent.record.output_ids)
    contents = [str(one) for one in range(2 * index + 1)]
    record = answer(ticket, f"answer {index}", request=data_of(ask(*contents)))
    return CallRow(record, index, start + 5, new_ids, 0 if parent is None else 2 * index - 1, parent is not None)


def make_group_result(group_id: str, *, ready: bool = True) -> GroupResult:
    return GroupResult(group_id, ready, "" if ready else "equal", 2, 2, 8, 40, 0.5, (0.0, 1.0), 3)


def test_calls_come_back_as_they_were_with_their_whole_prompts(store: Store, tmp_path: Path) -> None:
    store.open_group(make_spec())
    store.open_attempt(RUN, 0, b"hash")
    first = make_row(0)
    second = make_row(1, first)
    assert [store.append_call(row) for row in (first, second, second)] == [True, True, False]
    _, calls = read_run(str(tmp_path), RUN)
    assert [one.call_id for one in calls] == [first.record.call_id, second.record.call_id]
    assert calls[1].prompt_ids.tolist() == [*range(5), *first.record.output_ids.tolist(), *range(1, 6)]
    assert calls[1].prompt_ids.dtype == np.int32
    assert calls[1].logprobs.tobytes() == second.record.logprobs.tobytes()
    assert [one["content"] for one in calls[1].request["messages"]] == ["0", "1", "2"]
    assert store.calls(RUN, 0)[1].num_shared_messages == 1


def test_runs_are_listed_by_what_became_of_them(store: Store, tmp_path: Path) -> None:
    folder = str(tmp_path)
    store.open_group(make_spec(0))
    store.open_group(make_spec(1, is_eval=True))
    store.open_attempt(RUN, 0, b"hash")
    store.append_call(make_row(0))
    store.finish_run(make_result(RUN, 0.5, Outcome.HARNESS_TIMEOUT))
    summaries = list_runs(folder)
    assert [one.run_id for one in summaries] == ["g000000-r0", "g000000-r1", "e000001-r0", "e000001-r1"]
    first = summaries[0]
    assert (first.outcome, first.reward, first.num_calls, first.wall_s) == (Outcome.HARNESS_TIMEOUT, 0.5, 1, 2.0)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.version_min, first.version_max) == (5, 9, 3, 3)
    assert (summaries[1].outcome, summaries[1].num_calls, summaries[1].version_min) == (None, 0, None)

    def ids(filters: RunFilter) -> list[str]:
        return [one.run_id for one in list_runs(folder, filters)]

    assert ids(RunFilter(outcome=Outcome.HARNESS_TIMEOUT)) == [RUN]
    assert ids(RunFilter(unfinished=True, is_eval=False)) == ["g000000-r1"]
    assert ids(RunFilter(is_eval=True, limit=1)) == ["e000001-r1"]
    assert ids(RunFilter(group_id="g000000", task_name="task")) == ["g000000-r0", "g000000-r1"]
    assert ids(RunFilter(limit=0)) == []


def test_runs_of_all_shards_are_listed_in_order_of_dispatch(store: Store, tmp_path: Path) -> None:
    other = Store(StoreConfig(), "job", 1, tmp_path)
    store.open_group(make_spec(1))
    other.open_group(make_spec(0))
    other.close()
    assert [one.group_id for one in list_runs(str(tmp_path))] == ["g000001"] * 2 + ["g000000"] * 2
    assert read_run(str(tmp_path), "g000000-r1")[1] == []


def test_what_is_not_there_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_run(str(tmp_path), RUN)
    with pytest.raises(NotFoundError):
        list_runs(str(tmp_path / "elsewhere"))
    with pytest.raises(NotFoundError):
        store.finish_run(make_result(RUN, 1.0))


def test_only_untrained_groups_that_may_be_trained_are_live(store: Store) -> None:
    for index in range(5):
        store.open_group(make_spec(index))
    for index in range(3):
        store.finish_group(make_group_result(f"g00000{index}", ready=index != 2), {f"g00000{index}-r0": (1.0, None)})
    store.mark_trained(["g000000"], 4)
    store.end_group("g000003", GroupState.DROPPED, "too old")
    assert [one.spec.group_id for one in store.live_groups()] == ["g000001", "g000004"]
    assert store.live_groups()[0].result == make_group_result("g000001")
    assert store.live_groups()[1].spec == make_spec(4)
    store.clear_marks_above(4)
    assert len(store.live_groups()) == 2
    store.clear_marks_above(3)
    assert [one.spec.group_id for one in store.live_groups()] == ["g000000", "g000001", "g000004"]
    store.end_group("g000002", GroupState.DROPPED, "given up")
    assert store.group_result("g000002") == make_group_result("g000002", ready=False)


def test_a_store_of_another_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
        db.execute("CREATE TABLE groups (x)")
    db.close()
    before = path.read_bytes()
    for attempt in (lambda: Store(StoreConfig(), "job", 0, tmp_path), lambda: list_runs(str(tmp_path))):
        with pytest.raises(ConfigError, match=f"schema version {SCHEMA_VERSION + 1}"):
            attempt()
    assert path.read_bytes() == before


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shard-0.sqlite3").write_bytes(b"something else entirely" * 100)
    with pytest.raises(ConfigError):
        Store(StoreConfig(), "job", 0, tmp_path)


def test_a_store_has_one_writer(store: Store, tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        Store(StoreConfig(), "job", 0, tmp_path)


def test_a_finished_store_can_be_read_where_nothing_may_be_written(tmp_path: Path) -> None:
    store = Store(StoreConfig(), "job", 0, tmp_path)
    store.open_group(make_spec())
    store.close()
    tmp_path.chmod(0o555)
    try:
        assert len(list_runs(str(tmp_path))) == 2
    finally:
        tmp_path.chmod(0o755)


def append_for_ever(folder: str, acknowledged: Connection) -> None:
    """What runs until it is killed: calls of one run, each reported once ``append_call`` has returned."""

    async def work() -> None:
        shard = open_shard(Path(folder), max_model_len=1 << 30)
        await shard.open_group(make_spec())
        key = await shard.open_attempt(RUN, 0)
        contents = ["start"]
        while True:
            ticket = await call(shard, RUN, key, ask(*contents[-1:]), f"{os.getpid()}")
            acknowledged.send_bytes(f"{ticket.call_id} {os.getpid()}".encode())

    asyncio.run(work())


def test_kill_9_loses_no_acknowledged_call(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    acknowledged: dict[str, str] = {}
    for kill in range(10):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=append_for_ever, args=(str(tmp_path), sender), daemon=True)
        process.start()
        sender.close()
        for _ in range(3 + 2 * kill):
            assert receiver.poll(60)
            call_id, text = receiver.recv_bytes().decode().split()
            acknowledged[call_id] = text
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while receiver.poll():  # acknowledged before it died
            try:
                call_id, text = receiver.recv_bytes().decode().split()
            except EOFError:
                break
            acknowledged[call_id] = text
        stored = {one.call_id: one.output_text for one in read_run(str(tmp_path), RUN)[1]}
        assert {call_id: stored.get(call_id) for call_id in acknowledged} == acknowledged
    assert len(acknowledged) >= sum(3 + 2 * kill for kill in range(10))
