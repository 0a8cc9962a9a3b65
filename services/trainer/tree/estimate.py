"""What a model costs by its configuration: for plans on paper, and where measuring is not worth its time.

States and work are counted exactly. Activations are estimated from what the layers' products read and give; ``probe``
measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from services.trainer.tree.adapters import Adapter, LayerStates, adapter_for
from services.trainer.tree.costs import ChunkBytes, ModelCosts, PackBytes, PairCost, Speeds
from services.trainer.tree.kernels import accumulation_dtype

_LAST_PRODUCTS = frozenset({"o_proj", "out_proj", "down_proj"})
CPU_SPEEDS = Speeds(flops_per_s=3e10, memory_bytes_per_s=1e10, host_bytes_per_s=1e10, disk_bytes_per_s=1e9)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model and its chunks are spread over ranks, and what is trained, on paper."""

    context_ranks: int = 1
    """Ranks that share each chunk's tokens and the path's states."""
    weight_ranks: int = 1
    """Ranks that share the weights which are not experts'."""
    expert_ranks: int = 1
    """Ranks that share the experts."""
    weight_bits: float | None = None
    """Of frozen weights (4.5 for 4 bits with scales); None: those of the data type."""
    lora_rank: int | None = None
    """Adapters of this rank beside all linear layers but experts; None: all weights are trained."""
    trained_bytes: float = 16.0
    """For each trained element beside the weight itself: gradient, master weight and Adam's two moments."""


