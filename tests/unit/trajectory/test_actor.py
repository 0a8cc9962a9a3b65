from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.errors import AccessError, ContextLengthError, InvariantError, NotFoundError, TurnLimitError
from services.common.types import VersionSpan
from services.proxy.dialects import InvalidRequestError
from services.proxy.types import Lineage, ToolChoice, ToolMode
from services.rollout.types import Sampling
from services.trainer.types import MicroStep
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import Outcome
from services.trajectory.store import list_runs, read_run
from tests.unit.trajectory.world import (
    END,
    SAMPLING,
    CharRenderer,
    answer,
    ask,
    call,
    data_of,
    make_result,
    make_spec,
    open_shard,
    run_to_end,
)

RUN = "g000000-r0"
OpenShard = Callable[..., TrajectoryShard]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[OpenShard]:
    """Opens shards on one store; all are closed at the end."""
    shards: list[TrajectoryShard] = []

    def open_one(**options: Any) -> TrajectoryShard:
        shards.append(open_shard(tmp_path, **options))
        return shards[-1]

    yield open_one
    for shard in shards:
        await shard.close()


async def reopened(opened: OpenShard, shard: TrajectoryShard, **options: Any) -> TrajectoryShard:
    await shard.close()
    return opened(**options)


async def started(shard: TrajectoryShard, num_runs: int = 2, **spec: Any) -> str:
    """A group with its first run started; the run's key."""
    await shard.open_group(make_spec(num_runs=num_runs, **spec))
    return await shard.open_attempt(RUN, 0)


@contextlib.contextmanager
def held_up(shard: TrajectoryShard) -> Iterator[None]:
    """Until the end of the block the store writes nothing; then what was submitted, in order."""
    gate = threading.Event()
    shard._store.submit(gate.wait, 30)
    yield
    gate.set()


async def micro_steps(shard: TrajectoryShard, group_id: str) -> list[MicroStep]:
    return [await shard.micro_step(group_id, index) for index in range(await shard.num_micro_steps(group_id))]


async def test_a_continued_conversation_is_built_on_the_sampled_ids(opened: OpenShard) -> None:
    renderer = CharRenderer()
    shard = opened(renderer=renderer)
    key = await started(shard)
    first = await call(shard, RUN, key, ask("hello"), "  hi ")
    assert (first.parent_call_id, first.num_new_tokens) == (None, first.num_prompt_tokens)
    renderer.num_encoded = 0
    second = await shard.match_call(RUN, key, ask("hello", "hi", "more"))  # the harness stripped the answer
    assert second.parent_call_id == first.call_id
    text = "".join(chr(one) for one in second.prompt_ref.tolist()[first.num_prompt_tokens :][:5])
    assert text == "  hi "
    assert second.prompt_ref.tolist()[first.num_prompt_tokens + 5] == END
    assert second.num_new_tokens == second.num_prompt_tokens - first.num_prompt_tokens - 6
    assert renderer.num_encoded < 40


async def test_what_was_appended_is_in_the_store_at_once(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    key = await started(shard)
    first = await call(shard, RUN, key, ask("a"), "b", cells=("cell-0", "cell-1"))
    request = ask("a", "b", "c", temperature=0.1, stop=["X"])
    second = await call(shard, RUN, key, request, "d", finish_reason="length")
    summary, calls = read_run(str(tmp_path), RUN)
    assert (summary.num_calls, summary.outcome, summary.num_output_tokens) == (2, None, 3)
    assert [one.call_id for one in calls] == [first.call_id, second.call_id]
    assert calls[1].prompt_ids.tolist() == second.prompt_ref.tolist()
    assert calls[1].request == _as_lists(data_of(request))
    assert calls[1].requested_sampling == {"temperature": 0.1, "stop": ["X"]}
    assert calls[1].version_spans == (VersionSpan(3, 1),)
    assert calls[0].cells == ("cell-0", "cell-1")
    assert calls[0].logprobs.tolist() == answer(first, "b").logprobs.tolist()


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_lists(one) for name, one in value.items()}
    return [_as_lists(one) for one in value] if isinstance(value, list | tuple) else value


