from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tree_context, tree_measures
from benchmarks.tree import FULL, Task, measure
from benchmarks.tree_million import million
from benchmarks.tree_world import Group, Loss, agent_nodes, group_nodes, leaf_rows
from tests.waiting import wait_until

HIDDEN = {"hidden": 32}
GROUP = [192, 24, 8]


def test_flattened_rows_hold_each_target_once_and_all_before_it() -> None:
    nodes = agent_nodes(20, shrink=16)
    rows = list(leaf_rows(nodes))
    assert len(rows) == 20
    assert sum(len(row.positions) for row in rows) == sum(int(node.target_mask.sum()) for node in nodes)
    assert all((row.token_ids[row.positions[:-1]] == row.target_ids[:-1]).all() for row in rows)
    assert all(len(row.token_ids) == row.positions[-1] for row in rows)  # the last target is only predicted


def test_advantages_of_a_group_have_both_signs() -> None:
    slopes = Loss.of(group_nodes(Group(*GROUP))).slopes
    assert len(slopes) == GROUP[2]
    assert (slopes > 0).any()
    assert (slopes < 0).any()


@pytest.mark.parametrize("config", ["attention", "hybrid"])
def test_the_ways_that_are_timed_give_the_same_gradient(config: str) -> None:
    figures = tree_measures.speedup(config, HIDDEN, GROUP, repetitions=1)
    assert figures["grad_rel_err"] < 2e-5
    assert figures["speedup"] > 0
    assert figures["flattened_tokens"] == 8 * (192 + 24 - 1)
    assert figures["unique_tokens"] == 192 + 8 * (24 - 1)


def test_a_detached_prompt_gives_another_gradient() -> None:
    figures = tree_measures.detached("attention", HIDDEN, GROUP, repetitions=1)
    assert 0.01 < figures["grad_rel_err"] < 2
    assert figures["exact_over_detached_time"] > 0


def test_memory_does_not_grow_with_the_group() -> None:
    two, eight = (
        tree_measures.group_memory("attention", HIDDEN, [*GROUP[:2], size], chunk_tokens=64)["live_bytes"]
        for size in (2, 8)
    )
    assert eight / two < 1.005


def test_a_context_is_run_within_its_budgets() -> None:
    budget = {"live_bytes": 2 << 20, "disk_bytes": 1 << 20}
    longest = tree_context.longest_tree("attention", HIDDEN, **budget)["context_tokens"]
    peak = tree_context.run("tree", "attention", HIDDEN, longest, **budget)
    assert peak["live_bytes"] <= budget["live_bytes"]
    assert 0 < peak["disk_bytes"] <= budget["disk_bytes"]
    flat = tree_context.longest_flattened("attention", HIDDEN, sum(budget.values()))["context_tokens"]
    assert tree_context.run("flattened", "attention", HIDDEN, flat, **budget)["live_bytes"] <= sum(budget.values())
    assert longest > flat


class Canned:
    """Knows what every measurement gives."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}

    def make_all(self, tasks: Mapping[str, Task]) -> dict[str, Any]:
        self.tasks |= tasks
        return {name: self._result(name.split("/")) for name in tasks}

    def _result(self, name: list[str]) -> dict[str, Any]:
        match name:
            case ["longest", _, way]:
                return {"context_tokens": 6400 if way == "tree" else 320}
            case ["context", _, way]:
                rows = FULL.live_bytes + FULL.disk_bytes + (1 if way == "longer" else 0)
                return {"live_bytes": 1000 if way == "tree" else rows, "disk_bytes": 0, "plan": ""}
            case ["memory", _, members]:
                return {"live_bytes": 1000 + int(members)}
            case ["prediction", case]:
                return {"ratio": 0.93 if case == "hybrid, loose" else 1.05}
            case ["detached", _]:
                return {"grad_rel_err": 0.5, "exact_over_detached_time": 2.5}
            case [("group8" | "tree"), config]:
                return {"speedup": 5.0 if config == "hybrid" else 6.0}
        return {"grad_rel_err": 2e-6 if name[-1] == "sparse" else 1e-6}


def test_the_object_has_every_figure_and_takes_the_worst() -> None:
    figures = measure(FULL, Canned().make_all)
    assert {name: figures[name] for name in list(figures)[:8]} == {
        "grad_rel_err_max": 2e-6,
        "speedup_group8": 5.0,
        "speedup_tree": 5.0,
        "memory_g8_over_g2": 1008 / 1002,
        "context_ratio": 20.0,
        "detached_grad_rel_err": 0.5,
        "exact_over_detached_time": 2.5,
        "predicted_over_measured_memory": 0.93,
    }
    assert figures["contexts"]["hybrid"]["is_within"]
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_the_figures_are_of_the_forests_that_they_are_named_for() -> None:
    bench = Canned()
    measure(FULL, bench.make_all)
    assert bench.tasks["group8/attention"].arguments["forest"] == [8192, 256, 8]
    assert len(list(leaf_rows(agent_nodes()))) == 20


def test_a_killed_step_over_many_positions_goes_on_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.tree", "--million", "--folder", str(tmp_path / "killed")]
    command += ["--positions", "4096", "--every", "0", "--chunk", "256"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: list(tmp_path.glob("killed/visit-*")), 120, "progress is saved", poll_s=0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    resumed, whole = (million(tmp_path / name, 4096, every_s=0, chunk_tokens=256) for name in ("killed", "whole"))
    assert 0 < resumed["resumed_after_visits"] < resumed["visits"]
    assert whole["resumed_after_visits"] == 0
    for name in ("loss", "gradient_norm"):
        assert resumed[name] == whole[name]
