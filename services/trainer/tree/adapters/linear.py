"""Hybrid models with gated delta nets (Yang et al., Gated Delta Networks, arXiv 2412.06464): Qwen3-Next and Qwen3.5.

A linear layer's state does not grow: a matrix a head, and the last columns before its causal convolution. Both are read
at the start of a chunk and left at its end, with gradients.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.attention import key_value_states, use_tree_attention
from services.trainer.tree.adapters.moe import record_routing
from services.trainer.tree.states import current

CONVOLUTION = "conv"
"""Part of the store that holds the last ``kernel - 1`` columns before the convolution ``[1, channels, kernel - 1]``."""
RECURRENT = "recurrent"
"""Part of the store that holds the matrices of all heads, ``[1, heads, key, value]``, float32."""

BLOCK_TOKENS = 32
"""Tokens whose mutual influence is computed at once."""
SPAN_TOKENS = 512
"""Tokens of a chunk that go through the recurrence at a time, where no fused kernel does."""


class HybridLinear:
    """Layers with a gated delta net among layers with full attention, dense or with experts."""

    model_types = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
    is_attention_only = False

    def install(self, model: Any) -> None:
        use_tree_attention(model)
        pass_states(model)
        record_routing(model)

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        linear = LayerStates(boundary_elements=boundary_elements(config))
        return tuple(
            linear if kind == "linear_attention" else key_value_states(config, layer)
            for layer, kind in enumerate(config.layer_types)
        )


def boundary_elements(config: Any) -> int:
    """What a linear layer keeps at the end of a chunk: its convolution's columns and its matrices."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    columns = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return int(columns + values * config.linear_key_head_dim)


def pass_states(model: Any) -> None:
    """Let the gated delta nets of a model begin with the state of the chunk before."""
    for module in model.modules():
        if hasattr(module, "A_log") and hasattr(module, "conv1d") and hasattr(module, "out_proj"):
            module.forward = functools.partial(_mix, module)  # a partial survives a deepcopy of the model


