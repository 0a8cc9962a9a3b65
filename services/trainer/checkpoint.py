"""Checkpoints of the trainer: a folder appears whole or not at all, and what is damaged is passed over.

::

    <folder>/step-000010/                trainable.safetensors  optimizer.pt  random.pt  meta.json
    <folder>/step-000010/hugging-face/   its weights as a Hugging Face folder, if it was exported
    <folder>/step-000010/best.json       its mean held-out reward, if it was ever the best
    <folder>/best                        link to the best checkpoint's ``hugging-face``: the one mark of which it is
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.errors import TrainingError

_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_TENSORS, _OPTIMIZER, _RANDOM, _META, _REWARD = (
    "trainable.safetensors",
    "optimizer.pt",
    "random.pt",
    "meta.json",
    "best.json",
)
_BEST = "best"
EXPORT = "hugging-face"
"""Name of the export inside a checkpoint."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds: ``tensors`` are the trainable ones only (all weights, or the adapters)."""

    step: int
    version: int
    tensors: Mapping[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Best:
    """Which checkpoint is the best one."""

    step: int
    reward_mean: float
    """Its mean held-out reward."""


@dataclass(frozen=True, slots=True)
class _File:
    size_bytes: int
    checksum: int


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint beside its final place, then rename it there. Returns its folder.

    A checkpoint of the same step is replaced.
    """
    target = folder_of(folder, checkpoint.step)
    with _Staged(target) as staged:
        save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, staged / _TENSORS)
        torch.save(checkpoint.optimizer, staged / _OPTIMIZER)
        torch.save(checkpoint.random, staged / _RANDOM)
        files = {name: asdict(_describe(staged / name)) for name in (_TENSORS, _OPTIMIZER, _RANDOM)}
        meta = {"step": checkpoint.step, "version": checkpoint.version, "files": files}
        (staged / _META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
    return target


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"step-{step:06d}"


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are passed over with a warning."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            _log.warning("passing over the damaged checkpoint %s: %s", path, error)
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: _step_of(path))


def drop_newer(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps: they were saved, but never became the job's state."""
    for path in list_checkpoints(folder):
        if _step_of(path) > step:
            shutil.rmtree(path)


def mark_best(folder: Path, best: Best) -> None:
    """Keep a checkpoint whatever its age, in place of the one that was best before. ``best`` links to its export.

    Raises:
        TrainingError: it has no export.
    """
    path = folder_of(folder, best.step)
    if not (path / EXPORT).is_dir():
        raise TrainingError(
            f"the checkpoint of step {best.step} has no export, so it cannot be marked best.",
            "The one that was best before stays; look whether something deletes files of the job.",
        )
    staged = path / f".{_REWARD}.tmp"
    staged.write_text(json.dumps({"reward_mean": best.reward_mean}), encoding="utf-8")
    _sync(staged)
    staged.replace(path / _REWARD)
    link = folder / f".{_BEST}-{uuid.uuid4().hex}.tmp"
    link.symlink_to(Path(path.name) / EXPORT)
    link.replace(folder / _BEST)  # the mark: from one to the other in one piece
    _sync(folder)


def best_of(folder: Path) -> Best | None:
    """The best checkpoint, if one is marked and there."""
    try:
        name = (folder / _BEST).readlink().parent.name
        reward_mean = json.loads((folder / name / _REWARD).read_text(encoding="utf-8"))["reward_mean"]
        return Best(int(name.removeprefix("step-")), float(reward_mean))
    except (OSError, ValueError, KeyError):
        return None


def prune(folder: Path, keep: int, kept_steps: Collection[int] = ()) -> None:
    """Delete what is not needed any more, and what an interrupted save left behind.

    The ``keep`` newest checkpoints stay. The best one, the newest one and ``kept_steps`` stay with their exports.
    """
    best = best_of(folder)
    paths = list_checkpoints(folder)
    whole = {*kept_steps, *(_step_of(path) for path in paths[-1:])} | ({best.step} if best is not None else set())
    for index, path in enumerate(paths):
        if _step_of(path) in whole:
            _remove_leftovers(path)
        elif index < len(paths) - keep:
            shutil.rmtree(path, ignore_errors=True)
        else:
            shutil.rmtree(path / EXPORT, ignore_errors=True)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def export_hugging_face(
    target: Path, model_path: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write ``weights`` as a folder that Hugging Face's libraries and vLLM load, with the configuration, tokenizer
    and chat template of ``model_path``. An older export at ``target`` is replaced.
    """
    with _Staged(target) as staged:
        for source in model_path.iterdir():
            is_weights = source.suffix in (".safetensors", ".bin", ".pt", ".gguf") or ".index." in source.name
            if source.is_file() and not is_weights:
                shutil.copy2(source, staged / source.name)
        rounded = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu() for n, t in weights}
        save_file(rounded, staged / "model.safetensors", metadata={"format": "pt"})
        config_path = staged / "config.json"
        config = json.loads(config_path.read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


class _Staged:
    """A new folder beside ``target`` that takes its place when the block ends well."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._staged = target.with_name(f".{target.name}-{uuid.uuid4().hex}.tmp")

    def __enter__(self) -> Path:
        self._staged.mkdir(parents=True)
        return self._staged

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            return
        for path in self._staged.iterdir():
            _sync(path)
        _sync(self._staged)
        if self._target.exists():
            old = self._target.with_name(f".{self._target.name}-{uuid.uuid4().hex}.tmp")
            self._target.rename(old)
            self._staged.rename(self._target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            self._staged.rename(self._target)
        _sync(self._target.parent)


def _load(path: Path) -> Checkpoint:
    meta = _verify(path)
    return Checkpoint(
        step=int(meta["step"]),
        version=int(meta["version"]),
        tensors=load_file(path / _TENSORS),
        optimizer=torch.load(path / _OPTIMIZER, weights_only=True, map_location="cpu"),
        random=torch.load(path / _RANDOM, weights_only=True, map_location="cpu"),
    )


def _verify(path: Path) -> dict[str, Any]:
    """A checkpoint's meta data, once all its files are found as they were written."""
    meta: dict[str, Any] = json.loads((path / _META).read_text(encoding="utf-8"))
    for name, expected in meta["files"].items():
        if asdict(_describe(path / name)) != expected:
            raise ValueError(f"{name} is not as it was written")
    return meta


def _describe(path: Path) -> _File:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(16 << 20):
            checksum = zlib.crc32(piece, checksum)
    return _File(path.stat().st_size, checksum)


def _step_of(path: Path) -> int:
    match = _STEP_FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
