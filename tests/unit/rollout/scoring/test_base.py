"""What counts as a score, and how long scoring may take."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from services.rollout.scoring.base import (
    MAX_DETAILS_BYTES,
    Score,
    as_score,
    evaluation_timeout_s,
    invalid,
    json_ready,
    longest_scoring_s,
)
from services.rollout.scoring.config import FunctionScoring, HarborScoring
from services.rollout.types import RunResult, Task
from services.trajectory.encoding import result_json, run_result
from services.trajectory.outcome import Outcome

TASK = Task("t", "/t", "do it", 10, 30, 1 << 30)


@pytest.mark.parametrize(("answer", "value"), [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (-2, -2.0)])
def test_a_finite_number_is_a_score(answer: Any, value: float) -> None:
    assert as_score(answer) == Score(value, True)


@pytest.mark.parametrize("answer", [None, math.nan, math.inf, "1", b"1", [1], {"score": 1}, 10**400, object()])
def test_anything_else_is_no_score_and_no_zero(answer: Any) -> None:
    score = as_score(answer)
    assert (score.value, score.valid, score.failure) == (None, False, Outcome.VERIFIER_FAILURE)
    assert "no finite number" in score.reason


def test_a_score_that_is_not_valid_keeps_its_reason() -> None:
    score = as_score(Score(0.7, False, details={"reason": "the tests do not compile", "line": 3}))
    assert (score.value, score.valid) == (None, False)
    assert score.details == {"reason": "the tests do not compile", "line": 3}


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_valid_score_has_a_finite_value(value: float | None) -> None:
    with pytest.raises(ValueError, match="finite"):
        Score(value, True)


def test_details_that_cannot_be_stored_do_not_cost_the_score() -> None:
    assert json_ready({"a": [1, "b", None]}) == {"a": [1, "b", None]}
    assert "not JSON" in json_ready({"a": object()})["details_dropped"]
    assert "not JSON" in json_ready({"a": math.nan})["details_dropped"]
    assert "bytes" in json_ready({"a": "x" * MAX_DETAILS_BYTES})["details_dropped"]
    assert as_score(Score(1.0, True, details={"a": {1, 2}})).value == 1.0


def test_the_smaller_of_the_tasks_limit_and_the_jobs_holds() -> None:
    assert evaluation_timeout_s(HarborScoring(), TASK) == 30
    assert evaluation_timeout_s(HarborScoring(timeout_s=5), TASK) == 5
    assert evaluation_timeout_s(HarborScoring(timeout_s=50), TASK) == 30
    assert evaluation_timeout_s(FunctionScoring(path="a:b", timeout_s=50), TASK) == 50
    assert longest_scoring_s(FunctionScoring(path="a:b", timeout_s=50), TASK) == 100


def test_a_result_that_was_stored_before_there_were_details_is_read() -> None:
    result = RunResult(
        "r-r0", 0, Outcome.FINISHED, 1.0, 1.0, 1.0, 0.0, 0, evaluated_ref="sha256:1", score_details={"a": 1}
    )
    stored = json.loads(result_json(result))
    assert run_result(json.dumps(stored)) == result
    del stored["evaluated_ref"], stored["score_details"]
    older = run_result(json.dumps(stored))
    assert (older.evaluated_ref, older.score_details) == ("", {})


def test_an_invalid_score_says_why() -> None:
    score = invalid("too late", Outcome.VERIFIER_TIMEOUT, details={"cost_usd": 0.1}, is_final=True)
    assert (score.reason, score.failure, score.is_final) == ("too late", Outcome.VERIFIER_TIMEOUT, True)
    assert score.details["cost_usd"] == 0.1
