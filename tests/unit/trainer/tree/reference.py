"""The plain reference: every node with targets is a row of its own, through the unmodified model, with full logits.

Nothing of the tree executor is used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.trainer.config import ClippedLossConfig
from services.trainer.packing import Batch
from services.trainer.types import Node
from tests.unit.trainer.forests import path_to

Choices = Mapping[tuple[int, ...], Mapping[int, Tensor]]
"""Recorded choices of a token: by the ids of its path (itself last), then by layer: int64 [k]."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a reference run gives."""

    loss: float
    gradients: dict[str, Tensor]
    logprobs: Tensor
    """[M] Of the targets, by node and offset."""
    entropy: Tensor
    """[M]"""


@dataclass(frozen=True, slots=True)
class Row:
    """A path and the targets that are taken from it: positions on it, and their places among all targets."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    places: tuple[int, ...]
    num_detached: int = 0
    """So many of its first tokens are evaluated without autograd; the rest goes on from their cache."""


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities and entropies [M] of all targets, by node and offset, to the loss."""


def run(
    model: Any,
    batch: Batch,
    loss_function: LossFunction | None = None,
    *,
    temperature: float = 1.0,
    rows: Sequence[Row] | None = None,
    experts: Choices | None = None,
    selected: Choices | None = None,
) -> Result:
    """Loss and gradients of all parameters that require one.

    ``loss_function`` is ``clipped_loss`` by default, ``rows`` is ``node_rows``. With ``experts`` and ``selected``
    the routers and indexers of the model choose what was recorded (positions -1 count for nothing).
    """
    model.zero_grad(set_to_none=True)
    rows = node_rows(batch) if rows is None else rows
    num_targets = sum(int(node.target_mask.sum()) for node in batch.nodes)
    logprobs: list[Tensor | None] = [None] * num_targets
    entropy: list[Tensor | None] = [None] * num_targets
    for row in rows:
        logits, first = _logits(model, row, experts, selected)
        log_softmax = (logits / temperature).log_softmax(-1)
        for position, place in zip(row.positions, row.places, strict=True):
            predicted = log_softmax[position - 1 - first]
            assert logprobs[place] is None, "a target is counted once"
            logprobs[place] = predicted[row.token_ids[position]]
            entropy[place] = -(predicted.exp() * predicted).sum()
    joined = torch.stack([value for value in logprobs if value is not None])
    entropies = torch.stack([value for value in entropy if value is not None])
    assert len(joined) == num_targets
    loss = (loss_function or clipped_loss(batch))(joined, entropies)
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Result(float(loss), gradients, joined.detach(), entropies.detach())


def node_rows(batch: Batch, *, detach_shared: bool = False) -> list[Row]:
    """A row for every node with targets: its path, with its targets. ``detach_shared``: what runs share is evaluated
    without autograd, as in LongStraw (arXiv 2607.14952)."""
    rows, place = [], 0
    for index, node in enumerate(batch.nodes):
        ids = _path_ids(batch.nodes, index)
        offsets = np.flatnonzero(node.target_mask)
        if len(offsets):
            positions = tuple(int(len(ids) - len(node.token_ids) + offset) for offset in offsets)
            shared = [n for n in path_to(batch.nodes, index) if batch.nodes[n].run < 0] if detach_shared else []
            num_detached = sum(len(batch.nodes[n].token_ids) for n in shared)
            rows.append(Row(ids, positions, tuple(range(place, place + len(offsets))), num_detached))
            place += len(offsets)
    return rows


def leaf_rows(batch: Batch) -> list[Row]:
    """A row for every leaf: its path, with the targets that no row before it had."""
    parents = {node.parent for node in batch.nodes}
    firsts = np.cumsum([0, *(int(node.target_mask.sum()) for node in batch.nodes)])
    done: set[int] = set()
    rows = []
    for leaf in range(len(batch.nodes)):
        if leaf in parents:
            continue
        positions: list[int] = []
        places: list[int] = []
        start = 0
        for index in path_to(batch.nodes, leaf):
            node = batch.nodes[index]
            if index not in done:
                done.add(index)
                offsets = np.flatnonzero(node.target_mask)
                positions += [int(start + offset) for offset in offsets]
                places += range(int(firsts[index]), int(firsts[index + 1]))
            start += len(node.token_ids)
        if positions:
            rows.append(Row(_path_ids(batch.nodes, leaf), tuple(positions), tuple(places)))
    return rows


