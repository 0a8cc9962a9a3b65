"""What ``tidegate longctx`` plans with: a model's costs on paper, or those of a model that it loads to run a step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.trainer.backends.models import check_exactness, load_model
from services.trainer.config import FullConfig, LoraConfig, TrainerConfig
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import ModelCosts, Speeds
from services.trainer.tree.estimate import CPU_SPEEDS, Layout, costs_from_config, costs_of_model
from services.trainer.tree.executor import Executor
from services.trainer.tree.longctx import AlwaysHeld
from services.trainer.tree.packed import choose_attention
from services.trainer.tree.store import StoreBudget

_MEASURED_SIZES = (64, 256, 1024)
_GRADIENT_BYTES = 4.0
_MOMENTS_BYTES = 8.0
_MASTER_BYTES = 4.0
"""Of AdamW, for each trained weight; a master weight only where the weight itself is none. For adapters it is they."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded."""

    device: str
    dtype: str
    """Of forward and backward; weights are float32."""
    lora_rank: int | None
    seed: int
    budget: StoreBudget


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, ready for its step."""

    executor: Executor
    dtype: torch.dtype


def load_model_to_run(loading: Loading, folder: Path) -> Loaded:
    """As the ``torch`` backend loads it.

    Raises:
        ConfigError: the folder holds no model that can be trained exactly.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device, dtype = torch.device(loading.device), getattr(torch, loading.dtype)
    tune = FullConfig() if loading.lora_rank is None else LoraConfig(rank=loading.lora_rank)
    config = TrainerConfig.model_validate({"tune": tune, "dtype": loading.dtype})

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)

    model = load_model(str(folder), config, device, loading.seed)
    executor = Executor(
        model,
        adapter_for(model.config),
        budget=loading.budget,
        autocast=autocast,
        pack_attention=choose_attention("auto", device),
    )
    check_exactness(model, executor, loading.dtype, autocast)
    return Loaded(executor, dtype)


def costs_of_loaded(loaded: Loaded, *, is_measured: bool) -> tuple[ModelCosts, AlwaysHeld]:
    """What the model costs, measured or by its shape, and what it holds with an optimizer (``constant_bytes``)."""
    model = loaded.executor.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    held = AlwaysHeld(weights, _GRADIENT_BYTES * trained, _MOMENTS_BYTES * trained)
    if is_measured:
        from services.trainer.tree.probe import measure_costs

        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        sizes = [size for size in _MEASURED_SIZES if 3 * size <= positions]
        costs = measure_costs(loaded.executor, loaded.dtype, sizes=sizes)
    else:
        costs = costs_of_model(model, adapter_for(model.config), loaded.dtype)
    return replace(costs, constant_bytes=held.total), held


def costs_on_paper(
    config: Any,
    dtype: str,
    *,
    on_cpu: bool,
    context_ranks: int = 1,
    weight_ranks: int = 1,
    expert_ranks: int = 1,
    weight_bits: float | None = None,
    lora_rank: int | None = None,
    trained_bytes: float | None = None,
) -> tuple[ModelCosts, AlwaysHeld]:
    """What one rank pays for the model of a configuration. ``weight_bits``: 32 if not given; ``trained_bytes``: see
    ``Layout``; if not given, what AdamW takes."""
    are_masters = lora_rank is None and weight_bits in (None, 32)  # adapters come on top of the weights
    if trained_bytes is None:
        trained_bytes = _GRADIENT_BYTES + _MOMENTS_BYTES + (0.0 if are_masters else _MASTER_BYTES)
    layout = Layout(
        context_ranks=context_ranks,
        weight_ranks=weight_ranks,
        expert_ranks=expert_ranks,
        weight_bits=32 if weight_bits is None else weight_bits,
        lora_rank=lora_rank,
        trained_bytes=trained_bytes,
    )
    speeds = CPU_SPEEDS if on_cpu else Speeds()
    costs = costs_from_config(config, getattr(torch, dtype), layout, speeds, on_gpu=not on_cpu)
    beside = costs.constant_bytes - costs.weight_bytes
    gradients = beside * min(1.0, _GRADIENT_BYTES / trained_bytes) if trained_bytes else 0.0
    return costs, AlwaysHeld(costs.weight_bytes, gradients, beside - gradients)
