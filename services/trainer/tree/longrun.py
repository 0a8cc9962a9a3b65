"""One forward and backward over a forest, watched: progress, memory and time, for ``tidegate longctx --run``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.config import ClippedLossConfig
from services.trainer.objective import PolicyObjective
from services.trainer.tree.costs import ModelCosts
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest
from services.trainer.tree.memory import AllocationTracker
from services.trainer.tree.plan import Mode, Plan, VisitKind
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StateStore
from services.trainer.types import RunWeight

Observe = Callable[[float], None]
"""Told the share of the step's work that is done."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step took, all processes that worked on it together."""

    live_bytes: int
    """Peak of live tensors on the device, weights and their gradients included."""
    host_bytes: int
    """Peak of states in host memory beside an accelerator."""
    disk_bytes: int
    """Peak of states in page files."""
    seconds: float
    loss: float
    grad_norm: float
    resumed_share: float
    """Of the work, done before this process took over."""


def run_step(
    executor: Executor,
    forest: Forest,
    plan: Plan,
    costs: ModelCosts,
    runs: Sequence[RunWeight],
    *,
    temperature: float,
    observe: Observe,
    resume_dir: Path | None = None,
    every_s: float = 300.0,
) -> Measured:
    """One forward and backward with the policy loss. Gradients stay in the parameters; nothing is updated.

    ``resume_dir``: progress is saved there, and forgotten when the step is done.

    Raises:
        ConfigError: the folder holds the progress of another step.
        MachineError: states do not fit, or a disk is full or fails.
    """
    model, device = executor.model, executor.model.device
    watch = _Watch(resume_dir, every_s, visit_shares(plan, costs), observe, device)
    objective = _Objective(PolicyObjective(forest, runs, ClippedLossConfig(), device, version=-1), watch.counts["loss"])
    with watch.tracker or contextlib.nullcontext():
        executor.train(forest, plan, temperature, objective, progress=None if plan.mode is Mode.PACK else watch)
        watch.finish()
    observe(1.0)
    if resume_dir is not None:
        watch.clear()
    norms = [p.grad.norm().double() for p in model.parameters() if p.grad is not None]
    counts = {name: float(value) for name, value in watch.counts.items()}
    return Measured(
        live_bytes=int(counts["live_bytes"]),
        host_bytes=int(counts["host_bytes"]),
        disk_bytes=int(counts["disk_bytes"]),
        seconds=counts["seconds"],
        loss=counts["loss"],
        grad_norm=float(torch.stack(norms).norm()) if norms else 0.0,
        resumed_share=watch.resumed_share,
    )


def visit_shares(plan: Plan, costs: ModelCosts) -> list[float]:
    """Of the step's work, what is done after each number of visits; the head is left out."""
    done = [0.0]
    for visit in plan.visits:
        chunk = plan.chunks[visit.chunk]
        forward = costs.forward_flops(chunk.start, chunk.num_tokens)
        backward = costs.backward_flops(chunk.start, chunk.num_tokens)
        match visit.kind:
            case VisitKind.CAPTURE:
                work = forward
            case VisitKind.REPLAY | VisitKind.BACKWARD:
                work = forward + backward
            case VisitKind.RELEASE:
                work = 0.0
        done.append(done[-1] + work)
    total = done[-1] or 1.0
    return [work / total for work in done]


def random_weights(num_targets: Sequence[int], seed: int) -> tuple[RunWeight, ...]:
    """Advantages of both signs for runs with so many targets each."""
    advantages = np.random.default_rng(seed).normal(size=len(num_targets))
    return tuple(
        RunWeight(f"run-{index}", float(advantage), count)
        for index, (advantage, count) in enumerate(zip(advantages, num_targets, strict=True))
    )


class _Objective:
    """The policy loss, its sum in a tensor, so that it is saved with the step's progress."""

    def __init__(self, policy: PolicyObjective, total: Tensor) -> None:
        self._policy = policy
        self._total = total

    def __call__(self, index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
        before = self._policy.sums.loss
        slopes = self._policy(index, logprobs, entropy)
        self._total += self._policy.sums.loss - before
        return slopes


class _Watch(Progress):
    """Counts time and memory over all processes that worked on the step; saves only where it has a folder."""

    def __init__(
        self, folder: Path | None, every_s: float, shares: list[float], observe: Observe, device: torch.device
    ) -> None:
        names = ("seconds", "live_bytes", "host_bytes", "disk_bytes", "loss")
        self.counts = {name: torch.zeros((), dtype=torch.float64) for name in names}
        Progress.__init__(self, folder or Path(), every_s, sums=self.counts)
        self.tracker = None if device.type == "cuda" else AllocationTracker(count_existing=True)
        self._is_saving = folder is not None
        self._device = device
        self._shares = shares
        self._observe = observe
        self._last_s = time.monotonic()
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def resumed_share(self) -> float:
        return self._shares[self.resumed_visits]

    def restore(self, digest: str, model: Any, store: StateStore) -> int:
        done = Progress.restore(self, digest, model, store) if self._is_saving else 0
        self._last_s = time.monotonic()
        self._observe(self._shares[done])
        return done

    def note(self, num_visits: int, digest: str, model: Any, store: StateStore, *, is_last: bool) -> None:
        peaks = store.peaks
        if self._device.type == "cuda":
            self._raise_to("host_bytes", peaks.host)
        self._raise_to("disk_bytes", peaks.disk)
        self.finish()
        self._observe(self._shares[num_visits])
        if self._is_saving:
            Progress.note(self, num_visits, digest, model, store, is_last=is_last)

    def finish(self) -> None:
        """Count what there was until now."""
        if self.tracker is None:
            torch.cuda.synchronize(self._device)
            self._raise_to("live_bytes", torch.cuda.max_memory_allocated(self._device))
        else:
            self._raise_to("live_bytes", self.tracker.peak_bytes)
        now_s = time.monotonic()
        self.counts["seconds"] += now_s - self._last_s
        self._last_s = now_s

    def _raise_to(self, name: str, value: float) -> None:
        self.counts[name].clamp_(min=value)
