"""A language model as judge: what it sees, what it costs, and that it holds nothing up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.rollout.actor import Runner
from services.rollout.scoring.budget import BUDGET_FILE, Budget, Ledger
from services.rollout.scoring.config import JudgeScoring
from services.rollout.scoring.evaluate import check_scoring, judge_spending
from services.trajectory.outcome import Outcome
from tests.integration.scoring_runs import SANDBOX, Job, Judge, judge_server
from tests.waiting import until

KEY = "sk-of-the-test-0001"
PRICE = (1000 * 2 + 100 * 8) / 1e6
"""Of one answer with the server's usual usage."""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with judge_server() as server:
        yield server


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job", api_key=KEY)


def config_of(judge: Judge, **change: Any) -> JudgeScoring:
    fields: dict[str, Any] = {
        "base_url": judge.url,
        "model": "big",
        "api_key_env": "JUDGE_KEY",
        "timeout_s": 20,
        "backoff_s": 0.05,
        "max_cost_usd": 1.0,
        "price_per_million_input_usd": 2,
        "price_per_million_output_usd": 8,
    }
    return JudgeScoring.model_validate({**fields, **change})


def ledger(job: Job) -> Ledger:
    return Budget(job.folder / BUDGET_FILE, 1.0).read()


def test_a_judges_score_is_the_reward_and_its_price_is_kept(job: Job, judge: Judge) -> None:
    judge.answers = ['{"score": 8, "reason": "copied"}']
    result = job.score(config_of(judge))
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 0.8), result.detail
    assert result.score_details == {
        "judge": "big",
        "cost_usd": pytest.approx(PRICE),
        "judge_score": 8.0,
        "judge_reason": "copied",
    }
    assert result.evaluated_ref.startswith("sha256:")
    assert (ledger(job).spent_usd, ledger(job).reserved) == (pytest.approx(PRICE), {})
    [body] = judge.bodies
    system, user = (message["content"] for message in body["messages"])
    assert "Copy the seed." in user
    assert "I did it." in user
    assert "+++ b/answer.txt" in user
    assert "+more" in user
    mark = user.split("<")[1].split(">")[0]
    assert user.count(f"<{mark}>") == user.count(f"</{mark}>") == 2
    assert f"<{mark}>" in system
    assert judge.keys == [f"Bearer {KEY}"]
    kept = [path for path in job.folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert kept == [], "the key is in no file"


def test_the_answer_may_be_a_file_of_the_workspace_but_none_of_the_hosts(
    job: Job, judge: Judge, tmp_path: Path
) -> None:
    judge.answers = ['{"score": 1}']
    (tmp_path / "secret").write_text("of the host")
    config = config_of(judge, answer_file="answer.txt", prompt="{answer}")
    assert job.score(config).reward == 0.1
    assert "\nseed\n" in judge.bodies[0]["messages"][1]["content"]
    for command in (f"ln -s {tmp_path}/secret answer.txt", "true"):
        job.command = command
        result = job.score(config)
        assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None), result.detail
        assert "cannot be read" in result.detail
    assert len(judge.bodies) == 1


def test_a_busy_judge_is_asked_again_when_it_says(job: Job, judge: Judge) -> None:
    judge.answers = [(429, {"Retry-After": "1"}), (503, {}), '{"score": 10}']
    result = job.score(config_of(judge))
    assert (result.outcome, result.reward) == (Outcome.FINISHED, 1.0), result.detail
    assert judge.asked_at_s[1] - judge.asked_at_s[0] >= 1.0
    assert ledger(job).spent_usd == pytest.approx(PRICE), "refusals cost nothing"


def test_a_judge_that_stays_busy_is_a_failed_evaluation(job: Job, judge: Judge) -> None:
    judge.answers = [(500, {})]
    result = job.score(config_of(judge, max_attempts=3))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert "no answer to 3 requests: it answered 500" in result.detail
    assert len(judge.bodies) == 6, "two evaluations"
    assert ledger(job).total_usd == 0


def test_a_judge_that_wants_to_be_asked_too_late_is_a_timeout(job: Job, judge: Judge) -> None:
    judge.answers = [(429, {"Retry-After": "3600"})]
    result = job.score(config_of(judge))
    assert result.outcome is Outcome.VERIFIER_TIMEOUT, result.detail
    assert result.verifier_s < 15
    assert len(judge.bodies) == 2


def test_a_judge_that_is_not_there_is_a_failed_evaluation_and_costs_nothing(job: Job, judge: Judge) -> None:
    result = job.score(config_of(judge, base_url="http://127.0.0.1:9/v1", max_attempts=2))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert "ConnectError" in result.detail
    assert ledger(job).total_usd == 0


