from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import NotFoundError
from services.trajectory.outcome import Outcome
from services.trajectory.store import GroupState, PruneReport, RetentionConfig, Store
from services.trajectory.store.retention import HeldGroup, groups_to_prune
from tests.services import PostgresServer
from tests.unit.trajectory.stores import Place, make_group_result, make_row
from tests.unit.trajectory.world import make_result, make_spec
from tests.waiting import wait_until

DAY_S = 86_400.0
EVERYTHING = RetentionConfig(max_size_bytes=0)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        found.url = server.url()
    yield found
    found.close()


def held(group_id: str, ended_at_s: float, size_bytes: int, **options: Any) -> HeldGroup:
    return HeldGroup(group_id, ended_at_s, size_bytes, 1, 0, options.get("is_final", True))


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (RetentionConfig(), []),
        (RetentionConfig(max_age_days=1.0), ["a"]),
        (RetentionConfig(max_age_days=0.5), ["a", "c"]),
        (RetentionConfig(max_size_bytes=100), []),
        (RetentionConfig(max_size_bytes=99), ["a"]),
        (RetentionConfig(max_size_bytes=90), ["a"]),
        (RetentionConfig(max_size_bytes=89), ["a", "c"]),
        (RetentionConfig(max_size_bytes=0), ["a", "c", "d"]),
        (RetentionConfig(max_age_days=1.0, max_size_bytes=60), ["a", "c"]),
    ],
)
def test_the_oldest_groups_that_nobody_needs_go_first(config: RetentionConfig, chosen: list[str]) -> None:
    now_s = 10 * DAY_S
    groups = [
        held("a", now_s - 1.1 * DAY_S, 10),
        held("b", now_s - 1.1 * DAY_S, 20, is_final=False),
        held("c", now_s - 0.9 * DAY_S, 30),
        held("d", now_s - 0.1 * DAY_S, 40),
    ]
    assert [one.group_id for one in groups_to_prune(groups, config, now_s)] == chosen


def filled(place: Place, retention: RetentionConfig, num_groups: int = 6) -> Store:
    """Groups of one run with one call: 0 trained at step 2, 1 at step 3, 2 lost, 3 dropped, 4 ready, 5 open."""
    store = place.open(retention=retention)
    for index in range(num_groups):
        store.open_group(make_spec(index, num_runs=1))
        run_id = f"g00000{index}-r0"
        store.append_call(make_row(0, run_id=run_id))
        if index < 5:
            store.finish_run(make_result(run_id, 1.0))
            assert store.seal_run(run_id, 0).result(20) is (index != 5)
    for index in (0, 1, 2, 4):
        result = make_group_result(f"g00000{index}", ready=index != 2)
        store.finish_group(result, {f"g00000{index}-r0": (0.5, None)})
    store.mark_trained(["g000000"], 2)
    store.mark_trained(["g000001"], 3)
    store.end_group("g000003", GroupState.DROPPED, "old")
    return store


def test_what_a_resumed_job_needs_is_kept(place: Place) -> None:
    store = filled(place, EVERYTHING)
    report = store.prune(time.time(), durable_step=2)
    assert report.group_ids == ("g000000", "g000002", "g000003")  # step 3 is in no checkpoint
    assert (report.num_calls, report.num_objects, report.is_dry) == (3, 3, False)
    assert report.kept_bytes > 0
    store.clear_marks_above(2)  # what a resumed job does
    for stored in store.live_groups():
        assert len(store.calls(stored.spec.run_ids[0], 0)) == 1
    assert [one.spec.group_id for one in store.live_groups()] == ["g000001", "g000004", "g000005"]
    wait_until(lambda: len(store.objects.refs()) == 2, 20)


def test_the_summary_of_a_run_stays_and_says_what_is_gone(place: Place) -> None:
    store = filled(place, EVERYTHING)
    before = place.reader().list_runs()
    store.prune(time.time(), durable_step=2)
    assert place.reader().list_runs() == before
    group = place.reader().group("g000000")
    assert group.pruned_at_s is not None
    assert (group.result, group.trained_step) == (make_group_result("g000000"), 2)
    assert place.reader().group("g000001").pruned_at_s is None
    for read in (place.reader().read_run, lambda run_id: store.calls(run_id, 0)):
        with pytest.raises(NotFoundError, match="were deleted on 20") as caught:
            read("g000000-r0")
        assert "retention" in caught.value.hint
    result = place.reader().run_result("g000000-r0")
    assert result is not None
    assert result.outcome is Outcome.FINISHED


def test_calls_that_are_deleted_while_they_are_read_are_said_to_be_deleted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(place, EVERYTHING)
    reader = place.reader()
    read = reader._objects.read

    def read_late(ref: str) -> bytes:
        store.prune(time.time(), durable_step=2)
        wait_until(lambda: ref not in store.objects.refs(), 20)
        return read(ref)

    monkeypatch.setattr(reader._objects, "read", read_late)
    with pytest.raises(NotFoundError, match="were deleted on 20"):
        reader.read_run("g000000-r0")


def test_a_dry_run_says_the_same_and_deletes_nothing(place: Place) -> None:
    store = filled(place, EVERYTHING)
    dry = store.prune(time.time(), durable_step=3, is_dry=True)
    assert len(dry.group_ids) == 4
    assert len(place.reader().read_run("g000000-r0")[1]) == 1
    real = store.prune(time.time(), durable_step=3)
    assert (real.group_ids, real.num_calls, real.num_objects) == (dry.group_ids, dry.num_calls, dry.num_objects)
    assert (real.freed_bytes, real.kept_bytes, dry.is_dry) == (dry.freed_bytes, dry.kept_bytes, True)
    again = store.prune(time.time(), durable_step=3)
    assert again == PruneReport((), 0, 0, 0, real.kept_bytes, False)


def test_calls_go_by_age(place: Place) -> None:
    store = filled(place, RetentionConfig(max_age_days=2.0))
    assert store.prune(time.time() + 1.9 * DAY_S, durable_step=9).group_ids == ()
    assert len(store.prune(time.time() + 2.1 * DAY_S, durable_step=9).group_ids) == 4


def test_a_pruned_group_is_dispatched_again_like_any_other(place: Place) -> None:
    store = filled(place, EVERYTHING)
    store.prune(time.time(), durable_step=2)
    store.open_group(make_spec(0, num_runs=1))
    assert store.append_call(make_row(0, run_id="g000000-r0"))
    assert len(place.reader().read_run("g000000-r0")[1]) == 1


def test_shards_are_pruned_apart(place: Place) -> None:
    store = filled(place, EVERYTHING)
    other = place.open(1, retention=EVERYTHING)
    other.open_group(make_spec(8, num_runs=1))
    other.append_call(make_row(0, run_id="g000008-r0"))
    other.end_group("g000008", GroupState.DROPPED, "old")
    assert other.prune(time.time(), durable_step=9).group_ids == ("g000008",)
    assert len(store.calls("g000000-r0", 0)) == 1


def test_retention_that_is_off_deletes_nothing(place: Place) -> None:
    store = filled(place, RetentionConfig())
    assert store.prune(time.time() + 1_000 * DAY_S, durable_step=9).group_ids == ()
