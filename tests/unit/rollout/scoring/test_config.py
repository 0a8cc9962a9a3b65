"""A scorer that cannot work is refused when the configuration is read."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.config import parse_config
from services.common.errors import ConfigError
from services.rollout.config import RolloutConfig
from services.rollout.scoring.config import FunctionScoring, HarborScoring, JudgeScoring

JUDGE: dict[str, Any] = {
    "kind": "judge",
    "base_url": "https://judge.example/v1/",
    "model": "big",
    "max_cost_usd": 1,
    "price_per_million_input_usd": 2,
    "price_per_million_output_usd": 8,
}


def parse(**scoring: Any) -> Any:
    return parse_config(RolloutConfig, {"scoring": scoring} if scoring else {}, [], "job.yaml").scoring


def test_each_kind_is_read_and_the_tasks_own_verifier_is_the_default() -> None:
    assert parse() == HarborScoring()
    assert parse(kind="function", path="pack.mod:score") == FunctionScoring(path="pack.mod:score")
    judge = parse(**JUDGE)
    assert isinstance(judge, JudgeScoring)
    assert judge.base_url == "https://judge.example/v1"


@pytest.mark.parametrize("path", ["", "pack.mod:", ":score", "pack mod:score", "pack.mod:sco re", "../score", "a:b:c"])
def test_a_path_that_can_be_no_function_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"scoring\.function\.path"):
        parse(kind="function", path=path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base_url": "judge.example/v1"}, "http or https URL"),
        ({"base_url": "https://me:secret@judge.example/v1"}, "without user, password"),
        ({"base_url": "https://judge.example/v1?key=s"}, "or query"),
        ({"api_key_env": "sk-123456"}, "never the key itself"),
        ({"api_key": "sk-123456"}, "unknown key"),
        ({"scale_min": 10, "scale_max": 1}, "below scale_max"),
        ({"prompt": "Is it good?"}, "shows nothing of the run"),
        ({"read": "regex"}, "pattern"),
        ({"pattern": "(?P<score>.)"}, "pattern"),
        ({"read": "regex", "pattern": "("}, "no regular expression"),
        ({"read": "regex", "pattern": "(.)"}, "no group score"),
        ({"max_cost_usd": -1}, "max_cost_usd"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(**{**JUDGE, **change})


@pytest.mark.parametrize("key", ["max_cost_usd", "price_per_million_input_usd", "price_per_million_output_usd"])
def test_there_is_no_judge_without_a_cost_limit_and_prices(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(**{name: value for name, value in JUDGE.items() if name != key})


def test_a_limit_of_a_whole_attempt_is_above_zero() -> None:
    assert parse_config(RolloutConfig, {"run_timeout_s": 5}, [], "job.yaml").run_timeout_s == 5
    with pytest.raises(ConfigError, match="run_timeout_s"):
        parse_config(RolloutConfig, {"run_timeout_s": 0}, [], "job.yaml")
