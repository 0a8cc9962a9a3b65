"""Processes that train batches together, each its part of every chunk.

``python -m tests.unit.trainer.tree.sharing FOLDER`` starts them: the first two train the cases of two ranks while the
last one trains all cases alone; then all of them train those of three. What they got is left in ``FOLDER``, with the
errors of ranks that were left alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import services.trainer.tree.executor as executor_module
from services.common.errors import TidegateError
from services.trainer.packing import Batch
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.attend import TOKEN_STATES
from services.trainer.tree.executor import Executor, Scores
from services.trainer.tree.experts import ExpertShards, shard_experts
from services.trainer.tree.forest import make_forest
from services.trainer.tree.plan import PrefixGradient, Recompute
from services.trainer.tree.ranks import Ranks
from services.trainer.tree.store import StateKey, StateStore, StoreBudget
from tests.unit.trainer.tree.forests import Shape, chain, make_batch
from tests.unit.trainer.tree.models import Unrounded, make_model
from tests.unit.trainer.tree.walks import Objective, Way

NUM_PROCESSES = 3
TIMEOUT_S = 300.0
SHORT_TIMEOUT_S = 0.5
PATHS = (32, 48, 64)
"""Tokens of paths, in multiples of a chunk."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch and how it is trained."""

    family: str
    way: Way = field(default_factory=Way)
    dtype: torch.dtype = torch.float64
    is_unrounded: bool = False
    """The model is float64 throughout."""
    num_ranks: int = 2
    is_scored: bool = False
    shares_experts: bool = False
    seed: int = 1
    chain_tokens: int = 0
    """Instead of a random forest a single path of so many tokens, and a last target."""

    @property
    def batch(self) -> Batch:
        return chain(self.chain_tokens + 1, ()) if self.chain_tokens else make_batch(self.seed, _SMALL)

    @property
    def tolerance(self) -> float:
        """Of the largest relative error of a parameter's gradient."""
        if self.dtype == torch.float32:
            return 2e-5
        return 1e-9 if self.is_unrounded else 2e-6


_DETACHED = PrefixGradient.DETACHED
_SMALL = Shape(num_runs=2, max_own_nodes=2, prompt_tokens=7, long_tokens=9)
"""Chunks of one token, and parts shorter than a convolution, are among those of seeds 1 and 2."""

CASES = {
    "attention": Case("llama", is_unrounded=True, is_scored=True),
    "three ranks": Case("qwen3_window", is_unrounded=True, is_scored=True, num_ranks=3),
    "kept graphs": Case("qwen3", Way(recompute=Recompute.KEEP), torch.float32, seed=2),
    "layer by layer, attended kept": Case(
        "qwen3_window", Way(recompute_layers=True, keep_attended=True), is_unrounded=True
    ),
    "detached": Case("mistral", Way(prefix_gradient=_DETACHED), torch.float32),
    "experts": Case("qwen3_moe", dtype=torch.float32),
    "shared experts": Case("qwen3_moe", Way(recompute_layers=True), is_scored=True, shares_experts=True),
    "hybrid": Case("qwen3_5", is_scored=True),
    "hybrid, layer by layer, shared experts": Case("qwen3_next", Way(recompute_layers=True), shares_experts=True),
    "hybrid, detached, kept graphs": Case(
        "qwen3_5_moe", Way(recompute=Recompute.KEEP, prefix_gradient=_DETACHED), torch.float32
    ),
    "latents, shared experts": Case("deepseek_v3", shares_experts=True),
    "chosen positions": Case("deepseek_v32", is_unrounded=True, is_scored=True),
    "chosen positions, layer by layer": Case("glm_moe_dsa", Way(recompute_layers=True), torch.float32),
} | {f"path of {n}": Case("llama", Way(chunk_tokens=16), torch.float32, chain_tokens=n) for n in PATHS}


@dataclass(slots=True)
class Outcome:
    """What came of a case."""

    gradients: dict[str, Tensor]
    """Of all ranks together."""
    norm: float
    """Of all of it."""
    loss: float
    scores: Scores | None
    logits: Tensor | None
    """``[T, vocabulary]`` for some tokens, by the model on its own with the weights of all ranks."""
    stored_bytes: list[int]
    """Of token states, by rank."""
    sent_bytes: int
    """From the first rank to others."""


class CountingStore(StateStore):
    """Counts the bytes of the token states that are put into it."""

    num_bytes = 0

    def put(self, key: StateKey, tensors: Sequence[Tensor], *, needs_gradient: bool = True) -> None:
        if key.part == TOKEN_STATES:
            CountingStore.num_bytes += sum(tensor.nbytes for tensor in tensors)
        super().put(key, tensors, needs_gradient=needs_gradient)


