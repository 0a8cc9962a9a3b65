from __future__ import annotations

import asyncio
import threading

import pytest

from services.common.errors import AccessError, EngineError
from services.common.ids import JobId, RunId
from services.common.types import CellState, VersionSpan
from services.proxy import calls
from services.proxy.calls import Answer, CallFailedError, CallServer, Piece
from services.proxy.parsing import AnswerReader, PlainParser
from services.proxy.types import CanonicalRequest, Delta, Message, ParsedAnswer
from services.rollout.types import GenerateChunk, Sampling
from services.trajectory.types import CallTicket
from tests.unit.proxy.fakes import KEY, RUN, FakeBackends, FakeCell, FakeShard, word
from tests.waiting import until

REQUEST = CanonicalRequest("openai_chat", "m", (Message("user", "hi"),))


def chunk(num_tokens: int, version: int, reason: str | None = None) -> GenerateChunk:
    return GenerateChunk(tuple(range(num_tokens)), (-1.0,) * num_tokens, "x" * num_tokens, version, reason)


def test_neighbouring_tokens_of_one_version_make_one_span() -> None:
    answer = Answer()
    for cell, piece in [("a", chunk(2, 1)), ("a", chunk(1, 1)), ("a", chunk(3, 2)), ("b", chunk(0, 3, "abort"))]:
        answer.add(piece, cell)
    answer.add(chunk(1, 2, "stop"), "c")
    assert answer.version_spans == [VersionSpan(1, 3), VersionSpan(2, 4)]
    assert sum(span.num_tokens for span in answer.version_spans) == len(answer.token_ids) == len(answer.logprobs)
    assert answer.cells == ["a", "c"]  # b made nothing
    assert (answer.text, answer.finish_reason) == ("x" * 7, "stop")


def test_cached_tokens_are_those_of_the_cell_that_began() -> None:
    answer = Answer()
    answer.add(GenerateChunk((1,), (0.0,), "", 1, None, 32), "a")
    answer.add(GenerateChunk((2,), (0.0,), "", 1, "stop", 64), "b")
    assert answer.num_cached_tokens == 32


@pytest.mark.parametrize(
    "broken", [GenerateChunk((1, 2), (0.0,), "x", 1), GenerateChunk((1,), (0.0,), "x", 1, "error")]
)
def test_broken_chunk_counts_as_a_lost_cell_and_adds_nothing(broken: GenerateChunk) -> None:
    answer = Answer()
    with pytest.raises(EngineError):
        answer.add(broken, "a")
    assert answer == Answer()


async def test_pieces_join_to_the_text_of_the_record_and_the_last_comes_after_it() -> None:
    shard = FakeShard()
    pieces: list[tuple[str, bool, int]] = []

    def emit(piece: Piece) -> None:
        text = "".join(delta.text for delta in piece.deltas)
        pieces.append((text, piece.finished is not None, len(shard.records)))

    backends = FakeBackends(shard, a=FakeCell(dies_after=2), b=FakeCell())
    await CallServer(JobId("j"), backends, PlainParser(), 20).serve(RUN, KEY, REQUEST, emit)

    assert "".join(text for text, _, _ in pieces) == shard.records[0].output_text
    assert pieces[-1] == (word(4), True, 1)
    assert all(not is_last and num_stored == 0 for _, is_last, num_stored in pieces[:-1])


async def test_call_whose_harness_left_during_matching_is_taken_back() -> None:
    gate = asyncio.Event()

    class Slow(FakeShard):
        async def match_call(self, run_id, key, request):
            await gate.wait()
            return await super().match_call(run_id, key, request)

    shard, cell = Slow(), FakeCell()
    serving = asyncio.create_task(
        CallServer(JobId("j"), FakeBackends(shard, a=cell), PlainParser(), 20).serve(
            RUN, KEY, REQUEST, lambda piece: None
        )
    )
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait({serving})
    gate.set()
    await until(lambda: shard.abandoned == [(f"{RUN}-a0-c0", "cancelled")])
    assert cell.requests == []


async def test_all_cells_lost_is_a_failed_call_and_no_busy_loop() -> None:
    shard, cells = FakeShard(), {"a": FakeCell(dies_after=0), "b": FakeCell(dies_after=0)}
    server = CallServer(JobId("j"), FakeBackends(shard, **cells), PlainParser(), 0.4)
    with pytest.raises(CallFailedError):
        await server.serve(RUN, KEY, REQUEST, lambda piece: None)
    assert 2 <= len(cells["a"].requests) < 10
    await until(lambda: shard.lost == [f"{RUN}-a0-c0"])


async def test_harness_that_gives_up_waiting_for_a_cell_met_an_engine_loss() -> None:
    shard = FakeShard()
    backends = FakeBackends(shard, a=FakeCell())
    backends.publish({"a": CellState.STALE})
    serving = asyncio.create_task(CallServer(JobId("j"), backends, PlainParser(), 20).serve(RUN, KEY, REQUEST, print))
    await until(lambda: bool(shard.requests))
    serving.cancel()
    await until(lambda: shard.lost == [f"{RUN}-a0-c0"])


