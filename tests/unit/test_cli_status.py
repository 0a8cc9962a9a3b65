from __future__ import annotations

from typing import Any, get_args

import pytest

from services.cli_status import fold, policy_line, subject_of
from services.common.types import CellRole
from services.scheduler.actions import (
    AbortRuns,
    Action,
    DropGroup,
    FinishJob,
    MarkBest,
    OpenGroup,
    PublishWeights,
    RecordEvaluation,
    SaveCheckpoint,
    ScoreGroup,
    StartRun,
    SwitchCell,
    TrainStep,
)
from services.scheduler.codec import encode
from services.scheduler.groups import make_spec
from services.scheduler.types import JobStatus, LoggedDecision, PolicyView, ResumeState

SUBJECTS = [
    (OpenGroup(make_spec("g000003", "t0", 2, 0, is_eval=False), 0), "g000003"),
    (StartRun("g000003-r1", 0, "g000003", 0, "cell-1"), "g000003-r1"),
    (ScoreGroup("g000003"), "g000003"),
    (DropGroup("g000003", "too old"), "g000003"),
    (SwitchCell("cell-2", CellRole.TRAIN, 60.0), "cell-2 -> train"),
    (TrainStep(4, ("g000001", "g000002"), 3), "step 4 (2 groups)"),
    (TrainStep(4, ("g000001",), 3, num_missing=1), "step 4 (1 groups, 1 missing)"),
    (PublishWeights(4, ("cell-1", "cell-0")), "version 4 to 2 cells"),
    (SaveCheckpoint(4, False, (), ResumeState()), "step 4"),
    (MarkBest(4, 0.5), "step 4"),
    (RecordEvaluation(4, (), 0.5), "version 4"),
    (AbortRuns((("g000003-r1", 0), ("g000003-r0", 1)), "enough"), "2 runs"),
    (FinishJob(JobStatus.FINISHED, "done"), "finished"),
]


def logged(action: Any, sequence: int = 1) -> LoggedDecision:
    return LoggedDecision(sequence, 0.0, type(action).__name__, encode(action), "why")


@pytest.mark.parametrize(("action", "subject"), SUBJECTS, ids=[type(action).__name__ for action, _ in SUBJECTS])
def test_a_decision_says_what_it_is_about(action: Action, subject: str) -> None:
    assert subject_of(logged(action)) == subject


def test_every_action_has_a_subject() -> None:
    assert {type(action) for action, _ in SUBJECTS} == set(get_args(Action))


def test_alike_neighbours_share_a_line_but_each_switch_has_its_own() -> None:
    starts = [logged(StartRun(f"g000000-r{index}", 0, "g000000", 0, "cell-1")) for index in range(3)]
    switches = [logged(SwitchCell(f"cell-{index}", CellRole.TRAIN, 60.0)) for index in range(2)]
    assert fold([*starts, *switches, starts[0]]) == [starts, [switches[0]], [switches[1]], [starts[0]]]
    assert fold([]) == []


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (PolicyView("elastic", True, "best", 1, 0.5, 2), "elastic (streaming, rule best), phi 0.5, mu 2"),
        (PolicyView("async", False, "paper", 2, 1.0, 1), "async (whole steps, 2 cells only train), phi 1, mu 1"),
        (
            PolicyView("colocate", True, "paper", 1, 1.0, 1, {"mode": "async", "carry_over_steps": 0.0}, 7),
            "colocate (streaming), phi 1, mu 1; from step 7 on: mode async, phi 0",
        ),
    ],
)
def test_a_policy_is_told_in_one_line(policy: PolicyView, line: str) -> None:
    assert policy_line(policy) == line
