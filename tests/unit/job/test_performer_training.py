"""The performer's part in training: portions of a step, satellites that come, go and die."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import EngineError
from services.common.ids import JobId, make_cell_id
from services.common.types import CellKind, CellRole, CellState
from services.job.config import JobConfig, training_cells
from services.job.performer import ClusterPerformer, Surroundings
from services.job.report import read_metrics
from services.rollout.types import CellStatus
from services.scheduler.actions import FinishJob, SwitchCell, TrainStep
from services.scheduler.events import (
    CellAdmitted,
    CellDrained,
    CellJoined,
    CellLost,
    CellReported,
    Event,
    StepTrained,
    TrainingFailed,
    TrainingProgressed,
)
from services.scheduler.performer import Recovered
from services.scheduler.types import JobStatus
from services.trainer.backends.base import BatchResult
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Collect,
    Command,
    GradientSum,
    Load,
    Snapshot,
    SumReport,
    Update,
    WeightSnapshot,
)
from services.trainer.mailbox import Mailbox
from services.trainer.types import StepReport
from services.trajectory.types import GroupSpec
from tests.unit.trainer.cells import Handle
from tests.waiting import until


class Ranks:
    """The training side of a cell whose rank only keeps the books."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(timeout_s=60)
        self.commands: list[Command] = []
        self.keys: frozenset[str] = frozenset()
        self._epoch = 0
        self._task = asyncio.create_task(self._work())

    async def die(self, reason: str = "its ranks died") -> None:
        self._task.cancel()
        await self.mailbox.close(reason)

    async def _work(self) -> None:
        await self.mailbox.register("a", 0, 1, 0)
        while True:
            order = await self.mailbox.next("a", 0)
            self.commands.append(order.command)
            await self.mailbox.done("a", 0, order.order_id, self._do(order.command))

    def _do(self, command: Command) -> Any:
        if isinstance(command, Accumulate | Absorb | Collect | Update) and command.epoch != self._epoch:
            self.keys, self._epoch = frozenset(), command.epoch
        match command:
            case Accumulate(step, epoch, micro_steps=refs):
                self.keys |= {ref.key for ref in refs}
                return SumReport(step, epoch, self.keys)
            case Absorb(step, epoch, gradients):
                self.keys |= gradients.keys
                return SumReport(step, epoch, self.keys)
            case Collect(step, epoch):
                keys, self.keys = self.keys, frozenset()
                return GradientSum(step, epoch, keys, len(keys), 1, BatchResult(), {}, 1 << 30)
            case Update(step, micro_steps=refs):
                assert {ref.key for ref in refs} == self.keys
                self.keys = frozenset()
                return StepReport(step, 0.5, 1.0, 1e-3, len(refs), 20, 100, 0.0, 1.0, 0.0, 0.0, -1.0, 1.0)
            case Snapshot(step):
                return WeightSnapshot(step, {})
            case Load():
                self.keys = frozenset()
        return None


class Shard:
    """Every group has four micro-steps."""

    def __init__(self) -> None:
        self.trained: list[tuple[tuple[str, ...], int]] = []

    async def num_micro_steps(self, group_id: str) -> int:
        return 4

    async def note_checkpoint(self, step: int) -> None:
        """Old calls stay."""

    async def mark_trained(self, group_ids: list[str], step: int) -> None:
        self.trained.append((tuple(group_ids), step))


class Client:
    """The rollout side of a cell."""

    def __init__(self, cell_id: str) -> None:
        self.cell_id = cell_id
        self.is_admitting = True

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        self.is_admitting = False
        return 0, 0

    async def admit(self) -> None:
        self.is_admitting = True

    async def status(self) -> CellStatus:
        return CellStatus(self.cell_id, CellState.SERVING, 0, self.is_admitting, 0, 8)

    async def close(self) -> None:
        """Nothing to close."""


