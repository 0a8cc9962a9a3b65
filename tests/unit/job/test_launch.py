from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from services.common.errors import ConfigError, EngineError, MachineError
from services.job import launch


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a key."), 2),
        (MachineError("a port."), 3),
        (EngineError("an engine."), 1),
        (ActorDiedError(), 1),
        (RayTaskError("start", "Traceback ...", MachineError("a port.")).as_instanceof_cause(), 3),
    ],
)
def test_a_job_that_an_error_ended_exits_as_the_error_tree_says(error: Exception, code: int) -> None:
    assert launch.exit_code_of(error) == code
