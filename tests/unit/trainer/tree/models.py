"""Tiny random models of every architecture, with weights that make gradients and attention patterns telling."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.unit.trainer.forests import VOCAB_SIZE

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
_INDEX: dict[str, Any] = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 8, "num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of the tests."""

    config_class: str
    model_class: str
    settings: dict[str, Any]
    has_choices: bool = False
    """Experts or sparse attention: small differences can change what a token chooses."""
    has_linear: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _BASE),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**_BASE, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", _BASE),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_BASE, "sliding_window": 7}),
    "qwen3_window": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            **_BASE,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_BASE, **_EXPERTS, "head_dim": 8, "norm_topk_prob": True}, True
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_BASE, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16},
        True,
        True,
    ),
    "qwen3_5": Family(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_BASE, **_LINEAR, "rope_parameters": _MROPE}, has_linear=True
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_BASE, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16, "rope_parameters": _MROPE},
        True,
        True,
    ),
    "deepseek_v3": Family("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_BASE, **_MLA}, True),
    "deepseek_v32": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", {**_BASE, **_MLA, **_INDEX}, True),
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**_BASE, **_MLA, **_INDEX, "indexer_types": ["full", "full", "shared"]},
        True,
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any) -> Any:
    """A model of a family, in evaluation mode. The same arguments give the same weights.

    ``overrides`` are settings of its configuration.
    """
    import transformers

    family = FAMILIES[name]
    settings = {**family.settings, **overrides}
    if family.config_class.startswith("Qwen3_5Moe"):
        settings.pop("intermediate_size")
    config = getattr(transformers, family.config_class)(**settings)
    return make_model_of(config, dtype, seed)


def draw_settings(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Other settings for a family: numbers of layers, heads, experts, widths, windows."""
    family = FAMILIES[name]

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    num_layers = pick(1, 2, 3)
    heads, key_heads = pick((1, 1), (2, 1), (4, 2), (4, 4), (8, 2))
    settings: dict[str, Any] = {"num_hidden_layers": num_layers, "num_attention_heads": heads}
    if "kv_lora_rank" in family.settings:
        groups, of_group = pick(1, 2, 3), pick(2, 3)
        limit = int(rng.integers(1, groups + 1))
        settings |= {"num_key_value_heads": heads, "q_lora_rank": pick(5, 16), "kv_lora_rank": pick(3, 12, 40)}
        settings |= {"qk_rope_head_dim": pick(2, 4, 6), "qk_nope_head_dim": pick(4, 9), "v_head_dim": pick(3, 6, 20)}
        settings |= {"n_group": groups, "n_routed_experts": groups * of_group, "topk_group": limit}
        settings |= {
            "num_experts_per_tok": int(rng.integers(2, limit * of_group + 1)),
            "norm_topk_prob": pick(True, False),
        }
        settings |= {"n_shared_experts": pick(1, 2), "first_k_dense_replace": pick(0, 1, 2)}
        if name == "deepseek_v3":
            return settings | {"q_lora_rank": pick(None, 5, 16), "rope_interleave": pick(True, False)}
        settings |= {"index_topk": pick(2, 3, 5, 9, 100), "index_head_dim": pick(6, 8)}
        if name == "glm_moe_dsa":
            settings["indexer_types"] = ["full", *(pick("full", "shared") for _ in range(num_layers - 1))]
        return settings
    settings |= {"num_key_value_heads": key_heads, "head_dim": pick(8, 16) if family.has_linear else pick(4, 8, 12)}
    if "sliding_window" in family.settings:
        settings["sliding_window"] = pick(2, 3, 5, 9, 40)
    if "layer_types" in family.settings:
        kind = "linear_attention" if family.has_linear else "sliding_attention"
        settings["layer_types"] = [
            *(pick(kind, kind, "full_attention") for _ in range(num_layers - 1)),
            "full_attention",
        ]
    if family.has_choices:
        num_experts = int(rng.integers(2, 7))
        settings |= {"num_experts": num_experts, "num_experts_per_tok": int(rng.integers(2, num_experts + 1))}
    if family.has_linear:
        num_keys = pick(1, 2)
        settings |= {"linear_num_key_heads": num_keys, "linear_num_value_heads": num_keys * pick(1, 2, 3)}
        settings |= {"linear_key_head_dim": pick(4, 8), "linear_value_head_dim": pick(4, 6)}
        settings["linear_conv_kernel_dim"] = pick(1, 2, 3, 5)
    return settings


def make_model_of(config: Any, dtype: torch.dtype, seed: int = 0) -> Any:
    """A random model of a configuration."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "sdpa"  # Hugging Face's eager attention rounds its weights to float32
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        _spread(model)
    return model.eval()


class Unrounded(TorchFunctionMode):
    """While it is active float64 models are float64 throughout: where Hugging Face's norms, routers, rotary embeddings
    and recurrences round to float32, and where an adapter does it as they do, the numbers stay as they are."""

    def __init__(self, within: str = "") -> None:
        """``within``: only in functions whose name, with that of their class, contains it."""
        super().__init__()
        self._within = within

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HANDLED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func in (torch.autograd.backward, Tensor.backward):
            return self._backward(*args, **kwargs)
        if args[0].dtype == torch.float64 and self._is_kept(*_caller()):
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _is_kept(self, module: str, function: str) -> bool:
        return module.startswith(_ROUNDING) and self._within.lower() in function.replace("_", "").lower()

    def _backward(self, roots: Any, gradients: Any = None, **kwargs: Any) -> None:
        """A mode is off while it handles a call, but this call evaluates things again. So it goes past the mode."""
        gradients = kwargs.pop("grad_tensors", kwargs.pop("gradient", gradients))
        assert not any(kwargs.values()), "a plain backward"
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        gradients = (gradients,) * len(roots) if gradients is None or isinstance(gradients, Tensor) else gradients
        ones = tuple(torch.ones_like(r) if g is None else g for r, g in zip(roots, gradients, strict=True))
        with self:
            _engine_run_backward(roots, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


_HANDLED = frozenset(
    {torch.autograd.backward, Tensor.backward, Tensor.float, Tensor.to, Tensor.type, functional.softmax, torch.softmax}
)
"""Casts, what casts on the way, and backwards."""

_ROUNDING = ("transformers.models.", "services.trainer.tree.adapters.")


def _caller() -> tuple[str, str]:
    """Module and name of the function that calls PyTorch, through other modes or not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith("torch.") or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return ("", "") if frame is None else (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)


@torch.no_grad()
def _spread(model: Any) -> None:
    """Weights at the scale at which each layer keeps the size of its input, attention somewhat peaked, norms uneven,
    recurrent states that live for tens of tokens."""
    is_tied: bool = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        parameter.copy_(_draw(name, parameter, is_tied))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape))


def _draw(name: str, parameter: Tensor, is_tied: bool) -> Tensor:
    noise = torch.randn(parameter.shape, dtype=torch.float64)
    if name.endswith("A_log"):
        return (0.02 + 0.4 * torch.rand(parameter.shape, dtype=torch.float64)).log()
    if name.endswith("dt_bias"):
        return 0.5 * noise
    if name.endswith("embed_tokens.weight"):
        return noise * (0.3 if is_tied else 1.0)
    if "conv1d" in name:
        return 0.6 * noise
    if name.endswith("norm.weight"):
        return parameter.double() * (1.4 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0) + 0.2 * noise
    if parameter.dim() == 1:
        return 0.3 * noise
    gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "gate.weight", "lm_head")) else 1.0
    return gain * noise / math.sqrt(parameter.shape[-1])