async def test_a_key_opens_its_own_run_only_and_only_while_the_attempt_runs(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    other = await shard.open_attempt("g000000-r1", 0)
    assert key.startswith(f"{RUN}.")
    assert len(key.rpartition(".")[2]) == 32
    for run_id, wrong in [(RUN, other), (RUN, key[:-1]), (RUN, ""), ("g000009-r0", key), ("nonsense", key)]:
        with pytest.raises(AccessError):
            await shard.match_call(run_id, wrong, ask("a"))
    ticket = await shard.match_call(RUN, key, ask("a"))
    await shard.close_attempt(RUN, 0)
    with pytest.raises(AccessError):
        await shard.match_call(RUN, key, ask("a"))
    with pytest.raises(AccessError):
        await shard.append_call(answer(ticket, "too late"))


async def test_keys_are_not_stored(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    key = await started(shard)
    await shard.close()
    secret = key.rpartition(".")[2]
    contents = _contents(tmp_path)
    assert len(contents) >= 2
    for content in contents:
        assert secret.encode() not in content
        assert bytes.fromhex(secret) not in content


def _contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.iterdir()]


async def test_a_further_attempt_starts_afresh_and_ends_the_key_of_the_one_before(opened: OpenShard) -> None:
    shard = opened()
    old = await started(shard)
    await call(shard, RUN, old, ask("a"), "b")
    await shard.finish_run(make_result(RUN, None, Outcome.ENGINE_LOSS))
    new = await shard.open_attempt(RUN, 1)
    with pytest.raises(AccessError):
        await shard.match_call(RUN, old, ask("a"))
    ticket = await shard.match_call(RUN, new, ask("a", "b", "c"))
    assert (ticket.attempt, ticket.parent_call_id) == (1, None)
    (summary,) = [one for one in await shard.run_summaries() if one.run_id == RUN]
    assert (summary.attempt, summary.outcome, summary.num_calls) == (1, None, 0)


async def test_an_attempt_that_is_opened_again_goes_on_under_its_key(opened: OpenShard) -> None:
    """Also where the shard was made again meanwhile: the harness has nothing but its key."""
    shard = opened(key_secret="of the job")
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a"))
    assert await shard.open_attempt(RUN, 0) == key
    await shard.append_call(answer(ticket, "b", request=data_of(ask("a"))))  # it was in flight
    shard = await reopened(opened, shard, key_secret="of the job")
    assert await shard.open_attempt(RUN, 0) == key
    assert (await shard.match_call(RUN, key, ask("a", "b", "c"))).parent_call_id == ticket.call_id


async def test_another_secret_gives_other_keys(opened: OpenShard) -> None:
    shard = opened(key_secret="of the job")
    old = await started(shard)
    first = await call(shard, RUN, old, ask("a"), "b")
    shard = await reopened(opened, shard, key_secret="of another start")
    new = await shard.open_attempt(RUN, 0)
    with pytest.raises(AccessError):
        await shard.match_call(RUN, old, ask("a"))
    assert (await shard.match_call(RUN, new, ask("a", "b", "c"))).parent_call_id == first.call_id


async def test_an_attempt_whose_result_is_recorded_is_not_opened_again(opened: OpenShard) -> None:
    shard = opened()
    await started(shard)
    with pytest.raises(NotFoundError):
        await shard.attempt_result(RUN, 0)
    await shard.close_attempt(RUN, 0)
    assert await shard.open_attempt(RUN, 0)  # it was closed, but nobody recorded how it ended
    result = make_result(RUN, 1.0)
    assert await shard.finish_run(result) is Outcome.FINISHED
    assert await shard.finish_run(result) is Outcome.FINISHED
    assert await shard.open_attempt(RUN, 0) == ""
    assert await shard.attempt_result(RUN, 0) == result
    with pytest.raises(NotFoundError):
        await shard.attempt_result(RUN, 1)
    await shard.open_attempt(RUN, 1)
    with pytest.raises(InvariantError):
        await shard.open_attempt(RUN, 0)


async def test_all_that_is_said_of_a_group_may_be_said_twice(opened: OpenShard) -> None:
    """A scheduler that was killed says again what it does not know to have been heard."""
    shard = opened()
    spec = make_spec()
    for _ in range(2):
        await shard.open_group(spec)
    for run_id, reward in zip(spec.run_ids, (0.0, 1.0), strict=True):
        await run_to_end(shard, run_id, reward)
        await shard.close_attempt(run_id, 0)
        await shard.finish_run(make_result(run_id, reward))
    first = await shard.finish_group(spec.group_id)
    assert await shard.finish_group(spec.group_id) == first
    steps = await micro_steps(shard, spec.group_id)
    for _ in range(2):
        await shard.mark_trained([spec.group_id], step=1)
        again = await micro_steps(shard, spec.group_id)
        assert [step.runs for step in again] == [step.runs for step in steps]
    assert await shard.finish_group(spec.group_id) == first
    other = make_spec(1)
    await shard.open_group(other)
    for _ in range(2):
        await shard.drop_group(other.group_id, "too stale")
    assert {one.outcome for one in await shard.run_summaries(other.group_id)} == {Outcome.CANCELLED}


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({}, SAMPLING),
        ({"temperature": 0.0, "top_p": 0.1}, SAMPLING),
        ({"max_tokens": 8}, replace(SAMPLING, max_tokens=8)),
        ({"max_tokens": 9999}, SAMPLING),
        ({"stop": ["A", "B"]}, replace(SAMPLING, stop=("A", "B"))),
        ({"stop": "A"}, replace(SAMPLING, stop=("A",))),
    ],
)
async def test_the_jobs_sampling_wins_over_the_harness(
    opened: OpenShard, requested: dict[str, Any], expected: Sampling
) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a", **requested))
    assert ticket.sampling == expected
    assert ticket.trainable


