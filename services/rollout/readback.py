"""Loading weights into a running vLLM model, and proof that they are in there.

vLLM stacks, shards, casts and packs what a checkpoint names one by one, so the engine's tensors cannot be compared
with the sent ones by name. Instead every call of a weight loader is recorded while the weights are loaded. Afterwards
the same calls fill a fresh tensor in the engine's loading layout: that is what the parameter must hold, and

- a parameter that the engine keeps readable must equal it bit for bit;
- a matrix that was packed for a kernel and thrown away (CPU builds) is read through the kernel itself, by one-hot
  rows, which gives its columns exactly. Few columns a matrix and another set each version, so that it stays cheap;
- a packed copy beside a readable parameter (the head of a model with tied embeddings) is read the same way and must
  equal the parameter. A stale one shows there, and again in the canary.

Every sent tensor must have been loaded, and every parameter of the engine must have been filled.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

NUM_PROBE_COLUMNS = 64
"""Columns of each packed matrix that are read back after an update."""
MAX_COMPLAINTS = 5


@dataclass
class LoaderCall:
    """One call of a parameter's weight loader."""

    loader: Callable[..., Any]
    arguments: inspect.BoundArguments
    template: torch.Tensor
    """The parameter as the loader saw it: on the meta device, with the attributes that loaders look at."""


@dataclass
class Recording:
    """Which loader calls filled which parameter, and which sent tensors took part."""

    calls: dict[tuple[nn.Module, str], list[LoaderCall]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    current: str = ""
    """Name of the tensor that the model is loading now."""
    name_of_data: dict[int, str] = field(default_factory=dict)
    """Address of a sent tensor's first byte -> its name."""

    def note(self, layer: nn.Module, name: str, call: LoaderCall) -> None:
        self.calls.setdefault((layer, name), []).append(call)
        sent = (value for value in call.arguments.arguments.values() if isinstance(value, torch.Tensor))
        self.used.update(self.name_of_data.get(tensor.data_ptr(), self.current) for tensor in sent)


@dataclass
class ReadBack:
    """What reading back found."""

    complaints: list[str] = field(default_factory=list)
    num_equal: int = 0
    """Parameters compared whole, bit for bit."""
    num_probed: int = 0
    """Packed matrices of which columns were compared bit for bit."""
    num_unread: int = 0
    """Parameters in a layout that cannot be read back (quantised kernels); the canary is their only check."""


def load(model: nn.Module, vllm_config: Any, weights: dict[str, torch.Tensor]) -> Recording:
    """Load all weights into the running model, layer by layer, in place. Raises whatever vLLM raises."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # it warns of every layer that is loaded under another name or has nothing to load; read_back knows which matter
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    recording = Recording(name_of_data={tensor.data_ptr(): name for name, tensor in weights.items()})
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        _record_loaders(model, recording)
        try:
            model.load_weights(_announced(weights, recording))  # type: ignore[operator]
        finally:
            finalize_layerwise_reload(model, vllm_config.model_config)  # also puts a half-loaded model together again
    return recording


def repack_tied_heads(model: nn.Module, recording: Recording) -> int:
    """Pack the heads again whose parameter was loaded under another module's name; returns how many.

    Such a head is never loaded itself, so vLLM's reload leaves its packed copy as it was.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    heads = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and hasattr(module, "cpu_linear")
        and (module, "weight") not in recording.calls
    ]
    for head in heads:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    return len(heads)


@torch.no_grad()
def read_back(model: nn.Module, recording: Recording, sent: dict[str, torch.Tensor], version: int) -> ReadBack:
    """Compare the engine's tensors with what the recorded calls must have made of the sent ones."""
    found = ReadBack()
    names = {module: name for name, module in model.named_modules()}
    for (layer, name), calls in recording.calls.items():
        _check_parameter(found, layer, name, f"{names[layer]}.{name}", calls, version)
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.ndim == 2:
            _check_packed(found, layer, weight.data, f"{names[layer]} (packed copy)", version)
    for name in sorted(set(sent) - recording.used):
        if not any(_same(sent[name], sent[other]) for other in recording.used if other in sent):
            found.complaints.append(f"{name} was sent but not loaded")  # else it is the second name of a tied tensor
    filled = {id(getattr(layer, name)) for layer, name in recording.calls}
    found.complaints += [
        f"{name} got nothing" for name, parameter in model.named_parameters() if id(parameter) not in filled
    ]
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _announced(weights: dict[str, torch.Tensor], recording: Recording) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights.items():
        recording.current = name
        yield name, tensor


