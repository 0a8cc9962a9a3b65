"""What is published is what was trained, rounded once, with checksums and a canary that say so."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.errors import WeightsError
from services.trainer.types import WeightManifest
from services.trainer.weights import WeightPublisher, canary_tokens, plan_slots
from tests.unit.trainer.local_engine import LocalEngine


def named(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a.weight", torch.randn(5, 3, generator=generator)),
        ("b.bias", torch.randn(7, generator=generator)),
        ("c.count", torch.arange(3)),
    ]


def score(token_ids: Sequence[int], weights: Mapping[str, Tensor]) -> list[float]:
    return [-float(weights["a.weight"].float().sum())] * (len(token_ids) - 1)


def read(engine: LocalEngine, manifest: WeightManifest) -> dict[str, Tensor]:
    """What a cell would load, checksums checked."""
    pulled = np.zeros(manifest.size_bytes, dtype=np.uint8)
    engine.pull(manifest.segment, manifest.address, pulled)
    tensors = {}
    for slot in manifest.tensors:
        part = pulled[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
        assert zlib.crc32(part.data) == slot.checksum
        tensors[slot.name] = torch.from_numpy(part).view(getattr(torch, slot.dtype)).view(slot.shape)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_tensors_are_the_weights_in_the_engines_type(dtype: torch.dtype) -> None:
    engine = LocalEngine()
    manifest = WeightPublisher(engine, dtype).publish(4, named(), [1, 2, 3], score)
    tensors = read(engine, manifest)
    for name, tensor in named():
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        assert torch.equal(tensors[name], tensor.to(kind))
    assert (manifest.version, manifest.transport, manifest.segment) == (4, "local", "local:1")
    rounded = {name: tensor.to(dtype) for name, tensor in named() if tensor.is_floating_point()}
    assert manifest.canary.logprobs == tuple(score([1, 2, 3], rounded))
    assert manifest.canary.token_ids == (1, 2, 3)


def test_versions_share_one_registered_buffer() -> None:
    engine = LocalEngine()
    publisher = WeightPublisher(engine, torch.float32)
    first = publisher.publish(1, named(1), [1, 2], score)
    second = publisher.publish(2, named(2), [1, 2], score)
    assert first.address == second.address
    assert engine.num_exposed == 1
    assert [slot.checksum for slot in first.tensors] != [slot.checksum for slot in second.tensors]
    assert torch.equal(read(engine, second)["a.weight"], named(2)[0][1])
    publisher.close()
    assert not engine.exposed


def test_late_pull_of_an_older_version_shows_in_its_checksums() -> None:
    engine = LocalEngine()
    publisher = WeightPublisher(engine, torch.float32)
    first = publisher.publish(1, named(1), [1, 2], score)
    publisher.publish(2, named(2), [1, 2], score)
    with pytest.raises(AssertionError):
        read(engine, first)


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    slots, size_bytes = plan_slots(named(), torch.bfloat16)
    assert all(slot.offset_bytes % 64 == 0 for slot in slots)
    ends = [slot.offset_bytes + slot.size_bytes for slot in slots]
    assert all(end <= slot.offset_bytes for end, slot in zip(ends, slots[1:], strict=False))
    assert size_bytes >= ends[-1]


def test_weights_that_are_not_finite_are_not_published() -> None:
    broken = [("a.weight", torch.full((2, 2), float("nan")))]
    with pytest.raises(WeightsError, match="not finite"):
        WeightPublisher(LocalEngine(), torch.float32).publish(1, broken, [1, 2], score)


def test_canary_is_fixed_and_ordinary() -> None:
    ordinary = list(range(100, 200))
    assert canary_tokens(ordinary) == canary_tokens(ordinary)
    assert len(canary_tokens(ordinary)) == 48
    assert set(canary_tokens(ordinary)) <= set(ordinary)
    assert len(set(canary_tokens(ordinary))) > 20
