"""Multi-head latent attention: the latent and the rotated rope key are the state, not the heads made of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.attention import use_tree_attention
from services.trainer.tree.adapters.moe import record_routing
from services.trainer.tree.states import OwnStates


class LatentAttention:
    """DeepSeek-V2 and V3, and those that took over their attention."""

    model_types = frozenset({"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"})
    is_attention_only = True

    def install(self, model: Any) -> None:
        use_tree_attention(model)
        keep_latents(model)
        record_routing(model)

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        return (LayerStates(token_elements=latent_elements(config)),) * config.num_hidden_layers


def latent_elements(config: Any) -> int:
    """What a layer keeps of a token: the latent of all its keys and values, and the rope key that its heads share."""
    return int(config.kv_lora_rank + config.qk_rope_head_dim)


def keep_latents(model: Any) -> None:
    """Let the latents of a chunk reach its attention as they are; heads are made of them there, page by page."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.expand_kv = functools.partial(_expand_later, module)  # a partial survives deepcopy, a closure not


def _expand_later(
    module: Any, latent: Tensor | OwnStates, rope_key: Tensor | OwnStates
) -> tuple[Tensor, Tensor] | tuple[OwnStates, OwnStates]:
    """In place of a module's ``expand_kv``. ``latent`` ``[1, 1, T, rank]``, ``rope_key`` ``[1, 1, T, rope]``."""
    expand = functools.partial(type(module).expand_kv, module)
    if not isinstance(latent, OwnStates):
        keys_and_values: tuple[Tensor, Tensor] = expand(latent, rope_key)
        return keys_and_values
    own = replace(latent, expand=expand)
    return own, own
