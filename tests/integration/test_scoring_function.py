"""A Python function as scorer: in a process of its own, whatever it does."""

from __future__ import annotations

import asyncio
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.job.config import JobConfig
from services.job.plan import plan_job
from services.rollout.actor import Runner
from services.rollout.processes import pids_with_mark
from services.rollout.scoring.config import FunctionScoring
from services.rollout.scoring.contents import tree_digest
from services.rollout.scoring.evaluate import check_scoring
from services.trajectory.outcome import Outcome
from tests.integration.scoring_runs import SANDBOX, Job
from tests.waiting import until, wait_until

Scoring = Callable[..., FunctionScoring]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    """Makes a scorer of a function's body; its module is ``grader``."""

    def make(body: str, head: str = "", **config: Any) -> FunctionScoring:
        folder = tmp_path / "python"
        folder.mkdir(exist_ok=True)
        function = f"import os, sys, time\n{head}\ndef score(run, workspace):\n{textwrap.indent(body, '    ')}\n"
        (folder / "grader.py").write_text(function)
        return FunctionScoring(path="grader:score", python_path=(str(folder),), **{"timeout_s": 20, **config})

    return make


def test_a_number_is_the_reward_and_names_the_work_that_it_belongs_to(job: Job, scoring: Scoring) -> None:
    body = (
        'assert (workspace / "answer.txt").read_text() == "seed\\n"\n'
        'assert (run.task.instruction, run.run_id, run.outcome) == ("Copy the seed.", "g000000-r0", "finished")\n'
        'assert run.answer == "I did it.\\n"\n'
        'assert run.transcript.endswith("logs/agent/steps.jsonl")\n'
        "return 0.75"
    )
    job.command += '; echo "{}" > /logs/agent/steps.jsonl'
    config = scoring(body)
    check_scoring(config)
    result = job.score(config)
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.75), result.detail
    assert result.evaluated_ref == tree_digest(Path(result.workspace))
    assert result.detail == "exit code 0; reward 0.75"


def test_a_score_has_details_and_two_works_have_two_names(job: Job, scoring: Scoring) -> None:
    head = "from services.rollout.scoring.base import Score"
    config = scoring('return Score(0.5, True, details={"passed": 3, "of": 6})', head)
    first = job.score(config)
    assert (first.reward, first.score_details) == (0.5, {"passed": 3, "of": 6}), first.detail
    job.command = "echo other > answer.txt"
    assert job.score(config).evaluated_ref not in ("", first.evaluated_ref)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('raise RuntimeError("no such file")', "raised RuntimeError: no such file"),
        ("return None", "no finite number but None"),
        ('return float("nan")', "no finite number but nan"),
        ("os._exit(3)", "scorer ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "scorer ended with exit code 137"),
        ("sys.exit(0)", "scorer left no score"),
        ('x = b"x" * (500 << 20); time.sleep(60)', "128 MiB allowed"),
    ],
)
def test_a_function_without_a_number_is_a_failed_evaluation_never_a_zero(
    job: Job, scoring: Scoring, body: str, reason: str
) -> None:
    result = job.score(scoring(body, memory_bytes=128 << 20))
    assert (result.outcome, result.reward, result.evaluated_ref != "") == (Outcome.VERIFIER_FAILURE, None, True)
    assert reason in result.detail
    assert reason in result.score_details["reason"]
    assert (job.run_dir / "verifier-2").is_dir()
    assert not (job.run_dir / "verifier-3").exists()


def test_what_a_failed_evaluation_did_to_the_work_is_not_there_in_the_next(
    job: Job, scoring: Scoring, tmp_path: Path
) -> None:
    body = (
        f'again = os.path.exists("{tmp_path}/again"); open("{tmp_path}/again", "w").close()\n'
        '(workspace / "answer.txt").unlink()\n'
        "if not again: raise RuntimeError\n"
        "return 1"
    )
    result = job.score(scoring(body))
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.detail
    assert Path(result.workspace, "answer.txt").exists()


def test_a_function_that_hangs_is_killed_with_all_that_it_started(
    job: Job, scoring: Scoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORING_TEST", str(tmp_path))
    body = 'import subprocess\nsubprocess.Popen(["setsid", "sleep", "600"])\nsubprocess.run(["sleep", "600"])'
    result = job.score(scoring(body, timeout_s=1))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_TIMEOUT, None)
    assert 2 <= result.verifier_s < 15
    assert not pids_with_mark("SCORING_TEST", str(tmp_path))


