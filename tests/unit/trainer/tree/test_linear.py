"""Gated delta nets by chunks are those of the whole sequence: outputs, gradients, and states of a fixed size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.tree.adapters import linear
from services.trainer.tree.adapters.linear import CONVOLUTION, RECURRENT, HybridLinear, gated_delta_rule
from services.trainer.tree.states import ChunkContext, Page
from services.trainer.tree.store import StateKey, StateStore, StoreBudget
from tests.unit.trainer.tree.models import make_model
from tests.unit.trainer.tree.reference import gradient_error, gradients_of
from tests.unit.trainer.tree.walk import cuts, walk

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NUM_TOKENS = 70


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- the recurrence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("has_state", [False, True])
def test_blocks_give_the_recurrence_and_its_gradients(num_tokens: int, has_state: bool) -> None:
    inputs = draw(num_tokens, torch.float64)
    if not has_state:
        inputs[-1] = None
    ours, theirs = (with_gradients(rule, inputs) for rule in (gated_delta_rule, token_by_token))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("num_tokens", [5, 200])
def test_blocks_give_what_hugging_face_computes(num_tokens: int) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def theirs(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        query, key = (part.repeat_interleave(2, dim=2) for part in (query, key))
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return torch_chunk_gated_delta_rule(query, key, value, g=g, beta=beta, **options)

    inputs = draw(num_tokens, torch.float32)
    for mine, reference in zip(with_gradients(gated_delta_rule, inputs), with_gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-4, atol=2e-5)


def test_decay_to_nothing_overflows_nowhere() -> None:
    query, key, value, _, rate, state = draw(40, torch.float32)
    decay = torch.full(value.shape[:3], -60.0)
    for result in with_gradients(gated_delta_rule, [query, key, value, decay, rate, state]):
        assert result.isfinite().all()


def test_matrices_stay_float32_under_autocast() -> None:
    mixer = mixer_of(make_model("qwen3_5", torch.float32))
    inputs = (torch.zeros(1, mixer.conv_dim, 3), None, *linear._project(mixer, draw_hidden(torch.float32)))
    with torch.no_grad():
        plain = linear._mix_span(mixer, *inputs)[2]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            matrices = linear._mix_span(mixer, *inputs)[2]
    assert matrices.dtype == torch.float32
    error = (matrices - plain).norm() / plain.norm()
    assert 0 < error < 1e-2  # that of the convolution's output


# -- mixers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_chunks_give_the_output_and_gradients_of_the_whole_sequence(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_against_whole_sequence(family, cuts(NUM_TOKENS, seed), torch.float64, 2e-6, monkeypatch)


@pytest.mark.parametrize("sizes", [[1] * 24, [24], [23, 1], [1, 23], [2, 1, 21]], ids=str)
def test_chunks_of_any_length_are_exact(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_whole_sequence("qwen3_5", sizes, torch.float64, 2e-6, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_are_as_exact_as_float32_is(family: str) -> None:
    check_against_whole_sequence(family, cuts(NUM_TOKENS, 5), torch.float32, 2e-5)


def test_spans_of_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SPAN_TOKENS", 7)
    check_against_whole_sequence("qwen3_next", [30, 5, 35], torch.float64, 2e-6, monkeypatch)


def test_a_fused_rule_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a kernel it stands in the place of Hugging Face's own function, which stands here for it."""
    monkeypatch.setattr(linear, "is_fused", lambda _tensor: True)
    check_against_whole_sequence("qwen3_next", cuts(NUM_TOKENS, 3), torch.float32, 2e-5)


def test_state_is_of_the_promised_size() -> None:
    model = make_model("qwen3_next", torch.float32)
    HybridLinear().install(model)
    states = HybridLinear().layer_states(model.config)
    store = StateStore(torch.device("cpu"), StoreBudget())
    for num_tokens in (1, 33):
        chunk = Page(num_tokens, 0, num_tokens, has_gradient=True)
        with context(store, chunk).active(), torch.no_grad():
            mixer_of(model)(torch.randn(1, num_tokens, model.config.hidden_size))
        kept = [store.get(StateKey(num_tokens, 0, part))[0] for part in (CONVOLUTION, RECURRENT)]
        assert sum(state.numel() for state in kept) == states[0].boundary_elements
    assert states[0].token_elements == 0
    assert states[1].token_elements == 2 * model.config.num_key_value_heads * model.config.head_dim
    assert states[1].boundary_elements == 0


