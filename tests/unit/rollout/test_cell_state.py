"""The cell's state machine: only verified weights serve, and nothing wakes a dead engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvariantError
from services.common.types import CellState
from services.rollout.cell_state import (
    MIN_CONTEXTS_SEEN,
    AdmissionClosed,
    AdmissionOpened,
    EngineDied,
    Event,
    Standing,
    UpdateFailed,
    UpdateStarted,
    UpdateVerified,
    advance,
    count_slots,
)

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(UpdateStarted, st.integers(0, 3)),
    st.builds(UpdateVerified, st.integers(0, 3)),
    st.just(UpdateFailed("canary")),
    st.just(EngineDied("gone")),
    st.just(AdmissionOpened()),
    st.just(AdmissionClosed()),
)


def after(*events: Event) -> Standing:
    standing = Standing()
    for event in events:
        standing = advance(standing, event)
    return standing


def test_a_new_cell_is_stale_without_a_version() -> None:
    assert (Standing().state, Standing().version) == (CellState.STALE, -1)
    assert not Standing().takes_calls


@pytest.mark.parametrize(
    ("events", "state", "version"),
    [
        ([UpdateStarted(0)], CellState.UPDATING, -1),
        ([UpdateStarted(0), UpdateVerified(0)], CellState.SERVING, 0),
        ([UpdateStarted(0), UpdateFailed("canary")], CellState.STALE, -1),
        ([UpdateStarted(0), UpdateVerified(0), UpdateStarted(2)], CellState.UPDATING, 0),
        ([UpdateStarted(0), UpdateVerified(0), UpdateStarted(2), UpdateFailed("canary")], CellState.STALE, 0),
        ([UpdateStarted(0), UpdateFailed("canary"), UpdateStarted(0), UpdateVerified(0)], CellState.SERVING, 0),
        ([UpdateStarted(0), UpdateVerified(0), EngineDied("gone")], CellState.STALE, 0),
        ([UpdateStarted(0), EngineDied("gone")], CellState.STALE, -1),
    ],
)
def test_transitions(events: list[Event], state: CellState, version: int) -> None:
    standing = after(*events)
    assert (standing.state, standing.version) == (state, version)


def test_only_a_serving_cell_generates() -> None:
    updating = after(UpdateStarted(0))
    serving = advance(updating, UpdateVerified(0))
    stale = advance(updating, UpdateFailed("canary"))
    assert [each.may_generate for each in (updating, serving, stale)] == [False, True, False]


def test_calls_wait_through_an_update_and_leave_a_stale_cell() -> None:
    updating = after(UpdateStarted(0))
    assert updating.takes_calls
    assert updating.calls_wait
    stale = advance(updating, UpdateFailed("canary"))
    assert not stale.takes_calls
    assert not stale.calls_wait


def test_a_drained_cell_takes_no_calls_but_finishes_its_own() -> None:
    drained = after(UpdateStarted(0), UpdateVerified(0), AdmissionClosed())
    assert not drained.takes_calls
    assert drained.may_generate
    assert advance(drained, AdmissionOpened()).takes_calls


def test_an_update_does_not_open_a_drained_cell() -> None:
    assert not after(AdmissionClosed(), UpdateStarted(0), UpdateVerified(0)).takes_calls


def test_a_stale_cell_says_why_and_a_serving_one_has_no_reason() -> None:
    assert after(UpdateStarted(0), UpdateFailed("canary")).reason == "canary"
    assert after(UpdateStarted(0), UpdateFailed("canary"), UpdateStarted(1), UpdateVerified(1)).reason == ""


def test_the_first_death_is_the_one_that_is_told() -> None:
    assert after(EngineDied("out of memory"), EngineDied("gone")).reason == "out of memory"


@pytest.mark.parametrize(
    "events",
    [
        [UpdateVerified(0)],
        [UpdateFailed("canary")],
        [UpdateStarted(0), UpdateStarted(1)],
        [UpdateStarted(0), UpdateVerified(1)],
        [EngineDied("gone"), UpdateStarted(0)],
    ],
)
def test_an_impossible_event_raises_with_the_story(events: list[Event]) -> None:
    with pytest.raises(InvariantError) as caught:
        after(*events)
    assert type(events[-1]).__name__ in caught.value.hint


@given(st.lists(EVENTS, max_size=30))
def test_a_cell_serves_exactly_what_was_verified_last(events: list[Event]) -> None:
    standing, verified = Standing(), -1
    for event in events:
        try:
            following = advance(standing, event)
        except InvariantError:
            continue
        if isinstance(event, UpdateVerified):
            verified = event.version
        assert following.version == verified
        assert following.may_generate == (following.state is CellState.SERVING)
        assert (following.updating_to is not None) == (following.state is CellState.UPDATING)
        assert not (standing.dead and following.may_generate)
        standing = following


def test_slots_are_the_configured_number_until_contexts_were_seen() -> None:
    assert count_slots(16, 1000, [1000] * (MIN_CONTEXTS_SEEN - 1)) == 16


def test_slots_are_what_the_kv_pool_holds_at_a_high_quantile() -> None:
    assert count_slots(16, 8000, [100] * 80 + [1000] * 20) == 8
    assert count_slots(16, 8000, [100] * 100) == 16
    assert count_slots(16, 500, [1000] * 100) == 1