class World:
    def __init__(self, folder: Path, num_cells: int = 3, standalone_cells: int = 0, satellites: bool = True) -> None:
        cells = {"num_cells": num_cells, "standalone_cells": standalone_cells}
        self.config = JobConfig.model_validate(
            {"tasks": {"train": "t"}, "trainer": {"satellites": satellites}, "rollout": {"cells": cells}}
        )
        self.folder = folder
        self.events: list[Event] = []
        self.shard = Shard()
        self.sides = {cell_id: Ranks() for cell_id in training_cells(self.config)}
        self.clients = {cell_id: Client(cell_id) for cell_id in map(make_cell_id, range(num_cells))}
        self.performer = self.make_performer()

    def make_performer(self) -> ClusterPerformer:
        surroundings = Surroundings(JobId("j"), self.config, str(self.folder), "http://127.0.0.1:1", "t", (), (), 0)
        performer = ClusterPerformer(surroundings, self.find)
        for cell_id, client in self.clients.items():
            performer._cells._clients[cell_id] = client  # type: ignore[assignment]
            performer._cells._looked_at[cell_id].set()
        performer._emit = self.events.append
        for group in range(4):
            performer._specs[f"g{group}"] = GroupSpec(f"g{group}", "t", (), version=0)
        return performer

    def find(self, name: str) -> Any:
        _, cell_id, *side = name.split("/")
        return Handle(self.sides[make_cell_id(int(cell_id[-1]))].mailbox if side == ["train"] else self.shard)

    async def perform(self, action: Any) -> None:
        await asyncio.wait_for(self.performer.perform(action, self.events.append), 10)

    async def switch(self, index: int, role: CellRole) -> None:
        await self.perform(SwitchCell(make_cell_id(index), role, 1.0))

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def test_a_step_is_trained_once_its_last_portion_is_in(tmp_path: Path) -> None:
    world = World(tmp_path, satellites=False)
    await world.perform(TrainStep(1, ("g0",), 0, num_missing=2))
    await until(lambda: TrainingProgressed(1, 0) in world.events)
    await world.perform(TrainStep(1, ("g1",), 0, num_missing=1))
    assert not world.of_kind(StepTrained)
    await world.perform(TrainStep(1, ("g2",), 0))
    [trained] = world.of_kind(StepTrained)
    assert (trained.step, trained.num_tokens, trained.num_targets) == (1, 100, 20)
    assert world.events[-1] is trained
    assert world.shard.trained == [(("g0", "g1", "g2"), 1)]
    unclaimed = [event.num_unclaimed for event in world.of_kind(TrainingProgressed)]
    assert unclaimed[-1] == 0
    assert max(unclaimed) >= 3
    [line] = read_metrics(tmp_path)
    assert (line["staleness_mean_steps"], line["num_training_cells"]) == (0.0, 1)
    await world.perform(FinishJob(JobStatus.FINISHED, ""))


async def test_each_portion_is_answered_with_what_is_unclaimed(tmp_path: Path) -> None:
    """The scheduler counts a group that it told as unclaimed until it hears of it."""
    world = World(tmp_path, satellites=False)

    async def one(group_id: str) -> int:
        return 1

    world.shard.num_micro_steps = one  # type: ignore[method-assign]
    for group, num_missing in (("g0", 2), ("g1", 1)):
        world.events.clear()
        await world.perform(TrainStep(1, (group,), 0, num_missing=num_missing))
        assert world.events == [TrainingProgressed(1, 0)]  # the core took it at once
        await until(lambda: len(world.sides[make_cell_id(0)].keys) == 3 - num_missing)  # noqa: B023