def test_graph_holds_nothing_of_the_recurrence() -> None:
    model = make_model("qwen3_5", torch.float32)
    HybridLinear().install(model)
    mixer, hidden = mixer_of(model), torch.randn(1, 300, model.config.hidden_size)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    store = StateStore(torch.device("cpu"), StoreBudget())
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with context(store, Page(0, 0, 300, has_gradient=True)).active(), hooks:
        mixer(hidden)
    block_matrices = 300 * mixer.num_v_heads * linear.BLOCK_TOKENS * hidden.element_size()
    assert max(saved.values()) < block_matrices


def test_without_a_context_the_model_runs_as_before() -> None:
    plain, installed = make_model("qwen3_5_moe"), make_model("qwen3_5_moe")
    HybridLinear().install(installed)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(installed(ids).logits, plain(ids).logits, rtol=1e-10, atol=1e-10)


# -- helpers -----------------------------------------------------------------------------------------------------------


def check_against_whole_sequence(
    family: str, sizes: list[int], dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch | None = None
) -> None:
    """The reference is Hugging Face's mixer; with ``monkeypatch`` its recurrence is ``token_by_token``, as its own
    rounds to float32."""
    hidden, gradient = draw_hidden(dtype)[:, : sum(sizes)], torch.randn(1, sum(sizes), 32, dtype=dtype)
    plain, ours = make_model(family, dtype), make_model(family, dtype)
    HybridLinear().install(ours)
    mixer = mixer_of(ours)

    def evaluate(part: Tensor, context: ChunkContext) -> Tensor:
        with context.active():
            output: Tensor = mixer(part)
        return output

    walked = walk(evaluate, hidden, gradient, sizes)
    if monkeypatch is not None:
        modeling = sys.modules[type(mixer_of(plain)).__module__]
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", as_hugging_face_calls_it)
    leaf = hidden.clone().requires_grad_()
    output = mixer_of(plain)(leaf)
    output.backward(gradient)
    assert leaf.grad is not None
    reference = {**gradients_of(mixer_of(plain)), "output": output.detach(), "input": leaf.grad}
    result = {**gradients_of(mixer), "output": walked.output, "input": walked.input_gradient}
    error, name = gradient_error(result, reference)
    assert error <= bound, name


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is defined."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    if state is None:
        state = value.new_zeros(1, value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    for token in range(value.shape[1]):
        state = log_decay[:, token].exp()[..., None, None].to(value.dtype) * state
        seen = torch.einsum("bhk,bhkv->bhv", key[:, token], state)
        written = rate[:, token, :, None] * (value[:, token] - seen)
        state = state + key[:, token, :, :, None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, token] * key.shape[3] ** -0.5, state))
    return torch.stack(outputs, dim=1), state


def as_hugging_face_calls_it(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    return token_by_token(query, key, value, g, beta, initial_state)


def with_gradients(rule: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
    """Output, state and the gradients of the inputs."""
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    output, state = rule(*leaves)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    given = [leaf for leaf in leaves if leaf is not None]
    return [output, state, *torch.autograd.grad((weight * output).sum() + state.square().sum(), given)]


def draw(num_tokens: int, dtype: torch.dtype) -> list[Any]:
    """Query, key, value, log decay, rate and state, with two key heads for four heads."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    query, key, value = normal(1, num_tokens, 2, 8), normal(1, num_tokens, 2, 8), normal(1, num_tokens, 4, 6)
    decay, rate = -0.2 * normal(1, num_tokens, 4).abs(), normal(1, num_tokens, 4).sigmoid()
    return [query, key, value, decay, rate, normal(1, 4, 8, 6)]


def draw_hidden(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, NUM_TOKENS, 32, dtype=dtype)


def mixer_of(model: Any) -> Any:
    return model.base_model.layers[0].linear_attn


def context(store: StateStore, chunk: Page) -> ChunkContext:
    anchor = torch.zeros((), requires_grad=True)
    return ChunkContext(store, [], chunk, is_recorded=True, is_inner=True, anchor=anchor)
