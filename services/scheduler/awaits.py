"""Which actions still wait for their answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from services.scheduler.groups import GroupStatus

if TYPE_CHECKING:
    from services.scheduler.state import JobState


def awaits(state: JobState, action: Action) -> bool:
    """Whether the answer to an action is still awaited; True for actions that need no answer."""
    if state.status.is_final:
        return isinstance(action, FinishJob)
    match action:
        case OpenGroup(spec, _):
            return state.book.find(spec.group_id) is not None
        case StartRun(run_id, attempt):
            run = state.book.find_run(run_id, attempt)
            return run is not None and run.is_active
        case ScoreGroup(group_id):
            group = state.book.find(group_id)
            return group is not None and group.status is GroupStatus.SCORING
        case SwitchCell(cell_id, role, _):
            expected = CellRole.TO_TRAIN if role is CellRole.TRAIN else CellRole.TO_ROLLOUT
            return state.cells.get(cell_id).role is expected
        case TrainStep(step):
            return state.training_step is not None and state.training_step.step == step
        case PublishWeights():
            return state.publication == action
        case SaveCheckpoint():
            return state.checkpoint == action
        case MarkBest():
            return state.new_best == action and state.is_marking_best
        case _:
            return True
