"""The measurements of the tree benchmark, each to be made in a process of its own."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tree_world import (
    CONFIGS,
    HEAD_ROWS,
    IN_FLOAT64,
    Group,
    Loss,
    agent_nodes,
    gradient_error,
    gradients_of,
    group_nodes,
    leaf_rows,
    make_executor,
    make_model,
    train_flattened,
    train_tree,
    unrounded_recurrence,
)
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.estimate import costs_of_model
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.memory import AllocationTracker
from services.trainer.tree.plan import ModeChoice, Plan, PlanOptions, PrefixGradient, Recompute, make_plan
from services.trainer.tree.probe import measure_costs
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StateStore, StoreBudget
from services.trainer.types import Node

MEMORY_BYTES = 2 << 30
"""What the trainer's configuration gives states and activations unless told otherwise."""
_BLOCK_TOKENS = 64
_MIB = 1 << 20


def nodes_of(forest: str | Sequence[int]) -> tuple[Node, ...]:
    """``agent``, or the prompt's tokens, the tokens of a response and the size of a group."""
    return agent_nodes() if forest == "agent" else group_nodes(Group(*forest))


def options_for(model: Any, **settings: Any) -> PlanOptions:
    """As the trainer sets them, but for ``settings``."""
    alignment_tokens = 1 if adapter_for(model.config).is_attention_only else _BLOCK_TOKENS
    kinds: dict[str, Any] = {"mode": ModeChoice, "recompute": Recompute, "prefix_gradient": PrefixGradient}
    chosen: dict[str, Any] = {name: kinds[name](value) if name in kinds else value for name, value in settings.items()}
    return PlanOptions(**{"alignment_tokens": alignment_tokens, "head_rows": HEAD_ROWS, **chosen})


def trainer_plan(model: Any, forest: Forest, **settings: Any) -> Plan:
    """The plan that the trainer would make."""
    costs = costs_of_model(model, adapter_for(model.config), model.dtype)
    return make_plan(forest, costs, Budget(MEMORY_BYTES), options_for(model, **settings))


# -- time -------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Processor seconds of steps that are taken in turns, so that none has the machine's better minutes."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def take(self, name: str, model: Any, step: Callable[[], float]) -> float:
        """One step, with the gradients cleared before. Returns the loss."""
        model.zero_grad(set_to_none=True)
        started_s = time.process_time()
        loss = step()
        self._seconds.setdefault(name, []).append(time.process_time() - started_s)
        return loss

    def median(self, name: str) -> float:
        return statistics.median(self._seconds[name])


def speedup(config: str, settings: dict[str, Any], forest: str | list[int], repetitions: int) -> dict[str, Any]:
    """The trainer's own plan, and a walk that recomputes its chunks, against flattened rows."""
    nodes = nodes_of(forest)
    tree = make_forest(nodes)
    loss = Loss.of(nodes)
    flat_model, tree_model = (make_model(CONFIGS[config](**settings)) for _ in range(2))
    executor = make_executor(tree_model)
    plans = {
        "tree": trainer_plan(tree_model, tree),
        "walk": trainer_plan(tree_model, tree, mode=ModeChoice.WALK, recompute=Recompute.CHUNK),
    }
    watch = Stopwatch()
    errors: list[float] = []
    for _ in range(repetitions):
        watch.take("flat", flat_model, partial(train_flattened, flat_model, nodes))
        for name, plan in plans.items():
            watch.take(name, tree_model, partial(train_tree, executor, tree, plan, loss))
            errors.append(gradient_error(gradients_of(tree_model), gradients_of(flat_model)))
    return {
        "speedup": watch.median("flat") / watch.median("tree"),
        "speedup_walk": watch.median("flat") / watch.median("walk"),
        "flattened_s": watch.median("flat"),
        "tree_s": watch.median("tree"),
        "walk_s": watch.median("walk"),
        "plan": plans["tree"].reason,
        "walk_plan": plans["walk"].reason,
        "unique_tokens": tree.num_tokens,
        "flattened_tokens": sum(len(row.token_ids) for row in leaf_rows(nodes)),
        "grad_rel_err": max(errors),
    }


def detached(config: str, settings: dict[str, Any], forest: list[int], repetitions: int) -> dict[str, Any]:
    """What the prompt's gradient costs, and what is wrong without it."""
    nodes = nodes_of(forest)
    tree = make_forest(nodes)
    loss = Loss.of(nodes)
    model = make_model(CONFIGS[config](**settings))
    walk = {"mode": ModeChoice.WALK, "recompute": Recompute.CHUNK}
    executor = make_executor(model)
    plans = {kind.value: trainer_plan(model, tree, **walk, prefix_gradient=kind) for kind in PrefixGradient}
    plans["kept"] = trainer_plan(model, tree, mode=ModeChoice.WALK, recompute=Recompute.KEEP)
    watch = Stopwatch()
    gradients: dict[str, dict[str, Tensor]] = {}
    for _ in range(repetitions):
        for name, plan in plans.items():
            watch.take(name, model, partial(train_tree, executor, tree, plan, loss))
            gradients[name] = gradients_of(model)
    exact, dropped = gradients[PrefixGradient.EXACT], gradients[PrefixGradient.DETACHED]
    difference = sum(float((dropped[name] - exact[name]).square().sum()) for name in exact)
    norm = sum(float(gradient.square().sum()) for gradient in exact.values())
    return {
        "exact_over_detached_time": watch.median(PrefixGradient.EXACT) / watch.median(PrefixGradient.DETACHED),
        "kept_over_detached_time": watch.median("kept") / watch.median(PrefixGradient.DETACHED),
        "exact_s": watch.median(PrefixGradient.EXACT),
        "detached_s": watch.median(PrefixGradient.DETACHED),
        "grad_rel_err": (difference / norm) ** 0.5,
        "grad_rel_err_of_worst_parameter": gradient_error(dropped, exact),
    }