def test_cancelling_ends_a_function_at_once(job: Job, scoring: Scoring, tmp_path: Path) -> None:
    cancel = threading.Event()

    def watch() -> None:
        wait_until((tmp_path / "begun").exists, 20)
        cancel.set()

    threading.Thread(target=watch, daemon=True).start()
    result = job.score(scoring(f'open("{tmp_path}/begun", "w").close(); time.sleep(600)'), cancel=cancel)
    assert (result.outcome, result.reward) == (Outcome.CANCELLED, None)
    assert result.wall_s < 15


async def test_a_hanging_scorer_holds_up_no_other_run(job: Job, scoring: Scoring, tmp_path: Path) -> None:
    body = f'while run.run_id.endswith("r0"): open("{tmp_path}/hangs", "w").close(); time.sleep(0.01)\nreturn 1'
    config = scoring(body, timeout_s=120)
    one_at_once = job.harness().model_copy(update={"max_concurrent_runs": 1})
    runner = Runner(one_at_once, SANDBOX, keep_workspaces=False, scoring=job.setup(config))
    hanging = asyncio.create_task(runner.run(job.spec("g000000-r0")))
    await until((tmp_path / "hangs").exists)
    assert await runner.harness_ended("g000000-r0", 0)  # so the scheduler gives its slot to another
    other = await runner.run(job.spec("g000000-r1"))
    assert not await runner.harness_ended("g000000-r1", 0)
    assert (other.outcome, other.reward) == (Outcome.FINISHED, 1.0), other.detail
    assert not hanging.done()
    await runner.cancel([("g000000-r0", 0)])
    assert (await hanging).outcome is Outcome.CANCELLED


def test_nothing_that_a_policy_wrote_is_imported(job: Job, scoring: Scoring, tmp_path: Path) -> None:
    trap = f"open('{tmp_path}/caught', 'w')"
    job.command = "; ".join(f'echo "{trap}" > {name}.py' for name in ("json", "grader", "sitecustomize", "services"))
    result = job.score(scoring("return 1"))
    assert result.reward == 1.0, result.detail
    assert not (tmp_path / "caught").exists()


def test_an_installed_package_offers_a_function_by_name(job: Job, scoring: Scoring, tmp_path: Path) -> None:
    config = scoring("return 0.25")
    package = Path(config.python_path[0], "grader_pack-1.0.dist-info")
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: grader-pack\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[tidegate.scorers]\nshort = grader:score\n")
    config = config.model_copy(update={"path": "short"})
    check_scoring(config)
    assert job.score(config).reward == 0.25
    with pytest.raises(ConfigError, match=r"no installed package has an entry point 'long'.*found: short"):
        check_scoring(config.model_copy(update={"path": "long"}))


@pytest.mark.parametrize(
    ("path", "head", "reason"),
    [
        ("nowhere:score", "", r"No module named 'nowhere'.*python_path"),
        ("grader:nothing", "", "has no attribute 'nothing'"),
        ("grader:os", "", r"is a module.*Name a function"),
        ("grader:score", "raise ValueError('at import')", "ValueError: at import"),
        ("grader:score", "sys.exit('gone')", "gone"),
        ("grader:one", "def one(run): ...", r"cannot be called as function\(run, workspace\)"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_before_anything_starts(
    scoring: Scoring, path: str, head: str, reason: str
) -> None:
    config = scoring("return 1", head).model_copy(update={"path": path})
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_scoring(config)
    assert refusal.value.hint


def test_a_plan_is_not_made_with_a_scorer_that_is_not_there(tmp_path: Path, job: Job) -> None:
    job.spec()
    (tmp_path / "tasks").mkdir()
    (job.folder / "task").rename(tmp_path / "tasks" / "task")
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "grader.py").write_text("def score(run, workspace): return 1\n")
    config: dict[str, Any] = {
        "tasks": {"train": "tasks"},
        "model": {"path": "tiny-qwen3"},
        "output": {"dir": str(tmp_path / "runs")},
        "rollout": {"harness": {"command": ["true"]}},
    }

    def plan(path: str, *folders: str) -> Any:
        scoring = {"kind": "function", "path": path, "python_path": folders}
        rollout = {**config["rollout"], "scoring": scoring}
        whole = JobConfig.model_validate({**config, "rollout": rollout})
        return plan_job(whole, tmp_path / "job.yaml", resume=False)

    with pytest.raises(ConfigError, match="cannot import"):
        plan("grader:score")
    with pytest.raises(ConfigError, match="is not a folder"):
        plan("grader:score", "pythons")
    made = plan("grader:score", "python")
    assert made.config.rollout.scoring.python_path == (str(tmp_path / "python"),)
    assert "function grader:score" in [str(cell) for column in made.table().columns for cell in column.cells]
