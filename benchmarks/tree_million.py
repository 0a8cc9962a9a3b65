"""One step over a million positions of a small hybrid model, which goes on from its folder after it was killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tree_world import (
    HEAD_ROWS,
    LAYERS,
    Group,
    Loss,
    gradient_error,
    gradients_of,
    group_nodes,
    hybrid_config,
    make_executor,
    make_model,
    train_flattened,
    train_tree,
)
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.memory import AllocationTracker, peak_resident_bytes
from services.trainer.tree.plan import Mode, Plan, Prediction
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StateStore
from services.trainer.tree.visits import PrefixGradient, VisitKind, cut_chunks, list_visits

POSITIONS = 1_000_000
GROUP_SIZE, RESPONSE_TOKENS = 8, 256
CHUNK_TOKENS = 8192
"""The attention kernels are within 1% of their best, and a visit near the end takes a minute."""
ALIGNMENT_TOKENS = 64
"""Blocks of the linear layers' own kernel: cut there, a chunk rounds as the whole sequence does."""
BACKWARD_PAIRS = 2.65
"""Time of a pair of positions in the attention's backward, in units of its forward: for the forecast only."""
_GIB = 1 << 30


def million_plan(forest: Forest, chunk_tokens: int = CHUNK_TOKENS) -> Plan:
    """Every chunk evaluated twice, but its attention over what stands before it only once."""
    chunks = cut_chunks(forest, chunk_tokens, ALIGNMENT_TOKENS)
    visits = list_visits(forest, chunks, PrefixGradient.EXACT, frozenset())
    return Plan(Mode.WALK, chunks, visits, False, HEAD_ROWS, Prediction(), "as the benchmark wants", keep_attended=True)


class LoggedProgress(Progress):
    """Counts time and memory over all processes that worked on the step, and says how far it is."""

    def __init__(self, folder: Path, every_s: float, plan: Plan, tracker: AllocationTracker) -> None:
        counts = {name: torch.zeros((), dtype=torch.float64) for name in ("seconds", "live_bytes", "resident_bytes")}
        super().__init__(folder, every_s, sums=counts)
        self.counts = counts
        self.started_s = time.monotonic()
        self._tracker = tracker
        self._work = _work_done(plan)
        self._last_s = self.started_s

    def note(self, num_visits: int, digest: str, model: Any, store: StateStore, *, is_last: bool) -> None:
        now_s = time.monotonic()
        self.counts["seconds"] += now_s - self._last_s
        self._last_s = now_s
        _raise_to(self.counts["live_bytes"], self._tracker.peak_bytes)
        _raise_to(self.counts["resident_bytes"], peak_resident_bytes())
        super().note(num_visits, digest, model, store, is_last=is_last)
        done = self._work[num_visits] - self._work[self.resumed_visits]
        left_s = (1 - self._work[num_visits]) * (now_s - self.started_s) / max(done, 1e-9)
        print(
            f"visit {num_visits} of {len(self._work) - 1}: {float(self.counts['seconds']):.0f} s,"
            f" {self._work[num_visits]:.1%} of the pairs, about {left_s:.0f} s to go,"
            f" {peak_resident_bytes() / _GIB:.2f} GiB resident at most",
            file=sys.stderr,
            flush=True,
        )


def _raise_to(count: Tensor, value: float) -> None:
    count.fill_(max(float(count), value))


def _work_done(plan: Plan) -> list[float]:
    """The share of the attention's pairs that is done after so many visits."""
    done = [0.0]
    for visit in plan.visits:
        chunk = plan.chunks[visit.chunk]
        pairs = chunk.num_tokens * (chunk.start + chunk.num_tokens / 2)
        weight = {VisitKind.CAPTURE: 1.0, VisitKind.BACKWARD: BACKWARD_PAIRS, VisitKind.REPLAY: 1 + BACKWARD_PAIRS}
        done.append(done[-1] + weight.get(visit.kind, 0.0) * pairs)
    return [work / done[-1] for work in done]


def million(
    folder: Path, num_positions: int = POSITIONS, every_s: float = 300.0, chunk_tokens: int = CHUNK_TOKENS
) -> dict[str, Any]:
    """The step over ``num_positions``, begun in ``folder`` or gone on with."""
    group = Group(num_positions - GROUP_SIZE * RESPONSE_TOKENS, RESPONSE_TOKENS, GROUP_SIZE)
    nodes = group_nodes(group)
    forest = make_forest(nodes)
    plan = million_plan(forest, chunk_tokens)
    model = make_model(hybrid_config())
    with AllocationTracker(count_existing=True) as tracker:
        progress = LoggedProgress(folder, every_s, plan, tracker)
        loss = train_tree(make_executor(model), forest, plan, Loss.of(nodes), progress)
    return {
        "positions": group.num_positions,
        "group": group.size,
        "response_tokens": group.response_tokens,
        "layers": list(LAYERS),
        "attention_width": model.config.num_attention_heads * model.config.head_dim,
        "hidden": model.config.hidden_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": "float32",
        "chunk_tokens": chunk_tokens,
        "seconds": float(progress.counts["seconds"]),
        "threads": torch.get_num_threads(),
        "peak_resident_gib": float(progress.counts["resident_bytes"]) / _GIB,
        "peak_live_gib": float(progress.counts["live_bytes"]) / _GIB,
        "resumed_after_visits": progress.resumed_visits,
        "visits": len(plan.visits),
        "loss": loss,
        "gradient_norm": float(sum(of.square().sum() for of in gradients_of(model).values())) ** 0.5,
    }


def verify(num_positions: int, chunk_tokens: int = CHUNK_TOKENS) -> dict[str, float]:
    """The same step over fewer positions, against plain autograd over a whole row for each response."""
    group = Group(num_positions - GROUP_SIZE * RESPONSE_TOKENS, RESPONSE_TOKENS, GROUP_SIZE)
    nodes = group_nodes(group)
    forest = make_forest(nodes)
    model = make_model(hybrid_config())
    reference_loss = train_flattened(model, nodes, checkpointing=False)
    reference = gradients_of(model)
    model = make_model(hybrid_config())
    loss = train_tree(make_executor(model), forest, million_plan(forest, chunk_tokens), Loss.of(nodes))
    return {
        "positions": group.num_positions,
        "grad_rel_err_max": gradient_error(gradients_of(model), reference),
        "loss_rel_err": abs(loss - reference_loss) / abs(reference_loss),
    }
