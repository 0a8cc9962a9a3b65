"""The torch backend: gradients of random forests against plain rows, and what is made of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import ConfigError
from services.trainer.backends.base import BatchResult
from services.trainer.backends.torch import TorchBackend
from services.trainer.config import ClippedLossConfig, FullConfig, LoraConfig, OptimizerConfig, TrainerConfig
from services.trainer.packing import count_runs, plan_batches
from services.trainer.tree.adapters.attention import NAME
from services.trainer.tree.config import TreeConfig
from services.trainer.tree.plan import ModeChoice
from services.trainer.types import MicroStep
from tests.unit.trainer.forests import VOCAB_SIZE, make_micro_step, path_to, reference_loss

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(3)
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        ),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(paths[name])
    return paths


def make_backend(path: str, **settings: Any) -> TorchBackend:
    config = TrainerConfig(**{"optimizer": OptimizerConfig(learning_rate=1e-2), **settings})
    return TorchBackend(path, config, torch.device("cpu"))


def accumulate(backend: TorchBackend, micro_steps: list[MicroStep], max_tokens: int, version: int = -1) -> BatchResult:
    results = [backend.accumulate(batch, 0.8, version) for batch in plan_batches(micro_steps, max_tokens)]
    return sum(results, BatchResult())


def gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in backend.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("seeds", [(0, 1), (2, 3, 4)])
def test_packed_tree_equals_flattened_rows(model_paths: dict[str, str], name: str, seeds: tuple[int, ...]) -> None:
    micro_steps = [make_micro_step(seed) for seed in seeds]
    backend = make_backend(model_paths[name])
    backend.model.set_attn_implementation("sdpa")  # the reference uses nothing of ours
    loss = reference_loss(backend.model, micro_steps, backend._config.loss, 0.8)
    loss.backward()
    expected = gradients(backend)
    backend.discard()
    backend.model.set_attn_implementation(NAME)
    result = accumulate(backend, micro_steps, 10_000)
    assert result.sums.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert result.sums.num_targets == sum(micro_step.num_targets for micro_step in micro_steps)
    actual = gradients(backend)
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in actual.items():
        assert float((gradient - expected[parameter]).abs().max()) <= 1e-5 * max(largest, 1.0), parameter


def test_lora_gradients_equal_flattened_rows(model_paths: dict[str, str]) -> None:
    micro_steps = [make_micro_step(seed) for seed in (5, 6)]
    backend = make_backend(model_paths["qwen3"], tune=LoraConfig(rank=4))
    for name, parameter in backend._trainable.items():
        if ".lora_B." in name:  # they start at zero, which would hide the gradient of the other half
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    reference_loss(backend.model, micro_steps, backend._config.loss, 0.8).backward()
    expected = gradients(backend)
    backend.discard()
    accumulate(backend, micro_steps, 10_000)
    actual = gradients(backend)
    assert expected
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_splitting_a_group_changes_neither_loss_nor_gradient(
    model_paths: dict[str, str], dtype: torch.dtype, tolerance: float
) -> None:
    micro_steps = [make_micro_step(seed, num_runs=4) for seed in (7, 8)]
    backend = make_backend(model_paths["llama"])
    backend.model.to(dtype)
    if dtype == torch.float64:
        _use_float64_throughout(backend.model)
    whole = accumulate(backend, micro_steps, 10_000)
    expected = gradients(backend)
    for max_tokens in (1, 30, 60):
        backend.discard()
        split = accumulate(backend, list(reversed(micro_steps)), max_tokens)
        assert split.sums.loss == pytest.approx(whole.sums.loss, abs=10 * tolerance)
        for name, gradient in gradients(backend).items():
            scale = max(float(expected[name].abs().max()), 1.0)
            assert float((gradient - expected[name]).abs().max()) <= tolerance * scale, (name, max_tokens)


def _use_float64_throughout(model: Any) -> None:
    """Hugging Face's norms and rotary embeddings round to float32 inside."""

    def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return module.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    def rotary(module: Any, _x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * module.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = norm.__get__(module)
        if type(module).__name__ == "LlamaRotaryEmbedding":
            module.forward = rotary.__get__(module)


def test_no_advantage_changes_nothing(model_paths: dict[str, str]) -> None:
    micro_step = make_micro_step(9)
    micro_step = replace(micro_step, runs=tuple(replace(run, advantage=0.0) for run in micro_step.runs))
    backend = make_backend(model_paths["qwen3"])
    before = {name: tensor.clone() for name, tensor in backend.merged_weights()}
    accumulate(backend, [micro_step], 100)
    assert all(not gradient.any() for gradient in gradients(backend).values())
    assert backend.update(3, 1).grad_norm == 0.0
    for name, tensor in backend.merged_weights():
        assert torch.equal(tensor, before[name])


def test_updates_raise_what_went_well(model_paths: dict[str, str]) -> None:
    micro_step = make_micro_step(10, num_runs=2)
    micro_step = replace(
        micro_step, runs=tuple(replace(run, advantage=a) for run, a in zip(micro_step.runs, (1.0, -1.0), strict=True))
    )
    backend = make_backend(model_paths["qwen3"], optimizer=OptimizerConfig(learning_rate=3e-3))
    micro_step = _sampled_by(backend, micro_step)
    losses = []
    for step in range(1, 6):
        losses.append(accumulate(backend, [micro_step], 1000).sums.loss)
        assert not backend.update(count_runs([micro_step]), step).skipped
    assert losses[-1] < losses[0] - 0.1


def _sampled_by(backend: TorchBackend, micro_step: MicroStep, version: int = 0) -> MicroStep:
    """The micro-step as if the backend's current weights had sampled it."""
    from services.common.types import VersionSpan

    logprobs = []
    for index, node in enumerate(micro_step.nodes):
        ids = np.concatenate([micro_step.nodes[n].token_ids for n in path_to(micro_step.nodes, index)]).astype(np.int64)
        with torch.no_grad():
            logits = backend.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0] / 0.8
        own = logits[:-1].log_softmax(-1).gather(-1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
        own = np.concatenate([[0.0], own])[len(ids) - len(node.token_ids) :]
        logprobs.append(own[node.target_mask])
    nodes = []
    for index, node in enumerate(micro_step.nodes):
        values = node.logprobs.copy()
        values[node.target_mask] = logprobs[index]
        spans = (VersionSpan(version, len(logprobs[index])),) if len(logprobs[index]) else ()
        nodes.append(replace(node, logprobs=values, version_spans=spans))
    return replace(micro_step, nodes=tuple(nodes))


def test_parity_is_measured_on_tokens_of_the_current_version_only(model_paths: dict[str, str]) -> None:
    backend = make_backend(model_paths["qwen3"])
    fresh, old = _sampled_by(backend, make_micro_step(11), version=4), make_micro_step(12)
    assert 0 <= accumulate(backend, [fresh, old], 1000, version=4).logprob_abs_diff_max < 1e-5
    assert accumulate(backend, [fresh, old], 1000, version=5).logprob_abs_diff_max == -1
    assert accumulate(backend, [fresh, old], 1000, version=0).logprob_abs_diff_max > 1e-2


def test_gradient_that_is_not_finite_skips_the_step(model_paths: dict[str, str]) -> None:
    backend = make_backend(model_paths["qwen3"])
    micro_step = make_micro_step(13)
    accumulate(backend, [micro_step], 1000)
    before = {name: tensor.clone() for name, tensor in backend.merged_weights()}
    next(iter(backend._trainable.values())).grad[0, 0] = float("nan")
    update = backend.update(3, 1)
    assert update.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.merged_weights())
    accumulate(backend, [micro_step], 1000)
    assert not backend.update(3, 2).skipped


