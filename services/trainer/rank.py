"""One training rank: it does orders with its backend. Ranks of a cell do the same orders together."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from services.common.errors import TrainingError
from services.common.transfer import TransferEngine, open_transfer_engine
from services.trainer import checkpoint as checkpoints
from services.trainer.backends.base import BatchResult, TrainingBackend, Update
from services.trainer.backends.torch import TorchBackend
from services.trainer.commands import MarkBest, Order, Publish, SaveCheckpoint, Stop, TrainStep
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
    engine_dtype: str = "float32"
    """The rollout engine's data type: published weights are rounded to it."""
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    host: str = "127.0.0.1"
    """Address at which rollout cells reach this cell."""
    seed: int = 0


class TrainingRank:
    """The state of one rank: backend, step, and (on rank 0) the publisher."""

    def __init__(self, spec: TrainingSpec, rank: int, world_size: int, device: torch.device) -> None:
        """Load the model and the newest whole checkpoint.

        Raises:
            ConfigError: the model cannot be trained, or the checkpoint belongs to another one.
        """
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._backend: TrainingBackend = TorchBackend(spec.model_path, spec.config, device, spec.seed)
        self._engine: TransferEngine | None = None
        self._publisher: WeightPublisher | None = None
        self._canary_ids: list[int] = []
        self._published: WeightManifest | None = None
        self.step = 0
        """Optimizer steps in the weights."""
        torch.manual_seed(spec.seed)
        saved = checkpoints.load_latest(Path(spec.checkpoint_dir))
        if saved is not None:
            self._backend.load(saved.tensors, saved.optimizer)
            torch.set_rng_state(saved.random["torch"])
            self.step = saved.step

    def do(self, order: Order, micro_steps: Sequence[MicroStep]) -> Any:
        """Do an order; ``micro_steps`` are those of the order's claims.

        Raises:
            TidegateError, ValueError: it cannot be done. The gradient is forgotten, the weights are as before.
        """
        command = order.command
        match command:
            case TrainStep():
                try:
                    return self._train(command, micro_steps)
                finally:
                    self._backend.discard()
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

    def _train(self, command: TrainStep, micro_steps: Sequence[MicroStep]) -> StepReport:
        started_s = time.monotonic()
        if command.step != self.step + 1:
            raise TrainingError(
                f"the weights stand at step {self.step}, so step {command.step} cannot be taken.",
                "Resume the job from its last checkpoint.",
            )
        result = BatchResult()
        batches = plan_batches(micro_steps, self._spec.config.micro_batch_tokens)
        for batch in batches:
            result += self._backend.accumulate(batch, command.temperature, command.version)
        self._backend.reduce()
        result, num_runs, num_batches = self._sum_over_ranks(result, count_runs(micro_steps), len(batches))
        update = self._backend.update(num_runs, command.step)
        self.step = command.step
        return _report(command.step, result, update, num_runs, num_batches, time.monotonic() - started_s)

    def _sum_over_ranks(self, result: BatchResult, num_runs: int, num_batches: int) -> tuple[BatchResult, int, int]:
        if self._world_size == 1:
            return result, num_runs, num_batches
        sums = result.sums
        added = torch.tensor(
            [
                *(sums.loss, sums.num_targets, sums.num_clipped, sums.ratio, sums.kl_behaviour, sums.entropy),
                *(result.num_tokens, num_runs, num_batches),
            ],
            dtype=torch.float64,
            device=self._device,
        )
        largest = torch.tensor(result.logprob_abs_diff_max, dtype=torch.float64, device=self._device)
        dist.all_reduce(added)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        loss, targets, clipped, ratio, kl, entropy, tokens, runs, batches = added.tolist()
        total = LossSums(loss, int(targets), int(clipped), ratio, kl, entropy)
        return BatchResult(total, int(tokens), float(largest)), int(runs), int(batches)

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


def _report(
    step: int, result: BatchResult, update: Update, num_runs: int, num_batches: int, seconds: float
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
            "peak_rss_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        },
    )


def _ordinary_ids(model_path: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return sorted(set(tokenizer.get_vocab().values()) - special)