def _mix(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In place of a mixer's forward: of a chunk ``[1, T, hidden]``, with the states that its path left."""
    context = current()
    if context is None:
        return type(mixer).forward(mixer, hidden_states, *args, **kwargs)
    inputs = _project(mixer, hidden_states)
    columns = context.read(mixer.layer_idx, CONVOLUTION)
    if columns is None:
        columns = inputs[0].new_zeros(1, mixer.conv_dim, mixer.conv_kernel_size - 1)
    matrices = context.read(mixer.layer_idx, RECURRENT)
    keeps_all = is_fused(hidden_states)
    span_tokens = hidden_states.shape[1] if keeps_all else SPAN_TOKENS
    run = _mix_span if keeps_all or not torch.is_grad_enabled() else _mix_span_again
    outputs = []
    # split, not slices: the gradients of the spans are joined once, instead of each being padded to the whole chunk
    for span in zip(*(tensor.split(span_tokens, dim=1) for tensor in inputs), strict=True):
        output, columns, matrices = run(mixer, columns, matrices, *span)
        outputs.append(output)
    mixed = torch.cat(outputs, dim=1)
    assert matrices is not None
    mixed = context.leave(mixer.layer_idx, CONVOLUTION, columns, mixed)
    mixed = context.leave(mixer.layer_idx, RECURRENT, matrices, mixed)
    return mixer.out_proj(mixed)


def _project(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side ``[1, T, channels]``, the output gate ``[1, T, heads, value]``, and the
    logits of the learning rate and the input of the decay ``[1, T, heads]``."""
    if hasattr(mixer, "in_proj_qkvz"):
        projected = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
        *mixed, gate, rate, decay = projected
        return torch.cat([part.flatten(2) for part in mixed], dim=-1), gate, rate, decay
    gate = mixer.in_proj_z(hidden).unflatten(-1, (-1, mixer.head_v_dim))
    return mixer.in_proj_qkv(hidden), gate, mixer.in_proj_b(hidden), mixer.in_proj_a(hidden)


def _mix_span_again(mixer: Any, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``_mix_span`` with its inputs as the only thing that is kept for the backward.

    The recurrence would keep more than all else in a layer; its forward is cheap.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = checkpoint(
        _mix_span, mixer, *inputs, use_reentrant=False, preserve_rng_state=False
    )
    return outputs


def _mix_span(
    mixer: Any, columns: Tensor, matrices: Tensor | None, mixed: Tensor, gate: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, recurrence, norm and gate of consecutive tokens, with the states before them.

    Returns the output ``[1, t, values]`` and the states after them.
    """
    modeling = sys.modules[type(mixer).__module__]
    seen = torch.cat((columns, mixed.transpose(1, 2)), dim=-1)
    num_before = columns.shape[-1]
    weight = mixer.conv1d.weight.squeeze(1)
    convolved = modeling.causal_conv1d_fn(seen, weight, mixer.conv1d.bias, activation=mixer.activation)
    convolved = convolved[:, :, num_before:].transpose(1, 2)
    query, key, value = convolved.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
    query, key = (part.unflatten(-1, (-1, mixer.head_k_dim)) for part in (query, key))
    value = value.unflatten(-1, (-1, mixer.head_v_dim))
    wide = torch.promote_types(decay.dtype, torch.float32)
    log_decay = -mixer.A_log.to(wide).exp() * functional.softplus(decay.to(wide) + mixer.dt_bias)
    rule = _fused_rule(modeling) if is_fused(mixed) else gated_delta_rule
    with torch.autocast(mixed.device.type, enabled=False):  # its products stay in float32
        core, matrices = rule(query, key, value, log_decay, rate.sigmoid(), matrices)
    normed = mixer.norm(core.reshape(-1, mixer.head_v_dim), gate.reshape(-1, mixer.head_v_dim))
    return normed.view(1, mixed.shape[1], -1), seen[:, :, seen.shape[-1] - num_before :], matrices


# -- the recurrence ----------------------------------------------------------------------------------------------------


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, matrices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (arXiv 2412.06464, equation 10) by blocks of tokens (section 3.3 there), with all products
    of a block at once and one step a block for the matrices.

    ``query`` and ``key`` ``[1, T, key heads, key]``, normalised here; ``value`` ``[1, T, heads, value]``;
    ``log_decay`` and ``rate`` ``[1, T, heads]``; ``matrices`` ``[1, heads, key, value]`` before the first token, None
    for zeros. Returns ``[1, T, heads, value]`` and the matrices after the last token. All is computed in float32, in
    float64 for float64 values.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    num_tokens, num_key_heads = value.shape[1], key.shape[2]
    padding = -num_tokens % BLOCK_TOKENS  # tokens of zeros change no matrix

    def blocks(tensor: Tensor) -> Tensor:
        """``[1, T, heads, d]`` -> ``[1, key heads, heads of a key head, blocks, tokens, d]``"""
        padded = functional.pad(tensor.to(wide), (0, 0, 0, 0, 0, padding))
        grouped = padded.unflatten(2, (num_key_heads, -1)).unflatten(1, (-1, BLOCK_TOKENS))
        return grouped.permute(0, 3, 4, 1, 2, 5)

    queries, keys, values = _unit(blocks(query)) * query.shape[-1] ** -0.5, _unit(blocks(key)), blocks(value)
    rates = blocks(rate.unsqueeze(-1))
    decays = blocks(log_decay.unsqueeze(-1)).cumsum(-2)
    since_start, since_end = decays.exp(), (decays[..., -1:, :] - decays).exp()
    between = (decays - decays.mT).tril().exp().tril()
    mixing = (keys @ keys.mT) * between * rates
    solved = torch.linalg.solve_triangular(
        mixing, torch.cat((values * rates, keys * (rates * since_start)), -1), upper=False, unitriangular=True
    )
    written, read = solved.split((values.shape[-1], keys.shape[-1]), -1)
    at_end = (keys * since_end).mT
    kept = since_start[..., -1:, :]
    if matrices is None:
        matrices = values.new_zeros(1, value.shape[2], key.shape[-1], value.shape[-1])
    matrix = matrices.to(wide).unflatten(1, (num_key_heads, -1))
    before, news = [], []
    for block_written, block_read, block_end, block_kept in zip(
        *(tensor.unbind(3) for tensor in (written, read, at_end, kept)), strict=True
    ):
        before.append(matrix)
        news.append(block_written - block_read @ matrix)
        matrix = matrix * block_kept + block_end @ news[-1]
    out = (queries * since_start) @ torch.stack(before, 3)
    out = out + ((queries @ keys.mT) * between) @ torch.stack(news, 3)
    out = out.permute(0, 3, 4, 1, 2, 5).flatten(3, 4).flatten(1, 2)[:, :num_tokens]
    return out.to(value.dtype), matrix.flatten(1, 2)


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _fused_rule(modeling: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """That of a Hugging Face module, with its kernel."""

    def rule(
        query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, matrices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        repeats = value.shape[2] // key.shape[2]
        query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
        result: tuple[Tensor, Tensor] = modeling.torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=log_decay,
            beta=rate,
            initial_state=matrices,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return result

    return rule


def is_fused(tensor: Tensor) -> bool:
    """Whether Hugging Face's models evaluate the rule by a kernel: flash-linear-attention's, where it is installed."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _has_kernels()


@functools.cache
def _has_kernels() -> bool:
    return importlib.util.find_spec("fla") is not None
