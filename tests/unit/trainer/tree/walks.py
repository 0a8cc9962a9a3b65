"""The tree executor run on a batch, with everything that the reference is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.config import ClippedLossConfig
from services.trainer.loss import clipped_policy_loss
from services.trainer.packing import Batch
from services.trainer.tree import states
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.costs import Budget, ModelCosts
from services.trainer.tree.executor import Executor, Scores
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.plan import ModeChoice, Plan, PlanOptions, PrefixGradient, Recompute, make_plan
from services.trainer.tree.store import StoreBudget
from tests.unit.trainer.tree.reference import WIDE_LOSS, gradients_of

Table = dict[tuple[int, ...], dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class Way:
    """How a batch is trained."""

    chunk_tokens: int = 5
    recompute: Recompute = Recompute.CHUNK
    recompute_layers: bool = False
    keep_attended: bool = False
    prefix_gradient: PrefixGradient = PrefixGradient.EXACT
    mode: ModeChoice = ModeChoice.WALK
    alignment_tokens: int = 1
    head_rows: int = 7
    temperature: float = 0.9
    loss: ClippedLossConfig = WIDE_LOSS

    def plan(self, forest: Forest) -> Plan:
        options = PlanOptions(
            prefix_gradient=self.prefix_gradient,
            recompute=self.recompute,
            mode=self.mode,
            min_chunk_tokens=1,
            max_chunk_tokens=self.chunk_tokens,
            alignment_tokens=self.alignment_tokens,
            head_rows=self.head_rows,
        )
        costs = ModelCosts(can_pack=self.mode is ModeChoice.PACK)
        plan = make_plan(forest, costs, Budget(), options)
        return replace(plan, recompute_layers=self.recompute_layers, keep_attended=self.keep_attended)


@dataclass(slots=True)
class Outcome:
    """What training a batch gave."""

    loss: float
    gradients: dict[str, Tensor]
    scores: Scores | None
    """Of ``Executor.score``, by the forest's order of targets."""
    logprobs: Tensor
    """Those that the objective was given, in the same order."""
    forest: Forest
    plan: Plan
    experts: Table = field(default_factory=dict)
    selected: Table = field(default_factory=dict)


def make_executor(model: Any, budget: StoreBudget | None = None) -> Executor:
    """An executor that remembers choices."""
    return Executor(model, adapter_for(model.config), budget=budget or StoreBudget(), keep_choices=True)


def train(
    executor: Executor, batch: Batch, way: Way | None = None, *, with_scores: bool = False, clear: bool = True
) -> Outcome:
    """Loss and gradients of a batch by the executor; ``clear``: the model's gradients are cleared before and after."""
    way = way or Way()
    model = executor.model
    forest = make_forest(batch.nodes)
    plan = way.plan(forest)
    if clear:
        model.zero_grad(set_to_none=True)
    scores = executor.score(forest, plan, way.temperature) if with_scores else None
    objective = Objective(forest, batch, way.loss)
    with _selections(model) as seen:
        executor.train(forest, plan, way.temperature, objective)
    gradients = gradients_of(model)
    if clear:
        model.zero_grad(set_to_none=True)
    return Outcome(
        objective.loss,
        gradients,
        scores,
        objective.logprobs,
        forest,
        plan,
        experts=_expert_table(executor, forest, plan),
        selected=_table(forest, plan, seen),
    )


class Objective:
    """The clipped loss for ``Executor.train``. Every target is asked for once."""

    def __init__(self, forest: Forest, batch: Batch, config: ClippedLossConfig) -> None:
        self._forest = forest
        self._runs = torch.tensor([[run.advantage, 1 / run.num_targets] for run in batch.runs], dtype=torch.float64)
        self._config = config
        self.loss = 0.0
        self.logprobs = torch.full((len(forest.target_ids),), torch.nan, dtype=torch.float64)

    def __call__(self, index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
        assert self.logprobs[index].isnan().all(), "a target's objective is asked for once"
        self.logprobs[index] = logprobs.detach().double()
        leaf = logprobs.detach().requires_grad_()
        runs = self._runs[torch.from_numpy(self._forest.target_runs).long()[index]].to(leaf.dtype)
        behaviour = torch.from_numpy(self._forest.behaviour)[index].to(leaf.dtype)
        with torch.enable_grad():
            loss, sums = clipped_policy_loss(leaf, behaviour, runs[:, 0], runs[:, 1], entropy, self._config)
            (slope,) = torch.autograd.grad(loss, leaf)
        self.loss += sums.loss
        return slope


def by_forest(batch: Batch, forest: Forest, values: Tensor) -> Tensor:
    """Values of targets by node and offset, in the order of the forest's. Targets are told apart by behaviour."""
    behaviour = np.concatenate([node.logprobs[node.target_mask] for node in batch.nodes])
    assert len(set(behaviour.tolist())) == len(behaviour)
    place = {value: index for index, value in enumerate(behaviour.tolist())}
    return values[torch.tensor([place[value] for value in forest.behaviour.tolist()])]


def path_ids(forest: Forest, segment: int) -> tuple[int, ...]:
    """The tokens from the root to the end of a segment."""
    ids: tuple[int, ...] = ()
    while segment >= 0:
        ids = (*forest.segments[segment].token_ids.tolist(), *ids)
        segment = forest.segments[segment].parent
    return ids


def _table(forest: Forest, plan: Plan, recorded: Sequence[tuple[int, int, Tensor]]) -> Table:
    """From what was chosen by chunk, layer and token of the chunk to what was chosen by path."""
    table: Table = {}
    for index, layer, rows in recorded:
        chunk = plan.chunks[index]
        ids = path_ids(forest, chunk.segment)
        for offset, row in enumerate(rows):
            path = ids[: chunk.start + offset + 1]
            table.setdefault(path, {})[layer] = row
    return table


def _expert_table(executor: Executor, forest: Forest, plan: Plan) -> Table:
    recorded = [(key.chunk, key.layer, rows) for key, rows in executor.choices.items() if "expert" in key.part]
    return _table(forest, plan, recorded)


@contextmanager
def _selections(model: Any) -> Iterator[list[tuple[int, int, Tensor]]]:
    """Collects what the indexers of a model select: chunk, layer, positions ``[T, k]``."""
    seen: list[tuple[int, int, Tensor]] = []

    def see(module: Any, _inputs: Any, output: Tensor) -> None:
        context = states.current()
        if context is not None:
            chunk = next(iter(context.choices)).chunk
            seen.append((chunk, module.layer_idx, output[0].clone()))

    handles = [m.register_forward_hook(see) for m in model.modules() if type(m).__name__.endswith("Indexer")]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
