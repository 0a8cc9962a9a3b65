from __future__ import annotations

from pathlib import Path

import pytest

from services.trajectory.outcome import OUTCOME_TABLE, Outcome, OutcomeRule

PAGE = Path(__file__).parents[3] / "docs" / "trajectory.md"


def documented() -> dict[str, OutcomeRule]:
    """The rows of the table in the docs that begin with an outcome's name."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0].startswith("`"):
            name, salvaged, scored, trained, retries, counted, meaning = cells
            yes = {"yes": True, "no": False}
            rows[name.strip("`")] = OutcomeRule(
                yes[salvaged], yes[scored], yes[trained], int(retries), yes[counted], meaning
            )
    return rows


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_row_and_the_docs_say_the_same(outcome: Outcome) -> None:
    assert documented()[outcome.value] == OUTCOME_TABLE[outcome]


def test_the_docs_know_no_other_outcome() -> None:
    assert list(documented()) == [outcome.value for outcome in OUTCOME_TABLE] == [outcome.value for outcome in Outcome]


def test_what_is_trained_is_counted_what_is_counted_is_scored_and_what_is_scored_is_salvaged() -> None:
    for rule in OUTCOME_TABLE.values():
        assert rule.trained <= rule.counted <= rule.scored <= rule.salvaged


LOST = {Outcome.SANDBOX_DEATH, Outcome.SETUP_FAILURE, Outcome.ENGINE_LOSS, Outcome.RUNNER_LOSS}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_what_infrastructure_lost_has_further_attempts_and_they_are_bounded(outcome: Outcome) -> None:
    rule = OUTCOME_TABLE[outcome]
    attempts = [attempt for attempt in range(10) if rule.is_retried(attempt)]
    assert attempts == ([0, 1] if outcome in LOST else [])
    if outcome in LOST:
        assert not rule.counted, "infrastructure is never the policy's fault"


def test_a_failed_evaluation_is_repeated_and_is_never_a_zero() -> None:
    for outcome in (Outcome.VERIFIER_FAILURE, Outcome.VERIFIER_TIMEOUT):
        rule = OUTCOME_TABLE[outcome]
        assert (rule.salvaged, rule.scored, rule.max_retries) == (True, True, 1)
        assert not rule.trained
        assert not rule.counted
