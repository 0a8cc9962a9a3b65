"""A step is the same update whoever trains it: the core alone, in portions, with satellites, while cells die."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import TrainingError
from services.common.models import resolve_model
from services.trainer.commands import Absorb, Accumulate, Collect, Order, SaveCheckpoint, TrainStep, Update
from services.trainer.config import LoraConfig
from services.trainer.rank import TrainingRank
from services.trainer.step import Listener, Portion, TrainedStep
from services.trainer.team import TrainingTeam
from services.trainer.types import MicroStep, StepReport
from tests.unit.trainer import cells
from tests.unit.trainer.cells import LocalCell
from tests.unit.trainer.forests import make_micro_step
from tests.waiting import until

GROUPS: dict[str, list[MicroStep]] = {
    f"g{step}{group}": [make_micro_step(100 * step + 10 * group + index) for index in range(4)]
    for step in (1, 2)
    for group in range(3)
}
TEMPERATURE = 0.9


def groups_of(step: int) -> tuple[str, ...]:
    return tuple(group_id for group_id in GROUPS if group_id.startswith(f"g{step}"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(resolve_model("tiny-qwen3", tmp_path_factory.mktemp("models")))


class Alone:
    """What one rank that nobody disturbs makes of the steps."""

    def __init__(self, model_path: str, folder: Path, **settings: Any) -> None:
        cell = LocalCell(model_path, str(folder), **settings)
        rank = TrainingRank(cell.spec, rank=0, world_size=1, device=torch.device("cpu"))
        cell.rank = rank
        self.start = cell.weights()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.reports: dict[int, StepReport] = {}
        for step in (1, 2):
            micro_steps = [micro_step for group_id in groups_of(step) for micro_step in GROUPS[group_id]]
            command = TrainStep(step, 0, TEMPERATURE, tuple(micro_steps))
            self.reports[step] = rank.do(Order(step, command), micro_steps)
            self.weights[step] = cell.weights()

    def check(self, trained: TrainedStep | None, weights: dict[str, torch.Tensor]) -> None:
        """Equal weights, as large as the whole change is; equal counts."""
        assert trained is not None
        report, expected = trained.report, self.reports[trained.report.step]
        assert trained.group_ids == groups_of(report.step)
        counts = (report.num_runs, report.num_targets, report.num_tokens)
        assert counts == (expected.num_runs, expected.num_targets, expected.num_tokens)
        for name in ("loss", "grad_norm", "clip_fraction", "ratio_mean", "kl_behaviour", "entropy"):
            assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=2e-5, abs=1e-7), name
        assert report.logprob_abs_diff_max == pytest.approx(expected.logprob_abs_diff_max, abs=1e-5)
        for name, tensor in self.weights[report.step].items():
            change = (tensor - self.start[name]).abs().max()
            rounding = 2 * torch.finfo(torch.float32).eps * tensor.abs().max()
            assert (weights[name] - tensor).abs().max() <= 2e-5 * change + rounding, name


@pytest.fixture(scope="module")
def alone(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(model_path, tmp_path_factory.mktemp("alone"))


class World:
    """A core and satellites, and the team that drives them."""

    def __init__(self, model_path: str, folder: Path, num_satellites: int, **settings: Any) -> None:
        self.core = LocalCell(model_path, str(folder / "core"), **settings)
        self.satellites = {f"cell-{index + 1}": LocalCell(model_path, **settings) for index in range(num_satellites)}
        for cell in (self.core, *self.satellites.values()):
            cell.start()
        self.groups = dict(GROUPS)
        self.progress: list[int] = []
        self.failures: list[str] = []
        self.lost: list[str] = []
        self.team = self.make_team()

    def make_team(self) -> TrainingTeam:
        return TrainingTeam(
            "cell-0",
            {"cell-0": self.core.handle, **{name: cell.handle for name, cell in self.satellites.items()}},
            self.micro_steps_of,
            num_ranks=1,
            timeout_s=60.0,
            lost=lambda cell_id, reason: self.lost.append(cell_id),
        )

    async def micro_steps_of(self, group_id: str) -> list[MicroStep]:
        return self.groups[group_id]

    def train(self, step: int, group_ids: tuple[str, ...], *, is_last: bool = True) -> asyncio.Task[Any]:
        portion = Portion(step, 0, TEMPERATURE, group_ids, is_last)
        listener = Listener(self.progress.append, self.failures.append)
        return asyncio.create_task(self.team.train(portion, listener))

    async def whole(self, step: int) -> TrainedStep:
        trained: TrainedStep = await asyncio.wait_for(self.train(step, groups_of(step)), 60)
        return trained

    def join_all(self) -> None:
        for cell_id in self.satellites:
            self.team.join(cell_id)


def accumulated(cell: LocalCell) -> list[str]:
    return [
        ref.key for order in cell.orders if isinstance(order.command, Accumulate) for ref in order.command.micro_steps
    ]


def taken(cell: LocalCell, kind: type[Any]) -> int:
    return sum(isinstance(order.command, kind) for order in cell.orders)


class Gate:
    """Holds the first order of a kind until it is opened."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self.is_reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, order: Order) -> None:
        if isinstance(order.command, self._kind):
            self.is_reached.set()
            await self.opened.wait()


