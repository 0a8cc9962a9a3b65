"""One training rank: it does orders with its backend. Ranks of a cell do the same orders together."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from services.common.errors import TrainingError
from services.common.transfer import TransferEngine, open_transfer_engine
from services.trainer import checkpoint as checkpoints
from services.trainer.backends.base import BatchResult, TrainingBackend
from services.trainer.backends.base import Update as Updated
from services.trainer.backends.torch import TorchBackend
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Collect,
    Discard,
    GradientSum,
    Load,
    MarkBest,
    Order,
    Publish,
    SaveCheckpoint,
    Snapshot,
    Stop,
    SumReport,
    TrainStep,
    Update,
    WeightSnapshot,
)
from services.trainer.config import TrainerConfig
from services.trainer.loss import LossSums
from services.trainer.packing import count_runs, plan_batches
from services.trainer.types import MicroStep, StepReport, WeightManifest
from services.trainer.weights import WeightPublisher, canary_tokens


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """Everything that the ranks of a cell need to know."""

    mailbox_name: str
    """Name of the cell's ``Mailbox`` actor in Tidegate's Ray namespace."""
    model_path: str
    config: TrainerConfig
    checkpoint_dir: str
    """Empty for a satellite: it restores nothing, and has no weights to train from until it is given some."""
    engine_dtype: str = "float32"
    """The rollout engine's data type: published weights are rounded to it."""
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    host: str = "127.0.0.1"
    """Address at which rollout cells reach this cell."""
    seed: int = 0


Arrays = Mapping[str, NDArray[Any]]
"""By parameter name."""


@dataclass(slots=True)
class _Sum:
    """What this rank's gradient holds. ``epoch`` -1: a step that this cell takes alone."""

    step: int = 0
    epoch: int = -1
    keys: set[str] = field(default_factory=set)
    result: BatchResult = field(default_factory=BatchResult)
    num_runs: int = 0
    num_batches: int = 0
    seconds: float = 0.0


