"""Latent attention by chunks is latent attention of the whole sequence, and what is kept of it is the latent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.mla import LatentAttention
from services.trainer.tree.attend import TOKEN_STATES, Page
from services.trainer.tree.states import ChunkContext
from services.trainer.tree.store import StateKey, StateStore, StoreBudget
from tests.unit.trainer.tree.models import FAMILIES, make_model, make_model_of
from tests.unit.trainer.tree.walk import cuts, difference, random_states, through, walk

NUM_TOKENS = 24
RANK, ROPE, NOPE, VALUE = 12, 4, 8, 6  # of the models of FAMILIES
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_are_the_whole_sequence(seed: int) -> None:
    assert error_of(make_model("deepseek_v3"), make_model("deepseek_v3"), cuts(NUM_TOKENS, seed), seed) < 1e-12


@pytest.mark.parametrize("size", [1, 8, NUM_TOKENS])
def test_equal_chunks_are_the_whole_sequence(size: int) -> None:
    sizes = [size] * (NUM_TOKENS // size)
    assert error_of(make_model("deepseek_v3"), make_model("deepseek_v3"), sizes) < 1e-12


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("axk1", {}),
        ("deepseek_v2", {"n_group": None, "topk_group": None}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": YARN}),
        ("glm4_moe_lite", {}),
        ("youtu", {"attention_bias": True}),
    ],
)
def test_every_architecture_with_this_attention_is_exact(name: str, settings: dict[str, Any]) -> None:
    assert name in LatentAttention.model_types
    assert error_of(make_variant(name, settings), make_variant(name, settings), cuts(NUM_TOKENS, 1)) < 1e-12


def test_adapters_on_the_projection_of_the_latent_get_their_gradient() -> None:
    from peft import LoraConfig, get_peft_model

    def with_lora() -> Any:
        config = LoraConfig(r=2, target_modules=["kv_b_proj", "kv_a_proj_with_mqa"], init_lora_weights=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return get_peft_model(make_model("deepseek_v3"), config).double().base_model.model

    ours = with_lora()
    assert error_of(ours, with_lora(), cuts(NUM_TOKENS, 2)) < 1e-12
    trained = [name for name, parameter in ours.named_parameters() if parameter.grad is not None]
    assert len(trained) == 4
    assert all("lora" in name for name in trained)


def test_the_latent_is_kept_and_not_the_heads() -> None:
    model = installed(make_model("deepseek_v3"))
    store = StateStore(torch.device("cpu"), StoreBudget())
    context = ChunkContext(
        store, [], Page(0, 0, 5, has_gradient=True), is_recorded=False, is_inner=True, anchor=torch.zeros(())
    )
    with torch.no_grad():
        through(model)(random_states(5, 3)[0], context)
    shapes = [tuple(state.shape) for state in store.get(StateKey(0, 0, TOKEN_STATES))]
    assert shapes == [(1, 1, 5, RANK), (1, 1, 5, ROPE)]
    assert LatentAttention().layer_states(model.config) == (LayerStates(token_elements=RANK + ROPE),) * 2


def test_without_a_chunk_heads_are_made_of_the_latent_as_before() -> None:
    model = make_model("deepseek_v3")
    attention = model.model.layers[0].self_attn
    states = torch.randn(1, 1, 7, RANK, dtype=torch.float64), torch.randn(1, 1, 7, ROPE, dtype=torch.float64)
    before = attention.expand_kv(*states)
    installed(model)
    for made, expected in zip(attention.expand_kv(*states), before, strict=True):
        assert torch.equal(made, expected)
    assert [made.shape[-1] for made in before] == [NOPE + ROPE, VALUE]


def test_a_copy_of_a_model_makes_heads_with_its_own_weights() -> None:
    model = installed(make_model("deepseek_v3"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.kv_b_proj.weight.zero_()
    hidden, gradient = random_states(6, 4)
    assert not walk(through(twin), hidden, gradient, [4, 2]).output.any()
    assert walk(through(model), hidden, gradient, [4, 2]).output.any()


def error_of(ours: Any, plain: Any, sizes: list[int], seed: int = 0) -> float:
    """The largest relative error of the first model, in chunks of these sizes, against the second, unchanged one."""
    return difference(installed(ours), plain, random_states(NUM_TOKENS, seed), sizes)


def installed(model: Any) -> Any:
    """The model with its attention made to use chunks; a second time changes nothing."""
    LatentAttention().install(model)
    LatentAttention().install(model)
    return model


def make_variant(name: str, settings: dict[str, Any]) -> Any:
    """A small model in float64 of an architecture that need not be one of FAMILIES."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**FAMILIES["deepseek_v3"].settings, **settings})
    return make_model_of(config, torch.float64)
