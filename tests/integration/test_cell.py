"""The rollout cell: calls survive drains, updates and moves without losing or repeating a token."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from services.common.errors import AccessError, ConfigError, ContextLengthError
from services.common.types import CellRole, CellState
from services.rollout.client import CellClient
from services.rollout.types import Sampling
from tests.integration.calls import PROMPT, TOKEN, Answer, Pair, ask
from tests.integration.publisher import logprobs, with_a_wrong_checksum
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

LONG = Sampling(temperature=0.0, max_tokens=300)
SHORT = Sampling(temperature=0.0, max_tokens=24)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tied: Pair) -> AsyncIterator[CellClient]:
    client = CellClient(await tied.cell.start(), TOKEN)
    yield client
    await client.close()


def _assert_greedy(model: torch.nn.Module, answer: Answer, first: int, last: int) -> None:
    """Tokens ``first`` to ``last`` of an answer are what ``model`` says next, behind everything before them."""
    with torch.no_grad():
        ids = [*PROMPT, *answer.ids[:last]]
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0, len(PROMPT) - 1 + first : -1], dim=-1)
    best = rows.max(dim=-1).values.tolist()
    assert answer.logprobs[first:last] == pytest.approx(best, abs=1e-3)
    assert logprobs(model, ids, 1.0)[len(PROMPT) - 1 + first :] == pytest.approx(best, abs=1e-3)


async def _start(pair: Pair, num_calls: int, sampling: Sampling) -> tuple[list[asyncio.Task[Answer]], list[Answer]]:
    """Calls that have their first tokens."""
    answers = [Answer() for _ in range(num_calls)]
    tasks = [
        asyncio.create_task(ask(pair.cell, sampling, call_id=f"g000001-r{index}-a0-c0", answer=answer))
        for index, answer in enumerate(answers)
    ]
    await until(lambda: all(len(answer.ids) > 2 for answer in answers))
    return tasks, answers


async def test_a_new_cell_is_stale_and_serves_nothing(tied: Pair, client: CellClient) -> None:
    status = await client.status()
    assert (status.state, status.version, status.num_calls) == (CellState.STALE, -1, 0)
    answer = await ask(tied.cell, SHORT)
    assert (answer.ids, answer.text, answer.finish_reason) == ([], "", "abort")


async def test_published_weights_serve_under_their_version(tied: Pair, client: CellClient) -> None:
    result = await client.publish(tied.publisher.publish(1, tied.publisher.model(seed=1)))
    assert (result.ok, result.version, result.reason) == (True, 1, "")
    status = await client.status()
    assert (status.state, status.version, status.admitting, status.slots) == (CellState.SERVING, 1, True, 8)
    assert status.rss_bytes > 100 << 20
    answer = await ask(tied.cell, SHORT)
    assert len(answer.ids) == 24
    assert answer.finish_reason == "length"
    assert answer.text == tied.tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert set(answer.versions()) == {1}


async def test_an_older_version_is_refused_and_the_newer_goes_on_serving(tied: Pair, client: CellClient) -> None:
    result = await client.publish(tied.publisher.publish(0, tied.publisher.model(seed=5)))
    assert not result.ok
    status = await client.status()
    assert (status.state, status.version) == (CellState.SERVING, 1)


async def test_a_wrong_token_is_refused(tied: Pair) -> None:
    stranger = CellClient(await tied.cell.start(), "guess")
    with pytest.raises(AccessError):
        await stranger.status()
    await stranger.close()


async def test_a_prompt_without_room_for_an_answer_is_refused(tied: Pair) -> None:
    with pytest.raises(ContextLengthError):
        await ask(tied.cell, SHORT, prompt=[5] * 1024)


async def test_an_answer_ends_where_the_context_ends(tied: Pair) -> None:
    answer = await ask(tied.cell, SHORT, prompt=[5] * 1020)
    assert (len(answer.ids), answer.finish_reason) == (4, "length")


@pytest.mark.parametrize("num_before", [1, 7, 23, 24])
async def test_a_continuation_equals_the_uninterrupted_call(tied: Pair, num_before: int) -> None:
    whole = await ask(tied.cell, SHORT)
    rest = await ask(tied.cell, SHORT, generated=whole.ids[:num_before])
    assert rest.ids == whole.ids[num_before:]
    assert rest.logprobs == pytest.approx(whole.logprobs[num_before:], abs=1e-3)
    assert whole.text.endswith(rest.text)
    assert rest.finish_reason == "length"


async def test_an_answer_ends_before_its_stop_string(tied: Pair) -> None:
    whole = await ask(tied.cell, LONG)
    stop = whole.text[40:46]
    at = whole.text.find(stop)
    stopped = await ask(tied.cell, Sampling(temperature=0.0, max_tokens=300, stop=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[:at]
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert stop in tied.tokenizer.decode(stopped.ids)
    assert stop not in tied.tokenizer.decode(stopped.ids[:-1])
    for num_before in range(1, len(stopped.ids)):
        if num_before % 5 and num_before < len(stopped.ids) - 3:
            continue
        sampling = Sampling(temperature=0.0, max_tokens=300, stop=(stop,))
        rest = await ask(tied.cell, sampling, generated=stopped.ids[:num_before])
        assert rest.ids == stopped.ids[num_before:]
        assert rest.finish_reason == "stop"
        assert stopped.text.endswith(rest.text)


async def test_runs_of_a_group_differ_and_a_call_repeats(tied: Pair) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=16, seed=3)
    first = await ask(tied.cell, sampling, call_id="g000000-r0-a0-c0")
    again = await ask(tied.cell, sampling, call_id="g000000-r0-a0-c0")
    other = await ask(tied.cell, sampling, call_id="g000000-r1-a0-c0")
    assert first.ids == again.ids
    assert first.ids != other.ids


async def test_a_drained_cell_finishes_its_calls_and_takes_no_new_ones(tied: Pair, client: CellClient) -> None:
    tasks, answers = await _start(tied, 3, Sampling(temperature=0.0, max_tokens=100))
    draining = asyncio.create_task(client.drain(timeout_s=60))
    await until(lambda: draining.done() or not all(task.done() for task in tasks))
    assert await draining == (3, 0)
    assert [(len(answer.ids), answer.finish_reason) for answer in answers] == [(100, "length")] * 3
    refused = await ask(tied.cell, SHORT)
    assert (refused.ids, refused.finish_reason) == ([], "abort")
    assert not (await client.status()).admitting
    await client.admit()
    assert len((await ask(tied.cell, SHORT)).ids) == 24


async def test_calls_left_at_the_drains_deadline_keep_their_tokens(tied: Pair, client: CellClient) -> None:
    whole = await ask(tied.cell, LONG)
    tasks, answers = await _start(tied, 2, LONG)
    assert await client.drain(timeout_s=0) == (0, 2)
    await asyncio.gather(*tasks)
    await client.admit()
    for answer in answers:
        assert answer.finish_reason == "abort"
        assert answer.ids == whole.ids[: len(answer.ids)]
        rest = await ask(tied.cell, LONG, generated=answer.ids)
        assert answer.ids + rest.ids == whole.ids
        assert answer.text + rest.text == whole.text


async def test_a_switch_to_training_drains_and_one_to_rollout_admits(tied: Pair, client: CellClient) -> None:
    await client.switch(CellRole.TO_TRAIN, timeout_s=10)
    assert not (await client.status()).admitting
    await client.switch(CellRole.ROLLOUT, timeout_s=10)
    assert (await client.status()).admitting
    with pytest.raises(ConfigError):
        await client.switch(CellRole.DOWN, timeout_s=10)


async def test_an_aborted_call_ends_with_its_tokens(tied: Pair) -> None:
    (task,), (answer,) = await _start(tied, 1, LONG)
    await tied.cell.abort("g000001-r0-a0-c0")
    await task
    assert answer.finish_reason == "abort"
    assert 2 < len(answer.ids) < 300


async def test_an_abandoned_call_frees_its_place(tied: Pair) -> None:
    (task,), _ = await _start(tied, 1, LONG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await tied.cell.status()).num_calls == 0


async def test_an_update_during_generation_loses_and_repeats_nothing(tied: Pair) -> None:
    old, new = tied.publisher.model(seed=1), tied.publisher.model(seed=7)
    manifest = tied.publisher.publish(2, new)
    tasks, answers = await _start(tied, 4, LONG)
    assert (await tied.cell.publish(manifest)).ok
    await asyncio.gather(*tasks)
    for answer in answers:
        assert (len(answer.ids), answer.finish_reason) == (300, "length")
        assert [span.version for span in answer.spans] == [1, 2]
        num_old = answer.spans[0].num_tokens
        assert num_old + answer.spans[1].num_tokens == 300
        _assert_greedy(old, answer, 0, num_old)
        _assert_greedy(new, answer, num_old, 300)  # by the new weights alone: no old KV stands behind any of these
        assert answer.text == tied.tokenizer.decode(answer.ids, skip_special_tokens=True)


async def test_a_failed_update_ends_its_calls_and_the_next_good_one_heals(tied: Pair, client: CellClient) -> None:
    manifest = tied.publisher.publish(3, tied.publisher.model(seed=8))
    tasks, answers = await _start(tied, 2, LONG)
    refused = await client.publish(with_a_wrong_checksum(manifest))
    assert not refused.ok
    assert "checksum" in refused.reason
    await asyncio.gather(*tasks)
    for answer in answers:
        assert answer.finish_reason == "abort"
        assert set(answer.versions()) == {2}
    status = await client.status()
    assert (status.state, status.version) == (CellState.STALE, 2)
    assert "checksum" in status.reason
    assert (await ask(tied.cell, SHORT)).finish_reason == "abort"

    assert (await client.publish(manifest)).ok
    rest = await ask(tied.cell, LONG, generated=answers[0].ids)
    assert len(answers[0].ids) + len(rest.ids) == 300
    assert set(rest.versions()) == {3}


async def test_a_publisher_that_is_gone_leaves_the_cell_stale(tied: Pair, client: CellClient) -> None:
    manifest = tied.publisher.publish(4, tied.publisher.model(seed=9))
    refused = await client.publish(dataclasses.replace(manifest, segment="127.0.0.1:9"))
    assert not refused.ok
    assert (await client.status()).state is CellState.STALE
    assert (await client.publish(manifest)).ok


async def test_ten_updates_in_a_row_with_calls_in_flight(tied: Pair) -> None:
    models = [tied.publisher.model(seed=seed) for seed in (9, 10)]
    manifests = [tied.publisher.publish(version, models[version % 2]) for version in range(5, 15)]
    sampling = Sampling(temperature=0.0, max_tokens=900)
    tasks, answers = await _start(tied, 4, sampling)
    for manifest in manifests:
        result = await tied.cell.publish(manifest)
        assert (result.ok, result.reason) == (True, "")
        await until(lambda version=manifest.version: all(a.versions()[-1] == version for a in answers))
    await asyncio.gather(*tasks)
    for answer in answers:
        assert (len(answer.ids), answer.finish_reason) == (900, "length")
        assert [span.version for span in answer.spans] == [4, *range(5, 15)]
        first = 0
        for span in answer.spans:
            model = models[0] if span.version == 4 else models[span.version % 2]
            _assert_greedy(model, answer, first, first + span.num_tokens)
            first += span.num_tokens
