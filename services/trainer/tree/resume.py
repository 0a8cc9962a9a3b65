"""A long step that goes on after its process was killed: between visits its progress is written to a folder.

::

    <folder>/visit-00000123/    states/ (the store's)   progress.pt (gradients, sums, random state)   meta.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.errors import ConfigError
from services.trainer.tree.forest import Forest
from services.trainer.tree.plan import Plan
from services.trainer.tree.store import StateStore

_SAVED_FOLDER = re.compile(r"visit-(\d{8})")
_STATES, _PROGRESS, _META = "states", "progress.pt", "meta.json"
_DIGEST_ELEMENTS = 4096
"""Elements of each parameter that tell one model from another."""


@dataclass(slots=True)
class Progress:
    """Where a step saves its progress, and goes on from."""

    folder: Path
    every_s: float = 300.0
    """Least time between two saves, which are made between visits."""
    max_share: float = 0.05
    """Saving takes at most about this share of the time."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """What the step's objective adds up or notes, in place: saved with the rest, and restored in place."""
    resumed_visits: int = 0
    """Visits that were done before this process took over."""
    _save_at_s: float = 0.0

    def restore(self, digest: str, model: Any, store: StateStore) -> int:
        """Bring store, gradients and sums back to the last save. Returns the number of visits that are done.

        Raises:
            ConfigError: the folder holds the progress of another step.
        """
        self._save_at_s = time.monotonic() + self.every_s
        saved = self._saved()
        if not saved:
            return 0
        meta = json.loads((saved[-1] / _META).read_text(encoding="utf-8"))
        if meta["digest"] != digest:
            raise ConfigError(
                f"{self.folder} holds the progress of another step: other tokens, another plan or other weights.",
                "Use another folder, or delete this one to begin anew.",
            )
        store.load(saved[-1] / _STATES)
        progress = torch.load(saved[-1] / _PROGRESS, weights_only=True, map_location="cpu")
        for name, parameter in model.named_parameters():
            gradient = progress["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for name, total in self.sums.items():
            total.copy_(progress["sums"][name])
        _set_random_states(progress["random"])
        self.resumed_visits = int(meta["num_visits"])
        return self.resumed_visits

    def note(self, num_visits: int, digest: str, model: Any, store: StateStore, *, is_last: bool) -> None:
        """Save if it is time to, after ``num_visits`` visits; always after the last one."""
        now_s = time.monotonic()
        if now_s < self._save_at_s and not is_last:
            return
        self._save(num_visits, digest, model, store)
        done_s = time.monotonic()
        self._save_at_s = done_s + max(self.every_s, (done_s - now_s) / self.max_share)

    def clear(self) -> None:
        """Forget the step: to be called when its gradients have been used."""
        for path in (*self._saved(), *self._leftovers()):
            shutil.rmtree(path)

    def _save(self, num_visits: int, digest: str, model: Any, store: StateStore) -> None:
        """A folder appears whole or not at all; the one before it goes after that."""
        before = self._saved()
        for path in self._leftovers():
            shutil.rmtree(path)
        target = self.folder / f"visit-{num_visits:08d}"
        staged = self.folder / f".{target.name}.tmp"
        (staged / _STATES).mkdir(parents=True)
        store.save(staged / _STATES)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        progress = {"gradients": gradients, "sums": dict(self.sums), "random": _random_states()}
        torch.save(progress, staged / _PROGRESS)
        meta = {"digest": digest, "num_visits": num_visits}
        (staged / _META).write_text(json.dumps(meta), encoding="utf-8")
        for path in (*staged.rglob("*"), staged):
            _sync(path)
        staged.rename(target)
        _sync(self.folder)
        for path in before:
            shutil.rmtree(path)

    def _saved(self) -> list[Path]:
        """Whole saves, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _SAVED_FOLDER.fullmatch(path.name))

    def _leftovers(self) -> Iterator[Path]:
        return self.folder.glob(".visit-*.tmp")


def step_digest(forest: Forest, plan: Plan, temperature: float, model: Any) -> str:
    """What tells a step from others: its tokens, targets, visits, and a sample of the model's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (forest.target_ids, forest.target_runs, forest.behaviour, forest.versions):
        digest.update(array.tobytes())
    for segment in forest.segments:
        digest.update(repr((segment.parent, segment.start, segment.first_target, segment.is_shared)).encode())
        digest.update(segment.token_ids.tobytes())
        digest.update(segment.predecessors.tobytes())
    settings = (plan.mode.value, plan.recompute_layers, plan.head_rows, plan.keep_attended, temperature)
    digest.update(repr(settings).encode())
    for part in (*plan.chunks, *plan.visits):
        digest.update(repr(part).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _DIGEST_ELEMENTS)].contiguous().view(torch.uint8).cpu()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} {parameter.requires_grad}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def _random_states() -> dict[str, Any]:
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": on_gpu}


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