async def test_greedy_calls_are_not_trainable(opened: OpenShard) -> None:
    shard = opened(sampling=Sampling(temperature=0.0))
    key = await started(shard)
    assert not (await shard.match_call(RUN, key, ask("a"))).trainable


async def test_held_out_groups_are_sampled_in_their_own_way_and_never_trained(opened: OpenShard) -> None:
    shard = opened(eval_sampling=Sampling(temperature=0.0, max_tokens=5))
    spec = make_spec(is_eval=True)
    await shard.open_group(spec)
    for run_id, reward in zip(spec.run_ids, [0.0, 1.0], strict=True):
        key = await shard.open_attempt(run_id, 0)
        ticket = await call(shard, run_id, key, ask("a"), "b")
        assert (ticket.sampling.max_tokens, ticket.trainable) == (5, False)
        await shard.finish_run(make_result(run_id, reward))
    result = await shard.finish_group(spec.group_id)
    assert (result.ready, result.rewards, result.reward_mean) == (False, (0.0, 1.0), 0.5)


async def test_an_answer_gets_no_more_room_than_the_context_leaves(opened: OpenShard) -> None:
    shard = opened(max_model_len=20)
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("0123456789"))
    assert (ticket.num_prompt_tokens, ticket.sampling.max_tokens) == (13, 7)
    with pytest.raises(ContextLengthError) as caught:
        await shard.match_call(RUN, key, ask("0" * 17))
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (20, 20)


@pytest.mark.parametrize(
    ("outcome", "recorded"),
    [
        (Outcome.HARNESS_CRASH, Outcome.CONTEXT_LIMIT),
        (Outcome.FINISHED, Outcome.CONTEXT_LIMIT),
        (Outcome.VERIFIER_TIMEOUT, Outcome.VERIFIER_TIMEOUT),
    ],
)
async def test_a_harness_that_ended_because_its_last_call_did_not_fit_met_the_context_limit(
    opened: OpenShard, outcome: Outcome, recorded: Outcome
) -> None:
    shard = opened(max_model_len=20)
    key = await started(shard)
    with pytest.raises(ContextLengthError):
        await shard.match_call(RUN, key, ask("0" * 30))
    await shard.close_attempt(RUN, 0)
    assert await shard.finish_run(make_result(RUN, 0.5, outcome)) == recorded
    assert next(one for one in await shard.run_summaries() if one.run_id == RUN).outcome == recorded


async def test_a_harness_that_shortened_its_history_did_not_meet_the_context_limit(opened: OpenShard) -> None:
    shard = opened(max_model_len=20)
    key = await started(shard)
    with pytest.raises(ContextLengthError):
        await shard.match_call(RUN, key, ask("0" * 30))
    await call(shard, RUN, key, ask("short"), "b")
    assert await shard.finish_run(make_result(RUN, 0.5)) == Outcome.FINISHED


