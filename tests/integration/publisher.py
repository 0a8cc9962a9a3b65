"""A publisher of weights for tests of the rollout side: a Hugging Face model in fp32, served by the real transfer."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.common.transfer import Exposed, open_transfer_engine
from services.trainer.types import Canary, TensorSlot, WeightManifest

CANARY_IDS = tuple(range(20, 60))


class Publisher:
    """Weights of several versions of one model, and what Hugging Face computes with them."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._transfer = open_transfer_engine("tcp", "127.0.0.1")
        self._kept: list[tuple[Exposed, np.ndarray]] = []

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._transfer.close()

    def model(self, seed: int | None = None) -> torch.nn.Module:
        """The model as saved, or with a large change of all its weights (then it never ends an answer by itself)."""
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=torch.float32).eval()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.randn(parameter.shape, generator=generator) * 0.2
                model.get_output_embeddings().weight[model.config.eos_token_id] = 0  # its logit is 0, another's above
        return model

    def publish(self, version: int, model: torch.nn.Module) -> WeightManifest:
        named = dict(model.named_parameters())
        slots, parts, offset = [], [], 0
        for name, parameter in named.items():
            data = parameter.detach().contiguous().numpy().view(np.uint8).reshape(-1)
            slots.append(
                TensorSlot(name, tuple(parameter.shape), "float32", offset, data.nbytes, zlib.crc32(data.data))
            )
            parts.append(data)
            offset += data.nbytes
        buffer = np.concatenate(parts)
        exposed = self._transfer.expose(buffer)
        self._kept.append((exposed, buffer))
        canary = Canary(CANARY_IDS, tuple(logprobs(model, CANARY_IDS, 1.0)))
        return WeightManifest(
            version,
            exposed.segment,
            exposed.address,
            exposed.size_bytes,
            self._transfer.transport,
            tuple(slots),
            canary,
        )


def with_a_wrong_checksum(manifest: WeightManifest) -> WeightManifest:
    """The same manifest, as if one tensor's bytes had changed on the way."""
    first = dataclasses.replace(manifest.tensors[0], checksum=manifest.tensors[0].checksum ^ 1)
    return dataclasses.replace(manifest, tensors=(first, *manifest.tensors[1:]))


@torch.no_grad()
def logprobs(model: torch.nn.Module, token_ids: Sequence[int], temperature: float) -> list[float]:
    """Hugging Face's log-probabilities: element ``i`` is that of ``token_ids[i + 1]`` given those before it."""
    ids = torch.tensor([list(token_ids)])
    rows = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
    return rows.gather(1, ids[0, 1:, None])[:, 0].tolist()
