from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.common.types import VersionSpan
from services.proxy.types import CallPurpose, CanonicalRequest, Lineage, ToolChoice, ToolMode
from services.rollout.types import Sampling
from services.trajectory.sharing import LEASE_S, RequestBook, same_call_key
from services.trajectory.types import CallTicket, PartialAnswer, SharedAnswer
from tests.unit.trajectory.world import answer, ask

PARTIAL = PartialAnswer(
    np.array([1], dtype=np.int32), np.array([-1], dtype=np.float32), (VersionSpan(1, 1),), "x", ("a",)
)


def completed(call_id: str) -> SharedAnswer:
    ticket = CallTicket(call_id, "r", 0, None, 1, 1, None, Sampling(), True)
    return SharedAnswer(answer(ticket, "done"), 1)


def key(request: CanonicalRequest, node: int = 3) -> object:
    return same_call_key(request, node)


def test_a_request_made_again_while_its_call_is_generated_shares_it() -> None:
    book = RequestBook()
    assert book.shared_call("k", is_retry=True) is None
    book.begin("k", "c0", 0.0)
    assert book.shared_call("k", is_retry=False) == "c0"
    assert book.shared_call("other", is_retry=False) is None
    assert book.is_in_flight("c0")
    book.complete(completed("c0"))
    taken = book.take_answer("c0")
    assert taken is not None
    assert taken.record.call_id == "c0"


def test_a_request_whose_call_was_cut_goes_on_behind_what_there_is_once() -> None:
    book = RequestBook()
    assert book.begin("k", "c0", 0.0) is None
    book.abandon("c0", PARTIAL)
    assert book.shared_call("k", is_retry=False) is None
    assert book.begin("k", "c1", 0.0) is PARTIAL
    book.abandon("c1", None)
    assert book.begin("k", "c2", 0.0) is None


@pytest.mark.parametrize("is_retry", [True, False])
def test_an_answer_is_given_again_if_it_was_not_delivered_or_the_client_says_so(is_retry: bool) -> None:
    book = RequestBook()
    book.begin("k", "c0", 0.0)
    book.complete(completed("c0"))
    assert (book.shared_call("k", is_retry=is_retry) == "c0") is is_retry
    book.note_undelivered("c0")
    assert book.shared_call("k", is_retry=is_retry) == "c0"
    assert book.take_answer("c0") is not None
    assert (book.shared_call("k", is_retry=is_retry) == "c0") is is_retry  # it was delivered now


def test_a_new_sample_replaces_the_answer_that_was_kept() -> None:
    book = RequestBook()
    book.begin("k", "c0", 0.0)
    book.complete(completed("c0"))
    book.begin("k", "c1", 0.0)
    assert book.take_answer("c0") is None
    book.complete(completed("c1"))
    assert book.shared_call("k", is_retry=True) == "c1"


def test_a_call_of_which_nobody_says_anything_is_lost() -> None:
    book = RequestBook()
    book.begin("k", "c0", 10.0)
    book.renew(["c0", "unknown"], 12.0)
    assert not book.is_lost("c0", 12.0 + LEASE_S)
    assert book.is_lost("c0", 12.1 + LEASE_S)
    assert not book.is_lost("unknown", 1e9)


def test_only_the_newest_answers_are_kept() -> None:
    book = RequestBook()
    for index in range(100):
        book.begin(index, f"c{index}", 0.0)
        book.complete(completed(f"c{index}"))
        book.begin(-1 - index, f"d{index}", 0.0)
        book.abandon(f"d{index}", PARTIAL)
    assert book.shared_call(99, is_retry=True) == "c99"
    assert book.shared_call(0, is_retry=True) is None
    assert book.take_answer("c0") is None
    assert book.begin(-1, "e", 0.0) is None
    assert book.begin(-100, "f", 0.0) is PARTIAL


def test_what_is_the_same_call() -> None:
    request = ask("a", temperature=1.0, max_tokens=10, stop=["x"])
    same = replace(request, stream=True, requested_sampling={**request.requested_sampling, "max_tokens": 5})
    assert key(same) == key(request)
    for other in (
        replace(request, requested_sampling={**request.requested_sampling, "seed": 1}),
        replace(request, tool_choice=ToolChoice(ToolMode.NONE)),
        replace(request, response_schema={"type": "object"}),
        replace(request, choice=1),
        replace(request, lineage=Lineage(agent_id="sub")),
        replace(request, lineage=Lineage(purpose=CallPurpose.SIDE)),
    ):
        assert key(other) != key(request)
    assert key(request, 4) != key(request, 3)
