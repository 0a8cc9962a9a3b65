"""Batches are whole micro-steps, joined while they fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.packing import Batch, check_micro_step, count_runs, plan_batches
from services.trainer.types import MicroStep, Node, RunWeight
from tests.unit.trainer.forests import make_micro_step, make_node, path_to


def target_rows(nodes: tuple[Node, ...], runs: tuple[RunWeight, ...]) -> Counter[tuple[str, bytes, int, float]]:
    """Every target as (run, its whole path's tokens, offset in the node, behaviour log-probability)."""
    rows: Counter[tuple[str, bytes, int, float]] = Counter()
    for index, node in enumerate(nodes):
        path = np.concatenate([nodes[n].token_ids for n in path_to(nodes, index)]).tobytes()
        for offset in np.flatnonzero(node.target_mask):
            rows[(runs[node.run].run_id, path, int(offset), float(node.logprobs[offset]))] += 1
    return rows


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4, unique=True), st.integers(8, 120))
def test_batches_hold_every_target_once_and_no_part_of_a_run(seeds: list[int], max_tokens: int) -> None:
    micro_steps = [make_micro_step(seed) for seed in seeds]
    batches = plan_batches(micro_steps, max_tokens)
    expected = sum((target_rows(m.nodes, m.runs) for m in micro_steps), Counter())
    assert sum((target_rows(b.nodes, b.runs) for b in batches), Counter()) == expected
    seen = Counter(run.run_id for batch in batches for run in batch.runs)
    assert set(seen.values()) == {1}
    for batch in batches:
        assert batch.num_tokens <= max_tokens or sorted(batch.runs, key=id) in [
            sorted(micro_step.runs, key=id) for micro_step in micro_steps
        ]


def test_micro_steps_that_fit_share_a_batch() -> None:
    micro_steps = [make_micro_step(seed) for seed in range(3)]
    total = sum(micro_step.num_tokens for micro_step in micro_steps)
    assert len(plan_batches(micro_steps, total)) == 1
    assert len(plan_batches(micro_steps, max(m.num_tokens for m in micro_steps))) > 1


def test_larger_micro_step_goes_alone_and_whole() -> None:
    rng = np.random.default_rng(0)
    nodes = [make_node(rng, -1, -1, 20), *(make_node(rng, 0, run, 10, target_share=1.0) for run in range(4))]
    micro_step = MicroStep("m", "g", tuple(nodes), tuple(RunWeight(f"r{i}", 1.0, 10) for i in range(4)))
    small = make_micro_step(1, num_runs=1, max_nodes_per_run=1)
    batches = plan_batches([small, micro_step, small], 40)
    assert [len(batch.runs) for batch in batches] == [1, 4, 1]
    assert batches[1].nodes == micro_step.nodes


def test_run_without_target_is_not_counted_and_a_group_without_one_is_left_out() -> None:
    rng = np.random.default_rng(0)
    silent = replace(make_node(rng, 0, 1, 5), target_mask=np.zeros(5, dtype=np.bool_), version_spans=())
    nodes = (make_node(rng, -1, -1, 4), make_node(rng, 0, 0, 5, target_share=1.0), silent)
    micro_step = MicroStep("m", "g", nodes, (RunWeight("r0", 1.0, 5), RunWeight("r1", -1.0, 0)))
    assert count_runs([micro_step]) == 1
    nothing = MicroStep("n", "h", (nodes[0], replace(silent, run=0)), (RunWeight("r2", 1.0, 0),))
    assert plan_batches([nothing], 100) == []


def test_micro_steps_that_contradict_themselves_are_refused() -> None:
    rng = np.random.default_rng(0)
    prompt, answer = make_node(rng, -1, -1, 3), make_node(rng, 0, 0, 3, target_share=1.0)
    with pytest.raises(ValueError, match="3 targets here, 4 at selection"):
        check_micro_step(MicroStep("m", "g", (prompt, answer), (RunWeight("r0", 1.0, 4),)))
    with pytest.raises(ValueError, match="shared"):
        check_micro_step(MicroStep("m", "g", (prompt, replace(answer, run=-1)), ()))
    other = replace(answer, parent=1, run=1)
    runs = (RunWeight("r0", 1.0, 3), RunWeight("r1", 1.0, 3))
    with pytest.raises(ValueError, match="another run"):
        check_micro_step(MicroStep("m", "g", (prompt, answer, other), runs))


def test_nothing_gives_no_batches() -> None:
    assert plan_batches([], 100) == []
    assert isinstance(plan_batches([make_micro_step(0)], 1)[0], Batch)
