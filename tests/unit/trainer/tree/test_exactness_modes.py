"""Ways to train that may not change a gradient: adapters, dropout, tiers of states, packed passes, repeated calls."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.tree import states
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import make_forest
from services.trainer.tree.plan import Mode, ModeChoice, PrefixGradient, Recompute, VisitKind
from services.trainer.tree.store import StoreBudget
from tests.unit.trainer.tree import reference
from tests.unit.trainer.tree.forests import Shape, make_batch
from tests.unit.trainer.tree.models import FAMILIES, Unrounded, make_model
from tests.unit.trainer.tree.walks import Outcome, Way, make_executor, train

WAYS = [
    Way(4, recompute, recompute_layers=layers, keep_attended=attended)
    for recompute, layers, attended in itertools.product(
        (Recompute.CHUNK, Recompute.KEEP), (False, True), (False, True)
    )
]
SMALL = Shape(num_runs=2, max_own_nodes=2, prompt_tokens=6, long_tokens=7)
ONE_OF_EACH = ("qwen3_window", "qwen3_next", "deepseek_v3", "glm_moe_dsa")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_kept_and_what_is_recomputed_changes_nothing(name: str) -> None:
    batch = make_batch(11, SMALL)
    executor = make_executor(make_model(name))
    with Unrounded():
        first, *others = [train(executor, batch, way) for way in WAYS]
    for way, outcome in zip(WAYS[1:], others, strict=True):
        assert outcome.loss == pytest.approx(first.loss, rel=1e-12)
        error, worst = reference.gradient_error(outcome.gradients, first.gradients)
        assert error <= 1e-11, (way, worst)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_5", "deepseek_v32"])
def test_low_rank_adapters_get_the_gradient_of_plain_autograd(name: str) -> None:
    batch = make_batch(12, SMALL)
    ours, plain = with_adapters(make_model(name)), with_adapters(make_model(name))
    with Unrounded():
        outcome = train(make_executor(ours), batch, Way(5))
        expected = reference.run(plain, batch, temperature=0.9, experts=outcome.experts, selected=outcome.selected)
    assert expected.gradients
    assert all(".lora_" in name for name in expected.gradients)
    error, worst = reference.gradient_error(outcome.gradients, expected.gradients)
    assert error <= 1e-9, worst


@pytest.mark.parametrize(
    ("name", "modules", "layers"),
    [("llama", ["lm_head"], None), ("llama", ["q_proj"], [1]), ("deepseek_v3", ["kv_b_proj"], [0])],
)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[7], Way(mode=ModeChoice.PACK)])
def test_adapters_of_a_single_module_get_the_gradient_of_plain_autograd(
    name: str, modules: list[str], layers: list[int] | None, way: Way
) -> None:
    batch, settings = make_batch(12, SMALL), {"target_modules": modules, "layers_to_transform": layers}
    ours, plain = with_adapters(make_model(name), **settings), with_adapters(make_model(name), **settings)
    with Unrounded():
        outcome = train(make_executor(ours), batch, way)
        expected = reference.run(plain, batch, temperature=0.9)
    assert len(expected.gradients) == 2
    error, worst = reference.gradient_error(outcome.gradients, expected.gradients)
    assert error <= 1e-9, worst


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bfloat16_stays_near_float32(name: str) -> None:
    batch = make_batch(12, SMALL)
    expected = train(make_executor(make_model(name, torch.float32)), batch, WAYS[0])
    model = make_model(name, torch.float32)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    outcome = train(Executor(model, adapter_for(model.config), budget=StoreBudget(), autocast=autocast), batch, WAYS[0])
    assert outcome.loss == pytest.approx(expected.loss, abs=0.1)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for key, gradient in outcome.gradients.items():
        similarity = torch.cosine_similarity(gradient.flatten(), expected.gradients[key].flatten(), dim=0)
        assert similarity > 0.95, key


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        *product(["qwen3_window", "qwen3_5", "deepseek_v32"], ["embed_tokens", "mlp", "lm_head"]),
        *product(["qwen3_window", "deepseek_v32"], ["layers.0.self_attn.k"]),
        ("qwen3_5", "layers.0.linear"),
    ],
)
def test_any_part_of_a_model_may_be_frozen(name: str, trained: str) -> None:
    batch = make_batch(10, SMALL)
    ours, plain = make_model(name), make_model(name)
    for model in (ours, plain):
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(trained in key)
    assert any(parameter.requires_grad for parameter in ours.parameters())
    executor = make_executor(ours)
    with Unrounded():
        expected = reference.run(plain, batch, temperature=0.9, rows=reference.leaf_rows(batch))
        for way in (WAYS[0], WAYS[6]):
            error, worst = reference.gradient_error(train(executor, batch, way).gradients, expected.gradients)
            assert error <= 1e-9, worst


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_half_precision_is_the_same_whatever_is_recomputed(name: str) -> None:
    batch = make_batch(10, SMALL)

    def outcome(way: Way) -> Outcome:
        model = make_model(name, torch.float32)
        autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        return train(Executor(model, adapter_for(model.config), budget=StoreBudget(), autocast=autocast), batch, way)

    expected = outcome(Way(4, Recompute.KEEP))
    for way in (Way(4), Way(4, recompute_layers=True, keep_attended=True)):
        gradients = outcome(way).gradients
        assert all(torch.equal(gradient, gradients[key]) for key, gradient in expected.gradients.items())


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[6]])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe"])
def test_dropout_falls_in_a_recomputation_as_it_fell_before(name: str, way: Way) -> None:
    batch = make_batch(13, SMALL)
    executor = make_executor(with_dropout(make_model(name)))
    with Unrounded():
        torch.manual_seed(5)
        kept = train(executor, batch, replace(way, recompute=Recompute.KEEP, recompute_layers=False))
        torch.manual_seed(5)
        outcome = train(executor, batch, way)
        torch.manual_seed(6)
        other = train(executor, batch, way)
    assert outcome.loss == pytest.approx(kept.loss, rel=1e-12)
    error, worst = reference.gradient_error(outcome.gradients, kept.gradients)
    assert error <= 1e-10, worst
    assert reference.gradient_error(other.gradients, kept.gradients)[0] > 1e-3


def test_dropout_is_the_gradient_of_what_was_evaluated() -> None:
    """Along one direction, the loss under the same dropout changes as its gradient says."""
    batch = make_batch(14, SMALL)
    executor = make_executor(with_dropout(make_model("qwen3")))
    weight = executor.model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    losses = []
    with Unrounded():
        torch.manual_seed(5)
        outcome = train(executor, batch, Way(4))
        for step in (-1e-5, 2e-5):
            with torch.no_grad():
                weight += step * direction
            torch.manual_seed(5)
            losses.append(train(executor, batch, Way(4)).loss)
    slope = float((outcome.gradients["model.layers.0.self_attn.v_proj.weight"] * direction).sum())
    assert (losses[1] - losses[0]) / 2e-5 == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("host_bytes", [0, 6000])
def test_where_states_lie_changes_no_bit(name: str, host_bytes: int | None, tmp_path: Path) -> None:
    batch = make_batch(15, SMALL)
    way = Way(4, recompute_layers=True, keep_attended=True)
    expected = train(make_executor(make_model(name, torch.float32)), batch, way, with_scores=True)
    budget = StoreBudget(host_bytes=host_bytes, folder=tmp_path)
    outcome = train(make_executor(make_model(name, torch.float32), budget), batch, way, with_scores=True)
    assert outcome.loss == expected.loss
    assert outcome.scores is not None
    assert expected.scores is not None
    assert torch.equal(outcome.scores.logprobs, expected.scores.logprobs)
    assert outcome.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(gradient, expected.gradients[key]) for key, gradient in outcome.gradients.items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen2", "mistral", "qwen3_window", "qwen3_moe", "deepseek_v3"])
def test_one_pass_over_a_packed_tree_gives_the_same(name: str) -> None:
    batch = make_batch(16, Shape(num_roots=2, num_runs=4, max_own_nodes=3))
    with Unrounded():
        outcome = train(make_executor(make_model(name)), batch, Way(mode=ModeChoice.PACK), with_scores=True)
        expected = reference.run(make_model(name), batch, temperature=0.9)
    assert outcome.plan.mode is Mode.PACK
    assert outcome.loss == pytest.approx(expected.loss, rel=1e-9)
    assert outcome.scores is not None
    torch.testing.assert_close(outcome.scores.logprobs, outcome.logprobs, rtol=0, atol=1e-10)
    error, worst = reference.gradient_error(outcome.gradients, expected.gradients)
    assert error <= 1e-9, worst


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_call_leaves_nothing_behind_for_the_next(name: str) -> None:
    first, second = make_batch(17, SMALL), make_batch(18, SMALL)
    executor = make_executor(make_model(name, torch.float32))
    once = train(executor, first, Way(4))
    train(executor, second, Way(7, prefix_gradient=PrefixGradient.DETACHED), with_scores=True)
    again = train(executor, first, Way(4), with_scores=True)
    assert again.loss == once.loss
    assert all(torch.equal(gradient, again.gradients[key]) for key, gradient in once.gradients.items())


@pytest.mark.parametrize("way", [WAYS[3], WAYS[7]])
def test_a_step_that_fails_leaves_nothing_behind(way: Way, tmp_path: Path) -> None:
    batch, forest = make_batch(17, SMALL), make_forest(make_batch(17, SMALL).nodes)
    budget = StoreBudget(host_bytes=6000, folder=tmp_path)
    executor = make_executor(make_model("qwen3_next", torch.float32), budget)
    expected = train(executor, batch, way)
    asked = itertools.count()

    def fail(_index: Tensor, logprobs: Tensor, _entropy: Tensor) -> Tensor:
        if next(asked):
            raise RuntimeError("the objective fails")
        return torch.ones_like(logprobs)

    with pytest.raises(RuntimeError, match="the objective fails"):
        executor.train(forest, way.plan(forest), way.temperature, fail)
    assert states.current() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("state-store")]
    again = train(executor, batch, way)
    assert all(torch.equal(gradient, again.gradients[key]) for key, gradient in expected.gradients.items())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_of_several_batches_add_up(name: str) -> None:
    batches = [make_batch(19, SMALL), make_batch(20, SMALL)]
    executor = make_executor(make_model(name))
    with Unrounded():
        apart = [train(executor, batch, Way(5)).gradients for batch in batches]
        for batch in batches:
            train(executor, batch, Way(5), clear=False)
    together = reference.gradients_of(executor.model)
    both = {key: sum((part[key] for part in apart if key in part), torch.zeros(())) for key in together}
    error, worst = reference.gradient_error(together, both)
    assert error <= 1e-11, worst


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_chunk_an_adapted_model_runs_as_before(name: str) -> None:
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(0))
    plain = make_model(name)
    executor = make_executor(make_model(name))
    train(executor, make_batch(21, SMALL), Way(5))
    with torch.no_grad(), Unrounded():
        expected = plain(input_ids=ids, use_cache=False).logits
        logits = executor.model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def test_a_prefix_without_gradient_is_not_evaluated_again() -> None:
    batch = make_batch(22, Shape(num_runs=2, prompt_tokens=20))
    detached = Way(4, prefix_gradient=PrefixGradient.DETACHED).plan(make_forest(batch.nodes))
    exact = Way(4).plan(make_forest(batch.nodes))
    counts = [
        sum(visit.kind is VisitKind.BACKWARD for visit in plan.visits if plan.chunks[visit.chunk].start < 20)
        for plan in (exact, detached)
    ]
    assert counts == [5, 0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 96}),
        ("mamba", {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 96}),
        ("gemma2", {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 96}),
        ("gpt_oss", {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 96}),
    ],
)
def test_an_architecture_without_adapter_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **settings)
    with pytest.raises(ConfigError, match=name) as caught:
        adapter_for(config)
    assert "qwen3" in caught.value.hint


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_refused(kind: str) -> None:
    config = make_model("llama").config
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=kind):
        adapter_for(config)


def with_adapters(model: Any, **settings: Any) -> Any:
    """The model with low-rank adapters that are not zero, its other weights frozen. ``settings``: on which modules, if
    not on all."""
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        where = settings or {"target_modules": "all-linear"}
        peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **where))
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
    return model.double().eval()


def with_dropout(model: Any) -> Any:
    """The model in training mode, with dropout behind the activation of each dense layer."""
    for module in model.modules():
        if hasattr(module, "act_fn") and hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Linear):
            module.act_fn = nn.Sequential(module.act_fn, nn.Dropout(0.2))
    return model.train()
