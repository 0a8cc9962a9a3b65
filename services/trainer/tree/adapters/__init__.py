"""How each architecture keeps the states that later tokens read: one adapter a kind of token mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import ConfigError

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one layer keeps of the past, in numbers of elements."""

    token_elements: int = 0
    """Of each token, with a gradient of the same number."""
    frozen_token_elements: int = 0
    """Of each token, without gradient."""
    boundary_elements: int = 0
    """At the end of each chunk, with a gradient of the same number."""
    window: int | None = None
    """Only so many last tokens are read."""


class Adapter(Protocol):
    """Makes the models of some architectures use a ``ChunkContext``."""

    model_types: frozenset[str]
    """``model_type`` of the (text) configurations that it serves."""
    is_attention_only: bool
    """Trees may also go through in one pass (mode ``pack``)."""

    def install(self, model: Any) -> None:
        """Token mixers and routers use a ``ChunkContext`` where there is one. Without one the model runs as before."""

    def layer_states(self, config: Any) -> tuple[LayerStates, ...]:
        """What each layer keeps."""


def adapters() -> tuple[Adapter, ...]:
    """All of them."""
    from services.trainer.tree.adapters.attention import FullAttention
    from services.trainer.tree.adapters.linear import HybridLinear
    from services.trainer.tree.adapters.mla import LatentAttention
    from services.trainer.tree.adapters.moe import MixtureOfExperts
    from services.trainer.tree.adapters.sparse import SparseAttention

    return FullAttention(), MixtureOfExperts(), HybridLinear(), LatentAttention(), SparseAttention()


def adapter_for(config: Any) -> Adapter:
    """The adapter for a Hugging Face configuration.

    Raises:
        ConfigError: there is none for this architecture, or it uses something that is not exact here.
    """
    text_config = config.get_text_config()
    known = adapters()
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"{text_config.model_type} rotates its keys by angles that depend on the sequence's length (rope type "
            f"{', '.join(sorted(kinds & _LENGTH_DEPENDENT_ROPE))}): no states can be shared exactly.",
            "Set rope_type to one that does not (yarn, linear, llama3, default) in the model's config.json.",
        )
    for adapter in known:
        if text_config.model_type in adapter.model_types:
            return adapter
    served = ", ".join(sorted(name for adapter in known for name in adapter.model_types))
    raise ConfigError(
        f"no state adapter for the architecture {text_config.model_type!r}: it cannot be trained exactly in chunks.",
        f"Use a model of one of these: {served}. Or write an adapter: docs/tree.md says how.",
    )
