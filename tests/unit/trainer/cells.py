"""Cells whose ranks live in this process: real mailboxes, real ranks, deaths at will."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.trainer.commands import Absorb, Accumulate, GradientSum, Load, Order, TrainStep, WeightSnapshot
from services.trainer.config import OptimizerConfig, TrainerConfig
from services.trainer.mailbox import Mailbox
from services.trainer.rank import TrainingRank, TrainingSpec

LINEAR = OptimizerConfig(learning_rate=0.5, eps=1.0, grad_clip=1e9)
"""With so large an epsilon AdamW's update is nearly the gradient: errors show as they are."""


class _Method:
    def __init__(self, target: Any, name: str) -> None:
        self._target, self._name = target, name

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(getattr(self._target, self._name)(*arguments))


class Handle:
    """An object as Ray shows an actor."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._target, name)


class LocalCell:
    """The training side of a cell. ``before`` is awaited before each order of a rank: to hold it, or to kill it."""

    def __init__(self, model_path: str, checkpoint_dir: str = "", timeout_s: float = 60.0, **settings: Any) -> None:
        config = TrainerConfig(**{"optimizer": LINEAR, "micro_batch_tokens": 64, **settings})
        self.spec = TrainingSpec("none", model_path, config, checkpoint_dir)
        self.mailbox = Mailbox(timeout_s)
        self.handle = Handle(self.mailbox)
        self.orders: list[Order] = []
        self.before: Callable[[Order], Awaitable[None]] | None = None
        self.rank: TrainingRank | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> LocalCell:
        """Start a (new) group of one rank."""
        self.rank = TrainingRank(self.spec, rank=0, world_size=1, device=torch.device("cpu"))
        self._task = asyncio.create_task(self._work(self.rank, uuid.uuid4().hex))
        return self

    def kill(self) -> None:
        """The rank dies as it stands; nobody is told."""
        assert self._task is not None
        self._task.cancel()
        self.rank = None

    def weights(self) -> dict[str, torch.Tensor]:
        assert self.rank is not None
        return {name: tensor.clone() for name, tensor in self.rank._backend.state().items()}

    async def _work(self, rank: TrainingRank, group: str) -> None:
        await self.mailbox.register(group, 0, 1, rank.step)
        while True:
            order = await self.mailbox.next(group, 0)
            self.orders.append(order)
            if self.before is not None:
                await self.before(order)
            try:
                result = _copied(rank.do(order, _micro_steps(order), _arrays(order)))
            except Exception as error:
                await self.mailbox.failed(group, order.order_id, error)
            else:
                await self.mailbox.done(group, 0, order.order_id, result)


def _micro_steps(order: Order) -> list[Any]:
    command = order.command
    if isinstance(command, TrainStep):
        return [command.micro_steps[index] for index in order.claims]
    if isinstance(command, Accumulate):
        return [command.micro_steps[index].data for index in order.claims]
    return []


def _arrays(order: Order) -> Any:
    """None stands for an object that died with its owner."""
    command = order.command
    if isinstance(command, Load):
        return command.weights.tensors
    return command.gradients.tensors if isinstance(command, Absorb) else None


def _copied(result: Any) -> Any:
    """As through an object store: copied, and read-only."""
    if not isinstance(result, GradientSum | WeightSnapshot):
        return result
    arrays = {name: np.array(array) for name, array in result.tensors.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return replace(result, tensors=arrays)
