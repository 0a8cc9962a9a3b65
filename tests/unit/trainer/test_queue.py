"""Every micro-step counts exactly once, whoever claims it, dies, is late, or leaves and comes again."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.errors import InvariantError
from services.trainer.queue import (
    Failed,
    Grant,
    GrantKind,
    HandedIn,
    Joined,
    Left,
    Summed,
    Ticked,
    Told,
    WorkEvent,
    WorkQueue,
)

CORE = "cell-0"
SATELLITES = ("cell-1", "cell-2", "cell-3")
LEASE_S = 10.0


def keys_of(number: int, first: int = 0) -> tuple[str, ...]:
    return tuple(f"m{index}" for index in range(first, first + number))


class Story:
    """A queue with the ranks' sums as they would be."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.queue = WorkQueue(CORE, num_ranks, LEASE_S)
        self.now_s = 0.0
        self.grants: dict[str, Grant] = {}
        """What each cell was told last and has not answered."""
        self.sums: dict[str, set[str]] = {CORE: set()}
        self.handed_in: dict[int, frozenset[str]] = {}
        self.discarded: list[str] = []
        self.trained: tuple[str, ...] | None = None

    def handle(self, event: WorkEvent) -> None:
        for grant in self.queue.handle(event, self.now_s):
            if grant.kind in (GrantKind.DISCARD, GrantKind.DISMISS):
                self.sums[grant.cell_id] = set()
                self.discarded.append(grant.cell_id)
                self.grants.pop(grant.cell_id, None)
            else:
                self.grants[grant.cell_id] = grant

    def answer(self, cell_id: str) -> Grant:
        """A cell does what it was told."""
        grant = self.grants.pop(cell_id)
        held = self.sums[cell_id]
        match grant.kind:
            case GrantKind.ACCUMULATE:
                assert not held & set(grant.keys)
                held |= set(grant.keys)
            case GrantKind.ABSORB:
                given = self.handed_in.pop(grant.source)
                assert given == set(grant.keys)
                assert not held & given
                held |= given
            case GrantKind.COLLECT:
                self.handed_in[grant.grant_id] = frozenset(held)
                self.sums[cell_id] = set()
                self.handle(HandedIn(grant.grant_id, self.handed_in[grant.grant_id]))
                return grant
            case GrantKind.UPDATE if held == set(grant.keys):
                self.trained = grant.keys
                return grant
        self.handle(Summed(grant.grant_id, frozenset(held)))
        return grant

    def join(self, cell_id: str) -> None:
        self.sums[cell_id] = set()
        self.handle(Joined(cell_id))


def test_micro_steps_are_claimed_in_the_order_of_their_groups_the_core_first() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(5), is_last=True))
    assert story.grants[CORE].keys == ("m0",)
    assert story.grants["cell-1"].keys == ("m1",)
    story.answer("cell-1")
    assert story.grants["cell-1"].keys == ("m2",)
    assert story.queue.num_unclaimed == 2


def test_claims_are_of_few_micro_steps_and_smaller_towards_the_end() -> None:
    story = Story()
    story.handle(Told(keys_of(20), is_last=True))
    sizes = []
    while story.grants[CORE].kind is GrantKind.ACCUMULATE:
        sizes.append(len(story.answer(CORE).keys))
    assert sizes == [4, 4, 4, 4, 2, 1, 1]
    assert story.grants[CORE].kind is GrantKind.UPDATE


def test_each_rank_of_a_cell_gets_a_micro_step() -> None:
    story = Story(num_ranks=3)
    story.handle(Told(keys_of(4), is_last=True))
    assert len(story.grants[CORE].keys) == 3


def test_nothing_is_handed_in_or_stepped_while_groups_are_missing() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(2), is_last=False))
    story.answer(CORE)
    story.answer("cell-1")
    assert story.grants == {}
    story.handle(Told((), is_last=True))
    assert {cell_id: grant.kind for cell_id, grant in story.grants.items()} == {"cell-1": GrantKind.COLLECT}
    story.answer("cell-1")
    assert story.answer(CORE).kind is GrantKind.ABSORB
    assert story.grants[CORE] == Grant(story.grants[CORE].grant_id, CORE, GrantKind.UPDATE, keys_of(2))


def test_a_step_without_micro_steps_is_stepped() -> None:
    story = Story()
    story.handle(Told((), is_last=True))
    assert story.grants[CORE].kind is GrantKind.UPDATE


def test_a_satellite_that_fails_gives_all_that_was_not_absorbed_back() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(4), is_last=False))
    story.answer("cell-1")  # m1
    story.handle(Failed(story.grants["cell-1"].grant_id))  # with m2
    assert story.queue.num_unclaimed == 3


def test_what_a_satellite_hands_in_is_refused_unless_it_is_what_it_claimed() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(2), is_last=True))
    story.answer("cell-1")
    story.sums["cell-1"] = set()  # restarted ranks
    story.answer("cell-1")
    assert (story.grants["cell-1"].kind, story.grants["cell-1"].keys) == (GrantKind.ACCUMULATE, ("m1",))


def test_a_sum_that_holds_more_than_was_claimed_is_void() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(3), is_last=True))
    story.sums["cell-1"].add("m0")
    story.answer("cell-1")
    assert story.discarded == ["cell-1"]
    assert story.queue.num_unclaimed == 2


