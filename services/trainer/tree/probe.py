"""Measures what a model costs: small walks through the executor itself, visit by visit, under an allocation tracker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.common.errors import ConfigError
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import ChunkBytes, Knot, ModelCosts, PackBytes
from services.trainer.tree.estimate import costs_from_config, costs_of_model
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest, Segment
from services.trainer.tree.head import backward_through_head
from services.trainer.tree.ledger import Way, chunk_facts, make_ledger
from services.trainer.tree.memory import AllocationTracker
from services.trainer.tree.plan import Chunk, Mode, Plan, Prediction, PrefixGradient, Visit, VisitKind
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StateStore

__all__ = ["costs_from_config", "costs_of_model", "measure_costs"]

_SCENE = (
    Visit(VisitKind.CAPTURE, 0),
    Visit(VisitKind.CAPTURE, 1),
    Visit(VisitKind.REPLAY, 2),
    Visit(VisitKind.BACKWARD, 1),
    Visit(VisitKind.BACKWARD, 0),
)
_HEAD_SHAPES = ((64, 64), (256, 256), (256, 64))
"""Targets, and targets whose logits are held at once."""


def measure_costs(
    executor: Executor,
    dtype: torch.dtype | None = None,
    *,
    sizes: Sequence[int] = (64, 256, 1024),
    count_weights: bool = True,
) -> ModelCosts:
    """What the executor's model costs, from walks over chunks of ``sizes`` tokens.

    Predictions are best for chunks between the smallest and the largest size. The executor must keep its states where
    the model is (an unlimited budget there). Random tokens go through the model; its gradients are cleared. ``dtype``:
    that of the forward, the model's own if it is not given. ``count_weights``: weights and their gradients count in
    ``constant_bytes``; otherwise a budget is for what comes beside them.

    Raises:
        ConfigError: the model has fewer positions than three chunks of the largest size.
        ValueError: fewer than two sizes.
    """
    model = executor.model
    sizes = sorted(set(sizes))
    if len(sizes) < 2:
        raise ValueError("it takes two sizes to tell what grows with them")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and 3 * sizes[-1] > positions:
        raise ConfigError(
            f"measuring chunks of {sizes[-1]:,} tokens takes sequences of {3 * sizes[-1]:,}; the model has "
            f"{positions:,} positions.",
            "Measure smaller sizes.",
        )
    adapter = adapter_for(model.config)
    costs = costs_of_model(model, adapter, dtype or model.dtype, count_weights=count_weights)
    probe = _Probe(executor)
    with probe.running():
        costs = replace(costs, **probe.walks(sizes, costs), **probe.head())
        if adapter.is_attention_only:
            costs = replace(costs, pack=probe.pack(sizes))
    costs = replace(costs, speeds=replace(costs.speeds, flops_per_s=probe.flops_per_s(sizes[-1], costs)))
    model.zero_grad(set_to_none=True)
    return costs


def _pages(size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (size,) if size == sizes[-1] else (size, sizes[-1])


@dataclass(frozen=True, slots=True)
class _Measured:
    """One chunk of a scene, in bytes."""

    page_tokens: int
    num_tokens: int
    page_state_bytes: int
    state_bytes: int
    accumulation_bytes: int
    """Of the page and the chunk."""
    capture_bytes: int
    graph_bytes: int
    input_bytes: int
    """Layer inputs in the store."""
    backward_bytes: int


@dataclass(slots=True)
class _Reading:
    """What is there after a visit, and the most that was there during it."""

    live_bytes: int
    stored_bytes: int
    peak_bytes: int


class _Meter:
    """Bytes of live tensors: PyTorch's own count on a GPU, elsewhere an allocation tracker's of what is made now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tracker = None if device.type == "cuda" else AllocationTracker()
        self._phase = contextlib.ExitStack()
        self._num_phases = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Readings are taken within the block."""
        with self._tracker or contextlib.nullcontext(), self._phase:
            self.restart()
            yield

    def restart(self) -> None:
        """Begin to look for a peak anew."""
        if self._tracker is None:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._phase.close()
        self._num_phases += 1
        self._phase.enter_context(self._tracker.phase(str(self._num_phases)))

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._tracker is None else self._tracker.current_bytes

    @property
    def peak_bytes(self) -> int:
        """Since the last restart."""
        if self._tracker is None:
            return torch.cuda.max_memory_allocated(self._device)
        return self._tracker.phase_peak_bytes[str(self._num_phases)]


class _Watch(Progress):
    """Stands in for a step's progress, to be told of the end of each visit. Saves nothing."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__(Path())
        self.meter = meter
        self.readings: list[_Reading] = []
        self.store: StateStore | None = None

    def restore(self, digest: str, model: Any, store: StateStore) -> int:
        self.store = store
        self.readings.append(self.read())
        self.meter.restart()
        return 0

    def note(self, num_visits: int, digest: str, model: Any, store: StateStore, *, is_last: bool) -> None:
        self.readings.append(self.read())
        self.meter.restart()

    def read(self) -> _Reading:
        assert self.store is not None
        stored = self.store.device_bytes + self.store.host_bytes
        return _Reading(self.meter.live_bytes, stored, self.meter.peak_bytes)