async def test_a_harness_that_ended_because_no_cell_answered_met_an_engine_loss(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    await call(shard, RUN, key, ask("hello"), "first")
    ticket = await shard.match_call(RUN, key, ask("hello", "first", "more"))
    await shard.abandon_call(ticket.call_id, "TimeoutError", engine_lost=True)
    await shard.close_attempt(RUN, 0)
    assert await shard.finish_run(make_result(RUN, 0.0, Outcome.HARNESS_CRASH)) == Outcome.ENGINE_LOSS


async def test_a_harness_whose_next_try_was_answered_met_no_engine_loss(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("hello"))
    await shard.abandon_call(ticket.call_id, "TimeoutError", engine_lost=True)
    await call(shard, RUN, key, ask("hello"), "first")
    await shard.close_attempt(RUN, 0)
    assert await shard.finish_run(make_result(RUN, 1.0)) == Outcome.FINISHED


async def test_a_run_makes_no_more_calls_than_the_job_allows(opened: OpenShard) -> None:
    shard = opened(config=TrajectoryConfig(max_calls=2))
    key = await started(shard)
    await call(shard, RUN, key, ask("a"), "b")
    await call(shard, RUN, key, ask("a", "b", "c"), "d")
    with pytest.raises(TurnLimitError, match="2 model calls"):
        await shard.match_call(RUN, key, ask("a", "b", "c", "d", "e"))
    await shard.close_attempt(RUN, 0)
    assert await shard.finish_run(make_result(RUN, 1.0, Outcome.HARNESS_CRASH)) is Outcome.TURN_LIMIT


async def test_a_run_that_ended_with_its_last_call_allowed_met_no_limit(opened: OpenShard) -> None:
    shard = opened(config=TrajectoryConfig(max_calls=1))
    key = await started(shard)
    await call(shard, RUN, key, ask("a"), "b")
    await shard.close_attempt(RUN, 0)
    assert await shard.finish_run(make_result(RUN, 1.0)) is Outcome.FINISHED


async def test_appending_twice_stores_once(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a"))
    record = answer(ticket, "b", request=data_of(ask("a")))
    await asyncio.gather(shard.append_call(record), shard.append_call(record))
    await shard.close_attempt(RUN, 0)
    await shard.append_call(record)
    assert len(read_run(str(tmp_path), RUN)[1]) == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"logprobs": np.zeros(1, dtype=np.float32)},
        {"version_spans": (VersionSpan(3, 1),)},
        {"logprobs": np.asarray([-0.1, np.nan], dtype=np.float32)},
    ],
)
async def test_a_record_that_does_not_fit_together_is_refused(
    opened: OpenShard, tmp_path: Path, broken: dict[str, Any]
) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a"))
    with pytest.raises(InvariantError):
        await shard.append_call(answer(ticket, "b", **broken))
    assert read_run(str(tmp_path), RUN)[1] == []
    await shard.append_call(answer(ticket, "b"))


