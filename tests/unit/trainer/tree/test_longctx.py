from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.trainer.tree import longctx, longload
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import Budget, ChunkBytes, ModelCosts
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import make_forest
from services.trainer.tree.given import TokenPath, nodes_of_paths
from services.trainer.tree.longctx import Shape, longest_prompt, memory_parts, plan_longctx
from services.trainer.tree.longload import Loading, costs_of_loaded, costs_on_paper, load_model_to_run
from services.trainer.tree.longrun import Measured, random_weights, run_step, visit_shares
from services.trainer.tree.plan import ModeChoice, PlanOptions, PrefixGradient, Recompute, make_plan
from services.trainer.tree.store import StoreBudget
from tests.unit.trainer.tree.models import make_model

COSTS = ModelCosts(
    constant_bytes=1000.0,
    state_bytes_per_token=10.0,
    layer_state_bytes_per_token=1.0,
    accumulation_bytes_per_token=20.0,
    boundary_bytes=50.0,
    boundary_accumulation_bytes=50.0,
    capture=ChunkBytes.linear(per_token=2.0),
    graph=ChunkBytes.linear(per_token=40.0),
    backward=ChunkBytes.linear(per_token=5.0),
    layer_graph=ChunkBytes.linear(per_token=4.0),
    layer_backward=ChunkBytes.linear(per_token=15.0),
    layer_input_bytes_per_token=8.0,
    num_layers=4,
    row_bytes=3.0,
    head_bytes_per_row=6.0,
    flops_per_token=1e6,
)
OPTIONS = PlanOptions(mode=ModeChoice.WALK, min_chunk_tokens=16, max_chunk_tokens=64)
SHAPE = Shape(1000, 30, 4)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_group_shares_its_prompt_and_targets_all_of_its_answers() -> None:
    forest = make_forest(SHAPE.nodes(vocab_size=50))
    assert forest.num_tokens == 1000 + 4 * 29  # the last target of a run predicts nothing
    assert forest.longest_path == 1029
    assert np.bincount(forest.target_runs).tolist() == [30, 30, 30, 30]
    assert np.allclose(forest.behaviour, -np.log(50))
    assert forest.segments[0].is_shared


@pytest.mark.parametrize(
    "budget",
    [Budget(40_000, 0, 0), Budget(20_000, 50_000, 0), Budget(20_000, 10_000, 200_000), Budget(8000, 0, 1_000_000)],
)
@pytest.mark.parametrize("prefix_gradient", list(PrefixGradient))
def test_the_longest_prompt_fits_and_a_tenth_more_does_not(budget: Budget, prefix_gradient: PrefixGradient) -> None:
    options = replace(OPTIONS, prefix_gradient=prefix_gradient)
    found = longest_prompt(SHAPE, COSTS, budget, options)
    assert found is not None
    make_plan(make_forest(replace(SHAPE, prompt_tokens=found.prompt_tokens).nodes()), COSTS, budget, options)
    longer = make_forest(replace(SHAPE, prompt_tokens=int(1.1 * found.prompt_tokens)).nodes())
    with pytest.raises(ConfigError, match="no plan fits"):
        make_plan(longer, COSTS, budget, options)


def test_no_prompt_fits_a_device_that_the_weights_fill() -> None:
    assert longest_prompt(SHAPE, COSTS, Budget(1001, 0, 0), OPTIONS) is None


def test_the_longest_prompt_needs_limits() -> None:
    with pytest.raises(ConfigError, match="without a limit"):
        longest_prompt(SHAPE, COSTS, Budget(None, 0, 0), OPTIONS)


def test_small_chunks_are_tried_where_only_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longctx, "_MAX_CHUNKS", 100)
    many = replace(OPTIONS, max_chunk_tokens=1024)
    forest = make_forest(Shape(8000, 30, 2).nodes())
    roomy = plan_longctx(forest, COSTS, Budget(2_000_000, 0, 0), many)
    tight = plan_longctx(forest, COSTS, Budget(3000, 0, 2_000_000), many)
    assert max(chunk.num_tokens for chunk in roomy.chunks) > 80 > max(chunk.num_tokens for chunk in tight.chunks)


def test_memory_by_purpose_adds_up_to_the_peak_where_chunks_are_alike() -> None:
    forest = make_forest(Shape(640, 65, 1).nodes())
    plan = make_plan(forest, COSTS, Budget(None), OPTIONS)
    parts = memory_parts(forest, plan, COSTS, PrefixGradient.EXACT)
    assert parts.states == 640 * 10 + 10 * 50
    assert parts.gradients == 640 * 20 + 50
    assert (parts.graph, parts.backward) == (64 * 40, 64 * 5)
    assert parts.head == 65 * (3 + 6)  # the first target is predicted by the prompt's last token
    assert memory_parts(forest, plan, COSTS, PrefixGradient.DETACHED).gradients <= parts.gradients


def test_progress_is_told_in_shares_of_the_work() -> None:
    forest = make_forest(SHAPE.nodes())
    plan = make_plan(forest, COSTS, Budget(None), OPTIONS)
    shares = visit_shares(plan, COSTS)
    assert len(shares) == len(plan.visits) + 1
    assert shares[0] == 0.0
    assert shares[-1] == pytest.approx(1.0)
    assert shares == sorted(shares)


# -- given data -------------------------------------------------------------------------------------------------------