def test_step_without_a_target_changes_nothing(model_paths: dict[str, str]) -> None:
    backend = make_backend(model_paths["qwen3"])
    before = {name: tensor.clone() for name, tensor in backend.merged_weights()}
    update = backend.update(0, 1)
    assert (update.grad_norm, update.skipped) == (0.0, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.merged_weights())


def test_gradient_is_clipped_after_the_division_by_runs(model_paths: dict[str, str]) -> None:
    micro_steps = [make_micro_step(14)]
    backend = make_backend(model_paths["qwen3"], optimizer=OptimizerConfig(grad_clip=1e6))
    accumulate(backend, micro_steps, 1000)
    one = backend.update(1, 1).grad_norm
    backend = make_backend(model_paths["qwen3"], optimizer=OptimizerConfig(grad_clip=1e6))
    accumulate(backend, micro_steps, 1000)
    assert backend.update(4, 1).grad_norm == pytest.approx(one / 4, rel=1e-5)


def test_learning_rate_warms_up(model_paths: dict[str, str]) -> None:
    backend = make_backend(model_paths["qwen3"], optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=4))
    rates = []
    for step in (1, 2, 4, 9):
        accumulate(backend, [make_micro_step(15)], 1000)
        rates.append(backend.update(3, step).learning_rate)
    assert rates == [0.25, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_merged_weights_are_those_of_the_adapted_model_and_disturb_nothing(
    model_paths: dict[str, str], name: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    backend = make_backend(model_paths[name], tune=LoraConfig(rank=4))
    accumulate(backend, [make_micro_step(16)], 1000)
    backend.update(3, 1)
    trained = {name: tensor.clone() for name, tensor in backend.state().items()}
    merged = dict(backend.merged_weights())
    assert merged.keys() == load_file(Path(model_paths[name]) / "model.safetensors").keys()
    save_file({key: tensor.contiguous() for key, tensor in merged.items()}, tmp_path / "model.safetensors")
    backend.model.config.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None] % VOCAB_SIZE
    torch.testing.assert_close(plain(ids).logits, backend.model(ids).logits, rtol=1e-4, atol=1e-4)
    token_ids = ids[0].tolist()
    expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert backend.score(token_ids, merged) == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in backend.state().items())


