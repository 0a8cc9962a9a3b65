"""The ``torch`` backend: a Hugging Face model whose batches go through the tree executor: what runs share is computed
once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.backends.base import BatchResult, Update
from services.trainer.backends.models import check_exactness, load_model, lora_layers, plain_name
from services.trainer.config import TrainerConfig
from services.trainer.objective import PolicyObjective
from services.trainer.packing import Batch
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import Budget
from services.trainer.tree.estimate import costs_of_model
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import make_forest
from services.trainer.tree.packed import choose_attention
from services.trainer.tree.plan import ModeChoice, make_plan
from services.trainer.tree.store import StoreBudget

_BLOCK_TOKENS = 64
"""Recurrent layers work in blocks of so many tokens: chunks cut between blocks need no padding."""


class TorchBackend:
    """``TrainingBackend`` by PyTorch, over the ranks of the default process group: they share the micro-steps, or with
    ``tree.context_parallel`` each of them."""

    def __init__(self, model_path: str, config: TrainerConfig, device: torch.device, seed: int = 0) -> None:
        self._config = config
        self._device = device
        self.model = load_model(model_path, config, device, seed)
        adapter = adapter_for(self.model.config)
        tree = config.tree
        is_shared = tree.context_parallel and dist.is_initialized() and dist.get_world_size() > 1
        self._executor = Executor(
            self.model,
            adapter,
            budget=StoreBudget(
                host_bytes=None if device.type == "cpu" else tree.host_bytes,
                folder=tree.page_dir,
                disk_bytes=tree.page_bytes,
            ),
            autocast=self._autocast,
            pack_attention=choose_attention(tree.pack_attention, device),
            group=dist.group.WORLD if is_shared else None,
        )
        check_exactness(self.model, self._executor, config.dtype, self._autocast)
        self._counts = not is_shared or dist.get_rank() == 0
        self._costs = costs_of_model(self.model, adapter, getattr(torch, config.dtype))
        self._options = tree.options(alignment_tokens=1 if adapter.is_attention_only else _BLOCK_TOKENS)
        if is_shared:
            self._options = replace(self._options, mode=ModeChoice.WALK)
        self._budget = Budget(
            live_bytes=tree.memory_bytes,
            host_bytes=0 if device.type == "cpu" else tree.host_bytes,
            disk_bytes=0 if tree.page_dir is None else tree.page_bytes,
        )
        self._trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._trainable.values(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def accumulate(self, batch: Batch, temperature: float, version: int) -> BatchResult:
        forest = make_forest(batch.nodes)
        plan = make_plan(forest, self._costs, self._budget, self._options)
        old = None
        if self._config.loss.old_logprobs == "recomputed":
            old = self._executor.score(forest, plan, temperature).logprobs
        objective = PolicyObjective(forest, batch.runs, self._config.loss, self._device, version=version, old=old)
        self._executor.train(forest, plan, temperature, objective)
        return BatchResult(objective.sums, forest.num_tokens if self._counts else 0, objective.logprob_abs_diff_max)

    def reduce(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        works = []
        for parameter in self._trainable.values():
            if parameter.grad is None:  # this rank had no micro-step
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._trainable.items() if p.grad is not None}

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            if name not in self._trainable or self._trainable[name].shape != gradient.shape:
                raise ValueError(
                    f"a gradient of {name} with shape {tuple(gradient.shape)} belongs to no parameter here"
                )
        for name, gradient in gradients.items():
            parameter = self._trainable[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += gradient.to(parameter.device)

    def update(self, num_runs: int, step: int) -> Update:
        settings = self._config.optimizer
        learning_rate = settings.learning_rate * min(1.0, step / max(settings.warmup_steps, 1))
        gradients = [p.grad for p in self._trainable.values() if p.grad is not None]
        if gradients:  # a step whose groups left nothing to train has none
            torch._foreach_div_(gradients, float(max(num_runs, 1)))
        norm = float(nn.utils.clip_grad_norm_(self._trainable.values(), settings.grad_clip, foreach=True))
        is_finite = norm < float("inf")
        if is_finite and gradients:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.discard()
        return Update(norm, learning_rate, skipped=not is_finite)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        adapted = lora_layers(self.model)
        persistent = self.model.state_dict().keys()
        weights: dict[str, Tensor] = {}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]  # tied parameters come once
        for name, tensor in tensors:
            if name not in persistent or ".lora_" in name:
                continue
            published, value = plain_name(name), tensor.detach()
            if published in adapted:
                value = value + adapted[published].get_delta_weight("default")
            weights[published] = value
        yield from revert_weight_conversion(self.model, weights).items()

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], weights: Mapping[str, Tensor]) -> list[float]:
        adapters = ((name, layer.lora_B.parameters()) for name, layer in lora_layers(self.model).items())
        merged = {id(parameter) for name, parameters in adapters if name in weights for parameter in parameters}
        current: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            published = plain_name(name)
            if published in weights:
                current[name] = weights[published].to(parameter)
            elif id(parameter) in merged:
                current[name] = torch.zeros_like(parameter)
        ids = torch.tensor([list(token_ids)], device=self._device)
        output = torch.func.functional_call(self.model, current, kwargs={"input_ids": ids, "use_cache": False})
        logprobs = output.logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._trainable.items()}

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load(self, state: Mapping[str, Tensor], optimizer_state: dict[str, Any]) -> None:
        self.load_weights(state)
        self._optimizer.load_state_dict(optimizer_state)

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        own = {name: parameter.shape for name, parameter in self._trainable.items()}
        if own != {name: tensor.shape for name, tensor in state.items()}:
            raise ConfigError(
                "the checkpoint belongs to another model or another way of tuning.",
                "Resume with the configuration that made it, or start a new job.",
            )
        for name, parameter in self._trainable.items():
            parameter.copy_(state[name])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._config.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self._config.dtype))
