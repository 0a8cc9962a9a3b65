"""Every micro-step counts exactly once, whoever fails."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.errors import InvariantError
from services.trainer.claims import ClaimBoard

HOLDERS = st.sampled_from(["0", "1", "2"])
LEASE_S = 10.0


def test_claims_of_a_failed_holder_are_open_again() -> None:
    board = ClaimBoard(4, LEASE_S)
    assert board.claim("0", range(0, 4, 2), now_s=0.0) == (0, 2)
    assert board.claim("1", range(4), now_s=0.0) == (1, 3)
    assert board.release("1", now_s=1.0) == (1, 3)
    assert board.open_ids == (1, 3)
    assert not board.is_complete
    board.claim("0", (1, 3), now_s=1.0)
    assert board.reduced("0", (0, 1, 2, 3), now_s=2.0)
    assert board.is_complete


def test_gradient_that_differs_from_the_live_claims_is_refused_whole() -> None:
    board = ClaimBoard(3, LEASE_S)
    board.claim("0", (0, 1), now_s=0.0)
    assert not board.reduced("0", (0,), now_s=1.0)
    assert board.open_ids == (0, 1, 2)
    assert not board.reduced("0", (0, 1), now_s=1.0)


def test_lease_that_ran_out_does_not_count() -> None:
    board = ClaimBoard(1, LEASE_S)
    board.claim("0", (0,), now_s=0.0)
    assert board.claim("1", (0,), now_s=9.0) == ()
    assert board.claim("1", (0,), now_s=10.0) == (0,)
    assert not board.reduced("0", (0,), now_s=11.0)
    assert board.reduced("1", (0,), now_s=12.0)


def test_further_claim_renews_the_lease() -> None:
    board = ClaimBoard(2, LEASE_S)
    board.claim("0", (0,), now_s=0.0)
    board.claim("0", (1,), now_s=9.0)
    assert board.reduced("0", (0, 1), now_s=18.0)


def test_step_without_micro_steps_is_complete() -> None:
    assert ClaimBoard(0, LEASE_S).is_complete


class Claims(RuleBasedStateMachine):
    """Random claims, failures and reductions against a simple model."""

    @initialize(num_claims=st.integers(0, 6))
    def start(self, num_claims: int) -> None:
        self.board = ClaimBoard(num_claims, LEASE_S)
        self.num_claims = num_claims
        self.now_s = 0.0
        self.held: dict[str, set[int]] = {}
        self.counted: list[int] = []

    @rule(holder=HOLDERS, wanted=st.sets(st.integers(0, 6)))
    def claim(self, holder: str, wanted: set[int]) -> None:
        taken = self.board.claim(holder, wanted, self.now_s)
        assert not set(taken) & {claim for claims in self.held.values() for claim in claims}
        assert not set(taken) & set(self.counted)
        self.held.setdefault(holder, set()).update(taken)

    @rule(holder=HOLDERS, honest=st.booleans())
    def reduce(self, holder: str, honest: bool) -> None:
        given = self.held.get(holder, set()) | (set() if honest else {99})
        accepted = self.board.reduced(holder, given, self.now_s)
        assert accepted == (honest and holder in self.held)
        if accepted:
            self.counted += given
        self.held.pop(holder, None)

    @rule(holder=HOLDERS)
    def fail(self, holder: str) -> None:
        assert set(self.board.release(holder, self.now_s)) == self.held.pop(holder, set())

    @rule()
    def all_leases_run_out(self) -> None:
        self.now_s += LEASE_S + 1
        self.board.expire(self.now_s)
        self.held.clear()

    @invariant()
    def each_micro_step_is_in_one_place(self) -> None:
        if not hasattr(self, "board"):
            return
        places = [*self.board.open_ids, *self.counted, *(c for claims in self.held.values() for c in claims)]
        assert sorted(places) == list(range(self.num_claims))
        assert self.board.is_complete == (len(self.counted) == self.num_claims)


Claims.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestClaims = Claims.TestCase


def test_counting_twice_is_an_invariant_error() -> None:
    board = ClaimBoard(1, LEASE_S)
    board.claim("0", (0,), now_s=0.0)
    board.reduced("0", (0,), now_s=0.0)
    board._open.append(0)  # what no transition does
    board.claim("1", (0,), now_s=0.0)
    with pytest.raises(InvariantError, match="twice"):
        board.reduced("1", (0,), now_s=0.0)