async def test_an_abandoned_call_leaves_nothing(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a"))
    await shard.abandon_call(ticket.call_id, "the harness disconnected")
    await shard.abandon_call("g000077-r0-a0-c0", "unknown")
    with pytest.raises(NotFoundError):
        await shard.append_call(answer(ticket, "b"))
    assert (await shard.match_call(RUN, key, ask("a"))).call_id != ticket.call_id


async def test_a_caller_that_goes_away_leaves_store_and_tree_in_step(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    key = await started(shard)
    ticket = await shard.match_call(RUN, key, ask("a"))
    appending = asyncio.create_task(shard.append_call(answer(ticket, "b", request=data_of(ask("a")))))
    await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    following = await shard.match_call(RUN, key, ask("a", "b", "c"))
    assert following.parent_call_id == ticket.call_id
    assert len(read_run(str(tmp_path), RUN)[1]) == 1


async def test_a_retried_request_drops_the_answer_that_nobody_saw(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    await call(shard, RUN, key, ask("a"), "lost")
    await call(shard, RUN, key, ask("a"), "seen")  # the first answer was delivered, and not used
    await call(shard, RUN, key, ask("a", "seen", "c"), "end")
    await shard.finish_run(make_result(RUN, 1.0))
    await run_to_end(shard, "g000000-r1", 0.0)
    assert (await shard.finish_group("g000000")).ready
    (micro_step,) = await micro_steps(shard, "g000000")
    targets = [chr(one) for node in micro_step.nodes for one in node.token_ids[node.target_mask] if one != END]
    assert "lost" not in "".join(targets)
    assert "seen" in "".join(targets)
    assert micro_step.runs[0].num_targets == len("seen") + len("end") + 2


async def test_answers_to_one_prompt_that_were_asked_for_differently_do_not_replace_each_other(
    opened: OpenShard,
) -> None:
    shard = opened()
    key = await started(shard)
    for text, request in (
        ("one's", replace(ask("a"), lineage=Lineage(agent_id="one"))),
        ("another's", replace(ask("a"), lineage=Lineage(agent_id="another"))),
        ("told not to call", replace(ask("a"), tool_choice=ToolChoice(ToolMode.NONE))),
    ):
        await call(shard, RUN, key, request, text)
    await shard.finish_run(make_result(RUN, 1.0))
    await run_to_end(shard, "g000000-r1", 0.0)
    assert (await shard.finish_group("g000000")).ready
    (summary, _) = await shard.run_summaries("g000000")
    assert summary.selection is not None
    assert len(summary.selection.target_call_ids) == 3
    assert summary.selection.num_superseded == 0


async def test_the_run_continues_at_the_answer_that_the_harness_saw_of_two_retries(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    first = await call(shard, RUN, key, ask("a"), "one")
    await call(shard, RUN, key, ask("a"), "two")
    assert (await shard.match_call(RUN, key, ask("a", "one", "b"))).parent_call_id == first.call_id


async def test_a_complete_group_becomes_ready_with_its_micro_steps(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    await shard.open_group(make_spec())
    await run_to_end(shard, "g000000-r0", 1.0)
    with pytest.raises(InvariantError, match="g000000-r1"):
        await shard.finish_group("g000000")
    await run_to_end(shard, "g000000-r1", 0.0)
    result = await shard.finish_group("g000000")
    assert (result.ready, result.num_runs, result.num_counted, result.rewards) == (True, 2, 2, (1.0, 0.0))
    assert result.version_min == 3
    assert await shard.finish_group("g000000") == result
    (micro_step,) = await micro_steps(shard, "g000000")
    assert (micro_step.num_targets, micro_step.num_tokens) == (result.num_targets, result.num_tokens)
    assert micro_step.nodes[0].run == -1
    assert "".join(map(chr, micro_step.nodes[0].token_ids[1:6])) == "do it"
    advantages = {one.run_id: one.advantage for one in list_runs(str(tmp_path))}
    assert advantages == {one.run_id: one.advantage for one in micro_step.runs}
    assert [round(one or 0, 3) for one in advantages.values()] == [0.707, -0.707]


@pytest.mark.parametrize(
    ("rewards", "outcomes", "reason"),
    [
        ([1.0, 1.0], [Outcome.FINISHED, Outcome.FINISHED], "equal"),
        ([1.0, None], [Outcome.FINISHED, Outcome.VERIFIER_FAILURE], "1 of 2"),
        ([1.0, 0.0], [Outcome.FINISHED, Outcome.RUNNER_LOSS], "1 of 2"),
    ],
)
async def test_a_group_that_cannot_be_trained_is_lost_with_a_reason(
    opened: OpenShard, rewards: list[float | None], outcomes: list[Outcome], reason: str
) -> None:
    shard = opened()
    spec = make_spec()
    await shard.open_group(spec)
    for run_id, reward, outcome in zip(spec.run_ids, rewards, outcomes, strict=True):
        await run_to_end(shard, run_id, reward, outcome)
    result = await shard.finish_group(spec.group_id)
    assert not result.ready
    assert reason in result.reason
    assert await shard.finish_group(spec.group_id) == result
    with pytest.raises(NotFoundError):
        await micro_steps(shard, spec.group_id)


async def test_equal_rewards_are_kept_where_the_job_wants_it(opened: OpenShard) -> None:
    shard = opened(drop_equal_rewards=False)
    await shard.open_group(make_spec())
    for run_id in make_spec().run_ids:
        await run_to_end(shard, run_id, 1.0)
    assert (await shard.finish_group("g000000")).ready
    assert [run.advantage for run in (await micro_steps(shard, "g000000"))[0].runs] == [0.0, 0.0]


async def test_a_run_that_never_started_counts_as_what_it_is(opened: OpenShard) -> None:
    shard = opened()
    await shard.open_group(make_spec(num_runs=3))
    await run_to_end(shard, "g000000-r0", 1.0)
    await run_to_end(shard, "g000000-r1", 0.0)
    await shard.finish_run(make_result("g000000-r2", None, Outcome.SETUP_FAILURE, attempt=2))
    result = await shard.finish_group("g000000")
    assert (result.ready, result.num_runs, result.num_counted) == (True, 3, 2)


async def ready_group(shard: TrajectoryShard, index: int) -> str:
    spec = make_spec(index)
    await shard.open_group(spec)
    for run_id, reward in zip(spec.run_ids, [0.0, 1.0], strict=True):
        await run_to_end(shard, run_id, reward)
    assert (await shard.finish_group(spec.group_id)).ready
    return spec.group_id


async def test_the_checkpoint_wins_over_the_store_on_recovery(opened: OpenShard) -> None:
    shard = opened()
    ids = [await ready_group(shard, index) for index in range(3)]
    before = await micro_steps(shard, ids[1])
    await shard.mark_trained([ids[0]], step=1)
    await shard.mark_trained([ids[1]], step=2)
    shard = await reopened(opened, shard)
    results = await shard.recover(trained_step=1)
    assert [one.group_id for one in results] == [ids[1], ids[2]]
    after = await micro_steps(shard, ids[1])
    assert [node.token_ids.tolist() for node in after[0].nodes] == [node.token_ids.tolist() for node in before[0].nodes]
    assert after[0].runs == before[0].runs


async def test_recovery_settles_complete_groups_and_cancels_incomplete_ones(opened: OpenShard) -> None:
    shard = opened()
    await shard.open_group(make_spec(0))
    for run_id, reward in zip(make_spec(0).run_ids, [0.0, 1.0], strict=True):
        await run_to_end(shard, run_id, reward)
    await shard.open_group(make_spec(1))
    await run_to_end(shard, "g000001-r0", 1.0)
    key = await shard.open_attempt("g000001-r1", 0)
    shard = await reopened(opened, shard)
    assert [one.group_id for one in await shard.recover(trained_step=0)] == ["g000000"]
    outcomes = {one.run_id: one.outcome for one in await shard.run_summaries("g000001")}
    assert outcomes == {"g000001-r0": Outcome.FINISHED, "g000001-r1": Outcome.CANCELLED}
    with pytest.raises(AccessError):
        await shard.match_call("g000001-r1", key, ask("a"))
    assert await shard.recover(trained_step=0) != []


async def test_a_restarted_shard_goes_on_with_its_live_runs(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    first = await call(shard, RUN, key, ask("a"), "b")
    in_flight = await shard.match_call(RUN, key, ask("a", "b", "c"))
    shard = await reopened(opened, shard)
    again = await shard.match_call(RUN, key, ask("a", "b", "c"))
    assert again.parent_call_id == first.call_id
    assert again.prompt_ref.tolist() == in_flight.prompt_ref.tolist()
    assert again.call_id != in_flight.call_id
    with pytest.raises(NotFoundError):
        await shard.append_call(answer(in_flight, "d"))


async def test_a_group_that_is_dispatched_anew_replaces_the_one_that_was_cancelled(opened: OpenShard) -> None:
    shard = opened()
    await started(shard)
    shard = await reopened(opened, shard)
    await shard.recover(trained_step=0)
    spec = make_spec(num_runs=3)
    await shard.open_group(spec)
    await shard.open_group(spec)
    assert [one.outcome for one in await shard.run_summaries("g000000")] == [None, None, None]
    with pytest.raises(InvariantError):
        await shard.open_group(make_spec())


async def test_a_dropped_group_takes_no_calls_and_records_its_unfinished_runs(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    await shard.drop_group("g000000", "too old")
    with pytest.raises(AccessError):
        await shard.match_call(RUN, key, ask("a"))
    await shard.close_attempt(RUN, 0)
    await shard.finish_run(make_result("g000000-r1", None, Outcome.CANCELLED))
    summaries = await shard.run_summaries("g000000")
    assert [(one.outcome, one.detail) for one in summaries] == [
        (Outcome.CANCELLED, "too old"),
        (Outcome.CANCELLED, "as it went"),
    ]
    with pytest.raises(NotFoundError):
        await shard.finish_run(make_result("g000099-r0", None))


async def test_a_group_that_is_dropped_while_it_is_settled_stays_dropped(opened: OpenShard) -> None:
    shard = opened()
    await shard.open_group(make_spec())
    await run_to_end(shard, RUN, 1.0)
    await run_to_end(shard, "g000000-r1", 0.0)
    with held_up(shard):
        settling = asyncio.create_task(shard.finish_group("g000000"))
        dropping = asyncio.create_task(shard.drop_group("g000000", "too old"))
        await asyncio.sleep(0)  # both are on their way; the drop is written first
    await asyncio.gather(settling, dropping)
    shard = await reopened(opened, shard)
    assert await shard.recover(0) == []
    assert [one.advantage for one in await shard.run_summaries("g000000")] == [None, None]


async def test_the_calls_of_a_group_that_is_given_up_are_sealed(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened()
    for index in range(2):
        await shard.open_group(make_spec(index))
        await call(shard, f"g00000{index}-r0", await shard.open_attempt(f"g00000{index}-r0", 0), ask("a"), "b")
    await shard.drop_group("g000000", "too old")
    await shard.recover(0)
    await shard.close()
    objects = (tmp_path / "blobs").rglob("*.parquet")
    assert sorted(path.name.rpartition("-")[0] for path in objects) == ["g000000-r0-a0", "g000001-r0-a0"]


async def test_calls_of_one_run_may_come_at_once(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    root = await call(shard, RUN, key, ask("a"), "b")
    tickets = await asyncio.gather(*(call(shard, RUN, key, ask("a", "b", f"{i}"), f"to {i}") for i in range(20)))
    assert len({ticket.call_id for ticket in tickets}) == 20
    assert {ticket.parent_call_id for ticket in tickets} == {root.call_id}


async def test_the_event_loop_is_free_while_a_prompt_is_tokenised(opened: OpenShard) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(CharRenderer):
        def encode(self, text: str) -> list[int]:
            entered.set()
            assert go_on.wait(20)
            return super().encode(text)

    shard = opened(renderer=Slow())
    key = await started(shard)
    matching = asyncio.create_task(shard.match_call(RUN, key, ask("a")))
    assert await asyncio.to_thread(entered.wait, 20)
    await shard.open_attempt("g000000-r1", 0)  # answered meanwhile
    assert not matching.done()
    go_on.set()
    await matching


async def test_tickets_carry_the_reference_that_the_cluster_wants(opened: OpenShard) -> None:
    """Of long prompts: a short one is in the ticket itself."""
    shard = opened(as_ref=lambda ids: ("ref", len(ids)), max_model_len=100_000)
    key = await started(shard)
    short = await shard.match_call(RUN, key, ask("a"))
    assert short.prompt_ref.shape == (short.num_prompt_tokens,)
    long = await shard.match_call(RUN, key, ask("a" * 20_000))
    assert long.prompt_ref == ("ref", long.num_prompt_tokens)


async def test_a_request_may_name_the_call_that_it_stands_behind(opened: OpenShard) -> None:
    shard = opened()
    key = await started(shard)
    first = await call(shard, RUN, key, ask("a"), "b")
    behind = await shard.match_call(RUN, key, replace(ask("c"), previous_call_id=first.call_id))
    assert behind.parent_call_id == first.call_id
    assert behind.num_new_tokens < behind.num_prompt_tokens
    for unknown in ("g000000-r1-a0-c0", behind.call_id):
        with pytest.raises(InvalidRequestError, match="not found"):
            await shard.match_call(RUN, key, replace(ask("c"), previous_call_id=unknown))


async def test_counting_tokens_makes_no_call(opened: OpenShard) -> None:
    shard = opened(config=TrajectoryConfig(max_calls=1))
    key = await started(shard)
    assert await shard.count_tokens(RUN, key, ask("abc")) == len("uabcea")  # <user>abc<end><assistant>
    assert (await shard.match_call(RUN, key, ask("abc"))).num_prompt_tokens == len("uabcea")
    with pytest.raises(AccessError):
        await shard.count_tokens(RUN, "wrong", ask("abc"))


async def test_memory_and_disk_grow_with_new_text_not_with_history(opened: OpenShard, tmp_path: Path) -> None:
    shard = opened(max_model_len=10**9)
    key = await started(shard)
    contents = ["x" * 100_000]
    await call(shard, RUN, key, ask(*contents), "ok")
    size_bytes = (tmp_path / "shard-0.sqlite3-wal").stat().st_size
    for index in range(20):
        contents += ["ok", f"next {index}"]
        await call(shard, RUN, key, ask(*contents), "ok")
    log = shard._groups["g000000"].runs[RUN].log
    assert log is not None
    assert log.tree.num_tokens < 101_000
    assert len(pickle.dumps((log._conversations, log._roles))) < 20_000
    assert (tmp_path / "shard-0.sqlite3-wal").stat().st_size < size_bytes + 21 * 60_000
    assert read_run(str(tmp_path), RUN)[1][-1].request["messages"][0]["content"] == contents[0]