# -- exactness --------------------------------------------------------------------------------------------------------


def exactness(config: str) -> dict[str, float]:
    """Gradients by the executor against those of plain autograd over whole rows, without checkpointing."""
    dtype = torch.float64 if config in IN_FLOAT64 else torch.float32
    worst = 0.0
    for nodes in (agent_nodes(shrink=16), group_nodes(Group(300, 40, 4))):
        forest = make_forest(nodes)
        model = make_model(CONFIGS[config](), dtype)
        with unrounded_recurrence():
            train_flattened(model, nodes, checkpointing=False)
        reference = gradients_of(model)
        model = make_model(CONFIGS[config](), dtype)
        executor = make_executor(model)
        ways: tuple[dict[str, Any], ...] = (
            {"mode": ModeChoice.WALK, "recompute": Recompute.CHUNK, "max_chunk_tokens": 96},
            {"mode": ModeChoice.WALK, "recompute": Recompute.KEEP, "max_chunk_tokens": 128},
            {},
        )
        for way in ways:
            model.zero_grad(set_to_none=True)
            train_tree(executor, forest, trainer_plan(model, forest, **way), Loss.of(nodes))
            worst = max(worst, gradient_error(gradients_of(model), reference))
    return {"grad_rel_err": worst}


# -- memory -----------------------------------------------------------------------------------------------------------


class _Watch(Progress):
    """Sees a step's store at the end of each visit. Saves nothing."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.disk_bytes = 0

    def restore(self, digest: str, model: Any, store: StateStore) -> int:
        return 0

    def note(self, num_visits: int, digest: str, model: Any, store: StateStore, *, is_last: bool) -> None:
        self.disk_bytes = max(self.disk_bytes, store.peaks.disk)


@dataclass(frozen=True, slots=True)
class Peak:
    """Most bytes at once: of live tensors, weights and their gradients included, and in page files."""

    live_bytes: int
    disk_bytes: int


def tree_peak(model: Any, nodes: Sequence[Node], forest: Forest, plan: Plan, disk_bytes: int | None = None) -> Peak:
    """Of one step by a plan. ``disk_bytes``: most that page files may take."""
    watch = _Watch()
    gc.collect()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-tree-") as folder:  # /tmp may be memory
        executor = make_executor(model, StoreBudget(folder=Path(folder), disk_bytes=disk_bytes))
        with AllocationTracker(count_existing=True) as tracker:
            train_tree(executor, forest, plan, Loss.of(nodes), watch if plan.visits else None)
    return Peak(tracker.peak_bytes, watch.disk_bytes)


def flattened_peak(model: Any, nodes: Sequence[Node]) -> Peak:
    """Of one step over flattened rows."""
    gc.collect()
    with AllocationTracker(count_existing=True) as tracker:
        train_flattened(model, nodes)
    return Peak(tracker.peak_bytes, 0)


def group_memory(config: str, settings: dict[str, Any], forest: list[int], chunk_tokens: int) -> dict[str, Any]:
    """Peak of a walk over a group."""
    nodes = nodes_of(forest)
    tree = make_forest(nodes)
    model = make_model(CONFIGS[config](**settings))
    plan = trainer_plan(model, tree, mode=ModeChoice.WALK, recompute=Recompute.CHUNK, max_chunk_tokens=chunk_tokens)
    return {"live_bytes": tree_peak(model, nodes, tree, plan).live_bytes, "plan": plan.reason}


def measured_costs(config: str, settings: dict[str, Any]) -> ModelCosts:
    """By small walks; nothing of them is left behind."""
    costs = measure_costs(make_executor(make_model(CONFIGS[config](**settings))))
    gc.collect()
    return costs


def prediction(
    config: str, settings: dict[str, Any], forest: str | list[int], options: dict[str, Any], budget: dict[str, Any]
) -> dict[str, Any]:
    """The peak that the plan foretells from measured costs, over the peak that is measured."""
    nodes = nodes_of(forest)
    tree = make_forest(nodes)
    costs = measured_costs(config, settings)
    model = make_model(CONFIGS[config](**settings))
    plan = make_plan(tree, costs, Budget(**budget), options_for(model, **options))
    peak = tree_peak(model, nodes, tree, plan)
    return {
        "ratio": plan.predicted.live_bytes / peak.live_bytes,
        "predicted_mib": plan.predicted.live_bytes / _MIB,
        "measured_mib": peak.live_bytes / _MIB,
        "predicted_disk_mib": plan.predicted.disk_bytes / _MIB,
        "measured_disk_mib": peak.disk_bytes / _MIB,
        "plan": plan.reason,
    }
