"""Everything that goes into the event log or a commit record comes back as it was."""

from __future__ import annotations

import json
import random

import pytest

from services.common.errors import ConfigError
from services.scheduler.actions import StartRun
from services.scheduler.codec import decode, encode
from services.scheduler.events import ActionFailed, CellJoined, RunEnded
from services.trajectory.outcome import Outcome
from tests.unit.scheduler.world import World, options


def test_whole_jobs_survive_json() -> None:
    job = options(steps=5, checkpoint_every=1, eval_task_names=("e0",), eval_every=1, max_lost_groups=1000)
    world = World(job, (3, 3))
    world.join_all()
    world.play(random.Random(3), faults=True)
    values = [job, *(event for _, event, _ in world.log), *(d for _, _, made in world.log for d in made)]
    assert len({type(value) for value in values}) > 8
    for value in values:
        assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize(
    "value",
    [
        ActionFailed(StartRun("g000001-r0", 1, "g000001", 3, "cell-1"), "no runner"),
        RunEnded("g000001-r0", 0, Outcome.ENGINE_LOSS, None, "the engine died"),
    ],
)
def test_nested_actions_and_outcomes_come_back(value) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize("data", [{}, {"type": "Unknown"}, {**encode(CellJoined("c", 1)), "colour": "red"}])
def test_foreign_data_is_refused(data) -> None:
    with pytest.raises(ConfigError, match="not a record"):
        decode(data)
