"""The ``torch`` backend: a Hugging Face model and one packed forward a batch: shared segments are computed once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.trainer.backends.base import BatchResult, Update
from services.trainer.backends.head import HeadChunk
from services.trainer.backends.models import check_path_length, hidden_states, load_model, lora_layers
from services.trainer.config import TrainerConfig
from services.trainer.loss import LossSums, clipped_policy_loss
from services.trainer.packing import Batch, pack_forest

_HEAD_CHUNK_BYTES = 64 << 20
"""Size of one chunk of logits."""


class TorchBackend:
    """``TrainingBackend`` by PyTorch, data parallel over the ranks of the default process group."""

    def __init__(self, model_path: str, config: TrainerConfig, device: torch.device, seed: int = 0) -> None:
        self._config = config
        self._device = device
        self.model = load_model(model_path, config, device, seed)
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
        pack = pack_forest(batch.nodes)
        check_path_length(self.model.config, pack.longest_path)
        runs = torch.tensor([[run.advantage, 1.0 / run.num_targets] for run in batch.runs], dtype=torch.float64)
        per_target = runs[torch.from_numpy(pack.target_runs).long()].to(self._device)
        behaviour = torch.from_numpy(pack.behaviour).to(self._device)
        target_ids = torch.from_numpy(pack.target_ids).long().to(self._device)
        is_current = torch.from_numpy(pack.versions == version).to(self._device)
        with self._autocast():
            hidden = hidden_states(self.model, pack, self._device)
        rows = hidden[torch.from_numpy(pack.predecessors).long().to(self._device)]  # [M, hidden]
        leaf = rows.detach().requires_grad_()
        sums, difference = LossSums(), -1.0
        for start in range(0, len(leaf), self._rows_per_chunk()):
            part = slice(start, start + self._rows_per_chunk())
            with self._autocast():
                logits = self.model.get_output_embeddings()(leaf[part])
            head = HeadChunk(logits.detach(), target_ids[part], temperature)
            logprobs = head.logprobs.requires_grad_()
            weights = per_target[part].to(logprobs.dtype)
            loss, part_sums = clipped_policy_loss(
                logprobs,
                behaviour[part].to(logprobs.dtype),
                weights[:, 0],
                weights[:, 1],
                head.entropy,
                self._config.loss,
            )
            (slope,) = torch.autograd.grad(loss, logprobs)
            logits.backward(head.gradient(slope).to(logits.dtype))
            sums += part_sums
            compared = (logprobs.detach() - behaviour[part])[is_current[part]].abs()
            difference = max(difference, float(compared.max()) if len(compared) else -1.0)
        rows.backward(leaf.grad)
        return BatchResult(sums, len(pack.token_ids), difference)

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
            module, _, leaf = name.rpartition(".")
            module = module.removesuffix(".base_layer")
            value = tensor.detach()
            if module in adapted and leaf == "weight":
                value = value + adapted[module].get_delta_weight("default")
            weights[f"{module}.{leaf}"] = value
        yield from revert_weight_conversion(self.model, weights).items()

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], weights: Mapping[str, Tensor]) -> list[float]:
        adapted = lora_layers(self.model)
        current: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            module, _, leaf = name.rpartition(".")
            published = f"{module.removesuffix('.base_layer')}.{leaf}"
            if published in weights:
                current[name] = weights[published].to(parameter)
            elif ".lora_B." in name and adapted:
                current[name] = torch.zeros_like(parameter)  # the adapter is merged in already
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

    def _rows_per_chunk(self) -> int:
        vocab_size: int = self.model.config.get_text_config().vocab_size
        return max(1, _HEAD_CHUNK_BYTES // (4 * vocab_size))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._config.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self._config.dtype))