def test_a_wrong_key_is_not_tried_twice_and_is_reported(
    job: Job, judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    judge.answers = [(401, {})]
    result = job.score(config_of(judge))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert "it answered 401" in result.detail
    assert len(judge.bodies) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "others will meet the same" in caplog.text


@pytest.mark.parametrize("answer", ["I would say 7.", '{"score": 11}'])
def test_an_answer_without_a_score_is_a_failure_never_a_zero(job: Job, judge: Judge, answer: str) -> None:
    judge.answers = [answer]
    result = job.score(config_of(judge))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert ledger(job).spent_usd == pytest.approx(2 * PRICE), "it was asked twice, and both were billed"


def hangs(_: BaseHTTPRequestHandler) -> None:
    time.sleep(3)


def drips(handler: BaseHTTPRequestHandler) -> None:
    """Sends a byte now and then: no wait for a byte is ever too long."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(60):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        return


@pytest.mark.parametrize("answer", [hangs, drips])
def test_a_judge_that_hangs_is_given_up_at_the_limit(
    job: Job, judge: Judge, answer: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    judge.answers = [answer]
    result = job.score(config_of(judge, timeout_s=1, request_timeout_s=60))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_TIMEOUT, None), result.detail
    assert result.verifier_s < 10
    assert ledger(job).total_usd > 0, "nobody knows what it cost: its worst is taken"


async def test_a_hanging_judge_holds_up_no_other_run(job: Job, judge: Judge) -> None:
    waiting = threading.Event()

    def wait(_: BaseHTTPRequestHandler) -> None:
        waiting.set()
        time.sleep(4)

    judge.answers = [wait, '{"score": 5}']
    runner = Runner(job.harness(), SANDBOX, keep_workspaces=False, scoring=job.setup(config_of(judge, timeout_s=60)))
    first = asyncio.create_task(runner.run(job.spec("g000000-r0")))
    await until(waiting.is_set)
    second = await runner.run(job.spec("g000000-r1"))
    assert (second.outcome, second.reward) == (Outcome.FINISHED, 0.5), second.detail
    assert not first.done()
    await runner.cancel([("g000000-r0", 0)])
    assert (await first).outcome is Outcome.CANCELLED


# -- the budget -------------------------------------------------------------------------------------------------------


def test_a_call_that_the_budget_does_not_cover_is_not_made_and_told_loudly(
    job: Job, judge: Judge, caplog: pytest.LogCaptureFixture
) -> None:
    judge.answers = ['{"score": 5}']
    result = job.score(config_of(judge, max_cost_usd=0.002))
    assert (result.outcome, result.reward) == (Outcome.VERIFIER_FAILURE, None)
    assert "the judge's budget is spent" in result.detail
    assert "max_cost_usd" in result.detail
    assert judge.bodies == []
    spending = judge_spending(config_of(judge, max_cost_usd=0.002), job.folder)
    assert spending == {"spent_usd": 0.0, "max_cost_usd": 0.002, "num_calls": 0, "num_refused": 1}
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_the_runners_of_a_job_share_one_budget_that_survives_them(job: Job, judge: Judge) -> None:
    """Worst cases are reserved first, so that runs that are judged at once stay within the limit too."""
    judge.answers = ['{"score": 5}']
    judge.usage = {"prompt_tokens": 1, "completion_tokens": 1000}
    limit_usd = 0.05
    config = config_of(judge, max_cost_usd=limit_usd)
    results = []
    for start in (0, 5):  # the second runner is that of a job that was started again
        runner = Runner(job.harness(), SANDBOX, keep_workspaces=False, scoring=job.setup(config))
        specs = [job.spec(f"g000000-r{index}") for index in range(start, start + 5)]
        results += await asyncio.gather(*map(runner.run, specs))
    scored = [result for result in results if result.reward is not None]
    assert 2 <= len(scored) == len(judge.bodies) < 10
    spent_usd = sum(result.score_details["cost_usd"] for result in scored)
    assert spent_usd == pytest.approx(ledger(job).spent_usd)
    assert spent_usd <= limit_usd
    unscored = [result for result in results if result.reward is None]
    assert {result.outcome for result in unscored} == {Outcome.VERIFIER_FAILURE}
    assert all("budget is spent" in result.detail for result in unscored)


def test_an_answer_that_does_not_tell_its_usage_costs_its_worst(job: Job, judge: Judge) -> None:
    judge.answers, judge.usage = ['{"score": 5}'], None
    assert job.score(config_of(judge)).reward == 0.5
    assert ledger(job).spent_usd > 1024 * 8 / 1e6


def test_a_ledger_that_cannot_be_read_stops_spending(job: Job, judge: Judge) -> None:
    judge.answers = ['{"score": 5}']
    job.folder.mkdir()
    (job.folder / BUDGET_FILE).write_text("{")
    result = job.score(config_of(judge))
    assert (result.outcome, judge.bodies) == (Outcome.VERIFIER_FAILURE, [])
    assert "budget cannot be kept" in result.detail


def test_a_key_that_is_not_set_is_refused_before_anything_starts(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        check_scoring(config_of(judge))
    monkeypatch.setenv("JUDGE_KEY", KEY)
    check_scoring(config_of(judge))
    check_scoring(config_of(judge, api_key_env=""))
    assert KEY not in json.dumps(config_of(judge).model_dump(mode="json"))