def test_a_core_that_lost_its_sum_has_it_made_again_by_all() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(4), is_last=True))
    for cell_id in (CORE, CORE, "cell-1", CORE, "cell-1"):
        story.answer(cell_id)
    assert story.grants[CORE].kind is GrantKind.ABSORB
    story.sums[CORE] = set()
    story.answer(CORE)
    assert story.grants[CORE].kind is GrantKind.ACCUMULATE
    assert story.grants["cell-1"].kind is GrantKind.ACCUMULATE


def test_a_satellite_at_work_for_too_long_is_dismissed_and_one_that_waits_is_not() -> None:
    story = Story()
    story.join("cell-1")
    story.join("cell-2")
    story.handle(Told(keys_of(3), is_last=False))
    story.answer("cell-1")
    story.now_s = LEASE_S
    story.handle(Ticked())
    assert story.discarded == ["cell-2"]
    assert story.answer("cell-1").keys == ("m2",)
    story.answer(CORE)
    story.now_s = 5 * LEASE_S
    story.handle(Ticked())
    assert story.discarded == ["cell-2"]


def test_satellite_may_leave_while_its_sum_is_absorbed() -> None:
    story = Story()
    story.join("cell-1")
    story.handle(Told(keys_of(2), is_last=True))
    story.answer("cell-1")
    story.answer("cell-1")
    story.answer(CORE)
    assert story.grants[CORE].kind is GrantKind.ABSORB
    story.handle(Left("cell-1"))
    story.answer(CORE)
    assert story.answer(CORE).kind is GrantKind.UPDATE
    assert story.trained == keys_of(2)
    assert story.queue.shares == {CORE: 1, "cell-1": 1}


def test_impossible_events_are_refused() -> None:
    story = Story()
    story.handle(Told(keys_of(1), is_last=False))
    with pytest.raises(InvariantError, match="told twice"):
        story.handle(Told(keys_of(1), is_last=False))
    story = Story()
    story.handle(Told(keys_of(1), is_last=True))
    with pytest.raises(InvariantError, match="was complete"):
        story.handle(Told(keys_of(1, 1), is_last=True))
    story.sums[CORE].add("foreign")
    with pytest.raises(InvariantError, match="was not given"):
        story.answer(CORE)


class Cells(RuleBasedStateMachine):
    """Random claims, deaths, restarts, lateness and switches."""

    @initialize(num_ranks=st.integers(1, 3))
    def start(self, num_ranks: int) -> None:
        self.story = Story(num_ranks)
        self.num_told = 0
        self.is_told = False
        self.present: set[str] = set()

    @precondition(lambda self: not self.is_told)
    @rule(number=st.integers(0, 7), is_last=st.booleans())
    def tell(self, number: int, is_last: bool) -> None:
        self.story.handle(Told(keys_of(number, self.num_told), is_last))
        self.num_told += number
        self.is_told = is_last

    @rule(cell_id=st.sampled_from(SATELLITES))
    def join(self, cell_id: str) -> None:
        if cell_id not in self.present:
            self.present.add(cell_id)
            self.story.join(cell_id)

    @rule(cell_id=st.sampled_from(SATELLITES))
    def leave(self, cell_id: str) -> None:
        self.present.discard(cell_id)
        self.story.grants.pop(cell_id, None)
        self.story.handle(Left(cell_id))

    @rule(cell_id=st.sampled_from((CORE, *SATELLITES)))
    def answer(self, cell_id: str) -> None:
        if cell_id in self.story.grants:
            self.story.answer(cell_id)

    @rule(cell_id=st.sampled_from(SATELLITES))
    def fail(self, cell_id: str) -> None:
        grant = self.story.grants.pop(cell_id, None)
        if grant is not None:
            self.present.discard(cell_id)
            self.story.handle(Failed(grant.grant_id))

    @rule(cell_id=st.sampled_from((CORE, *SATELLITES)))
    def ranks_are_restarted(self, cell_id: str) -> None:
        if cell_id in self.story.sums and self.story.trained is None:
            self.story.sums[cell_id] = set()

    @rule()
    def gradients_die_with_their_owner(self) -> None:
        grant = self.story.grants.get(CORE)
        if grant is not None and grant.kind is GrantKind.ABSORB:
            del self.story.grants[CORE]
            self.story.handle(Summed(grant.grant_id, frozenset(self.story.sums[CORE])))

    @rule()
    def late(self) -> None:
        self.story.now_s += LEASE_S + 1
        self.story.handle(Ticked())
        self.present -= set(self.story.discarded)
        self.story.discarded.clear()

    @rule(cell_id=st.sampled_from(SATELLITES), grant_id=st.integers(1, 50))
    def word_of_a_grant_that_was_taken_back(self, cell_id: str, grant_id: int) -> None:
        if self.story.queue.cell_of(grant_id) is None:
            self.story.handle(Summed(grant_id, frozenset({"m0"})))

    @invariant()
    def an_update_holds_every_micro_step_once(self) -> None:
        if not hasattr(self, "story"):
            return
        self.present -= set(self.story.discarded)
        assert 0 <= self.story.queue.num_unclaimed <= self.num_told
        if self.story.trained is not None:
            assert self.is_told
            assert self.story.trained == keys_of(self.num_told)

    def teardown(self) -> None:
        """Whatever happened: those who are left end the step."""
        if not hasattr(self, "story"):
            return
        if not self.is_told:
            self.tell(number=2, is_last=True)
        for _ in range(10 * self.num_told + 50):
            if self.story.trained is not None:
                break
            for cell_id in list(self.story.grants):
                self.answer(cell_id)
        assert self.story.trained == keys_of(self.num_told)
        assert sum(self.story.queue.shares.values()) == self.num_told


Cells.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestCells = Cells.TestCase
