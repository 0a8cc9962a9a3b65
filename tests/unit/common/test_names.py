import inspect

import pytest

from services.common import names
from services.common.ids import JobId, make_cell_id

FUNCTIONS = [
    function for _, function in inspect.getmembers(names, inspect.isfunction) if function.__module__ == names.__name__
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_name_carries_the_job_id(function: object) -> None:
    def name(job_id: str) -> str:
        values = {"job_id": JobId(job_id), "index": 0, "cell_id": make_cell_id(0)}
        return function(*(values[key] for key in inspect.signature(function).parameters))  # type: ignore[operator, arg-type]

    assert "job-a" in name("job-a")
    assert name("job-a") != name("job-b")
