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
        if len(cells) == 6 and cells[0].startswith("`"):
            name, scored, trained, counted, retries, meaning = cells
            yes = {"yes": True, "no": False}
            rows[name.strip("`")] = OutcomeRule(yes[scored], yes[trained], yes[counted], int(retries), meaning)
    return rows


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_row_and_the_docs_say_the_same(outcome: Outcome) -> None:
    assert documented()[outcome.value] == OUTCOME_TABLE[outcome]


def test_the_docs_know_no_other_outcome() -> None:
    assert list(documented()) == [outcome.value for outcome in OUTCOME_TABLE] == [outcome.value for outcome in Outcome]


def test_what_is_trained_is_counted_and_what_is_counted_is_scored() -> None:
    for rule in OUTCOME_TABLE.values():
        assert rule.trained <= rule.counted <= rule.scored