@pytest.mark.parametrize("tune", [FullConfig(), LoraConfig(rank=2)])
def test_loaded_state_goes_on_exactly(model_paths: dict[str, str], tune: Any) -> None:
    first = make_backend(model_paths["llama"], tune=tune)
    accumulate(first, [make_micro_step(17)], 1000)
    first.update(3, 1)
    second = make_backend(model_paths["llama"], tune=tune)
    second.load(
        {name: tensor.clone() for name, tensor in first.state().items()}, copy.deepcopy(first.optimizer_state())
    )
    for backend in (first, second):
        accumulate(backend, [make_micro_step(18)], 1000)
        backend.update(3, 2)
    for (name, one), (_, other) in zip(first.merged_weights(), second.merged_weights(), strict=True):
        assert torch.equal(one, other), name
    with pytest.raises(ConfigError):
        second.load({}, {})


def test_sliding_window_shorter_than_a_path_is_exact(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(4)
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).save_pretrained(tmp_path)
    micro_step = make_micro_step(19, prompt_tokens=20)
    backend = make_backend(str(tmp_path))
    backend.model.set_attn_implementation("sdpa")
    reference_loss(backend.model, [micro_step], backend._config.loss, 0.8).backward()
    expected = gradients(backend)
    backend.model.set_attn_implementation(NAME)
    for mode in (ModeChoice.PACK, ModeChoice.WALK):
        backend = make_backend(str(tmp_path), tree=TreeConfig(mode=mode, min_chunk_tokens=4, max_chunk_tokens=4))
        accumulate(backend, [micro_step], 1000)
        for name, gradient in gradients(backend).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_architecture_without_an_adapter_is_refused_by_name_before_its_weights_are_read(tmp_path: Path) -> None:
    from transformers import FalconMambaConfig

    FalconMambaConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"falcon_mamba"):
        make_backend(str(tmp_path))


def test_ratios_against_recomputed_scores_are_one(model_paths: dict[str, str]) -> None:
    micro_step = make_micro_step(21)
    backend = make_backend(model_paths["qwen3"], loss=ClippedLossConfig(old_logprobs="recomputed"))
    sums = accumulate(backend, [micro_step], 1000).sums
    assert sums.ratio == pytest.approx(sums.num_targets, rel=1e-6)
    assert sums.num_clipped == 0


@pytest.mark.parametrize("memory_mib", [4, 64])
def test_memory_changes_how_a_batch_is_evaluated_and_nothing_else(model_paths: dict[str, str], memory_mib: int) -> None:
    micro_steps = [make_micro_step(seed, prompt_tokens=500, max_tokens=60) for seed in (22, 23)]
    expected = make_backend(model_paths["qwen3"])
    accumulate(expected, micro_steps, 100_000)
    tree = TreeConfig(memory_bytes=memory_mib << 20, min_chunk_tokens=32, head_rows=64)
    backend = make_backend(model_paths["qwen3"], tree=tree)
    accumulate(backend, micro_steps, 100_000)
    for name, gradient in gradients(backend).items():
        torch.testing.assert_close(gradient, gradients(expected)[name], rtol=1e-3, atol=1e-5)


def test_bfloat16_stays_near_float32(model_paths: dict[str, str]) -> None:
    micro_steps = [make_micro_step(20)]
    exact, rounded = make_backend(model_paths["qwen3"]), make_backend(model_paths["qwen3"], dtype="bfloat16")
    expected, actual = accumulate(exact, micro_steps, 1000), accumulate(rounded, micro_steps, 1000)
    assert actual.sums.loss == pytest.approx(expected.sums.loss, abs=0.1)
    assert all(p.dtype == torch.float32 for p in rounded._trainable.values())
    reference, approximate = gradients(exact), gradients(rounded)
    for name in reference:
        cosine = torch.cosine_similarity(reference[name].flatten(), approximate[name].flatten(), dim=0)
        assert np.isclose(float(cosine), 1.0, atol=0.05), name