async def test_a_satellite_takes_part_from_its_drain_to_its_return(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.switch(1, CellRole.TRAIN)
    assert world.events == [CellDrained("cell-1", 0)]
    await world.perform(TrainStep(1, ("g0", "g1", "g2"), 0))
    kinds = {type(command) for command in world.sides[make_cell_id(1)].commands}
    assert {Load, Accumulate, Collect} <= kinds
    assert not world.sides[make_cell_id(2)].commands
    [line] = read_metrics(tmp_path)
    assert line["num_training_cells"] == 2
    assert line["satellite_peak_rss_bytes"] == 1 << 30
    await world.switch(1, CellRole.ROLLOUT)
    assert world.events[-1] == CellAdmitted("cell-1")
    world.sides[make_cell_id(1)].commands.clear()
    await world.perform(TrainStep(2, ("g3",), 1))
    assert not world.sides[make_cell_id(1)].commands


async def test_a_satellite_whose_training_side_dies_serves_on_as_a_standalone_cell(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.switch(1, CellRole.TRAIN)
    await world.sides[make_cell_id(1)].die()
    await world.perform(TrainStep(1, ("g0", "g1"), 0))  # the step does not mind
    assert len(world.of_kind(StepTrained)) == 1
    await until(lambda: bool(world.of_kind(CellJoined)))
    [lost], [joined] = world.of_kind(CellLost), world.of_kind(CellJoined)
    assert (lost.cell_id, lost.may_return) == ("cell-1", True)
    assert "its ranks died" in lost.reason
    assert joined == CellJoined("cell-1", 8, CellKind.STANDALONE)
    assert world.clients[make_cell_id(1)].is_admitting


async def test_a_satellite_that_cannot_train_is_not_drained_for_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.sides[make_cell_id(2)].die()
    client = world.clients[make_cell_id(2)]
    drained: list[float] = []
    client.drain = drained.append  # type: ignore[method-assign, assignment]
    await world.switch(2, CellRole.TRAIN)
    assert [type(event) for event in world.events] == [CellLost, CellJoined]
    assert world.events[-1] == CellJoined("cell-2", 8, CellKind.STANDALONE)
    assert not drained


async def test_a_cell_whose_rollout_side_is_gone_too_is_left_to_its_watcher(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.sides[make_cell_id(2)].die()

    async def fail() -> None:
        raise EngineError("its engine is dead.")

    world.clients[make_cell_id(2)].admit = fail  # type: ignore[method-assign]
    await world.switch(2, CellRole.TRAIN)
    assert [type(event) for event in world.events] == [CellLost]


async def test_a_dead_core_fails_the_training(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.perform(TrainStep(1, ("g0",), 0, num_missing=1))
    await until(lambda: TrainingProgressed(1, 0) in world.events)
    await world.sides[make_cell_id(0)].die("the ranks died 3 times")
    await world.perform(TrainStep(1, ("g1",), 0))
    assert isinstance(world.events[-1], TrainingFailed)
    assert "3 times" in world.events[-1].reason


async def test_cells_without_a_training_side_are_standalone(tmp_path: Path) -> None:
    kinds = {
        (satellites, standalone): [
            World(tmp_path, 3, standalone, satellites).performer._kind_of(make_cell_id(index)) for index in range(3)
        ]
        for satellites, standalone in ((True, 0), (True, 1), (False, 0))
    }
    core, satellite, alone = CellKind.CORE, CellKind.SATELLITE, CellKind.STANDALONE
    assert kinds == {
        (True, 0): [core, satellite, satellite],
        (True, 1): [core, satellite, alone],
        (False, 0): [core, alone, alone],
    }


async def test_a_new_performer_finds_who_is_in_training(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.switch(1, CellRole.TRAIN)
    await world.perform(TrainStep(1, ("g0",), 0, num_missing=1))
    await world.performer._team.close()  # its process died
    performer = world.performer = world.make_performer()
    up = ("cell-0", "cell-1", "cell-2")
    await performer.recover(Recovered(tuple(performer._specs.values()), (), (), (), up, training=("cell-0", "cell-1")))
    for cell_id, client in world.clients.items():
        assert performer._cells._first_word(cell_id, await client.status()) == CellReported(cell_id, 8, 0)
    world.sides[make_cell_id(1)].commands.clear()
    await world.perform(TrainStep(1, ("g1", "g2"), 0))
    assert world.shard.trained == [(("g0", "g1", "g2"), 1)]
    assert any(isinstance(command, Collect) for command in world.sides[make_cell_id(1)].commands)
    assert not world.sides[make_cell_id(2)].commands


def test_standalone_cells_are_fewer_than_cells() -> None:
    with pytest.raises(ValueError, match="standalone_cells"):
        JobConfig.model_validate({"tasks": {"train": "t"}, "rollout": {"cells": {"standalone_cells": 2}}})