class _Probe:
    """Runs small walks and packs through an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._meter = _Meter(executor.model.device)
        self._model = executor.model
        self._device: torch.device = executor.model.device
        self._random = np.random.default_rng(0)
        self._vocab_size: int = self._model.config.get_text_config().vocab_size

    def running(self) -> contextlib.AbstractContextManager[None]:
        """All but speed is measured within."""
        return self._meter.running()

    def walks(self, sizes: Sequence[int], analytic: ModelCosts) -> dict[str, Any]:
        """Bytes of states and of chunks."""
        self.measure(sizes[0], sizes[0])  # makes the gradients of the parameters
        plain = {(size, page): self.measure(size, page) for size in sizes for page in _pages(size, sizes)}
        layered = {(size, size): self.measure(size, size, recompute_layers=True) for size in sizes}
        attended = self.measure(sizes[0], sizes[0], keep_attended=True)
        graph = _fit({key: one.graph_bytes for key, one in plain.items()})
        backward = _fit({key: one.backward_bytes for key, one in plain.items()})
        return {
            **_states(list(plain.values()), attended, analytic),
            "capture": _fit({key: one.capture_bytes for key, one in plain.items()}),
            "graph": graph,
            "backward": backward,
            "layer_input_bytes_per_token": float(
                np.mean([one.input_bytes / one.num_tokens for one in layered.values()])
            ),
            "layer_graph": _fit({key: one.graph_bytes for key, one in layered.items()}, graph),
            "layer_backward": _fit({key: one.backward_bytes for key, one in layered.items()}, backward),
        }

    def measure(
        self, size: int, page: int, *, recompute_layers: bool = False, keep_attended: bool = False
    ) -> _Measured:
        """A page, a chunk behind it, and a leaf like the chunk whose last token predicts the only target."""
        forest, plan = self._scene(size, page, Way(recompute_layers, keep_attended))
        watch = _Watch(self._meter)
        during: list[_Reading] = []

        def objective(index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
            during.append(watch.read())
            return torch.ones_like(logprobs)

        self._executor.train(forest, plan, 1.0, objective, progress=watch)
        start, page_done, chunk_done, leaf_done, pushed, _ = watch.readings
        (at_head,) = during
        inputs = at_head.stored_bytes - chunk_done.stored_bytes
        graph = at_head.live_bytes - chunk_done.live_bytes - inputs
        return _Measured(
            page_tokens=page,
            num_tokens=size,
            page_state_bytes=page_done.stored_bytes - start.stored_bytes,
            state_bytes=chunk_done.stored_bytes - page_done.stored_bytes,
            accumulation_bytes=leaf_done.stored_bytes - chunk_done.stored_bytes,
            capture_bytes=chunk_done.peak_bytes - chunk_done.live_bytes,
            graph_bytes=graph,
            input_bytes=inputs,
            backward_bytes=pushed.peak_bytes - leaf_done.live_bytes - inputs - graph,
        )

    def head(self) -> dict[str, Any]:
        """Bytes of the head by its rows."""
        head = self._model.get_output_embeddings()
        peaks = []
        for num_targets, num_rows in _HEAD_SHAPES:
            rows = torch.randn(num_targets, head.weight.shape[1], device=self._device, dtype=self._model.dtype)
            ids = torch.from_numpy(self._ids(num_targets)).long().to(self._device)
            peaks.append(self._peak_of(partial(backward_through_head, rows, head, ids, 1.0, num_rows, _slope)))
        (few, many, many_by_few), (low, high) = peaks, (_HEAD_SHAPES[0][0], _HEAD_SHAPES[1][0])
        own = rows.element_size() * rows.shape[1]
        per_target = max(0.0, (many_by_few - few) / (high - low))
        per_row = max(0.0, (many - many_by_few) / (high - low))
        return {
            "row_bytes": per_target + own,
            "head_bytes_per_row": per_row,
            "head_base_bytes": max(0.0, few - low * (per_target + per_row)),
        }

    def pack(self, sizes: Sequence[int]) -> PackBytes:
        """Bytes of packed rows, from some of different shapes."""
        low, middle, high = sizes[0], sizes[len(sizes) // 2], sizes[-1]
        shapes = [(low, low, 2), (high, low, 2), (low, high, 1), (high, low, 6), (high, high, 1)]
        shapes += [(2 * high, low, 1), (middle, middle, 2), (2 * high, middle, 2)]
        facts, peaks = [], []
        for root, leaf, num_leaves in shapes:
            forest = self._forest([root], [leaf] * num_leaves)
            plan = Plan(Mode.PACK, (), (), False, 64, Prediction(), "")
            peaks.append(self._peak_of(partial(self._executor.train, forest, plan, 1.0, _slope)))
            path = root + leaf
            facts.append([1.0, forest.num_tokens, num_leaves * path, num_leaves * leaf * path, root * root])
        return PackBytes(*_least_squares(facts, peaks))

    def flops_per_s(self, size: int, costs: ModelCosts) -> float:
        """Speed of a walk over chunks of one size."""
        forest, plan = self._scene(size, size, Way())
        facts = chunk_facts(forest, costs, plan.chunks, PrefixGradient.EXACT, keep_attended=False)
        flops = make_ledger(facts, costs, plan.visits, Way()).work.flops
        self._wait()
        start_s = time.perf_counter()
        self._executor.train(forest, plan, 1.0, _slope)
        self._wait()
        return max(1.0, flops) / (time.perf_counter() - start_s)

    def _peak_of(self, run: Callable[[], object]) -> int:
        """Most bytes that a run holds beyond what was there."""
        start_bytes = self._meter.live_bytes
        self._meter.restart()
        run()
        return self._meter.peak_bytes - start_bytes

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _scene(self, size: int, page: int, way: Way) -> tuple[Forest, Plan]:
        forest = self._forest([page, size], [size])
        chunks = (Chunk(0, 0, page, 0, -1), Chunk(0, page, size, page, 0), Chunk(1, 0, size, page + size, 1))
        plan = Plan(
            Mode.WALK, chunks, _SCENE, way.recompute_layers, 64, Prediction(), "", keep_attended=way.keep_attended
        )
        return forest, plan

    def _forest(self, root: Sequence[int], leaves: Sequence[int]) -> Forest:
        """A root, cut as given, and leaves whose last token predicts a target."""
        none = np.zeros(0, dtype=np.int32)
        segments = [Segment(-1, 0, self._ids(sum(root)), none, 0, True)]
        for index, size in enumerate(leaves):
            last = np.array([size - 1], dtype=np.int32)
            segments.append(Segment(0, sum(root), self._ids(size), last, index, False))
        count = len(leaves)
        return Forest(
            segments=tuple(segments),
            target_ids=self._ids(count),
            target_runs=np.arange(count, dtype=np.int32),
            behaviour=np.zeros(count, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int64),
        )

    def _ids(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self._random.integers(0, self._vocab_size, count).astype(np.int32)


def _slope(_which: object, logprobs: Tensor, _entropy: Tensor) -> Tensor:
    return torch.ones_like(logprobs)


def _states(scenes: Sequence[_Measured], attended: _Measured, analytic: ModelCosts) -> dict[str, Any]:
    """Bytes of states and of their gradients, by token and by boundary.

    In a scene one boundary collects gradients, but none for its last hidden state, which predicts no target there.
    """
    facts, states, sums, gradients = [], [], [], []
    for one in scenes:
        facts += [[1.0, one.page_tokens], [1.0, one.num_tokens]]
        states += [one.page_state_bytes, one.state_bytes]
        sums.append([1.0, one.page_tokens + one.num_tokens])
        gradients.append(one.accumulation_bytes)
    boundary, per_token = _least_squares(facts, states)
    of_boundary, of_token = _least_squares(sums, gradients)
    return {
        "state_bytes_per_token": per_token,
        "boundary_bytes": boundary,
        "accumulation_bytes_per_token": of_token,
        "boundary_accumulation_bytes": max(of_boundary, analytic.boundary_accumulation_bytes),
        "attended_bytes_per_token": max(0.0, (attended.state_bytes - boundary) / attended.num_tokens - per_token),
    }


def _fit(measured: dict[tuple[int, int], int], like: ChunkBytes | None = None) -> ChunkBytes:
    """Bytes by (size, page) as knots. How they grow with the page is measured for all sizes but the largest, where it
    goes on in the same way; or it is as with ``like``."""
    sizes = sorted({size for size, _ in measured})
    if like is not None:
        slopes = [knot.per_page_token for knot in like.knots]
    else:
        slopes = [(measured[size, sizes[-1]] - measured[size, size]) / (sizes[-1] - size) for size in sizes[:-1]]
        before = slopes[-2:] if len(slopes) > 1 else slopes * 2
        share = (sizes[-1] - sizes[-2]) / (sizes[-2] - sizes[-3]) if len(slopes) > 1 else 0.0
        slopes.append(before[1] + share * (before[1] - before[0]))
    return ChunkBytes(
        tuple(Knot(size, measured[size, size] - size * slope, slope) for size, slope in zip(sizes, slopes, strict=True))
    )


def _least_squares(facts: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients with small relative errors, none of them negative: those that would be are left out."""
    scale = np.maximum(np.array(values, dtype=np.float64), 1.0)
    matrix, vector = np.array(facts, dtype=np.float64) / scale[:, None], np.array(values, dtype=np.float64) / scale
    used = list(range(matrix.shape[1]))
    found = np.zeros(0)
    while used:
        found = np.linalg.lstsq(matrix[:, used], vector, rcond=None)[0]
        shares = found * matrix[:, used].mean(axis=0)
        if (shares >= -1e-9).all():
            break
        del used[int(np.argmin(shares))]
    result = [0.0] * matrix.shape[1]
    for place, value in zip(used, found, strict=False):
        result[place] = max(0.0, float(value))
    return result
