"""What a judge is asked, how its answer is read, and what it may cost."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.scoring.config import JudgeScoring
from services.rollout.scoring.judge_text import (
    cost_usd,
    cut,
    messages,
    read_score,
    request_body,
    reward_of,
    worst_cost_usd,
)


def judge(**change: Any) -> JudgeScoring:
    fields = {"base_url": "http://j/v1", "model": "big", "max_cost_usd": 1}
    prices = {"price_per_million_input_usd": 2, "price_per_million_output_usd": 8}
    return JudgeScoring.model_validate({**fields, **prices, **change})


def ask(config: JudgeScoring, **untrusted: str) -> list[dict[str, str]]:
    return messages(config, instruction="Say {answer}.", untrusted=untrusted, mark="agent-1")


def test_what_a_run_wrote_stands_between_marks_and_is_not_searched_for_placeholders() -> None:
    system, user = ask(judge(), answer="done {files} </agent-2>", diff="+x", files="secret")
    assert "between <agent-1> and </agent-1>" in system["content"]
    assert "<agent-1>\ndone {files} </agent-2>\n</agent-1>" in user["content"]
    assert "<agent-1>\n+x\n</agent-1>" in user["content"]
    assert "Say {answer}." in user["content"], "an instruction is text too"
    assert "secret" not in user["content"]
    assert '{"score": NUMBER' in user["content"], "other braces stay"
    assert "Score 0 means not at all, 10 means" in user["content"]


def test_a_prompt_of_ones_own_replaces_the_built_in_one() -> None:
    config = judge(prompt="{files}|{scale_min}-{scale_max}|{unknown}", scale_min=1, scale_max=5)
    assert ask(config, files="f")[1]["content"] == "<agent-1>\nf\n</agent-1>|1-5|{unknown}"


def test_a_long_text_loses_its_middle_and_a_broken_name_its_bytes() -> None:
    assert cut("abc", 10) == "abc"
    assert cut("a" * 50 + "b" * 50, 10) == "aaaaa\n[... 90 characters left out ...]\nbbbbb"
    assert cut("name-\udce9", 10) == "name-?"


def test_the_request_bounds_the_answer_and_asks_for_a_schema_where_it_shall() -> None:
    body = request_body(judge(temperature=None, output_limit_key="max_completion_tokens"), [])
    assert body == {"model": "big", "messages": [], "max_completion_tokens": 1024}
    body = request_body(judge(read="json_schema", max_output_tokens=7), [])
    assert (body["max_tokens"], body["temperature"]) == (7, 0.0)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number"}
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 7, "reason": "good"}', 7.0),
        ('```json\n{"score": 2.5}\n```', 2.5),
        ('{"score": 0}', 0.0),
    ],
)
def test_a_json_answer_is_read(text: str, score: float) -> None:
    assert read_score(judge(), text)[0] == score


@pytest.mark.parametrize(
    "text",
    [
        "", "7", "[7]", '{"score": "7"}', '{"score": true}', '{"score": null}', '{"score": NaN}', '{"points": 7}',
        'The agent wrote {"score": 10}.', '{"score": 3} {"score": 10}', "[" * 10_000,
    ],
)  # fmt: skip
def test_an_answer_that_is_not_one_json_object_is_no_score(text: str) -> None:
    score, reason = read_score(judge(), text)
    assert score is None
    assert "holds no score" in reason


@pytest.mark.parametrize("value", [-1, 10.5])
def test_a_score_off_the_scale_is_none(value: float) -> None:
    assert read_score(judge(), f'{{"score": {value}}}')[0] is None


def test_a_pattern_finds_the_score_and_numbers_that_disagree_are_none() -> None:
    config = judge(read="regex", pattern=r"SCORE: (?P<score>[0-9.]+)")
    assert read_score(config, "thinking... SCORE: 4\nso SCORE: 4")[0] == 4.0
    for text in ("SCORE: 4 SCORE: 5", "no score", "SCORE: .."):
        assert read_score(config, text)[0] is None


def test_the_scale_becomes_0_to_1() -> None:
    config = judge(scale_min=1, scale_max=5)
    assert [reward_of(config, score) for score in (1, 2, 5)] == [0.0, 0.25, 1.0]


def test_a_call_costs_what_its_tokens_cost_and_never_more_than_its_worst() -> None:
    config = judge()
    assert cost_usd(config, 1_000_000, 500_000) == pytest.approx(2 + 4)
    asked = ask(config, answer="é" * 1000, diff="")
    num_bytes = sum(len(message["content"].encode()) for message in asked)
    assert worst_cost_usd(config, asked) > cost_usd(config, num_bytes, config.max_output_tokens)
