"""Loading a Hugging Face model for training on packed trees, and refusing one for which that is not exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.backends import attention
from services.trainer.config import LoraConfig, TrainerConfig
from services.trainer.packing import Pack, pack_forest
from services.trainer.types import Node

EXACT_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose result on a packed tree equals that on each path alone (a window only while a path fits it)."""

_HINT = "Use a model of softmax attention only (Llama, Qwen2, Qwen3, Mistral and the like)."
_PROBE_TOLERANCE = 1e-3


def load_model(model_path: str, config: TrainerConfig, device: torch.device, seed: int) -> Any:
    """A causal language model with float32 weights, adapters injected if asked for, frozen where not trained.

    The same seed gives the same adapters on every rank.

    Raises:
        ConfigError: the folder holds no such model, or packed trees are not exact for its architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    try:
        check_architecture(AutoConfig.from_pretrained(model_path))
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the trainer cannot load {model_path}: {error}", _HINT) from error
    _disable_dropout(model)
    model.to(device)
    if isinstance(config.tune, LoraConfig):
        _inject_lora(model, config.tune, seed)
    model.eval()  # no dropout, as when the engine sampled
    check_packing(model)
    return model


def check_architecture(config: Any) -> None:
    """Raise ``ConfigError`` for layers whose result on a packed tree differs from that on each path alone."""
    text_config = config.get_text_config()
    others = sorted(set(getattr(text_config, "layer_types", None) or ()) - EXACT_LAYERS)
    if others:
        raise ConfigError(
            f"the torch backend cannot train {config.model_type} exactly: it has layers of type {', '.join(others)}.",
            _HINT,
        )


def check_path_length(config: Any, longest_path: int) -> None:
    """Raise ``ConfigError`` if a path is longer than the model's attention window, which tree attention ignores."""
    text_config = config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None)
    if window and longest_path > window and (layer_types is None or "sliding_attention" in layer_types):
        raise ConfigError(
            f"a trajectory of {longest_path} tokens is longer than {config.model_type}'s attention window of {window}.",
            "Lower rollout.engine.max_model_len to the window, or use a model with full attention.",
        )


def hidden_states(model: Any, pack: Pack, device: torch.device) -> Tensor:
    """Last hidden states ``[T, hidden]`` of a packed forest."""
    output = model.base_model(
        input_ids=_row(pack.token_ids, device),
        position_ids=_row(pack.position_ids, device),
        use_cache=False,
        tree=attention.make_layout(pack, device),
    )
    return output.last_hidden_state[0]


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Compare a small packed tree with its paths alone, through the model's own head.

    Raises:
        ConfigError: they differ (recurrent layers, logits transformed after the head, ...).
    """
    device = model.device
    name = model.config.model_type
    ids = np.random.default_rng(0).integers(0, model.config.get_text_config().vocab_size, 24).astype(np.int32)
    pieces = [(-1, ids[:10]), (0, ids[10:15]), (0, ids[15:20]), (1, ids[20:])]
    nodes = [
        Node(parent, -1, piece, np.zeros(len(piece), dtype=np.bool_), np.zeros(len(piece), dtype=np.float32))
        for parent, piece in pieces
    ]
    try:
        pack = pack_forest(nodes)
        packed = model.get_output_embeddings()(hidden_states(model, pack, device))
        difference = 0.0
        for path in ((0, 1, 3), (0, 2)):
            alone = model(input_ids=_row(np.concatenate([pieces[n][1] for n in path]), device), use_cache=False).logits
            rows = np.concatenate([np.arange(pack.node_starts[n], pack.node_starts[n + 1]) for n in path])
            difference = max(difference, float((packed[torch.from_numpy(rows)] - alone[0]).abs().max()))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"the torch backend cannot train {name} on packed trees: {error}", _HINT) from error
    if not difference <= _PROBE_TOLERANCE * max(1.0, float(packed.abs().max())):
        raise ConfigError(
            f"the torch backend cannot train {name} exactly: logits of a packed tree differ by {difference:.2g} from "
            "those of its paths.",
            _HINT,
        )


def lora_layers(model: Any) -> dict[str, Any]:
    """Modules with an adapter, by the name of the module that they stand for."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _inject_lora(model: Any, config: LoraConfig, seed: int) -> None:
    import peft

    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"no adapters for this model: {error}", "Set trainer.tune.target_modules to names of its linear layers."
            ) from error


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _row(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)[None]
