import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import errors
from services.common.ids import group_of, is_job_name, make_call_id, make_group_id, make_run_id, shard_of, spread_of


@given(st.integers(0, 10**6 - 1), st.integers(0, 999), st.booleans(), st.integers(1, 64))
def test_all_runs_of_a_group_share_a_shard(group: int, index: int, is_eval: bool, num_shards: int) -> None:
    group_id = make_group_id(group, is_eval=is_eval)
    run_id = make_run_id(group_id, index)
    assert group_of(run_id) == group_id
    assert shard_of(run_id, num_shards) == shard_of(make_run_id(group_id, index + 1), num_shards) < num_shards
    assert make_call_id(run_id, 0, 3).startswith(run_id)


def test_groups_spread_over_shards() -> None:
    shards = [shard_of(make_run_id(make_group_id(index), 0), 4) for index in range(400)]
    assert min(shards.count(shard) for shard in range(4)) > 60


def test_runs_of_a_group_spread_evenly_and_a_further_attempt_lands_elsewhere() -> None:
    runs = [make_run_id(make_group_id(index), run) for index in range(50) for run in range(8)]
    places = [spread_of(run_id, 0, 4) for run_id in runs]
    assert [places.count(place) for place in range(4)] == [100] * 4
    assert all(spread_of(run_id, 1, 4) == (place + 1) % 4 for run_id, place in zip(runs, places, strict=True))


def test_something_else_is_not_a_run_id() -> None:
    with pytest.raises(ValueError, match="not a run id"):
        group_of("g000001")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "ok"), [("demo", True), ("a-1", True), ("", False), ("A", False), ("a/b", False)])
def test_job_names_fit_paths_and_labels(name: str, ok: bool) -> None:
    assert is_job_name(name) is ok


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.EngineError, errors.InvariantError])
def test_errors_survive_pickling_between_actors(kind: type[errors.TidegateError]) -> None:
    copy = pickle.loads(pickle.dumps(kind("what happened", "what to do")))
    assert (type(copy), copy.message, copy.hint) == (kind, "what happened", "what to do")
