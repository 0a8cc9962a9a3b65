"""Softmax attention with grouped heads, full or in a sliding window: keys and values are the state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.common.errors import ConfigError
from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.states import OwnStates

NAME = "tidegate_tree"
"""Hugging Face's name for the attention that serves chunks and packed trees."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class FullAttention:
    """Llama, Qwen, Mistral and their like."""

    model_types = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
    is_attention_only = True

    def install(self, model: Any) -> None:
        use_tree_attention(model)

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        return tuple(key_value_states(config, layer) for layer in range(config.num_hidden_layers))


def key_value_states(config: Any, layer: int) -> LayerStates:
    """Of one layer of softmax attention."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        window = None
    return LayerStates(token_elements=2 * config.num_key_value_heads * head_dim, window=window)


def use_tree_attention(model: Any) -> None:
    """Make all softmax attention of a model go through ``tree_attention``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    model.set_attn_implementation(NAME)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor | OwnStates,
    value: Tensor | OwnStates,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tree: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention function. ``query`` ``[1, heads, T, head]``; the result ``[1, T, heads, head]``.

    With the states of a chunk for a key it walks over the chunk's path, with a ``tree`` layout over a packed tree;
    otherwise the row is one causal sequence.

    Raises:
        ConfigError: the model wants something of its attention that is not computed here.
    """
    unknown = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or dropout:
        raise ConfigError(
            f"attention with {', '.join(unknown) or 'a mask or dropout'} cannot be trained exactly on trees.",
            "Use a model whose attention is plain softmax, full or in a sliding window.",
        )
    if sliding_window is None and _should_slide(module):
        raise ConfigError(
            f"{type(module).__name__} has a sliding window by its configuration and does not tell its attention.",
            "Use another version of transformers, or a model with full attention.",
        )
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        from services.trainer.tree.packed import packed_attention

        return packed_attention(
            module, query, key, value, None, scaling=scaling, sliding_window=sliding_window, tree=tree
        )
    assert isinstance(key, OwnStates)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = key.attend(query, scale=scale, window=sliding_window)
    return out.transpose(1, 2), None


def _should_slide(module: Any) -> bool:
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    return layer_types is not None and layer is not None and layer_types[layer] == "sliding_attention"
