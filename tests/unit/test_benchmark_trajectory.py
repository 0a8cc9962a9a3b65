from __future__ import annotations

import json
import math

import pytest

from benchmarks.synthetic_run import RunShape, synthetic_run
from benchmarks.trajectory import measure


@pytest.fixture(scope="module")
def figures() -> dict[str, object]:
    return measure(small=True)


def test_every_figure_is_a_number(figures: dict[str, object]) -> None:
    names = (
        "ingest_tokens_per_s",
        "rerender_tokens_per_s",
        "prefix_match_tokens_per_s",
        "speedup",
        "speedup_prefix_match",
        "bytes_per_unique_token",
        "dedup_ratio",
        "select_ms",
        "store_calls_per_s_durable",
    )
    assert all(isinstance(figures[name], float) and math.isfinite(figures[name]) for name in names)  # type: ignore[arg-type]


def test_the_object_is_json_that_any_parser_reads(figures: dict[str, object]) -> None:
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_a_limit_on_trajectories_saves_tokens_and_no_limit_saves_none(figures: dict[str, object]) -> None:
    shares = figures["jmax"]
    assert isinstance(shares, dict)
    assert shares["none"]["train_tokens_share"] == shares["none"]["forward_tokens_share"] == 1
    assert 0 < shares["1"]["train_tokens_share"] < shares["5"]["train_tokens_share"] <= 1


def test_a_run_is_made_again_by_its_seed_and_has_its_parts() -> None:
    shape = RunShape((6, 5), (2, 3), tool_chars=50, answer_chars=20)
    calls = list(synthetic_run(shape, seed=1))
    assert calls == list(synthetic_run(shape, seed=1))
    assert len(calls) == 6 + 5 + 2 + 3 + 1  # and one summary
