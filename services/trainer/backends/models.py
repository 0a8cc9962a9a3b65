"""Loading a Hugging Face model for training, and refusing one that would not be trained exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from services.common.errors import ConfigError
from services.common.types import VersionSpan
from services.trainer.config import LoraConfig, TrainerConfig
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.head import check_head
from services.trainer.tree.plan import Mode, Plan, Prediction, PrefixGradient, cut_chunks, list_visits
from services.trainer.types import Node

_HINT = "See docs/tree.md for the architectures that are trained exactly, and how another one is added."
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3}
"""By how much log-probabilities of random tokens may differ on average by rounding; single ones differ by more."""


def load_model(model_path: str, config: TrainerConfig, device: torch.device, seed: int) -> Any:
    """A causal language model with float32 weights, adapters injected if asked for, frozen where not trained.

    The same seed gives the same adapters on every rank.

    Raises:
        ConfigError: the folder holds no such model, or its architecture is not known to the tree executor.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        adapter_for(AutoConfig.from_pretrained(model_path))
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the trainer cannot load {model_path}: {error}", _HINT) from error
    _disable_dropout(model)
    model.to(device)
    if isinstance(config.tune, LoraConfig):
        _inject_lora(model, config.tune, seed)
    model.eval()  # no dropout, as when the engine sampled
    return model


@torch.no_grad()
def check_exactness(
    model: Any, executor: Executor, dtype: str, autocast: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """Compare the scores of a small tree, chunk by chunk, with those of its paths through the plain model.

    Raises:
        ConfigError: they differ (logits transformed after the head, a kernel that is not what it should be, ...).
    """
    name = model.config.model_type
    check_head(model)
    forest = _small_tree(model.config.get_text_config().vocab_size)
    chunks = cut_chunks(forest, 4, 1)
    visits = list_visits(forest, chunks, PrefixGradient.EXACT, frozenset())
    plan = Plan(Mode.WALK, chunks, visits, recompute_layers=False, head_rows=16, predicted=Prediction(), reason="")
    try:
        scores = executor.score(forest, plan, 1.0).logprobs
        differences = []
        for segment in forest.segments[1:]:
            ids = torch.from_numpy(np.concatenate([forest.segments[0].token_ids, segment.token_ids])).long()
            with autocast():
                logits = model(input_ids=ids.to(model.device)[None], use_cache=False).logits[0].float()
            plain = logits.log_softmax(-1)[segment.start + torch.from_numpy(segment.predecessors).long()]
            own = slice(segment.first_target, segment.first_target + segment.num_targets)
            targets = torch.from_numpy(forest.target_ids[own]).long().to(model.device)
            plain = plain.gather(-1, targets[:, None])[:, 0]
            differences.append((scores[own] - plain).abs())
        difference = float(torch.cat(differences).mean())
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"the torch backend cannot train {name}: {error}", _HINT) from error
    if not difference <= _TOLERANCES[dtype]:
        raise ConfigError(
            f"the torch backend cannot train {name} exactly: log-probabilities of a tree differ by {difference:.2g} "
            "from those of its paths.",
            _HINT,
        )


def _small_tree(vocab_size: int) -> Forest:
    ids = np.random.default_rng(0).integers(0, vocab_size, 24).astype(np.int32)
    nodes: list[Node] = []
    for parent, piece in ((-1, ids[:10]), (0, ids[10:16]), (0, ids[16:])):
        mask = np.full(len(piece), parent >= 0)
        spans = (VersionSpan(0, len(piece)),) if parent >= 0 else ()
        nodes.append(Node(parent, len(nodes) - 1, piece, mask, np.zeros(len(piece), dtype=np.float32), spans))
    return make_forest(nodes)


def lora_layers(model: Any) -> dict[str, Any]:
    """Modules with an adapter, by the name of the parameter that it changes, in the model without adapters."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{plain_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def plain_name(name: str) -> str:
    """The name of a module or parameter in the model without adapters."""
    return name.replace(".base_layer", "")


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