async def test_harness_that_leaves_a_cell_at_work_met_no_engine_loss() -> None:
    shard, cell = FakeShard(), FakeCell(hangs_after=1)
    serving = asyncio.create_task(
        CallServer(JobId("j"), FakeBackends(shard, a=cell), PlainParser(), 20).serve(RUN, KEY, REQUEST, print)
    )
    await until(lambda: bool(cell.requests))
    serving.cancel()
    await until(lambda: len(shard.abandoned) == 1)
    assert shard.lost == []


async def test_refusal_of_the_shard_reaches_the_caller_untouched() -> None:
    shard = FakeShard(keys=set())
    with pytest.raises(AccessError):
        await CallServer(JobId("j"), FakeBackends(shard, a=FakeCell()), PlainParser(), 20).serve(
            RUN, KEY, REQUEST, print
        )
    assert shard.abandoned == []


async def test_a_harness_that_leaves_while_it_waits_for_anothers_answer_may_ask_for_it_again() -> None:
    class Sharing(FakeShard):
        async def match_call(self, run_id, key, request):
            self.requests.append(request)
            return CallTicket("shared", run_id, 0, None, 0, 0, None, Sampling(), False, is_shared=True)

        async def shared_answer(self, run_id, call_id):
            await asyncio.Event().wait()

    shard = Sharing()
    server = CallServer(JobId("j"), FakeBackends(shard, a=FakeCell()), PlainParser(), 20)
    serving = asyncio.create_task(server.serve(RUN, KEY, REQUEST, print))
    await until(lambda: bool(shard.requests))
    await asyncio.sleep(0)
    serving.cancel()
    await until(lambda: shard.undelivered == ["shared"])


async def test_an_answer_that_is_stored_too_late_for_its_harness_is_kept_for_it() -> None:
    shard = FakeShard(append_gate=asyncio.Event())
    server = CallServer(JobId("j"), FakeBackends(shard, a=FakeCell()), PlainParser(), 0.2)
    with pytest.raises(CallFailedError):
        await server.serve(RUN, KEY, REQUEST, lambda piece: None)
    assert shard.undelivered == []
    assert shard.append_gate is not None
    shard.append_gate.set()
    await until(lambda: shard.undelivered == [f"{RUN}-a0-c0"])


async def test_other_calls_go_on_while_an_answer_is_read_slowly() -> None:
    may_end = threading.Event()

    class Slow:
        is_slow = False

        def prepare(self) -> None: ...

        def feed(self, text: str) -> list[Delta]:
            return []

        def finish(self) -> tuple[list[Delta], ParsedAnswer]:
            assert may_end.wait(20)
            return [], ParsedAnswer("read")

    class SlowParser:
        def reader(self, request: CanonicalRequest, call_id: str) -> AnswerReader:
            return Slow()

    shard, cell = FakeShard(), FakeCell()
    server = CallServer(JobId("j"), FakeBackends(shard, a=cell), SlowParser(), 20)
    serving = asyncio.create_task(server.serve(RUN, KEY, REQUEST, lambda piece: None))
    await until(lambda: bool(cell.requests))
    for _ in range(100):
        await asyncio.sleep(0)
    assert shard.records == []
    may_end.set()
    await serving
    assert shard.records[0].answer == ParsedAnswer("read")


async def test_nobody_waits_for_a_call_whose_answer_could_not_be_read() -> None:
    class Failing(PlainParser):
        def reader(self, request: CanonicalRequest, call_id: str) -> AnswerReader:
            reader = super().reader(request, call_id)
            reader.finish = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
            return reader

    shard = FakeShard()
    server = CallServer(JobId("j"), FakeBackends(shard, a=FakeCell()), Failing(), 20)
    with pytest.raises(ZeroDivisionError):
        await server.serve(RUN, KEY, REQUEST, lambda piece: None)
    await until(lambda: shard.abandoned == [(f"{RUN}-a0-c0", "ZeroDivisionError")])
    assert shard.partials[0].output_ids.tolist() == list(range(5))


async def test_nobody_waits_for_a_call_that_could_not_be_stored() -> None:
    shard = FakeShard(append_error=EngineError("broken"))
    server = CallServer(JobId("j"), FakeBackends(shard, a=FakeCell()), PlainParser(), 20)
    with pytest.raises(EngineError):
        await server.serve(RUN, KEY, REQUEST, lambda piece: None)
    await until(lambda: shard.abandoned == [(f"{RUN}-a0-c0", "EngineError")])


async def test_shards_hear_of_calls_in_flight_though_another_shard_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeShard):
        async def renew_calls(self, call_ids):
            await asyncio.Event().wait()

    monkeypatch.setattr(calls, "_RENEWAL_S", 0.02)
    shards = {RUN: FakeShard(), "g000001-r1": Hanging()}
    backends = FakeBackends(FakeShard(), a=FakeCell(hangs_after=1))
    backends.shard_for = lambda run_id: shards[run_id]  # type: ignore[method-assign]
    server = CallServer(JobId("j"), backends, PlainParser(), 20)
    serving = [
        asyncio.create_task(
            server.serve(RunId(run_id), f"{run_id}.{KEY.partition('.')[2]}", REQUEST, lambda piece: None)
        )
        for run_id in shards
    ]
    shards["g000001-r1"].keys = {f"g000001-r1.{KEY.partition('.')[2]}"}
    await until(lambda: len(shards[RUN].renewed) > 3)
    assert set(shards[RUN].renewed) == {f"{RUN}-a0-c0"}
    for one in serving:
        one.cancel()
    await asyncio.wait(serving)