async def test_the_core_alone(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 0)
    for step in (1, 2):
        alone.check(await world.whole(step), world.core.weights())
    assert world.progress[-1] == 0
    assert not world.failures


async def test_a_step_told_in_portions_is_one_update(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 1)
    world.join_all()
    first, second, third = groups_of(1)
    assert await world.train(1, (first,), is_last=False) is None
    await until(lambda: taken(world.core, Accumulate) > 0 and world.progress[-1] == 0)
    assert await world.train(1, (second,), is_last=False) is None
    assert await world.train(1, (second,), is_last=False) is None  # said again
    assert taken(world.core, Update) == 0
    alone.check(await world.train(1, (third,)), world.core.weights())
    rises = [after for before, after in zip(world.progress, world.progress[1:], strict=False) if after > before]
    assert len(rises) == 2  # at each further portion
    assert await world.train(1, (first, second, third)) is not None  # trained: answered again
    assert taken(world.core, Update) == 1


async def test_a_step_may_be_closed_with_no_further_group(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 0)
    assert await world.train(1, groups_of(1), is_last=False) is None
    alone.check(await world.train(1, ()), world.core.weights())


@pytest.mark.parametrize("num_satellites", [1, 2])
async def test_satellites_share_the_work(model_path: str, tmp_path: Path, alone: Alone, num_satellites: int) -> None:
    world = World(model_path, tmp_path, num_satellites)
    world.join_all()
    for step in (1, 2):
        gate = world.core.before = Gate(Accumulate)  # the core is slow, or it would have done all of so little
        training = world.train(step, groups_of(step))
        await gate.is_reached.wait()
        await until(lambda: all(accumulated(cell) for cell in world.satellites.values()))
        gate.opened.set()
        trained = await training
        alone.check(trained, world.core.weights())
        assert trained.report.extra["num_training_cells"] == num_satellites + 1
        assert 0 < trained.report.extra["satellite_share"] < 1
        world.core.before = None
    assert taken(world.core, Absorb) >= 2 * num_satellites
    for cell in (world.core, *world.satellites.values()):
        cell.orders.clear()


async def test_adapters_are_trained_by_satellites_too(model_path: str, tmp_path: Path) -> None:
    tune = LoraConfig(rank=4)
    world = World(model_path, tmp_path, 1, tune=tune)
    world.join_all()
    gate = world.core.before = Gate(Accumulate)
    training = world.train(1, groups_of(1))
    await until(lambda: taken(world.satellites["cell-1"], Collect) > 0)
    gate.opened.set()
    Alone(model_path, tmp_path / "alone", tune=tune).check(await training, world.core.weights())


@pytest.mark.parametrize("kind", [Accumulate, Collect])
async def test_a_satellite_killed_in_the_middle_gives_its_part_back(
    model_path: str, tmp_path: Path, alone: Alone, kind: type[Any]
) -> None:
    world = World(model_path, tmp_path, 2)
    world.join_all()
    core_gate = world.core.before = Gate(Accumulate)
    victim = world.satellites["cell-1"]
    gate = victim.before = Gate(kind)
    training = world.train(1, groups_of(1))
    await gate.is_reached.wait()
    held = accumulated(victim)
    victim.kill()
    await victim.mailbox.close("its ranks died too often")
    core_gate.opened.set()
    alone.check(await training, world.core.weights())
    assert set(held) <= set(accumulated(world.core) + accumulated(world.satellites["cell-2"]))
    assert world.lost == ["cell-1"]
    assert world.team.why_dead("cell-1")
    with pytest.raises(TrainingError, match="cannot train"):
        world.team.join("cell-1")
    alone.check(await world.whole(2), world.core.weights())