def clipped_loss(batch: Batch, config: ClippedLossConfig | None = None) -> LossFunction:
    """The clipped policy loss, target by target."""
    settings = config or WIDE_LOSS

    def loss(logprobs: Tensor, _entropy: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        place = 0
        for node in batch.nodes:
            for offset in np.flatnonzero(node.target_mask):
                run = batch.runs[node.run]
                ratio = torch.exp(logprobs[place] - float(node.logprobs[offset]))
                if ratio > settings.ratio_max:
                    ratio = ratio.new_tensor(settings.ratio_max)
                bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
                total = total - min(ratio * run.advantage, bounded * run.advantage).double() / run.num_targets
                place += 1
        return total

    return loss


WIDE_LOSS = ClippedLossConfig(clip_low=0.95, clip_high=20.0, ratio_max=50.0)
"""Bounds that few targets reach, so that most of them have a gradient."""


def gradient_error(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a parameter's gradient, norm of the difference over norm, and its name.

    A parameter that has a gradient on one side only, other than zero, is infinitely wrong.
    """
    worst, worst_name = 0.0, ""
    for name in reference.keys() | gradients.keys():
        ours, theirs = gradients.get(name), reference.get(name)
        if ours is None or theirs is None:
            present = ours if theirs is None else theirs
            error = math.inf if present is not None and bool(present.any()) else 0.0
        else:
            norm = float(theirs.double().norm())
            difference = float((ours.double() - theirs.double()).norm())
            error = difference / norm if norm > 0 else (math.inf if difference > 0 else 0.0)
        if not error <= worst:
            worst, worst_name = error, name
    return worst, worst_name


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Copies of a model's gradients, by parameter."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _path_ids(nodes: Sequence[Node], index: int) -> tuple[int, ...]:
    return tuple(int(token) for n in path_to(nodes, index) for token in nodes[n].token_ids)


def _logits(model: Any, row: Row, experts: Choices | None, selected: Choices | None) -> tuple[Tensor, int]:
    """Logits ``[n, vocabulary]`` of a row's last n positions, and the position of the first of them."""
    ids = torch.tensor([row.token_ids])
    split = row.num_detached
    if split == 0:
        with _injected(model, row.token_ids, 0, experts, selected):
            return model(input_ids=ids, use_cache=False).logits[0], 0
    with torch.no_grad(), _injected(model, row.token_ids[:split], 0, experts, selected):
        prefix = model.base_model(input_ids=ids[:, :split], use_cache=True)
    cache = prefix.past_key_values
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):  # it would overwrite the state that the graph needs
            layer.update_recurrent_state = lambda state, *_, **__: state
    with _injected(model, row.token_ids, split, experts, selected):
        rest = model.base_model(input_ids=ids[:, split:], past_key_values=cache, use_cache=True)
    hidden = torch.cat((prefix.last_hidden_state[:, -1:], rest.last_hidden_state), dim=1)
    return model.get_output_embeddings()(hidden)[0], split - 1


@contextmanager
def _injected(
    model: Any, ids: tuple[int, ...], start: int, experts: Choices | None, selected: Choices | None
) -> Iterator[None]:
    """Let routers and indexers choose what was recorded for the tokens of a row from ``start`` on."""
    handles: list[Any] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        recorded = experts if kind.lower().endswith("topkrouter") else selected if kind.endswith("Indexer") else None
        if recorded is None:
            continue
        layer = int(name.split("layers.")[1].split(".")[0])
        choices = [recorded.get(ids[: position + 1], {}).get(layer) for position in range(start, len(ids))]
        shape = (len(choices), module.num_experts) if recorded is experts else (1, len(choices), len(ids))
        handles += _active_within(module, _Chosen(choices, shape))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recorded_experts(model: Any, batch: Batch) -> dict[tuple[int, ...], dict[int, Tensor]]:
    """What the model itself chooses when it evaluates each row, in the form in which choices are injected."""
    return _record(model, batch, "TopkRouter")


def recorded_positions(model: Any, batch: Batch) -> dict[tuple[int, ...], dict[int, Tensor]]:
    """Likewise, the positions that its indexers select."""
    return _record(model, batch, "Indexer")


@torch.no_grad()
def _record(model: Any, batch: Batch, kind: str) -> dict[tuple[int, ...], dict[int, Tensor]]:
    found: dict[tuple[int, ...], dict[int, Tensor]] = {}
    for row in node_rows(batch):
        handles = []
        for name, module in model.named_modules():
            if not type(module).__name__.lower().endswith(kind.lower()):
                continue
            layer = int(name.split("layers.")[1].split(".")[0])

            def keep(_module: Any, _inputs: Any, output: Any, layer: int = layer, row: Row = row) -> None:
                chosen = output[2] if isinstance(output, tuple) else output[0]
                for position, choice in enumerate(chosen):
                    is_seen = choice <= position if kind == "Indexer" else choice >= 0
                    found.setdefault(row.token_ids[: position + 1], {})[layer] = torch.where(is_seen, choice, -1)

            handles.append(module.register_forward_hook(keep))
        model(input_ids=torch.tensor([row.token_ids]), use_cache=False)
        for handle in handles:
            handle.remove()
    return found


def _active_within(module: Any, mode: TorchFunctionMode) -> list[Any]:
    """Hooks that make a mode active during the module's forward."""

    def enter(_module: Any, _inputs: Any) -> None:
        mode.__enter__()

    def leave(_module: Any, _inputs: Any, _output: Any) -> None:
        mode.__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


class _Chosen(TorchFunctionMode):
    """Replaces the result of the ``topk`` over a router's experts ``[T, experts]`` or an indexer's positions
    ``[1, T, positions]``. Routers that limit groups also take that of the groups, and of the best experts of each.

    A token for which nothing was recorded chooses for itself.
    """

    def __init__(self, choices: list[Tensor | None], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._choices = choices
        self._shape = shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape != self._shape:
            return result
        flat = result.indices.reshape(len(self._choices), -1).clone()
        for token, choice in enumerate(self._choices):
            if choice is not None:
                chosen = choice[choice >= 0].to(flat)
                padding = chosen[:1].expand(flat.shape[1] - len(chosen))  # a position chosen twice is chosen once
                flat[token] = torch.cat((chosen, padding))
        indices = flat.view_as(result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