def costs_from_config(
    config: Any,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout | None = None,
    speeds: Speeds | None = None,
    *,
    on_gpu: bool = True,
) -> ModelCosts:
    """What one rank pays for the model of a Hugging Face configuration, without its weights.

    Raises:
        ConfigError: the architecture has no adapter.
    """
    from transformers import AutoModelForCausalLM

    layout = layout or Layout()
    adapter = adapter_for(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    is_frozen = layout.lora_rank is not None
    costs = costs_of_model(model, adapter, dtype, speeds=speeds or Speeds(), is_frozen=is_frozen, on_gpu=on_gpu)
    return _spread(costs, model, dtype, layout)


def costs_of_model(
    model: Any,
    adapter: Adapter,
    dtype: torch.dtype,
    *,
    count_weights: bool = False,
    speeds: Speeds | None = None,
    is_frozen: bool | None = None,
    on_gpu: bool | None = None,
) -> ModelCosts:
    """What a model costs whose forward is in ``dtype``, without running it; a model without data (``meta``) will do.

    ``count_weights``: weights and the gradients of those that are trained count in ``constant_bytes``; otherwise
    memory budgets are for what comes beside them. ``is_frozen``: most weights are (adapters are trained); as the model
    is, if not given. ``on_gpu``: where it will run; where it is, if not given.
    """
    on_gpu = model.device.type != "cpu" if on_gpu is None else on_gpu
    config = model.config.get_text_config()
    parameters = list(model.parameters())
    weight_bytes = sum(p.numel() * p.element_size() for p in parameters)
    trained = [p for p in parameters if p.requires_grad]
    if is_frozen is None:
        is_frozen = sum(p.numel() for p in trained) < 0.5 * sum(p.numel() for p in parameters)
    constant = weight_bytes + sum(p.numel() * p.element_size() for p in trained)
    if speeds is None:
        speeds = CPU_SPEEDS if model.device.type == "cpu" else Speeds()
    states = adapter.layer_states(config)
    wide = torch.promote_types(dtype, torch.float32)  # of hidden states, norms and recurrent matrices
    layers = [_activations(layer, config, dtype) for layer in model.base_model.layers]
    costs = ModelCosts(
        constant_bytes=constant if count_weights else 0.0,
        weight_bytes=weight_bytes,
        num_layers=len(layers),
        can_pack=adapter.is_attention_only,
        backward_over_forward=1.0 if is_frozen else 2.0,
        speeds=speeds,
        **_state_costs(states, config, dtype),
        **_work(model, states, config),
        **_head_costs(model, dtype, is_frozen=is_frozen),
    )
    largest = 0 if is_frozen else max((p.numel() * p.element_size() for p in model.base_model.parameters()), default=0)
    return replace(costs, **_activation_costs(layers, states, config, dtype, wide, largest, on_gpu=on_gpu))


def _state_costs(states: tuple[LayerStates, ...], config: Any, dtype: torch.dtype) -> dict[str, Any]:
    summed = accumulation_dtype(dtype).itemsize
    own = [(s.token_elements + s.frozen_token_elements) * dtype.itemsize for s in states]
    choices = len(states) * (getattr(config, "num_experts_per_tok", None) or 0)  # a byte or two each
    boundary = sum(s.boundary_elements for s in states)
    hidden = config.hidden_size * summed
    attended = sum(1 for s in states if s.token_elements) * _query_width(config)
    heads = sum(1 for s in states if s.token_elements) * config.num_attention_heads
    return {
        "state_bytes_per_token": sum(own) + choices,
        "layer_state_bytes_per_token": max(own, default=0),
        "accumulation_bytes_per_token": sum(s.token_elements for s in states) * summed,
        "boundary_bytes": boundary * summed + hidden,
        "boundary_accumulation_bytes": boundary * summed + hidden,
        "attended_bytes_per_token": attended * dtype.itemsize + heads * summed,
    }


def _query_width(config: Any) -> int:
    """Elements of one token's attention output, all heads."""
    value = getattr(config, "v_head_dim", None) or _head_dim(config)
    return int(config.num_attention_heads * value)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


# Work


def _work(model: Any, states: tuple[LayerStates, ...], config: Any) -> dict[str, Any]:
    """Two operations a weight and token; experts by the share that a token goes through."""
    embedding = model.get_input_embeddings().weight
    per_token = 0.0
    for name, parameter in model.base_model.named_parameters():
        if parameter is embedding or parameter.dim() < 2:
            continue
        per_token += 2.0 * parameter.numel() * (_expert_share(config) if _is_expert(name) else 1.0)
    recurrent = sum(1 for s in states if not s.token_elements)
    if recurrent:
        heads, key, value = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        per_token += recurrent * 6.0 * heads * key * value
    head = model.get_output_embeddings().weight
    return {
        "flops_per_token": per_token,
        "head_flops_per_target": 2.0 * head.numel(),
        "pairs": tuple(_pairs(states, config)),
    }


def _pairs(states: tuple[LayerStates, ...], config: Any) -> Iterator[PairCost]:
    """Scores and weighted sums of all query heads; an indexer's scores."""
    key = getattr(config, "qk_head_dim", None) or _head_dim(config)
    flops = 2.0 * config.num_attention_heads * key + 2.0 * _query_width(config)
    windows = [s.window for s in states if s.token_elements]
    for window in sorted(set(windows), key=lambda window: window or 0):
        yield PairCost(flops * windows.count(window), window)
    indexers = sum(1 for s in states if s.frozen_token_elements)
    if indexers:
        index = 2.0 * config.index_n_heads * config.index_head_dim
        yield PairCost(index * indexers, is_attended=False, backward_over_forward=0.0)


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _expert_share(config: Any) -> float:
    number = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    number = number or getattr(config, "num_local_experts", None) or 1
    return float((getattr(config, "num_experts_per_tok", None) or 1) / number)


# Activations


@dataclass(frozen=True, slots=True)
class _Activations:
    """Of one layer, bytes for each token."""

    graph: float
    widest: float
    """The largest tensor that lives beside it for a moment."""


def _activations(layer: nn.Module, config: Any, dtype: torch.dtype) -> _Activations:
    """What the backward needs: what products and gates read, and what norms do, which compute in float32."""
    size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    hidden = config.hidden_size
    graph = widest = 0.0
    for name, module in layer.named_modules():
        last = name.removesuffix(".base_layer").rpartition(".")[2]
        if isinstance(module, nn.Linear):
            graph += size * module.out_features
            if last in _LAST_PRODUCTS:  # their input is a product of its own, and in a gated unit of a third tensor
                graph += size * module.in_features * (2 if last == "down_proj" else 1)
            widest = max(widest, size * module.out_features)
        elif last.endswith("norm") and getattr(module, "weight", None) is not None:
            times = _heads_of(last, module, config)
            graph += (wide + 2 * size) * module.weight.numel() * times
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            chosen = config.num_experts_per_tok
            inner = module.down_proj.shape[-1]
            graph += chosen * size * (2 * hidden + 4 * inner)
            widest = max(widest, chosen * size * 2.0 * inner)
    return _Activations(graph, widest)


def _heads_of(last: str, norm: Any, config: Any) -> int:
    """How often a norm runs for each token: once, or once a head."""
    if norm.weight.numel() == config.hidden_size:
        return 1
    if last == "q_norm":
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if last == "k_norm" else 1


def _activation_costs(
    layers: list[_Activations],
    states: tuple[LayerStates, ...],
    config: Any,
    dtype: torch.dtype,
    wide: torch.dtype,
    largest_weight_bytes: float,
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    hidden = config.hidden_size * wide.itemsize
    graph = sum(layer.graph for layer in layers) + 3 * hidden
    one = max((layer.graph for layer in layers), default=0.0)
    widest = max((layer.widest for layer in layers), default=0.0)
    query = _query_width(config) * wide.itemsize
    page = 2.0 * max((s.token_elements for s in states), default=0) * wide.itemsize
    if hasattr(config, "kv_lora_rank"):  # latents are expanded to all heads, page by page, forward and backward
        page += 3.0 * 2 * query
    backward = 3 * widest + 2 * query + 2 * hidden
    return {
        "capture": ChunkBytes.linear(0.0, 3 * widest + 2 * hidden + query, page / 2),
        "graph": ChunkBytes.linear(0.0, graph),
        "backward": ChunkBytes.linear(largest_weight_bytes, backward, page),
        "layer_input_bytes_per_token": len(layers) * hidden,
        "layer_graph": ChunkBytes.linear(0.0, 4 * hidden),
        "layer_backward": ChunkBytes.linear(largest_weight_bytes, one + backward, page),
        "pack": _pack_costs(PackBytes(largest_weight_bytes, graph + backward), states, config, dtype, on_gpu=on_gpu),
    }


def _pack_costs(
    plain: PackBytes, states: tuple[LayerStates, ...], config: Any, dtype: torch.dtype, *, on_gpu: bool
) -> PackBytes:
    """What packing adds to a plain row. On a CPU each layer keeps a mask for each branch, as numbers, and scores where
    keys and values are of different widths, which no fused kernel there takes."""
    gathered = sum(s.token_elements for s in states) * dtype.itemsize
    if hasattr(config, "kv_lora_rank"):
        gathered = len(states) * 2 * _query_width(config) * dtype.itemsize
    if on_gpu:
        return replace(plain, per_path_token=gathered)
    is_fused = not hasattr(config, "kv_lora_rank")
    scores = 0.0 if is_fused else 1.5 * config.num_attention_heads * dtype.itemsize * len(states)
    masks = float(dtype.itemsize * len(states))
    return replace(plain, per_path_token=gathered, per_pair=masks + scores, per_root_pair=scores)


def _head_costs(model: Any, dtype: torch.dtype, *, is_frozen: bool) -> dict[str, Any]:
    weight = model.get_output_embeddings().weight
    vocabulary, hidden = weight.shape
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return {
        "row_bytes": 3.0 * hidden * wide,
        "head_base_bytes": 0.0 if is_frozen else float(weight.numel() * weight.element_size()),
        "head_bytes_per_row": float(vocabulary * (wide + 2 * dtype.itemsize)),
    }


# Spreading over ranks


def _spread(costs: ModelCosts, model: Any, dtype: torch.dtype, layout: Layout) -> ModelCosts:
    """One rank's share. Boundary states are every rank's; tokens of a chunk and of the path are shared."""
    experts = sum(p.numel() for name, p in model.named_parameters() if _is_expert(name))
    others = sum(p.numel() for p in model.parameters()) - experts
    held = experts / layout.expert_ranks + others / layout.weight_ranks
    if layout.lora_rank is None:
        trained = held
    else:
        linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in name]
        trained = sum(layout.lora_rank * (m.in_features + m.out_features) for m in linears)
    bits = 8 * dtype.itemsize if layout.weight_bits is None else layout.weight_bits
    ranks = layout.context_ranks
    return replace(
        costs,
        constant_bytes=held * bits / 8 + trained * layout.trained_bytes,
        weight_bytes=held * bits / 8,
        state_bytes_per_token=costs.state_bytes_per_token / ranks,
        layer_state_bytes_per_token=costs.layer_state_bytes_per_token / ranks,
        accumulation_bytes_per_token=costs.accumulation_bytes_per_token / ranks,
        attended_bytes_per_token=costs.attended_bytes_per_token / ranks,
        capture=_shared(costs.capture, ranks),
        graph=_shared(costs.graph, ranks),
        backward=_shared(costs.backward, ranks),
        layer_input_bytes_per_token=costs.layer_input_bytes_per_token / ranks,
        layer_graph=_shared(costs.layer_graph, ranks),
        layer_backward=_shared(costs.layer_backward, ranks),
        can_pack=costs.can_pack and ranks == 1,
        flops_per_token=costs.flops_per_token / ranks,
        pairs=tuple(replace(pair, flops_per_pair=pair.flops_per_pair / ranks) for pair in costs.pairs),
        row_bytes=costs.row_bytes / ranks,
        head_flops_per_target=costs.head_flops_per_target / ranks,
    )


def _shared(cost: ChunkBytes, ranks: int) -> ChunkBytes:
    """Of a linear cost, with the tokens of chunk and page shared."""
    if not cost.knots:
        return cost
    low, high = cost.knots
    return ChunkBytes.linear(
        low.base,
        (high.base - low.base) / ranks,
        low.per_page_token / ranks,
        (high.per_page_token - low.per_page_token) / ranks**2,
    )
