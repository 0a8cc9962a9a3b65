"""What users may ask of a running job, and why not."""

from __future__ import annotations

import math
import random

import pytest

from services.common.errors import ConfigError, NotFoundError, RefusedError
from services.common.types import CellKind, CellRole
from services.scheduler.actions import SwitchCell
from services.scheduler.events import (
    CancelRequested,
    DrainRequested,
    PolicyRequested,
    SwitchRequested,
    UndrainRequested,
)
from services.scheduler.options import PolicyMode
from services.scheduler.types import JobStatus
from tests.unit.scheduler.test_placement import answer, end_runs, in_training, world_of


def elastic(**changes):
    return world_of(PolicyMode.ELASTIC, **changes)


@pytest.mark.parametrize(
    ("request_", "error", "why"),
    [
        (DrainRequested("cell-9"), NotFoundError, "no cell 'cell-9'"),
        (DrainRequested("cell-0"), RefusedError, "is the core"),
        (UndrainRequested("cell-1"), RefusedError, "is not drained"),
        (SwitchRequested("cell-1", CellRole.TRAIN), RefusedError, "cells leave in fixed order, cell-0 is next"),
        (
            SwitchRequested("cell-0", CellRole.TRAIN),
            RefusedError,
            "C_core = 8 and 0 groups are ready of the 1",
        ),
        (SwitchRequested("cell-1", CellRole.ROLLOUT), RefusedError, "it is rollout"),
        (SwitchRequested("cell-1", CellRole.DOWN), ConfigError, "cannot be told to go to down"),
        (PolicyRequested(carry_over_steps=-1.0), ConfigError, "phi"),
        (PolicyRequested(carry_over_steps=math.inf), ConfigError, "phi"),
        (PolicyRequested(carry_over_steps=math.nan), ConfigError, "phi"),
        (PolicyRequested(steps_per_burst=0), ConfigError, "mu"),
        (PolicyRequested(carry_over_steps=20.0), ConfigError, "max_staleness_steps"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_reason(request_, error, why) -> None:
    refusal = elastic().ask(request_)
    assert type(refusal) is error
    assert why in str(refusal)


def test_async_needs_a_cell_that_serves() -> None:
    world = elastic(slots=(8,))
    assert "async needs a cell" in str(world.ask(PolicyRequested(mode=PolicyMode.ASYNC)))


def test_the_last_cell_that_can_serve_is_not_drained() -> None:
    world = elastic(others=CellKind.STANDALONE)
    world.lose("cell-0")
    assert world.ask(DrainRequested("cell-1")) is None
    assert "the last cell that can serve" in str(world.ask(DrainRequested("cell-2")))


def test_cells_return_in_reverse_order() -> None:
    world = elastic()
    end_runs(world, 4)
    while len(in_training(world)) < 2 or any(cell.role is CellRole.TO_TRAIN for cell in world.cells.values()):
        answer(world, SwitchCell)
    last = in_training(world)[-1]
    assert f"{last} is first" in str(world.ask(SwitchRequested("cell-0", CellRole.ROLLOUT)))
    assert world.ask(SwitchRequested(last, CellRole.ROLLOUT)) is None


def test_a_policy_holds_from_the_next_boundary_on() -> None:
    world = elastic(steps=6)
    assert world.ask(PolicyRequested(steps_per_burst=2)) is None
    assert world.ask(PolicyRequested(carry_over_steps=0.5)) is None
    shown = world.state.snapshot()["policy"]
    assert shown["pending"] == {"steps_per_burst": 2, "carry_over_steps": 0.5}
    assert (shown["steps_per_burst"], shown["pending_from_step"]) == (1, 1)
    while world.state.step < 1 or world.state.at_boundary or world.state.wanted_version is not None:
        world.answer(0, random.Random(0))
    shown = world.state.snapshot()["policy"]
    assert (shown["steps_per_burst"], shown["carry_over_steps"], shown["pending"]) == (2, 0.5, None)
    assert world.play(random.Random(0)).status is JobStatus.FINISHED


@pytest.mark.parametrize("mode", [PolicyMode.ASYNC, PolicyMode.COLOCATE])
def test_the_mode_can_change_while_the_job_runs(mode) -> None:
    world = elastic(steps=4)
    assert world.ask(PolicyRequested(mode=mode)) is None
    assert world.play(random.Random(1)).status is JobStatus.FINISHED
    assert world.state.options.policy.mode is mode


def test_nothing_is_asked_of_a_job_that_ends() -> None:
    world = elastic()
    world.feed(CancelRequested("enough"))
    assert "enough" in str(world.ask(PolicyRequested(steps_per_burst=2)))
