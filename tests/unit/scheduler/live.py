"""A performer for tests: an ideal world in which every action succeeds at once, with hooks for what a test needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.common.types import CellRole
from services.scheduler.actions import (
    Action,
    FinishJob,
    MarkBest,
    OpenGroup,
    PublishWeights,
    SaveCheckpoint,
    ScoreGroup,
    StartRun,
    SwitchCell,
    TrainStep,
)
from services.scheduler.events import (
    BestMarked,
    CellAdmitted,
    CellDrained,
    CellServing,
    CheckpointSaved,
    Event,
    GroupScored,
    PublicationEnded,
    RunEnded,
    RunStarted,
    StepTrained,
)
from services.scheduler.performer import Recovered
from services.trajectory.outcome import Outcome
from tests.unit.scheduler.world import group_result

ActionT = TypeVar("ActionT", bound=Action)


class IdealPerformer:
    """Answers every action at once. Steps wait for ``hold``; actions of a type in ``fails`` raise its error."""

    def __init__(self) -> None:
        self.performed: list[Action] = []
        self.opened: set[str] = set()
        self.recovered: list[Recovered] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.fails: dict[type, Exception] = {}

    async def attend(self, emit: Callable[[Event], None]) -> None:
        """Nothing happens by itself in an ideal world."""

    async def recover(self, recovered: Recovered) -> None:
        """An ideal world remembers what was done in it."""
        self.recovered.append(recovered)

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        if type(action) in self.fails:
            raise self.fails[type(action)]
        if isinstance(action, TrainStep):
            await self.hold.wait()
        await asyncio.sleep(0)
        self.performed.append(action)
        for event in self.answers(action):
            emit(event)

    def answers(self, action: Action) -> list[Event]:
        match action:
            case OpenGroup(spec, _):
                self.opened.add(spec.group_id)
            case StartRun(run_id, attempt, group_id):
                assert group_id in self.opened, "a run starts before its group is open"
                return [RunStarted(run_id, attempt), RunEnded(run_id, attempt, Outcome.FINISHED, 1.0)]
            case ScoreGroup(group_id):
                return [GroupScored(group_result(group_id))]
            case SwitchCell(cell_id, role, _):
                return [CellDrained(cell_id) if role is CellRole.TRAIN else CellAdmitted(cell_id)]
            case TrainStep(step, _, _):
                return [StepTrained(step, num_tokens=7)]
            case PublishWeights(version, cell_ids):
                return [*(CellServing(cell_id, version) for cell_id in cell_ids), PublicationEnded(version)]
            case SaveCheckpoint(step):
                return [CheckpointSaved(step)]
            case MarkBest(step):
                return [BestMarked(step)]
        return []

    def did(self, kind: type[ActionT]) -> list[ActionT]:
        return [action for action in self.performed if isinstance(action, kind)]

    @property
    def finish(self) -> FinishJob:
        [action] = [action for action in self.performed if isinstance(action, FinishJob)]
        return action
