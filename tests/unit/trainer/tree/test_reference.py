"""The reference itself: that it is what it claims to be, for every architecture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.packing import Batch
from tests.unit.trainer.forests import path_to
from tests.unit.trainer.tree import reference
from tests.unit.trainer.tree.forests import Shape, chain, make_batch
from tests.unit.trainer.tree.models import FAMILIES, Unrounded, make_model


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_by_leaf_give_what_rows_by_node_give(name: str) -> None:
    model = make_model(name)
    batch = make_batch(1)
    by_node = reference.run(model, batch)
    by_leaf = reference.run(model, batch, rows=reference.leaf_rows(batch))
    assert by_leaf.loss == pytest.approx(by_node.loss, rel=1e-7)
    error, worst = reference.gradient_error(by_leaf.gradients, by_node.gradients)
    assert error < 2e-6, worst


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unrounded_model_repeats_itself(name: str) -> None:
    model = make_model(name)
    batch = make_batch(2)
    with Unrounded():
        by_node = reference.run(model, batch)
        by_leaf = reference.run(model, batch, rows=reference.leaf_rows(batch))
    error, worst = reference.gradient_error(by_leaf.gradients, by_node.gradients)
    assert error < 1e-11, worst


@pytest.mark.parametrize("name", ["qwen3", "qwen3_window", "qwen3_next", "deepseek_v3"])
def test_an_unrounded_model_is_the_model_but_for_rounding(name: str) -> None:
    batch = chain(40, (7, 30))
    model = make_model(name)
    rounded = reference.run(model, batch)
    with Unrounded():
        exact = reference.run(model, batch)
    assert torch.allclose(rounded.logprobs, exact.logprobs, atol=1e-5)
    error, worst = reference.gradient_error(rounded.gradients, exact.gradients)
    assert 1e-9 < error < 1e-5, worst


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("qwen3_window", "model.layers.0.self_attn.k_proj.weight"),
        ("qwen3_window", "model.embed_tokens.weight"),
        ("qwen3_5", "model.layers.0.linear_attn.A_log"),
        ("deepseek_v3", "model.layers.1.mlp.gate.weight"),
    ],
)
def test_the_gradient_is_that_of_finite_differences(name: str, parameter: str) -> None:
    model = make_model(name)
    batch = make_batch(3)
    weight = model.get_parameter(parameter)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = []
    with Unrounded():
        slope = float((reference.run(model, batch).gradients[parameter] * direction).sum())
        for step in (-1e-5, 2e-5):
            with torch.no_grad():
                weight += step * direction
            losses.append(reference.run(model, batch).loss)
    assert (losses[1] - losses[0]) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.has_choices])
def test_what_the_model_chose_changes_nothing_when_injected(name: str) -> None:
    model = make_model(name, torch.float32)
    batch = make_batch(4)
    plain = reference.run(model, batch)
    experts = reference.recorded_experts(model, batch)
    selected = reference.recorded_positions(model, batch)
    injected = reference.run(model, batch, experts=experts, selected=selected)
    error, worst = reference.gradient_error(injected.gradients, plain.gradients)
    assert error < 1e-6, worst
    assert injected.loss == pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32"])
def test_other_choices_change_the_gradient(name: str) -> None:
    model = make_model(name)
    batch = chain(20, (7,))
    plain = reference.run(model, batch)
    is_sparse = name == "deepseek_v32"
    choices = (reference.recorded_positions if is_sparse else reference.recorded_experts)(model, batch)
    last = max(choices, key=len)

    def changed() -> torch.Tensor:
        injected = {"selected": choices} if is_sparse else {"experts": choices}
        return reference.run(model, batch, **injected).logprobs  # type: ignore[arg-type]

    choices[last] = {layer: torch.tensor([0, 1, 2, 3, 4, 5][: len(choice)]) for layer, choice in choices[last].items()}
    assert torch.equal(changed()[:-1], plain.logprobs[:-1])  # the last token predicts no target
    before = choices[last[:-1]]
    choices[last[:-1]] = {layer: torch.tensor([1, 2, 3, 4, 5, 0][: len(choice)]) for layer, choice in before.items()}
    assert changed()[-1] != plain.logprobs[-1]
    assert torch.allclose(changed()[:-1], plain.logprobs[:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_detached_changes_gradients_alone(name: str) -> None:
    model = make_model(name)
    batch = make_batch(5)
    rows = reference.node_rows(batch, detach_shared=True)
    assert any(row.num_detached for row in rows)
    with Unrounded():
        exact = reference.run(model, batch)
        detached = reference.run(model, batch, rows=rows)
    assert torch.allclose(detached.logprobs, exact.logprobs, atol=1e-12)
    error, _ = reference.gradient_error(detached.gradients, exact.gradients)
    assert error > 0.5
    head = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    same = torch.allclose(detached.gradients[head], exact.gradients[head], atol=1e-12)
    assert same != model.config.tie_word_embeddings


def test_forests_have_every_shape() -> None:
    batches = [make_batch(seed, Shape(num_roots=1 + seed % 2)) for seed in range(60)]
    depths = {max(len(path_to(batch.nodes, n)) for n in range(len(batch.nodes))) for batch in batches}
    assert depths == {3, 4, 5} or depths == {2, 3, 4, 5}
    nodes = [node for batch in batches for node in batch.nodes]
    sizes = {len(node.token_ids) for node in nodes}
    assert {0, 1, 2, 14} <= sizes
    own = [node for node in nodes if node.run >= 0 and len(node.token_ids)]
    assert any(node.target_mask[0] for node in own)
    assert any(not node.target_mask.any() for node in own)
    assert any(node.target_mask.any() and not node.target_mask[-1] for node in own)
    assert any(_has_branches(batch) for batch in batches)
    assert any(sum(node.parent < 0 for node in batch.nodes) > 1 for batch in batches)


def test_a_chain_is_one_path_however_it_is_cut() -> None:
    whole, cut = chain(30, ()), chain(30, (4, 5, 19))
    assert sum(len(node.token_ids) for node in cut.nodes) == len(whole.nodes[0].token_ids)
    ids = np.concatenate([node.token_ids for node in cut.nodes])
    model = make_model("llama")
    pieces = tuple(
        replace(node, token_ids=part) for node, part in zip(cut.nodes, np.split(ids, (4, 5, 19)), strict=True)
    )
    rows = reference.node_rows(Batch(pieces, cut.runs))
    assert [len(row.token_ids) for row in rows] == [4, 5, 19, 30]
    assert sum(len(row.positions) for row in rows) == 29
    assert len(reference.run(model, cut).logprobs) == 29


def _has_branches(batch: Batch) -> bool:
    parents = [node.parent for node in batch.nodes if node.run >= 0 and batch.nodes[node.parent].run >= 0]
    return len(set(parents)) < len(parents)