def train(case: Case, group: dist.ProcessGroup | None) -> Outcome:
    """Train a case alone (no group), or together with the other ranks of a group."""
    with Unrounded() if case.is_unrounded else contextlib.nullcontext():
        return _train(case, group)


def _train(case: Case, group: dist.ProcessGroup | None) -> Outcome:
    model = make_model(case.family, case.dtype)
    batch = case.batch
    executor = Executor(model, adapter_for(model.config), budget=StoreBudget(), group=group)
    shards = shard_experts(model, group) if group is not None and case.shares_experts else None
    forest = make_forest(batch.nodes)
    plan = case.way.plan(forest)
    CountingStore.num_bytes = 0
    scores = executor.score(forest, plan, case.way.temperature) if case.is_scored else None
    objective = Objective(forest, batch, case.way.loss)
    executor.train(forest, plan, case.way.temperature, objective)
    loss = torch.tensor(objective.loss)
    stored_bytes = torch.tensor(CountingStore.num_bytes)[None]
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    sent_bytes = 0
    if group is not None:
        ranks = Ranks(group)
        ranks.sum(loss)
        stored_bytes = ranks.collect(stored_bytes, [1] * ranks.size)
        (shards or ExpertShards(ranks, {})).reduce(gradients)
        assert executor._ranks is not None
        sent_bytes = executor._ranks.sent_bytes
    norm = shards.norm(gradients) if shards else torch.stack([g.norm() for g in gradients.values()]).norm()
    weights = dict(model.named_parameters())
    if shards is not None:
        gradients = _whole(shards, gradients)
        weights = _whole(shards, weights)
    logits = _logits(model, weights) if case.shares_experts else None
    return Outcome(gradients, float(norm), float(loss), scores, logits, stored_bytes.tolist(), sent_bytes)


def _whole(shards: ExpertShards, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = {name: shards.whole(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(shards.own(name, whole[name]), tensor)
    return whole


@torch.no_grad()
def _logits(model: Any, weights: dict[str, Tensor]) -> Tensor:
    ids = torch.arange(12)[None]
    arguments = {"input_ids": ids, "use_cache": False}
    return torch.func.functional_call(model, weights, kwargs=arguments).logits[0]


def run_rank(rank: int, folder: Path) -> None:
    """What one of the processes does."""
    torch.set_num_threads(1)
    executor_module.StateStore = CountingStore  # type: ignore[misc]
    store = dist.FileStore(str(folder / "store"), NUM_PROCESSES)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_PROCESSES, timeout=timedelta(seconds=TIMEOUT_S)
    )
    pair = dist.new_group([0, 1])
    for name, case in sorted(CASES.items(), key=lambda item: item[1].num_ranks):
        if rank == NUM_PROCESSES - 1:
            torch.save(train(case, None), folder / f"{name}.alone.pt")
        if rank < case.num_ranks:
            outcome = train(case, pair if case.num_ranks == 2 else dist.group.WORLD)
            if rank == 0:
                torch.save(outcome, folder / f"{name}.together.pt")
    refused = [_error(shard_experts, make_model("llama"), dist.group.WORLD)]
    refused += [_error(shard_experts, make_model("qwen3_moe", num_experts=2), dist.group.WORLD)]
    lost = _be_left(rank, store) if rank < 2 else []
    if rank == 0:
        torch.save({"refused": refused, "lost": lost}, folder / "errors.pt")
    os._exit(0)  # a group of which a rank is gone cannot be taken down in order


def _be_left(rank: int, store: dist.Store) -> list[str]:
    """The errors of the first rank when the second one hangs, and when it ends."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=SHORT_TIMEOUT_S), use_local_synchronization=True)]
    groups += [dist.new_group([0, 1], use_local_synchronization=True)]
    for group in groups:
        dist.barrier(group=group)
    if rank == 1:
        store.wait(["the first rank gave up waiting"])
        os._exit(0)
    hung = _error(train, CASES["attention"], groups[0])
    store.set("the first rank gave up waiting", "")
    return [hung, _error(train, CASES["attention"], groups[1])]


def _error(function: Callable[..., Any], *arguments: Any) -> str:
    """Kind and text of the error that a call raises."""
    try:
        function(*arguments)
    except TidegateError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> int:
    """Fork the processes, so that what takes long to import is imported once."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for case in CASES.values():
        make_model(case.family, case.dtype)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()])
            if any(process.exitcode for process in processes):
                return 1
        return 0
    finally:
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    from tests.unit.trainer.tree import sharing

    sys.exit(sharing.main(Path(sys.argv[1])))  # as a module that the reader of what is pickled knows, too
