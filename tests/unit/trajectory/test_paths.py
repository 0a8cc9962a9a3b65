from __future__ import annotations

from services.trajectory.paths import trajectories_of
from services.trajectory.types import CallRole
from tests.unit.trajectory.test_draw import run_for, selected
from tests.unit.trajectory.trees import make_call


def test_a_trajectory_ends_before_the_side_calls_behind_it() -> None:
    run = run_for(
        make_call("c0", None, [1], [2], ordinal=0),
        make_call("c1", "c0", [3], [4], ordinal=1),
        make_call("memory", "c1", [5], [6], ordinal=2),
        make_call("memory2", "memory", [7], [8], ordinal=3),
        selection=selected("c1", "c0", "c1", num_targets=2),
        memory=CallRole.SIDE,
        memory2=CallRole.SIDE,
    )
    found = [(one.calls[-1].record.call_id, one.role, one.draw) for one in trajectories_of(run)]
    assert found == [("c1", CallRole.MAIN, 0), ("memory2", CallRole.SIDE, None)]
