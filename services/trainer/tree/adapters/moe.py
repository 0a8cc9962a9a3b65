"""Mixture of experts: experts are chosen when a chunk is first evaluated, and replayed in its recomputation.

Rounding differs between two evaluations of a chunk, and a token whose best refused expert is almost as good as its
worst chosen one could change its mind in between; its gradient would be that of another function. So the indices that a
router chooses are recorded; its probabilities are computed anew and stay differentiable.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from services.common.errors import ConfigError
from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.attention import key_value_states, use_tree_attention
from services.trainer.tree.states import ChunkContext, current

EXPERTS = "choice.experts"
"""Part of the store that holds the experts of each token ``[T, k]``."""
GROUPS = "choice.groups"
"""Part of the store that holds the groups to which each token's experts are limited ``[T, k]`` (DeepSeek)."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class MixtureOfExperts:
    """Softmax attention with experts: Qwen3-MoE and its like."""

    model_types = frozenset({"glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})
    is_attention_only = True

    def install(self, model: Any) -> None:
        use_tree_attention(model)
        record_routing(model)

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        return tuple(key_value_states(config, layer) for layer in range(config.num_hidden_layers))


def record_routing(model: Any) -> None:
    """Let all routers of a model record and replay their choices, and evaluate its experts by ``evaluate_experts``.

    A load-balance loss is switched off: it is a product of means over tokens, so no sum over the parts of a batch.
    Nothing changes in a model without experts.

    Raises:
        ConfigError: a layer with experts has no router that is known.
    """
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        layer = _LAYER.search(f"{name}.")
        if not isinstance(experts, torch.nn.Module) or layer is None:
            continue
        experts = _without_adapters(experts)
        children = [_without_adapters(child) for child in block.children()]
        routers = [child for child in children if type(child).__name__.lower().endswith("topkrouter")]
        if len(routers) != 1:
            raise ConfigError(
                f"the choice of experts cannot be recorded: {name} ({type(block).__name__}) has no router of its own.",
                "Use a model whose layers with experts have a top-k router (Qwen3-MoE, DeepSeek-V3 and the like).",
            )
        # partials survive a deepcopy of the model, closures would stay with the original
        routers[0].forward = functools.partial(_route, routers[0], int(layer.group(1)))
        if _is_plain(experts):
            experts.forward = functools.partial(evaluate_experts, experts)
        if getattr(block, "jitter_noise", 0.0):
            block.jitter_noise = 0.0


def _without_adapters(module: Any) -> Any:
    """What low-rank adapters are wrapped around: they change its weights while it runs."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


# -- routing -----------------------------------------------------------------------------------------------------------


def _route(router: Any, layer: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In place of a router's forward: its own, with each choice it makes recorded or replayed."""
    forward = functools.partial(type(router).forward, router)
    context = current()
    if context is None:
        return forward(hidden_states, *args, **kwargs)
    with _Replayed(context, layer, router.num_experts):
        return forward(hidden_states, *args, **kwargs)


class _Replayed(TorchFunctionMode):
    """Replaces the result of ``topk`` over scores ``[T, candidates]``. That over ``[T, groups, experts of a group]``
    gives the scores of groups, not a choice, and is left alone."""

    def __init__(self, context: ChunkContext, layer: int, num_experts: int) -> None:
        super().__init__()
        self._context = context
        self._layer = layer
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2:
            return func(*args, **(kwargs or {}))
        scores: Tensor = args[0]
        num_candidates = scores.shape[1]

        def choose() -> Tensor:
            indices: Tensor = func(*args, **(kwargs or {})).indices
            return indices.to(_smallest_type(num_candidates))

        part = EXPERTS if num_candidates == self._num_experts else GROUPS
        indices = self._context.chosen(self._layer, part, choose).long()
        return torch.return_types.topk((scores.gather(1, indices), indices))


def _smallest_type(num_values: int) -> torch.dtype:
    if num_values <= 2**8:
        return torch.uint8
    return torch.int16 if num_values <= 2**15 else torch.int32


# -- experts -----------------------------------------------------------------------------------------------------------


def evaluate_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """In place of an experts module's forward. ``hidden`` ``[T, hidden]``, ``indices`` and ``weights`` ``[T, k]``:
    the experts of each token and what their results count; returns ``[T, hidden]``.

    Rows are sorted by expert, evaluated by ``apply_experts`` and summed in the order of a token's choices, so the
    result does not depend on the order in which threads finish.
    """
    num_tokens, num_chosen = indices.shape
    chosen = indices.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=experts.num_experts)
    rows = apply_experts(experts, hidden[order // num_chosen], counts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    results = rows[place].unflatten(0, (num_tokens, num_chosen))
    return (results * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def apply_experts(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Send rows through the experts of a module: the first ``counts[0]`` rows through the first expert, and so on.

    ``rows`` ``[R, hidden]``, ``counts`` int64 ``[experts]``, summing to R; returns ``[R, hidden]``. Where the model is
    configured for ``grouped_mm`` and its numbers are of a type that has it, experts are multiplied together.
    """
    if not len(rows):
        return rows
    up, down = experts.gate_up_proj, experts.down_proj
    if experts.config._experts_implementation == "grouped_mm" and _compute_type(rows) in _GROUPED_TYPES:
        compute = _compute_type(rows)
        ends = counts.cumsum(0).int()
        hidden = functional.grouped_mm(rows.to(compute), up.to(compute).transpose(1, 2), offs=ends)
        return functional.grouped_mm(experts._apply_gate(hidden), down.to(compute).transpose(1, 2), offs=ends)
    # unbind gathers the gradients of all experts once; indexing would add a tensor of the size of all for each of them
    results = [
        functional.linear(experts._apply_gate(functional.linear(part, one_up)), one_down)
        for part, one_up, one_down in zip(rows.split(counts.tolist()), up.unbind(), down.unbind(), strict=True)
        if len(part)
    ]
    return torch.cat(results)


def _compute_type(rows: Tensor) -> torch.dtype:
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def _is_plain(experts: Any) -> bool:
    """Gated experts without bias, their weights ``[experts, out, in]``."""
    return (
        hasattr(experts, "gate_up_proj")
        and hasattr(experts, "_apply_gate")
        and experts.has_gate
        and not experts.has_bias
        and not experts.is_transposed
    )