async def test_a_satellite_that_is_restarted_takes_part_again(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 1)
    world.join_all()
    core_gate = world.core.before = Gate(Accumulate)
    satellite = world.satellites["cell-1"]
    gate = satellite.before = Gate(Collect)
    training = world.train(1, groups_of(1))
    await gate.is_reached.wait()
    satellite.kill()
    satellite.before = None
    satellite.orders.clear()
    satellite.start()  # without weights: it cannot hand in what it lost
    await until(lambda: bool(accumulated(satellite)))
    core_gate.opened.set()
    alone.check(await training, world.core.weights())
    assert not world.lost


async def test_a_satellite_that_goes_back_to_rollout_gives_its_part_back(
    model_path: str, tmp_path: Path, alone: Alone
) -> None:
    world = World(model_path, tmp_path, 1)
    world.join_all()
    core_gate = world.core.before = Gate(Accumulate)
    satellite = world.satellites["cell-1"]
    gate = satellite.before = Gate(Collect)
    training = world.train(1, groups_of(1))
    await gate.is_reached.wait()
    world.team.leave("cell-1")
    assert world.progress[-1] > 0
    gate.opened.set()
    core_gate.opened.set()
    alone.check(await training, world.core.weights())
    assert taken(world.core, Absorb) == 0
    world.team.join("cell-1")  # and comes again
    alone.check(await world.whole(2), world.core.weights())


async def test_a_satellite_that_joins_in_the_middle_of_a_step(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 1)
    gate = world.core.before = Gate(Accumulate)
    training = world.train(1, groups_of(1))
    await gate.is_reached.wait()
    world.team.join("cell-1")
    gate.opened.set()
    alone.check(await training, world.core.weights())


async def test_a_gradient_that_died_with_its_owner_is_made_again(
    model_path: str, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(model_path, tmp_path, 1)
    world.join_all()
    core_gate = world.core.before = Gate(Accumulate)
    fetch = cells._arrays
    num_lost = 0

    def lose_once(order: Order) -> Any:
        nonlocal num_lost
        if isinstance(order.command, Absorb) and num_lost == 0:
            num_lost += 1
            return None
        return fetch(order)

    monkeypatch.setattr(cells, "_arrays", lose_once)
    training = world.train(1, groups_of(1))
    await until(lambda: taken(world.satellites["cell-1"], Collect) > 0)
    core_gate.opened.set()
    alone.check(await training, world.core.weights())
    assert num_lost == 1


async def test_the_core_killed_in_the_middle(model_path: str, tmp_path: Path, alone: Alone) -> None:
    world = World(model_path, tmp_path, 1)
    alone.check(await world.whole(1), world.core.weights())  # in no checkpoint: it is taken again
    world.join_all()
    gate = world.core.before = Gate(Update)
    training = world.train(2, groups_of(2))
    await gate.is_reached.wait()
    world.core.kill()
    world.core.before = None
    world.core.start()
    alone.check(await training, world.core.weights())
    assert taken(world.core, TrainStep) == 1


@pytest.mark.parametrize("kind", [Accumulate, Update])
async def test_a_team_that_is_made_anew_goes_on(model_path: str, tmp_path: Path, alone: Alone, kind: type[Any]) -> None:
    """The scheduler's process died; its last portion is performed again."""
    world = World(model_path, tmp_path, 1)
    world.join_all()
    gate = world.core.before = Gate(kind)
    first, *others = groups_of(1)
    await world.train(1, (first,), is_last=False)
    old = world.train(1, tuple(others))
    await gate.is_reached.wait()
    old.cancel()
    await world.team.close()
    world.team = world.make_team()
    world.join_all()
    training = world.train(1, tuple(others))
    gate.opened.set()
    alone.check(await training, world.core.weights())
    assert taken(world.core, Update) == 1


async def test_a_team_that_is_made_anew_knows_a_step_that_was_trained(
    model_path: str, tmp_path: Path, alone: Alone
) -> None:
    world = World(model_path, tmp_path, 0)
    await world.whole(1)
    await world.core.mailbox.submit(SaveCheckpoint(1, 0))
    world.team = world.make_team()
    world.groups.clear()  # the shards have let go of them
    alone.check(await world.whole(1), world.core.weights())
    assert taken(world.core, Update) == 1


async def test_a_micro_step_that_cannot_be_trained_fails_the_step(model_path: str, tmp_path: Path) -> None:
    world = World(model_path, tmp_path, 0)
    broken = make_micro_step(7)
    world.groups["bad"] = [replace(broken, runs=tuple(replace(run, num_targets=99) for run in broken.runs))]
    assert await world.train(1, ("bad",), is_last=False) is None
    await until(lambda: bool(world.failures))  # at once, while more groups are awaited
    with pytest.raises(ValueError, match="targets"):
        await world.train(1, (), is_last=True)