def path(run: int, ids: list[int], targets: set[int], version: int = 3) -> TokenPath:
    mask = np.array([at in targets for at in range(len(ids))])
    return TokenPath(
        run,
        np.array(ids, dtype=np.int32),
        mask,
        np.where(mask, -0.5 - run, -0.25).astype(np.float32),
        np.where(mask, version, -1).astype(np.int32),
    )


def test_paths_share_what_they_have_in_common() -> None:
    nodes = nodes_of_paths(
        [
            path(0, [1, 2, 3, 4, 5, 6], {4, 5}),
            path(1, [1, 2, 3, 7, 8], {4}),
            path(
                0, [1, 2, 3, 4, 5, 6, 9, 9], {6, 7}, version=4
            ),  # a later turn: its history's targets are marked above
        ]
    )
    told = [
        (node.parent, node.run, node.token_ids.tolist(), np.flatnonzero(node.target_mask).tolist()) for node in nodes
    ]
    assert told == [
        (-1, -1, [1, 2, 3], []),
        (0, 0, [4, 5, 6], [1, 2]),
        (1, 0, [9, 9], [0, 1]),
        (0, 1, [7, 8], [1]),
    ]
    assert [[(s.version, s.num_tokens) for s in node.version_spans] for node in nodes] == [
        [],
        [(3, 2)],
        [(4, 2)],
        [(3, 1)],
    ]
    assert nodes[1].logprobs.tolist() == [0.0, -0.5, -0.5]


def test_a_target_is_marked_on_a_later_path_of_its_run() -> None:
    nodes = nodes_of_paths([path(0, [1, 2, 3, 4], {3}), path(0, [1, 2, 3, 5], {2, 3})])
    assert [(node.token_ids.tolist(), node.target_mask.tolist()) for node in nodes] == [
        ([1, 2, 3], [False, False, True]),
        ([4], [True]),
        ([5], [True]),
    ]


def test_a_target_is_neither_another_runs_context_nor_a_target_twice() -> None:
    same = [1, 2, 3, 4]
    for other in (path(1, same, {2, 3}), path(1, same, {3}), path(0, same, {2, 3})):
        nodes = nodes_of_paths([path(0, same, {2, 3}), other])
        assert [node.token_ids.tolist() for node in nodes] == [[1, 2], [3, 4], [3, 4]]
        assert sum(int(node.target_mask.sum()) for node in nodes) == 2 + int(other.target_mask.sum())
        assert not nodes[0].target_mask.any()


# -- a step -----------------------------------------------------------------------------------------------------------


class InterruptionError(Exception):
    pass


@pytest.fixture(scope="module")
def hybrid() -> Executor:
    model = make_model("qwen3_5", torch.float32)
    return Executor(model, adapter_for(model.config), budget=StoreBudget())


def step(executor: Executor, folder: Path | None = None, stop_at: float = 2.0) -> Measured:
    shape = Shape(90, 12, 3)
    forest = make_forest(shape.nodes(executor.model.config.vocab_size))
    plan = make_plan(forest, COSTS, Budget(None), replace(OPTIONS, max_chunk_tokens=16, recompute=Recompute.CHUNK))

    def observe(share: float) -> None:
        if share >= stop_at:
            raise InterruptionError

    weights = random_weights([12] * 3, seed=1)
    return run_step(
        executor, forest, plan, COSTS, weights, temperature=1.0, observe=observe, resume_dir=folder, every_s=0.0
    )


def test_an_interrupted_step_goes_on_from_its_folder(hybrid: Executor, tmp_path: Path) -> None:
    hybrid.model.zero_grad()
    whole = step(hybrid)
    gradients = {name: p.grad.clone() for name, p in hybrid.model.named_parameters() if p.grad is not None}
    hybrid.model.zero_grad()
    with pytest.raises(InterruptionError):
        step(hybrid, tmp_path, stop_at=0.6)
    hybrid.model.zero_grad()
    again = step(hybrid, tmp_path)
    assert 0.0 < again.resumed_share < 0.6
    assert again.loss == pytest.approx(whole.loss, rel=1e-12)
    assert again.grad_norm == pytest.approx(whole.grad_norm, rel=1e-12)
    for name, parameter in hybrid.model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name])
    assert list(tmp_path.iterdir()) == []  # the step is done: nothing is left of it


def test_a_model_that_is_loaded_costs_what_it_costs_on_paper(tmp_path: Path) -> None:
    model = make_model("qwen3", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_model_to_run(Loading("cpu", "float32", None, 0, StoreBudget()), tmp_path)
    costs, held = costs_of_loaded(loaded, is_measured=False)
    on_paper, held_on_paper = costs_on_paper(model.config, "float32", on_cpu=True)
    assert costs == on_paper
    assert held == held_on_paper
    assert held.optimizer == 2 * held.gradients == 2 * held.weights


def test_prediction_holds_for_a_measured_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longload, "_MEASURED_SIZES", (32, 128))
    model = make_model("qwen3", torch.float32, max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    loaded = load_model_to_run(Loading("cpu", "float32", None, 0, StoreBudget()), tmp_path)
    costs, held = costs_of_loaded(loaded, is_measured=True)
    forest = make_forest(Shape(800, 60, 3).nodes(model.config.vocab_size))
    plan = plan_longctx(forest, costs, Budget(None), replace(OPTIONS, max_chunk_tokens=128))
    found = run_step(
        loaded.executor,
        forest,
        plan,
        costs,
        random_weights([60] * 3, 0),
        temperature=1.0,
        observe=lambda _share: None,
    )
    assert found.live_bytes == pytest.approx(plan.predicted.live_bytes - held.optimizer, rel=0.1)
