"""kill -9 at random moments: what was told to be durable is there, once, and the store opens again."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.errors import NotFoundError
from services.trajectory.encoding import CallRow
from services.trajectory.store.reading import refs_in_use, unsealed_attempts
from tests.integration.store_writer import call_for_ever, expected_row, write_for_ever
from tests.services import PostgresServer
from tests.unit.trajectory.stores import Place
from tests.waiting import wait_until

NUM_KILLS = 24


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path, job_id="job")
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        found.url = server.new_database()
    yield found
    found.close()


def told_until_killed(target: Callable[..., None], place: Place, generation: int, kill_after: int) -> set[str]:
    """What a process told to be durable; it is killed once it has told so much."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.store_writer", "services.common.metrics"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (place.config(), place.job_id, str(place.folder), generation, sender)
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    sender.close()
    assert process.pid is not None
    told: set[str] = set()
    try:
        while len(told) < kill_after:
            assert receiver.poll(60)
            told.add(receiver.recv_bytes().decode())
        os.kill(process.pid, signal.SIGKILL)
        while True:
            told.add(receiver.recv_bytes().decode())
    except (EOFError, OSError):  # OSError: it died in the middle of telling
        process.join()
        assert process.exitcode == -signal.SIGKILL
        return told
    finally:
        receiver.close()


def check(place: Place, told: set[str]) -> int:
    """All that was told is stored as it was written; the number of calls that are stored."""
    reader = place.reader()
    numbers = defaultdict(set)
    for call_id in told:
        run_id, _, number = call_id.rpartition("-a0-c")
        numbers[run_id].add(int(number))
    num_stored = 0
    for run_id, wanted in numbers.items():
        summary, calls = reader.read_run(run_id)
        ids = [call.call_id for call in calls]
        assert len(ids) == len(set(ids)) == summary.num_calls
        assert wanted <= {int(one.rpartition("-c")[2]) for one in ids}
        parent: CallRow | None = None
        for number, call in enumerate(calls):
            parent = expected_row(run_id, number, parent)
            assert call.output_ids.tobytes() == parent.record.output_ids.tobytes()
            assert call.logprobs.tobytes() == parent.record.logprobs.tobytes()
            assert call.request == parent.record.request
            assert len(call.prompt_ids) == parent.num_prompt_tokens
        num_stored += len(calls)
    return num_stored


def test_kill_9_at_any_moment_loses_nothing_that_was_durable(place: Place) -> None:
    moments = random.Random(4)
    told: set[str] = set()
    for kill in range(NUM_KILLS):
        of_this_one = told_until_killed(write_for_ever, place, kill, moments.randrange(1, 90))
        assert check(place, of_this_one) >= len(of_this_one)
        told |= of_this_one
    assert check(place, told) >= len(told) > NUM_KILLS
    summaries = place.reader().list_runs()
    for group_id, members in itertools.groupby(summaries, key=lambda one: one.group_id):
        assert len(list(members)) == 4, group_id
    store = place.open()
    with pytest.raises(NotFoundError):
        place.reader().read_run("g999999-r0")

    def is_tidy() -> bool:
        """All that ended is sealed, and there is no object that nothing refers to."""
        with store._reading() as db:
            return not unsealed_attempts(db, store.scope) and refs_in_use(db, store.scope) == set(store.objects.refs())

    wait_until(is_tidy, 60)
    assert len(store.objects.refs()) == sum(one.outcome is not None for one in summaries) > 4
    assert check(place, told) >= len(told)


def test_kill_9_of_a_shard_loses_no_acknowledged_call(place: Place) -> None:
    """Each time the shard takes its runs up where they were."""
    moments = random.Random(5)
    told: dict[str, str] = {}
    for kill in range(20):
        for line in told_until_killed(call_for_ever, place, kill, moments.randrange(1, 40)):
            call_id, _, text = line.partition(" ")
            assert call_id not in told
            told[call_id] = text
        stored: dict[str, str] = {}
        for summary in place.reader().list_runs():
            calls = place.reader().read_run(summary.run_id)[1]
            stored |= {one.call_id: one.output_text for one in calls}
            assert len({one.call_id for one in calls}) == len(calls) == summary.num_calls
        assert {call_id: stored.get(call_id) for call_id in told} == told
    assert len(told) >= 20
