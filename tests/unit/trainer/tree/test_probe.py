"""What is predicted from measured costs is what a step really holds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.estimate import Layout, costs_from_config, costs_of_model
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.memory import AllocationTracker
from services.trainer.tree.plan import Mode, ModeChoice, Plan, PlanOptions, PrefixGradient, Recompute, make_plan
from services.trainer.tree.probe import measure_costs
from services.trainer.tree.store import StoreBudget
from tests.unit.trainer.forests import make_node
from tests.unit.trainer.tree.models import make_model

SIZES = (32, 64, 96)
"""Multiples of the block of linear attention."""
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"]
WALK = PlanOptions(
    mode=ModeChoice.WALK,
    recompute=Recompute.CHUNK,
    min_chunk_tokens=32,
    max_chunk_tokens=96,
    alignment_tokens=32,
    spare_share=0.0,
)


@cache
def measured(family: str) -> tuple[Executor, ModelCosts]:
    executor = make_executor(family)
    return executor, measure_costs(executor, sizes=SIZES, count_weights=False)


def make_executor(family: str, budget: StoreBudget | None = None) -> Executor:
    model = make_model(family, torch.float32)
    return Executor(model, adapter_for(model.config), budget=budget or StoreBudget())


def group(num_runs: int, prompt_tokens: int = 230, response_tokens: int = 65) -> Forest:
    rng = np.random.default_rng(0)
    own = [make_node(rng, 0, run, response_tokens, target_share=1.0) for run in range(num_runs)]
    return make_forest([make_node(rng, -1, -1, prompt_tokens), *own])


def tree() -> Forest:
    rng = np.random.default_rng(1)
    nodes = [make_node(rng, -1, -1, 90)]
    for index in range(7):
        parent = int(rng.integers(max(0, index - 2), index + 1))
        nodes.append(make_node(rng, parent, 0, int(rng.integers(10, 70)), target_share=0.5))
    return make_forest(nodes)


def peak_bytes(executor: Executor, forest: Forest, plan: Plan) -> int:
    """Most bytes beside the weights and their gradients."""
    for parameter in executor.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with AllocationTracker() as tracker:
        executor.train(forest, plan, 1.0, lambda _index, logprobs, _entropy: torch.full_like(logprobs, 0.01))
    executor.model.zero_grad(set_to_none=True)
    return tracker.peak_bytes


def check(executor: Executor, forest: Forest, plan: Plan, tolerance: float = 0.1) -> None:
    predicted = plan.predicted.live_bytes
    assert predicted == pytest.approx(peak_bytes(executor, forest, plan), rel=tolerance), plan.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_peak_is_what_a_walk_holds(family: str) -> None:
    executor, costs = measured(family)
    check(executor, group(3), make_plan(group(3), costs, Budget(), WALK))
    kept = replace(WALK, recompute=Recompute.KEEP, max_chunk_tokens=64)
    check(executor, tree(), make_plan(tree(), costs, Budget(), kept))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_predicted_peak_is_what_other_walks_hold(family: str) -> None:
    executor, costs = measured(family)
    check(executor, group(3), make_plan(group(3), costs, Budget(), replace(WALK, max_chunk_tokens=32)))
    detached = replace(WALK, prefix_gradient=PrefixGradient.DETACHED)
    check(executor, group(3), make_plan(group(3), costs, Budget(), detached))
    whole = make_plan(tree(), costs, Budget(), WALK)
    some = make_plan(
        tree(), costs, Budget(int(1.3 * whole.predicted.live_bytes)), replace(WALK, recompute=Recompute.AUTO)
    )
    assert 0 < sum(visit.keep_graph for visit in some.visits) < len(some.chunks) - 1
    check(executor, tree(), some)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_predicted_peak_is_what_layers_one_at_a_time_hold(family: str) -> None:
    executor, costs = measured(family)
    forest = group(2)
    whole = make_plan(forest, costs, Budget(), WALK)
    large = replace(WALK, min_chunk_tokens=96)
    plan = make_plan(forest, costs, Budget(live_bytes=int(0.9 * whole.predicted.live_bytes)), large)
    assert plan.recompute_layers
    check(executor, forest, plan)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_budget_holds_with_states_in_files(family: str, tmp_path: Path) -> None:
    _, costs = measured(family)
    forest = group(2, prompt_tokens=400)
    resident = make_plan(forest, costs, Budget(), replace(WALK, max_chunk_tokens=32))
    limit = resident.predicted.live_bytes - resident.predicted.stored_bytes // 2
    plan = make_plan(forest, costs, Budget(live_bytes=limit, disk_bytes=None), WALK)
    assert plan.predicted.disk_bytes > 0
    executor = make_executor(family, StoreBudget(host_bytes=plan.predicted.store_limit_bytes, folder=tmp_path))
    check(executor, forest, plan)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_predicted_peak_is_what_a_packed_row_holds(family: str) -> None:
    executor, costs = measured(family)
    for forest in (group(3, prompt_tokens=120), tree()):
        plan = make_plan(forest, costs, Budget(), PlanOptions(mode=ModeChoice.PACK))
        assert plan.mode is Mode.PACK
        check(executor, forest, plan, 0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_that_the_adapter_names(family: str) -> None:
    executor, costs = measured(family)
    states = adapter_for(executor.model.config).layer_states(executor.model.config)
    assert costs.accumulation_bytes_per_token == pytest.approx(4 * sum(s.token_elements for s in states), rel=0.02)
    hidden = executor.model.config.hidden_size
    boundary = 4 * (sum(s.boundary_elements for s in states) + hidden)
    assert costs.boundary_bytes == pytest.approx(boundary, rel=0.05, abs=128)
    assert costs.boundary_accumulation_bytes == pytest.approx(boundary, rel=0.05, abs=128)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_by_configuration_are_near_the_measured_ones(family: str) -> None:
    executor, costs = measured(family)
    by_config = costs_of_model(executor.model, adapter_for(executor.model.config), torch.float32)
    for forest in (group(3), tree()):
        peaks = [make_plan(forest, given, Budget(), WALK).predicted.live_bytes for given in (by_config, costs)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.5)
    if costs.can_pack:
        segments = [(0, 96), (96, 64), (96, 64), (160, 32)]
        assert by_config.pack.at(segments) == pytest.approx(costs.pack.at(segments), rel=0.5)
    for name in ("state_bytes_per_token", "attended_bytes_per_token", "layer_input_bytes_per_token"):
        assert getattr(by_config, name) == pytest.approx(getattr(costs, name), rel=0.05)


def test_measuring_leaves_no_gradients_behind() -> None:
    executor, _ = measured("qwen3")
    assert all(parameter.grad is None for parameter in executor.model.parameters())


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    executor, _ = measured("qwen3")
    with pytest.raises(ConfigError, match="the model has 512 positions"):
        measure_costs(executor, sizes=(32, 256))
    with pytest.raises(ValueError, match="two sizes"):
        measure_costs(executor, sizes=(32,))


# On paper


def large_hybrid(**overrides: Any) -> Any:
    from transformers import Qwen3_5TextConfig

    settings: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 32000,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    }
    return Qwen3_5TextConfig(**{**settings, **overrides})


def test_configuration_alone_gives_states_and_work() -> None:
    config = large_hybrid()
    costs = costs_from_config(config, torch.bfloat16, Layout(weight_bits=16.0))
    assert costs.state_bytes_per_token == 2 * (2 * 2 * 128) * 2
    assert costs.accumulation_bytes_per_token == 2 * costs.state_bytes_per_token
    matrices = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert costs.boundary_bytes > 6 * matrices * 4
    assert costs.pairs[0].flops_per_pair == 2 * 4 * 8 * 128
    assert not costs.can_pack
    layers = 2 * 8 * (3 * 1024 * 3072)
    assert costs.flops_per_token > layers
    assert costs.weight_bytes == pytest.approx(costs.flops_per_token + 2 * 2 * 32000 * 1024, rel=0.1)


def test_ranks_share_tokens_and_weights() -> None:
    config = large_hybrid()
    one, eight = (
        costs_from_config(config, layout=Layout(context_ranks=ranks, weight_ranks=ranks, lora_rank=8))
        for ranks in (1, 8)
    )
    assert eight.state_bytes_per_token == one.state_bytes_per_token / 8
    assert eight.flops_per_token == one.flops_per_token / 8
    assert eight.boundary_bytes == one.boundary_bytes
    assert eight.graph.at(800, 800) == pytest.approx(one.graph.at(100, 100))
    assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8)


def test_adapters_leave_weights_without_gradient() -> None:
    config = large_hybrid()
    full, lora = (costs_from_config(config, layout=Layout(lora_rank=rank)) for rank in (None, 8))
    quantised = costs_from_config(config, layout=Layout(lora_rank=8, weight_bits=4.5))
    assert lora.constant_bytes < 0.2 * full.constant_bytes
    assert quantised.weight_bytes == pytest.approx(lora.weight_bytes * 4.5 / 16)
    assert lora.backward_over_forward == 1.0
    assert full.backward_over_forward == 2.0
