"""Reading weights back: what the engine holds must be what was sent, through stacking, padding and packing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from services.rollout.readback import LoaderCall, ReadBack, Recording, read_back


class Stacked(nn.Module):
    """Two matrices of a checkpoint in one parameter, with rows of padding that no loader writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3), requires_grad=False)

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard: int) -> None:
        param.data[2 * shard : 2 * shard + 2] = loaded_weight


class Packed(nn.Module):
    """A matrix that was thrown away once its kernel had a copy."""

    def __init__(self, kernel_weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.cpu_linear = lambda x, weight, bias: x @ kernel_weight.T

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)


def record(recording: Recording, layer: Any, loaded: torch.Tensor, template: torch.Tensor, *more: Any) -> None:
    arguments = inspect.signature(layer.load).bind(None, loaded, *more)
    arguments.arguments.pop("param")
    recording.note(layer, "weight", LoaderCall(layer.load, arguments, template))


def stacked_update() -> tuple[nn.Module, Recording, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    sent = {"up": torch.randn(2, 3), "gate": torch.randn(2, 3)}
    model = nn.ModuleDict({"layer": Stacked()})
    recording = Recording(name_of_data={tensor.data_ptr(): name for name, tensor in sent.items()})
    for shard, tensor in enumerate(sent.values()):
        model["layer"].load(model["layer"].weight, tensor, shard)  # type: ignore[operator]
        record(recording, model["layer"], tensor, torch.empty(6, 3, device="meta"), shard)
    return model, recording, sent


def test_stacked_weights_that_arrived_are_equal() -> None:
    found = read_back(*stacked_update(), version=0)
    assert found == ReadBack(num_equal=1)


def test_one_wrong_bit_of_a_stacked_weight_is_named() -> None:
    model, recording, sent = stacked_update()
    model["layer"].weight.data[3, 1] += 1e-6  # type: ignore[index]
    assert read_back(model, recording, sent, version=0).complaints == ["layer.weight differs from what was sent"]


def test_padding_does_not_count() -> None:
    model, recording, sent = stacked_update()
    model["layer"].weight.data[5] = 7  # type: ignore[index]
    assert read_back(model, recording, sent, version=0).complaints == []


def test_a_tensor_that_no_loader_took_is_named() -> None:
    model, recording, sent = stacked_update()
    found = read_back(model, recording, {**sent, "bias": torch.ones(2)}, version=0)
    assert found.complaints == ["bias was sent but not loaded"]


def test_the_second_name_of_a_tied_tensor_need_not_be_loaded() -> None:
    model, recording, sent = stacked_update()
    assert read_back(model, recording, {**sent, "head": sent["up"].clone()}, version=0).complaints == []


def test_a_parameter_that_got_nothing_is_named() -> None:
    model, recording, sent = stacked_update()
    model["other"] = nn.Linear(2, 2, bias=False)  # type: ignore[index]
    assert read_back(model, recording, sent, version=0).complaints == ["other.weight got nothing"]


def packed_update(kernel_error: float, column: int = 0) -> tuple[nn.Module, Recording, dict[str, torch.Tensor]]:
    sent = {"proj": torch.randn(5, 200)}
    kernel_weight = sent["proj"].clone()
    kernel_weight[2, column] += kernel_error
    model = nn.ModuleDict({"layer": Packed(kernel_weight)})
    recording = Recording(name_of_data={sent["proj"].data_ptr(): "proj"})
    record(recording, model["layer"], sent["proj"], torch.empty(5, 200, device="meta"))
    return model, recording, sent


def test_packed_weights_are_read_through_their_kernel() -> None:
    assert read_back(*packed_update(0.0), version=0) == ReadBack(num_probed=1)


def test_a_packed_weight_of_another_version_is_named() -> None:
    (complaint,) = read_back(*packed_update(1e-5), version=0).complaints
    assert complaint.startswith("layer.weight multiplies with other weights")


@pytest.mark.parametrize("column", [0, 63, 64, 130, 199])
def test_every_column_is_probed_within_a_few_versions(column: int) -> None:
    update = packed_update(1.0, column)
    assert any(read_back(*update, version=version).complaints for version in range(4))


def test_a_stale_packed_copy_beside_a_fresh_parameter_is_named() -> None:
    model, recording, sent = stacked_update()
    head = Packed(torch.zeros(6, 3))
    head.weight = model["layer"].weight  # type: ignore[index,assignment]
    model["head"] = head  # type: ignore[index]
    (complaint,) = read_back(model, recording, sent, version=0).complaints
    assert complaint.startswith("head (packed copy) multiplies with other weights")
