"""The training side of a cell: a Ray Train group whose ranks take their orders from the cell's mailbox."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions
import ray.train
import torch
import torch.distributed as dist

from services.common.errors import MachineError, TidegateError, TrainingError
from services.common.names import RAY_NAMESPACE
from services.trainer.commands import (
    Absorb,
    Accumulate,
    GradientSum,
    Load,
    MicroStepAt,
    Order,
    Stop,
    TrainStep,
    WeightSnapshot,
)
from services.trainer.rank import Arrays, TrainingRank, TrainingSpec
from services.trainer.types import MicroStep

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_FETCH_TIMEOUT_S = 600.0
"""For one object; the deadline of the command comes first where it is shorter."""


def run_training(spec: TrainingSpec, storage_dir: str) -> None:
    """Keep the cell's training ranks running until they are told to stop. Blocks: meant to be a Ray task.

    Ray Train restarts the ranks as a group when one dies, ``max_restarts`` times; each group goes on from the newest
    checkpoint. When no group will follow, the mailbox is closed, so that nobody waits for an answer.

    Raises:
        TrainingError: the ranks died more often than they may.
    """
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    os.environ.update({"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"})
    config = spec.config
    resources = {"CPU": config.cpus_per_worker}
    if config.gpus_per_worker:
        resources["GPU"] = config.gpus_per_worker
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"spec": spec},
        torch_config=TorchConfig(backend="nccl" if config.gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers, use_gpu=config.gpus_per_worker > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=spec.mailbox_name.replace("/", "-"),
            storage_path=storage_dir,
            failure_config=FailureConfig(max_failures=config.max_restarts),
            logging_config=LoggingConfig(log_level="ERROR"),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.num_threads), **_QUIET}},
        ),
    )
    reason = "training has ended."
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        reason = f"the training ranks failed and may not be restarted any more: {_cause(error)}"
        raise TrainingError(reason, "Look into the logs of the training ranks for the cause.") from error
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            mailbox = ray.get_actor(spec.mailbox_name, namespace=RAY_NAMESPACE)
            ray.get(mailbox.close.remote(reason), timeout=30)


def train_loop(config: dict[str, Any]) -> None:
    """What each Ray Train worker runs: get ready, register, then do orders until told to stop."""
    spec: TrainingSpec = config["spec"]
    torch.set_num_threads(spec.config.num_threads)
    mailbox = ray.get_actor(spec.mailbox_name, namespace=RAY_NAMESPACE)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    try:
        state = TrainingRank(spec, rank, world_size, _device(spec))
    except TidegateError as error:
        ray.get(mailbox.close.remote(str(error)))  # a restart would meet it again
        return
    group = _agree_on_group(rank, world_size)
    ray.get(mailbox.register.remote(group, rank, world_size, state.step))
    while True:
        order: Order = ray.get(mailbox.next.remote(group, rank))
        try:
            result = _kept(state.do(order, _micro_steps(order), _arrays(order, rank)))
        except Exception as error:
            _log.exception("order %d failed", order.order_id)
            ray.get(mailbox.failed.remote(group, order.order_id, _as_tidegate_error(error)))
            if world_size > 1:
                raise  # the other ranks wait in a collective: only a new group gets them out
            continue
        ray.get(mailbox.done.remote(group, rank, order.order_id, result))
        if isinstance(order.command, Stop):
            state.close()
            return


_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def _device(spec: TrainingSpec) -> torch.device:
    if not spec.config.gpus_per_worker:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _agree_on_group(rank: int, world_size: int) -> str:
    """A name for this group of ranks that no earlier one had."""
    names = [uuid.uuid4().hex if rank == 0 else ""]
    if world_size > 1:
        dist.broadcast_object_list(names, src=0)
    return names[0]


def _micro_steps(order: Order) -> list[MicroStep]:
    command = order.command
    match command:
        case TrainStep():
            claimed = [command.micro_steps[index] for index in order.claims]
        case Accumulate():
            claimed = [command.micro_steps[index].data for index in order.claims]
        case _:
            return []
    return [fetch_micro_step(item) if isinstance(item, MicroStepAt) else _fetch(item) for item in claimed]


def _arrays(order: Order, rank: int) -> Arrays | None:
    """Weights or gradients of another cell, read where the object store holds them; None if they are gone."""
    match order.command:
        case Load(weights):
            reference = weights.tensors
        case Absorb(gradients=gradients) if rank == 0:
            reference = gradients.tensors
        case _:
            return None
    try:
        arrays: Arrays = _fetch(reference)
    except ray.exceptions.RayError as error:
        _log.warning("what another cell gave for %s is gone: %s", type(order.command).__name__, error)
        return None
    return arrays


def fetch_micro_step(place: MicroStepAt) -> MicroStep:
    """Have a micro-step from its shard. What a shard gave out before it died is gone with it, so it is asked again.

    Raises:
        TrainingError: the shard gave nothing in time.
    """
    deadline_s = time.monotonic() + _FETCH_TIMEOUT_S
    while True:
        try:
            shard = _shard(place.shard)
            reference = ray.get(shard.micro_step.remote(place.group_id, place.index), timeout=_FETCH_TIMEOUT_S)
            micro_step: MicroStep = _fetch(reference)
        except (
            ray.exceptions.ObjectLostError,
            ray.exceptions.RayActorError,
            ray.exceptions.GetTimeoutError,
            MachineError,
        ) as error:
            if time.monotonic() > deadline_s:
                raise TrainingError(
                    f"{place.shard} gave no micro-step of {place.group_id} in {_FETCH_TIMEOUT_S:g} s ({error}).",
                    "See the shard's log.",
                ) from error
            _log.warning("a micro-step of %s is asked for again: %s", place.group_id, type(error).__name__)
            time.sleep(_RETRY_S)
            continue
        return micro_step


def _shard(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError as error:
        raise MachineError(f"there is no shard {name}.", "It may be about to be made again.") from error


def _fetch(item: Any) -> Any:
    return ray.get(item, timeout=_FETCH_TIMEOUT_S) if isinstance(item, ray.ObjectRef) else item


def _kept(result: Any) -> Any:
    """Arrays go through the object store: the mailbox passes on their reference."""
    if isinstance(result, GradientSum | WeightSnapshot):
        return replace(result, tensors=ray.put(result.tensors))
    return result


def _as_tidegate_error(error: Exception) -> TidegateError:
    if isinstance(error, TidegateError):
        return error
    return TrainingError(f"{type(error).__name__}: {error}", "Look into the logs of the training ranks.")


def _cause(error: BaseException) -> str:
    """The last line of what Ray Train collected."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
