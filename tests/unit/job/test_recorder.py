import json
import math
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.common.errors import MachineError
from services.job.recorder import Recorder, check_wandb, evaluation_figures, mean_and_sem, pass_at_k
from services.job.report import make_summary, plot_reward, read_metrics, step_line_of, summary_table, what_runs_say
from services.trainer.types import StepReport
from services.trajectory.outcome import Outcome
from services.trajectory.types import GroupResult, LossReason, RunSummary


def report(step: int, diff: float = 1e-5) -> StepReport:
    return StepReport(step, 0.1, 1.0, 1e-5, 8, 100, 400, 0.0, 1.0, 0.0, 2.0, diff, 4.0)


def scored(*rewards: float, ready: bool = True) -> GroupResult:
    mean = sum(rewards) / len(rewards)
    return GroupResult("g000000", ready, "", len(rewards), len(rewards), 10, 40, mean, rewards, 0)


@pytest.mark.parametrize(("num_runs", "num_passed", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 6), (4, 3, 2)])
def test_pass_at_k_equals_counting_all_choices(num_runs: int, num_passed: int, k: int) -> None:
    runs = [True] * num_passed + [False] * (num_runs - num_passed)
    choices = list(combinations(runs, k))
    assert pass_at_k(num_runs, num_passed, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_a_run_without_a_reward_is_not_a_zero_in_an_evaluation() -> None:
    figures = evaluation_figures({"a": (1.0, 0.0), "b": (1.0,), "c": ()}, pass_reward=1.0)
    assert figures["pass_rate"] == pytest.approx(2 / 3)
    assert (figures["k"], figures["num_runs"], figures["num_tasks"]) == (1, 3, 2)


def test_standard_error_of_the_mean() -> None:
    mean, sem = mean_and_sem([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert sem == pytest.approx(math.sqrt(5 / 3 / 4))
    assert mean_and_sem([]) == (None, None)


def test_rewards_of_filtered_groups_count_in_the_curve(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "job", "", {})
    recorder.group_scored(scored(1.0, 1.0, ready=False))
    recorder.group_scored(scored(0.0, 1.0))
    first = recorder.step_trained(report(1), version=0, staleness_steps=[0, 1])
    second = recorder.step_trained(report(2), version=0, staleness_steps=[])
    recorder.close()
    assert first["reward_mean"] == 0.75
    assert first["staleness_mean_steps"] == 0.5
    assert second["reward_mean"] is None
    assert list((tmp_path / "tensorboard").iterdir())


def test_why_groups_were_filtered_is_told_with_the_next_step_and_summed_up(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "job", "", {})
    for reason in (LossReason.EQUAL_REWARDS, LossReason.EQUAL_REWARDS, LossReason.TOO_FEW_COUNTED, None):
        recorder.group_scored(replace(scored(1.0, 1.0), loss_reason=reason, num_left_out=0 if reason else 7))
    first = recorder.step_trained(report(1), version=0, staleness_steps=[])
    second = recorder.step_trained(report(2), version=0, staleness_steps=[])
    recorder.close()
    assert (first["groups_lost_equal_rewards"], first["groups_lost_too_few_counted"]) == (2, 1)
    assert (first["left_out_tokens"], second["left_out_tokens"], second["groups_lost_equal_rewards"]) == (7, 0, 0)
    summary = make_summary(
        job_id="job",
        status="finished",
        reason="",
        folder=tmp_path,
        snapshot={},
        runs={"finished": 4, "failed": 0, "outcomes": {}, "output_tokens": 9},
        wall_s=1.0,
        peak_rss_bytes=1,
    )
    assert summary["groups_lost_by_reason"] == {"equal_rewards": 2, "too_few_counted": 1}


def test_summary_counts_a_step_that_was_trained_again_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "job", "", {})
    for step, diff in ((1, 1e-5), (2, 3e-5), (2, 2e-5), (3, -1.0)):
        recorder.step_trained(report(step, diff), version=step - 1, staleness_steps=[0])
    recorder.evaluated(3, {"a": (1.0, 0.0)}, 1.0)
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # the process died while it wrote
    summary = make_summary(
        job_id="job",
        status="finished",
        reason="",
        folder=tmp_path,
        snapshot={"version": 3},
        runs={"finished": 4, "failed": 0, "outcomes": {}, "output_tokens": 9},
        wall_s=1.0,
        peak_rss_bytes=1,
    )
    assert summary["steps_completed"] == 3
    assert summary["train_tokens"] == 1200
    assert summary["logprob_abs_diff_max"] == 2e-5
    assert summary["evaluations"][0]["pass_rate"] == 0.5
    assert len(read_metrics(tmp_path)) == 5
    json.dumps(summary)
    plot_reward(tmp_path, "job")
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    recorder = Recorder(tmp_path, "job-1", "", {})
    recorder.weights_updated(1, cell="cell-0")
    recorder.close()
    assert [(line["kind"], line["step"]) for line in read_metrics(tmp_path)] == [("step", 1), ("weights", 1)]


def test_a_reason_may_hold_what_looks_like_markup(tmp_path: Path) -> None:
    summary = make_summary(
        job_id="job-1",
        status="failed",
        reason="cannot read [/config/agent.py]",
        folder=tmp_path,
        snapshot={},
        runs={"finished": 0, "failed": 0, "outcomes": {}, "output_tokens": 0},
        wall_s=1.0,
        peak_rss_bytes=1,
    )
    console = Console(width=100, record=True, file=StringIO())
    console.print(summary_table(summary, tmp_path))
    assert "cannot read [/config/agent.py]" in console.export_text()


def test_wandb_is_asked_for_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    check_wandb("")
    with pytest.raises(MachineError, match="wandb is not installed"):
        check_wandb("my-project")


def _run(run_id: str, outcome: Outcome | None, detail: str = "") -> RunSummary:
    return RunSummary(run_id, "g000000", "t", 1, outcome, 0.0, None, 0, 0, 0, None, None, 1.0, False, detail)


def test_a_failed_job_says_how_most_of_its_runs_ended(tmp_path: Path) -> None:
    good = [_run("g000000-r0", Outcome.FINISHED), _run("g000000-r1", Outcome.FINISHED)]
    bad = [_run(f"g000001-r{n}", Outcome.HARNESS_CRASH, f"exit code {n}") for n in range(3)]
    unfinished = _run("g000002-r0", None)
    assert what_runs_say([], tmp_path) == what_runs_say([*good, bad[0], unfinished], tmp_path) == ""
    said = what_runs_say([*good, *bad, unfinished], tmp_path)
    assert said.startswith("3 of 5 runs ended with harness_crash, the last one: exit code 2. ")
    assert str(tmp_path / "attempts" / "g000001-r2-a1") in said


def test_a_resumed_job_shows_no_step_that_is_still_to_be_trained_again() -> None:
    lines: list[dict[str, Any]] = [{"kind": "step", "step": step, "attempt": 0} for step in (1, 2, 3)]
    assert step_line_of(lines, 2) == lines[1]
    lines.append({"kind": "step", "step": 3, "attempt": 1})
    lines.append({"kind": "weights", "step": 3})
    assert step_line_of(lines, 3) == lines[3]
    assert step_line_of([], 1) is None
