"""A token's experts are those of its first evaluation, with the probabilities of the weights as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.tree.adapters.moe import EXPERTS, GROUPS, MixtureOfExperts, apply_experts, record_routing
from services.trainer.tree.states import ChunkContext, Page
from services.trainer.tree.store import StateStore, StoreBudget
from tests.unit.trainer.tree import reference
from tests.unit.trainer.tree.forests import make_batch
from tests.unit.trainer.tree.models import FAMILIES, make_model, make_model_of
from tests.unit.trainer.tree.walks import make_executor, train

WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.has_choices]
OTHERS = {
    "Glm4MoeConfig": {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
    "MixtralConfig": {"num_local_experts": 6},
    "OlmoeConfig": {"num_experts": 6},
    "Qwen2MoeConfig": {"num_experts": 6, "shared_expert_intermediate_size": 16},
}
LAYER, NUM_TOKENS = 1, 30


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- routing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_replayed_under_changed_weights(name: str) -> None:
    model = make_model(name)
    record_routing(model)
    block = model.base_model.layers[LAYER].mlp
    hidden = torch.randn(1, NUM_TOKENS, model.config.hidden_size, dtype=torch.float64)
    store = StateStore(torch.device("cpu"), StoreBudget())
    with torch.no_grad():
        chosen, _ = evaluate(block, hidden, store)
        free, _ = evaluate(block, hidden)
        assert torch.equal(chosen, free)
        block.gate.weight.neg_()
        other, _ = evaluate(block, hidden)
    assert not torch.equal(chosen, other)
    replayed, weights = evaluate(block, hidden, store)
    assert torch.equal(chosen, replayed)
    expected = expert_weights(block.gate, hidden[0], chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7, check_dtype=False)
    slope = torch.randn_like(weights)
    ours, theirs = (torch.autograd.grad((slope * value).sum(), block.gate.weight)[0] for value in (weights, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_choices_are_kept_as_bytes() -> None:
    model = make_model("deepseek_v3")
    record_routing(model)
    context = make_context(StateStore(torch.device("cpu"), StoreBudget()))
    with context.active():
        model.base_model.layers[LAYER].mlp(torch.randn(1, NUM_TOKENS, 32, dtype=torch.float64))
    kept = {key.part: (tensor.dtype, tuple(tensor.shape)) for key, tensor in context.choices.items()}
    assert kept == {EXPERTS: (torch.uint8, (NUM_TOKENS, 2)), GROUPS: (torch.uint8, (NUM_TOKENS, 2))}
    assert {key.layer for key in context.choices} == {LAYER}


def test_copies_of_a_model_route_by_their_own_weights() -> None:
    model = make_model("qwen3_moe")
    record_routing(model)
    other = copy.deepcopy(model)
    hidden = torch.randn(1, NUM_TOKENS, 32, dtype=torch.float64)
    block, twin = model.base_model.layers[LAYER].mlp, other.base_model.layers[LAYER].mlp
    before = block(hidden)
    with torch.no_grad():
        twin.gate.weight.neg_()
        twin.experts.down_proj.zero_()
    assert torch.equal(block(hidden), before)
    assert not twin(hidden).any()


def test_load_balance_loss_is_off() -> None:
    model = make_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1.0)
    ids = torch.arange(20)[None]
    with_it = model(ids, labels=ids).loss
    record_routing(model)
    result = model(ids, labels=ids)
    assert result.aux_loss is None
    plain = make_model("qwen3_moe")(ids, labels=ids).loss
    torch.testing.assert_close(result.loss, plain)
    assert with_it - plain > 0.1


def test_experts_without_a_router_are_refused() -> None:
    model = make_model("qwen3_moe")
    model.base_model.layers[LAYER].mlp.gate = nn.Linear(32, 6)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp"):
        record_routing(model)


def test_models_without_experts_are_left_alone() -> None:
    model = make_model("qwen3")
    record_routing(model)
    assert not any("forward" in vars(module) for module in model.modules())


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_give_the_results_and_gradients_of_hugging_face(name: str) -> None:
    plain, ours = make_model(name), make_model(name)
    record_routing(ours)
    hidden = torch.randn(1, NUM_TOKENS, 32, dtype=torch.float64)
    results = []
    for model in (ours, plain):
        block, leaf = model.base_model.layers[LAYER].mlp, hidden.clone().requires_grad_()
        output = block(leaf)
        output.square().sum().backward()
        results.append(gathered(block, leaf, output))
    error, parameter = reference.gradient_error(*results)
    assert error < 1e-12, parameter


def test_grouped_products_are_those_of_each_expert() -> None:
    experts = make_model("qwen3_moe", torch.float32).base_model.layers[LAYER].mlp.experts
    counts = torch.tensor([5, 0, 9, 1, 0, 3])
    rows = torch.randn(18, 32)
    results = []
    for implementation in ("eager", "grouped_mm"):
        experts.config._experts_implementation = implementation
        leaf = rows.clone().requires_grad_()
        output = apply_experts(experts, leaf, counts)
        output.square().sum().backward()
        results.append(gathered(experts, leaf, output))
        experts.zero_grad()
    error, parameter = reference.gradient_error(*results)
    assert error < 1e-5, parameter


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_no_tokens_give_no_results(implementation: str) -> None:
    model = make_model("qwen3_moe", torch.float32)
    model.config._experts_implementation = implementation
    record_routing(model)
    hidden, indices = torch.zeros(0, 32, requires_grad=True), torch.zeros(0, 2, dtype=torch.int64)
    output = model.base_model.layers[LAYER].mlp.experts(hidden, indices, torch.zeros(0, 2))
    assert output.shape == (0, 32)
    output.sum().backward()
    assert hidden.grad is not None


def test_configured_grouped_products_serve_float64_too() -> None:
    model, plain = make_model("qwen3_moe"), make_model("qwen3_moe")
    model.config._experts_implementation = "grouped_mm"
    record_routing(model)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_like_architectures_are_exact_on_trees(name: str) -> None:
    import transformers

    settings = {**FAMILIES["qwen3_moe"].settings, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = {key: value for key, value in settings.items() if key not in ("num_experts", "norm_topk_prob")}
    config = getattr(transformers, name)(**settings, **OTHERS[name])
    assert config.model_type in MixtureOfExperts.model_types
    batch = make_batch(1)
    trained = train(make_executor(make_model_of(config, torch.float64)), batch)
    assert trained.experts
    expected = reference.run(make_model_of(config, torch.float64), batch, temperature=0.9)
    error, parameter = reference.gradient_error(trained.gradients, expected.gradients)
    assert error < 2e-6, parameter
    assert trained.loss == pytest.approx(expected.loss)


# -- helpers -----------------------------------------------------------------------------------------------------------


def make_context(store: StateStore) -> ChunkContext:
    page = Page(0, 0, NUM_TOKENS, has_gradient=True)
    anchor = torch.zeros((), requires_grad=True)
    return ChunkContext(store, [], page, is_recorded=torch.is_grad_enabled(), is_inner=True, anchor=anchor)


def evaluate(block: Any, hidden: Tensor, store: StateStore | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights ``[T, k]``, in a new context of a chunk of ``store``, if given."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = block.experts.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[1:3]))
    if store is None:
        block(hidden)
    else:
        with make_context(store).active():
            block(hidden)
    handle.remove()
    ((indices, weights),) = seen
    return indices, weights


def gathered(module: Any, leaf: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Gradients of a module's parameters and of its input, and its output."""
    assert leaf.grad is not None
    return {**reference.gradients_of(module), "output": output.detach(), "input": leaf.grad}


def expert_weights(router: Any, hidden: Tensor, indices: Tensor) -> Tensor:
    """What the results of some experts count: softmax over all of them (Qwen3) or sigmoid (DeepSeek), then shared."""
    logits = hidden @ router.weight.T
    is_sigmoid = hasattr(router, "e_score_correction_bias")
    chosen = (logits.sigmoid() if is_sigmoid else logits.softmax(-1)).gather(1, indices)
    scale = router.routed_scaling_factor if is_sigmoid else 1.0
    return chosen / chosen.sum(-1, keepdim=True) * scale
