import gc
import weakref

import torch
from torch import nn

from services.rollout import readback


def copying_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def make_layer() -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.weight_loader = copying_loader  # type: ignore[assignment]
    return layer


def record(layer: nn.Module, weight: torch.Tensor) -> readback.Recording:
    recording = readback.Recording(name_of_data={weight.data_ptr(): "weight"})
    readback._record_loaders(layer, recording)
    layer.weight.weight_loader(layer.weight, weight)  # type: ignore[operator, union-attr]
    return recording


def test_an_update_keeps_nothing_of_the_one_before_it() -> None:
    layer, weight = make_layer(), torch.ones(4, 4)
    first = weakref.ref(record(layer, weight))
    gc.collect()
    assert first() is None
    sent = torch.zeros(4, 4)
    before = weakref.ref(sent)
    second = record(layer, sent)
    assert len(second.calls[(layer, "weight")]) == 1
    assert torch.equal(layer.weight, sent)
    del second, sent
    gc.collect()
    assert before() is None


def test_recorded_loaders_do_not_nest() -> None:
    layer, weight = make_layer(), torch.ones(4, 4)
    for _ in range(3):
        record(layer, weight)
    assert layer.weight.weight_loader.unrecorded is copying_loader  # type: ignore[union-attr]