class TrainingRank:
    """The state of one rank: backend, step, gradient sum, and (on rank 0) the publisher."""

    def __init__(self, spec: TrainingSpec, rank: int, world_size: int, device: torch.device) -> None:
        """Load the model and the newest whole checkpoint.

        Raises:
            ConfigError: the model cannot be trained, or the checkpoint belongs to another one.
        """
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._counts = rank == 0 or not spec.config.tree.context_parallel
        """Ranks that share their micro-steps count them once."""
        self._device = device
        self._backend: TrainingBackend = TorchBackend(spec.model_path, spec.config, device, spec.seed)
        self._engine: TransferEngine | None = None
        self._publisher: WeightPublisher | None = None
        self._canary_ids: list[int] = []
        self._published: WeightManifest | None = None
        self._sum = _Sum()
        self.step = 0 if spec.checkpoint_dir else -1
        """Optimizer steps in the weights; -1: a satellite that was given none yet."""
        torch.manual_seed(spec.seed)
        saved = checkpoints.load_latest(Path(spec.checkpoint_dir)) if spec.checkpoint_dir else None
        if saved is not None:
            self._backend.load(saved.tensors, saved.optimizer)
            torch.set_rng_state(saved.random["torch"])
            self.step = saved.step

    def do(self, order: Order, micro_steps: Sequence[MicroStep] = (), arrays: Arrays | None = None) -> Any:
        """Do an order. ``micro_steps`` are those of the order's claims, ``arrays`` those of its weights or gradients
        (None: they could not be fetched). Arrays in the result are views of this rank's memory.

        Raises:
            TidegateError, ValueError: it cannot be done. The gradient is forgotten, the weights are as before.
        """
        try:
            return self._do(order, micro_steps, arrays)
        except Exception:
            self._forget()
            raise

    def _do(self, order: Order, micro_steps: Sequence[MicroStep], arrays: Arrays | None) -> Any:
        command = order.command
        match command:
            case TrainStep():
                return self._train(command, micro_steps)
            case Accumulate():
                return self._accumulate(
                    command, [command.micro_steps[index].key for index in order.claims], micro_steps
                )
            case Collect():
                return self._collect(command)
            case Absorb():
                return self._absorb(command, arrays)
            case Update():
                return self._update(command)
            case Snapshot():
                return self._snapshot(command) if self._rank == 0 else None
            case Load(weights):
                return self._load(weights, arrays)
            case Discard():
                return self._forget()
            case Publish():
                return self._publish(command) if self._rank == 0 else None
            case SaveCheckpoint():
                return self._save(command) if self._rank == 0 else None
            case MarkBest():
                return self._mark_best(command) if self._rank == 0 else None
            case Stop():
                return None

    def close(self) -> None:
        """Take published weights back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._publisher = None
            self._published = None

    # -- a step -------------------------------------------------------------------------------------------------------

    def _train(self, command: TrainStep, micro_steps: Sequence[MicroStep]) -> StepReport:
        """A whole step by this cell alone."""
        self._forget()
        self._begin(command.step, -1)
        self._add(micro_steps, command.temperature, command.version)
        return self._step(self._sum_over_ranks(self._sum))

    def _accumulate(self, command: Accumulate, keys: Sequence[str], micro_steps: Sequence[MicroStep]) -> SumReport:
        self._begin(command.step, command.epoch)
        if self._sum.keys.intersection(keys):
            raise TrainingError(f"micro-steps {sorted(self._sum.keys.intersection(keys))} are in the sum already.")
        self._add(micro_steps, command.temperature, command.version)
        self._sum.keys.update(keys)
        return self._report_sum()

    def _collect(self, command: Collect) -> GradientSum | SumReport:
        self._begin(command.step, command.epoch)
        self._backend.reduce()
        total, keys = self._sum_over_ranks(self._sum), frozenset(self._sum.keys)
        gradients = {name: gradient.cpu().numpy() for name, gradient in self._backend.gradients().items()}
        self._forget()
        if self._rank > 0:
            return SumReport(command.step, command.epoch, keys)
        return GradientSum(
            step=command.step,
            epoch=command.epoch,
            keys=keys,
            num_runs=total.num_runs,
            num_batches=total.num_batches,
            result=total.result,
            tensors=gradients,
            peak_rss_bytes=_peak_rss_bytes(),
        )

    def _absorb(self, command: Absorb, arrays: Arrays | None) -> SumReport:
        self._begin(command.step, command.epoch)
        given = command.gradients
        is_ours = (given.step, given.epoch) == (command.step, command.epoch) and not given.keys & self._sum.keys
        if self._rank == 0 and arrays is not None and is_ours:
            started_s = time.monotonic()
            self._backend.add_gradients(_as_tensors(arrays))
            held = self._sum
            held.keys |= given.keys
            held.result += given.result
            held.num_runs += given.num_runs
            held.num_batches += given.num_batches
            held.seconds += time.monotonic() - started_s
        return self._report_sum()

    def _update(self, command: Update) -> StepReport | SumReport:
        self._begin(command.step, command.epoch)
        wanted = {micro_step.key for micro_step in command.micro_steps}
        total = self._sum_over_ranks(self._sum, is_wrong=not self._sum.keys <= wanted)
        if total.is_wrong or total.num_keys != len(wanted):
            return self._report_sum()
        return self._step(total)

    def _begin(self, step: int, epoch: int) -> None:
        """Make sure that the sum is of this step and epoch."""
        self._check_step(step)
        if (self._sum.step, self._sum.epoch) != (step, epoch):
            self._forget()
            self._sum = _Sum(step, epoch)

    def _check_step(self, step: int) -> None:
        if step == self.step + 1 and self.step >= 0:
            return
        stand = f"the weights stand at step {self.step}" if self.step >= 0 else "this cell has no weights yet"
        raise TrainingError(f"{stand}, so step {step} cannot be taken.", "Resume the job from its last checkpoint.")

    def _add(self, micro_steps: Sequence[MicroStep], temperature: float, version: int) -> None:
        """Forward and backward of whole micro-steps; everything is only ever summed."""
        started_s = time.monotonic()
        held = self._sum
        for batch in plan_batches(micro_steps, self._spec.config.micro_batch_tokens):
            held.result += self._backend.accumulate(batch, temperature, version)
            held.num_batches += self._counts
        held.num_runs += count_runs(micro_steps) if self._counts else 0
        held.seconds += time.monotonic() - started_s

    def _step(self, total: _Total) -> StepReport:
        """Divide once by the number of counted runs, clip, step the optimizer."""
        started_s = time.monotonic()
        step = self._sum.step
        self._backend.reduce()
        update = self._backend.update(total.num_runs, step)
        self.step = step
        seconds = total.seconds + time.monotonic() - started_s
        self._forget()
        return _report(step, total.result, update, total.num_runs, total.num_batches, seconds)

    def _report_sum(self) -> SumReport:
        return SumReport(self._sum.step, self._sum.epoch, frozenset(self._sum.keys))

    def _forget(self) -> None:
        self._backend.discard()
        self._sum = _Sum()

    def _sum_over_ranks(self, held: _Sum, *, is_wrong: bool = False) -> _Total:
        result = held.result
        if self._world_size == 1:
            return _Total(result, held.num_runs, held.num_batches, held.seconds, len(held.keys), is_wrong)
        sums = result.sums
        added = torch.tensor(
            [
                *(sums.loss, sums.num_targets, sums.num_clipped, sums.ratio, sums.kl_behaviour, sums.entropy),
                *(result.num_tokens, held.num_runs, held.num_batches, len(held.keys) * self._counts, is_wrong),
            ],
            dtype=torch.float64,
            device=self._device,
        )
        largest = torch.tensor([result.logprob_abs_diff_max, held.seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(added)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, targets, clipped, ratio, kl, entropy, tokens, runs, batches, keys, wrong = added.tolist()
        difference, seconds = largest.tolist()
        total = BatchResult(LossSums(loss, int(targets), int(clipped), ratio, kl, entropy), int(tokens), difference)
        return _Total(total, int(runs), int(batches), seconds, int(keys), wrong > 0)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _snapshot(self, command: Snapshot) -> WeightSnapshot:
        self._check_step(command.step)
        return WeightSnapshot(command.step, {name: w.cpu().numpy() for name, w in self._backend.state().items()})

    def _load(self, weights: WeightSnapshot, arrays: Arrays | None) -> None:
        self._forget()
        if arrays is None:
            raise TrainingError("the weights for this cell are gone.", "They are asked for again.")
        self._backend.load_weights(_as_tensors(arrays))
        self.step = weights.step - 1

    def _publish(self, command: Publish) -> WeightManifest:
        if self._published is not None and self._published.version == command.version:
            return self._published  # its buffer is untouched, whatever was trained since
        if command.version != self.step:
            raise TrainingError(
                f"the weights stand at step {self.step}, so they cannot be published as version {command.version}.",
                "Publish the version of the newest step.",
            )
        if self._publisher is None:
            self._engine = open_transfer_engine(self._spec.transfer_protocol, self._spec.host)
            self._publisher = WeightPublisher(self._engine, getattr(torch, self._spec.engine_dtype))
            self._canary_ids = canary_tokens(_ordinary_ids(self._spec.model_path))
        self._published = None  # the buffer is being overwritten
        self._published = self._publisher.publish(
            command.version, self._backend.merged_weights(), self._canary_ids, self._backend.score
        )
        return self._published

    def _save(self, command: SaveCheckpoint) -> str:
        if command.step != self.step:
            raise TrainingError(
                f"the weights stand at step {self.step}, so no checkpoint of step {command.step} can be made.",
                "Resume the job from its last checkpoint.",
            )
        folder = Path(self._spec.checkpoint_dir)
        saved = checkpoints.Checkpoint(
            step=self.step,
            version=command.version,
            tensors=self._backend.state(),
            optimizer=self._backend.optimizer_state(),
            random={"torch": torch.get_rng_state()},
        )
        path = checkpoints.save_checkpoint(folder, saved)
        if command.export:
            checkpoints.export_hugging_face(
                path / checkpoints.EXPORT,
                Path(self._spec.model_path),
                self._backend.merged_weights(),
                getattr(torch, self._spec.engine_dtype),
            )
        checkpoints.prune(folder, self._spec.config.keep_checkpoints, command.kept_steps)
        return str(path)

    def _mark_best(self, command: MarkBest) -> None:
        folder = Path(self._spec.checkpoint_dir)
        checkpoints.mark_best(folder, checkpoints.Best(command.step, command.reward_mean))
        checkpoints.prune(folder, self._spec.config.keep_checkpoints)


@dataclass(frozen=True, slots=True)
class _Total:
    """The sums of all ranks of the cell."""

    result: BatchResult
    num_runs: int
    num_batches: int
    seconds: float
    """Of the slowest rank."""
    num_keys: int
    is_wrong: bool
    """A rank's sum holds what it should not."""


def _as_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Views, where the arrays lie in memory that may only be read (nobody writes to them)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _report(
    step: int, result: BatchResult, update: Updated, num_runs: int, num_batches: int, seconds: float
) -> StepReport:
    sums = result.sums
    num_targets = max(sums.num_targets, 1)
    return StepReport(
        step=step,
        loss=sums.loss / max(num_runs, 1),
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        num_runs=num_runs,
        num_targets=sums.num_targets,
        num_tokens=result.num_tokens,
        clip_fraction=sums.num_clipped / num_targets,
        ratio_mean=sums.ratio / num_targets,
        kl_behaviour=sums.kl_behaviour / num_targets,
        entropy=sums.entropy / num_targets,
        logprob_abs_diff_max=result.logprob_abs_diff_max,
        seconds=seconds,
        extra={
            "skipped": float(update.skipped),
            "num_batches": float(num_batches),
            "tokens_per_s": result.num_tokens / max(seconds, 1e-9),
            "peak_rss_bytes": float(_peak_rss_bytes()),
        },
    )


def _ordinary_ids(model_path: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return sorted(set(tokenizer.get_vocab().values()) - special)
