"""Ranks that share chunks get what one rank gets alone; what they hold and what they send."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from services.trainer.tree.forest import make_forest
from services.trainer.tree.ranks import split_tokens
from tests.unit.trainer.tree import sharing
from tests.unit.trainer.tree.reference import gradient_error
from tests.unit.trainer.tree.sharing import CASES, PATHS, Outcome

pytestmark = pytest.mark.timeout(900)  # ranks that wait for each other are slow where others keep the processors busy

Outcomes = Mapping[str, tuple[Outcome, Outcome]]
"""By case: what came of it alone, and together."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes have left what they got."""
    folder = tmp_path_factory.mktemp("sharing")
    subprocess.run([sys.executable, "-m", sharing.__name__, str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    kinds = ("alone", "together")
    alone, together = ({n: torch.load(folder / f"{n}.{kind}.pt", weights_only=False) for n in CASES} for kind in kinds)
    return {name: (alone[name], together[name]) for name in CASES}


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[str, list[str]]:
    return torch.load(folder / "errors.pt", weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_get_the_gradients_of_one_alone(outcomes: Outcomes, name: str) -> None:
    alone, together = outcomes[name]
    error, worst = gradient_error(together.gradients, alone.gradients)
    assert error < CASES[name].tolerance, worst
    assert together.norm == pytest.approx(alone.norm, rel=1e-5)
    assert together.loss == pytest.approx(alone.loss, rel=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_scored])
def test_every_target_is_scored_on_every_rank(outcomes: Outcomes, name: str) -> None:
    alone, together = (outcome.scores for outcome in outcomes[name])
    assert alone is not None
    assert together is not None
    torch.testing.assert_close(together.logprobs, alone.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(together.entropy, alone.entropy, rtol=1e-6, atol=1e-6)


def test_the_cases_have_chunks_that_leave_ranks_without_tokens() -> None:
    case = CASES["attention"]
    forest = make_forest(case.batch.nodes)
    sizes = [chunk.num_tokens for chunk in case.way.plan(forest).chunks]
    assert {1, 5} <= set(sizes)
    assert any(-1 in segment.predecessors for segment in forest.segments)


def test_a_path_costs_each_rank_half_the_memory(outcomes: Outcomes) -> None:
    for length in PATHS:
        alone, together = outcomes[f"path of {length}"]
        assert together.stored_bytes == [alone.stored_bytes[0] // 2] * 2


def test_what_a_chunk_sends_does_not_grow_with_its_path(outcomes: Outcomes) -> None:
    short, middle, long = (outcomes[f"path of {length}"][1].sent_bytes for length in PATHS)
    assert long - middle == middle - short > 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shares_experts])
def test_the_slices_of_all_ranks_are_the_model(outcomes: Outcomes, name: str) -> None:
    alone, together = (outcome.logits for outcome in outcomes[name])
    assert alone is not None
    assert torch.equal(together, alone)


def test_a_rank_that_hangs_or_ends_is_told_with_the_visit(errors: dict[str, list[str]]) -> None:
    for error in errors["lost"]:
        assert error.startswith("TrainingError: rank 0 of the 2 that share chunks failed in the scoring of chunk 0")
    hung, ended = errors["lost"]
    assert "imed out" in hung
    assert "peer" in ended


def test_experts_that_cannot_be_shared_are_refused(errors: dict[str, list[str]]) -> None:
    without, too_few = errors["refused"]
    assert without.startswith("ConfigError: llama has no experts to share.")
    assert too_few.startswith("ConfigError: 2 experts cannot be shared by 3 ranks.")


@pytest.mark.parametrize(("num_tokens", "sizes"), [(7, (3, 2, 2)), (6, (2, 2, 2)), (2, (1, 1, 0)), (1, (1, 0, 0))])
def test_tokens_are_split_evenly_and_the_first_ranks_have_them(num_tokens: int, sizes: tuple[int, ...]) -> None:
    assert split_tokens(num_tokens, 3) == sizes
