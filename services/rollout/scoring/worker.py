"""The process in which a function or a judge scores one run.

``worker.py REQUEST RESULT``: REQUEST is the JSON that ``process.ProcessScorer`` writes, RESULT takes a score's fields.
``worker.py --check PATH``: whether a scoring function is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.rollout.scoring.base import Score, ScoredRunView, as_score, invalid
from services.rollout.scoring.config import FunctionScoring, JudgeScoring
from services.rollout.scoring.functions import find_function
from services.rollout.types import Task
from services.trajectory.outcome import Outcome


def main(arguments: list[str]) -> int:
    if arguments[0] == "--check":
        return _check(arguments[1])
    with contextlib.suppress(OSError):  # where the kernel must choose, it shall not be the runner
        Path("/proc/self/oom_score_adj").write_text("1000")
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    view = {**request["run"], "task": Task(**request["run"]["task"]), "outcome": Outcome(request["run"]["outcome"])}
    score = _score(request, ScoredRunView(**view), Path(request["workspace"]))
    partial = Path(arguments[1] + ".partial")
    partial.write_text(json.dumps(asdict(score)), encoding="utf-8")
    partial.replace(arguments[1])
    return 0


def _score(request: dict[str, Any], run: ScoredRunView, workspace: Path) -> Score:
    if request["kind"] == "judge":
        from services.rollout.scoring.judge import JudgeScorer

        judge = JudgeScoring.model_validate(request["config"])
        return JudgeScorer(judge, os.environ.get(judge.api_key_env, ""), Path(request["job_dir"])).score(run, workspace)
    try:
        function = find_function(FunctionScoring.model_validate(request["config"]).path)
        return as_score(function(run, workspace))
    except Exception as error:  # whatever it raises, the run has no score and others go on
        traceback.print_exc()
        return invalid(f"the function raised {type(error).__name__}: {error}"[:500])


def _check(path: str) -> int:
    try:
        find_function(path)
    except ConfigError as error:
        print(json.dumps([error.message, error.hint]))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that a function left behind hold nothing up
