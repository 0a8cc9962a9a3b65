"""The chunked head against a plain softmax over full logits and its autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.tree.head import HeadChunk, Slopes, backward_through_head, check_head, reference_kl, target_scores
from services.trainer.tree.memory import AllocationTracker
from tests.unit.trainer.tree.models import make_model

NUM_ROWS, HIDDEN, VOCAB = 11, 12, 37


def make_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    rows = torch.randn(NUM_ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return rows, head, torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)


class _Loss:
    """A loss of log-probabilities, entropies and the divergence from a reference, with its slopes by autograd."""

    def __init__(self, entropy_weight: float, kl_weight: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
        self.reference = -3 + torch.randn(NUM_ROWS, generator=generator, dtype=torch.float64)
        self.entropy_weight = entropy_weight
        self.kl_weight = kl_weight
        self.seen: list[slice] = []

    def of(self, logprobs: Tensor, entropy: Tensor, part: slice = slice(None)) -> Tensor:
        difference = self.reference[part] - logprobs
        kl = difference.exp() - 1 - difference
        return (
            (logprobs.sin() * self.weights[part]).sum()
            + self.entropy_weight * (entropy.cos() * self.weights[part]).sum()
            + self.kl_weight * kl.sum()
        )

    def slopes(self, part: slice, logprobs: Tensor, entropy: Tensor) -> Slopes:
        assert not logprobs.requires_grad
        assert not entropy.requires_grad
        self.seen.append(part)
        slope = logprobs.cos() * self.weights[part] + self.kl_weight * reference_kl(logprobs, self.reference[part])[1]
        if not self.entropy_weight:
            return slope
        return slope, -self.entropy_weight * entropy.sin() * self.weights[part]


def plain_scores(
    rows: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs = (head(rows) / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_plain_softmax(rows_per_chunk: int, temperature: float) -> None:
    rows, head, ids = make_case()
    expected = plain_scores(rows, head, ids, temperature)
    actual = target_scores(rows, head, ids, temperature, rows_per_chunk)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert not one.requires_grad


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("entropy_weight", "kl_weight"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_gradients_are_those_of_autograd_in_chunks_of_any_size(
    rows_per_chunk: int, temperature: float, entropy_weight: float, kl_weight: float
) -> None:
    rows, head, ids = make_case()
    loss = _Loss(entropy_weight, kl_weight)
    leaf = rows.clone().requires_grad_()
    expected = torch.autograd.grad(loss.of(*plain_scores(leaf, head, ids, temperature)), [leaf, head.weight, head.bias])
    gradient = backward_through_head(rows, head, ids, temperature, rows_per_chunk, loss.slopes)
    for one, other in zip((gradient, head.weight.grad, head.bias.grad), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert [part.start for part in loss.seen] == list(range(0, NUM_ROWS, rows_per_chunk))
    assert loss.seen[-1].stop == NUM_ROWS
    backward_through_head(rows, head, ids, temperature, rows_per_chunk, loss.slopes)
    torch.testing.assert_close(head.weight.grad, 2 * expected[1], rtol=1e-12, atol=1e-12)  # it accumulates


def test_divergence_estimates_have_their_own_slope_and_the_right_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    leaf = policy.clone().requires_grad_()
    estimate, slope = reference_kl(leaf.detach(), reference)
    ((reference - leaf).exp() - 1 - (reference - leaf)).sum().backward()
    torch.testing.assert_close(slope, leaf.grad, rtol=1e-12, atol=1e-12)
    assert (estimate >= 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * estimate).sum()) == pytest.approx(float(exact), abs=1e-12)
    nearly, flat = reference_kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0 + 1e-4, -1.0]))
    assert float(nearly[0]) == pytest.approx(5e-9, rel=0.02)  # no digits lost to exp(d) - 1
    assert (float(nearly[1]), float(flat[1])) == (0.0, 0.0)


def test_adapters_on_the_head_and_a_frozen_head() -> None:
    rows, base, ids = make_case()
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0)
    head = peft.tuners.lora.Linear(base, config=config, adapter_name="default", r=3, lora_alpha=5).double()
    base.requires_grad_(False)
    nn.init.normal_(head.lora_B["default"].weight)
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    assert len(trainable) == 2
    loss = _Loss(0.1, 0.1)
    leaf = rows.clone().requires_grad_()
    expected = torch.autograd.grad(loss.of(*plain_scores(leaf, head, ids, 0.9)), [leaf, *trainable])
    gradient = backward_through_head(rows, head, ids, 0.9, 4, loss.slopes)
    for one, other in zip((gradient, *(p.grad for p in trainable)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert base.weight.grad is None
    leaf = rows.clone().requires_grad_()
    expected = torch.autograd.grad(loss.of(*plain_scores(leaf, base, ids, 0.9)), [leaf])
    gradient = backward_through_head(rows, base, ids, 0.9, 4, loss.slopes)
    torch.testing.assert_close(gradient, expected[0], rtol=1e-12, atol=1e-12)


def test_tied_weights_collect_both_gradients() -> None:
    _, head, ids = make_case()
    embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
    embed.weight = head.weight
    loss = _Loss(0.0, 0.0)
    inputs = ids.flip(0)
    loss.of(*plain_scores(embed(inputs).tanh(), head, ids, 1.0)).backward()
    expected, head.weight.grad = head.weight.grad, None
    rows = embed(inputs).tanh()
    rows.backward(backward_through_head(rows.detach(), head, ids, 1.0, 4, loss.slopes))
    torch.testing.assert_close(head.weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_widens_the_logits_and_keeps_master_gradients(rows_dtype: torch.dtype) -> None:
    rows, head, ids = make_case(torch.float32)
    rows = rows.to(rows_dtype)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    loss = _Loss(0.1, 0.1)
    leaf = rows.clone().requires_grad_()
    with autocast():
        logits = head(leaf)
    assert logits.dtype == torch.bfloat16
    loss.of(*plain_scores(logits, lambda wide: wide.float(), ids, 0.8)).backward()
    expected = leaf.grad, head.weight.grad, head.bias.grad
    head.zero_grad()
    gradient = backward_through_head(rows, head, ids, 0.8, 4, loss.slopes, autocast)
    assert gradient.dtype == rows_dtype
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32
    for one, other in zip((gradient, head.weight.grad, head.bias.grad), expected, strict=True):
        assert one is not None
        assert other is not None
        assert float((one - other).norm()) < 0.01 * float(other.norm())
    scores = target_scores(rows, head, ids, 0.8, NUM_ROWS, autocast)  # chunks of other sizes round otherwise
    for one, other in zip(scores, plain_scores(logits, lambda wide: wide.float(), ids, 0.8), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[2e4, -2e4, 1.0], [-2e4, -2e4, -2e4]])
    chunk = HeadChunk(logits, torch.tensor([1, 2]), 0.5)
    torch.testing.assert_close(chunk.logprobs, torch.tensor([-8e4, -math.log(3)]))
    torch.testing.assert_close(chunk.entropy, torch.tensor([0.0, math.log(3)]), atol=1e-2, rtol=0)
    gradient = chunk.gradient((torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])))
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]), atol=0.02, rtol=0)


def test_no_more_than_a_chunk_of_logits_is_alive() -> None:
    vocab, hidden, num_rows, per_chunk = 4096, 8, 64, 16
    head = nn.Linear(hidden, vocab, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    rows, ids = torch.randn(num_rows, hidden), torch.randint(0, vocab, (num_rows,))
    seen: list[int] = []
    head.register_forward_hook(lambda _m, _i, logits: seen.append(len(logits)))
    chunk_bytes, weight_bytes = per_chunk * vocab * 4, vocab * hidden * 4
    with AllocationTracker() as tracker:
        backward_through_head(rows, head, ids, 0.8, per_chunk, lambda _p, logprobs, _e: logprobs)
        assert tracker.peak_bytes < 2 * chunk_bytes + weight_bytes
        target_scores(rows, head, ids, 0.8, per_chunk)
        assert tracker.peak_bytes < 2 * chunk_bytes + weight_bytes
    assert seen == [per_chunk] * (2 * num_rows // per_chunk)


def test_no_targets_are_no_work() -> None:
    rows, head, ids = make_case(torch.float32)
    gradient = backward_through_head(rows[:0], head, ids[:0], 1.0, 4, lambda *_: pytest.fail("no chunk"))
    assert gradient.shape == (0, HIDDEN)
    assert [len(scores) for scores in target_scores(rows[:0], head, ids[:0], 1.0, 4)] == [0, 0]
    assert head.weight.grad is None


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3_next", "deepseek_v3"])
def test_plain_heads_pass_the_check(name: str) -> None:
    model = make_model(name, torch.float32)
    check_head(model)
    head = model.get_output_embeddings()
    assert not head._forward_hooks


def _capped(class_name: str, **settings: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{class_name}Config")(**sizes, **settings)
    return getattr(transformers, f"{class_name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("Gemma2", {"final_logit_softcapping": 30.0}),
        ("Cohere", {"logit_scale": 0.0625}),
        ("Granite", {"logits_scaling": 8.0}),
    ],
)
def test_models_that_transform_their_logits_are_refused_by_name(class_name: str, settings: dict[str, Any]) -> None:
    model = _capped(class_name, **settings)
    with pytest.raises(ConfigError, match=class_name.lower()):
        check_head(model)
    assert not model.get_output_embeddings()._forward_hooks


def test_a_head_that_is_given_something_else_is_refused() -> None:
    model = make_model("llama", torch.float32)
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, inputs: (inputs[0] * 0.5,))
    with pytest.raises(ConfigError, match="llama"):
        check_head(model)