def _record_loaders(model: nn.Module, recording: Recording) -> None:
    for layer in model.modules():
        for name, parameter in [*layer._parameters.items(), *layer._buffers.items()]:
            inner = getattr(parameter, "weight_loader", None)
            if inner is not None:
                inner = getattr(inner, "unrecorded", inner)  # an earlier update's; else they would nest
                parameter.weight_loader = _recorded(inner, layer, name, recording)  # type: ignore[union-attr]


def _recorded(inner: Callable[..., Any], layer: nn.Module, name: str, recording: Recording) -> Callable[..., Any]:
    original = inspect.unwrap(inner)
    signature = inspect.signature(original)
    reference = weakref.ref(recording)  # vLLM keeps the loaders; through them it must not keep all the weights

    @functools.wraps(inner)  # keeps the name by which vLLM's reload tells its own wrappers, and lets it unwrap this one
    def recorded(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        template = arguments.arguments.pop("param")
        if (live := reference()) is not None:
            live.note(layer, name, LoaderCall(original, arguments, template))
        return inner(*args, **kwargs)

    recorded.unrecorded = inner  # type: ignore[attr-defined]
    return recorded


def _check_parameter(
    found: ReadBack, layer: nn.Module, name: str, full_name: str, calls: list[LoaderCall], version: int
) -> None:
    held = getattr(layer, name).data
    expected = _fill(calls, held.device)
    if held.shape == expected.shape:
        if _equal_where_given(held, expected):
            found.num_equal += 1
        else:
            found.complaints.append(f"{full_name} differs from what was sent")
    elif hasattr(layer, "cpu_linear") and expected.ndim == 2:
        _check_packed(found, layer, expected, full_name, version)
    else:
        found.num_unread += 1


def _equal_where_given(held: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are equal, bit for bit, wherever a loader wrote something into ``expected``."""
    held = held.to(expected.dtype)
    if torch.equal(held, expected):
        return True
    if not expected.is_floating_point():
        return False
    given = ~expected.isnan()
    return torch.equal(held[given], expected[given])


def _fill(calls: list[LoaderCall], device: torch.device) -> torch.Tensor:
    """What the loaders make of the sent tensors in a fresh one; NaN where they write nothing (padding)."""
    template = calls[0].template
    fresh = torch.empty_strided(template.size(), template.stride(), dtype=template.dtype, device=device)
    if fresh.is_floating_point():
        fresh.fill_(torch.nan)
    fresh.__class__ = template.__class__
    fresh.__dict__ = template.__dict__.copy()
    for call in calls:
        call.arguments.arguments["param"] = fresh
        call.loader(*call.arguments.args, **call.arguments.kwargs)
    return fresh.data


def _check_packed(found: ReadBack, layer: nn.Module, expected: torch.Tensor, full_name: str, version: int) -> None:
    """``expected`` ``[outputs, inputs]``: what the layer's kernel must multiply with."""
    num_inputs = expected.shape[1]
    num_columns = min(NUM_PROBE_COLUMNS, num_inputs)
    columns = (torch.arange(num_columns) + version * num_columns) % num_inputs
    one_hot = torch.zeros(num_columns, num_inputs, dtype=expected.dtype)
    one_hot[torch.arange(num_columns), columns] = 1
    read = layer.cpu_linear(one_hot, getattr(layer, "weight", None), None)  # type: ignore[operator]
    wanted = expected[:, columns].T
    if _equal_where_given(read, wanted):
        found.num_probed += 1
    else:
        found.complaints.append(f"{full_name} multiplies with other weights than were sent")
