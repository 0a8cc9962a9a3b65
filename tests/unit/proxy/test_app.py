from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import prometheus_client
import pytest

from services.common.errors import JobError, TemplateError
from services.common.types import CellState, VersionSpan
from services.proxy.responses import StreamCutError, is_no_cut
from tests.unit.proxy.conftest import JOB, Serve, Server, chat
from tests.unit.proxy.fakes import KEY, PROMPT, RUN, FakeBackends, FakeCell, FakeShard, word
from tests.waiting import until

WHOLE = "".join(word(index) for index in range(5))
HI = [{"role": "user", "content": "hi"}]


def events(stream: str) -> list[str]:
    return [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")]


def text_of(stream: str) -> str:
    chunks = [json.loads(event) for event in events(stream) if event != "[DONE]"]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def read_into(pieces: list[str], server: Server) -> None:
    """Read a stream piece by piece, so that what came before an error is kept."""
    async with server.http.stream("POST", f"/run/{KEY}/v1/chat/completions", json=chat(stream=True)) as response:
        async for piece in response.aiter_text():
            pieces.append(piece)


# --- a call that goes well -------------------------------------------------------------------------------------


async def test_official_client_gets_a_completion(serve: Serve) -> None:
    shard, cell = FakeShard(), FakeCell(finish_reason="stop")
    async with serve(FakeBackends(shard, a=cell)) as server:
        answer = await server.openai().chat.completions.create(model="m", messages=HI, stop=["END"])  # type: ignore[arg-type]
    assert answer.choices[0].message.content == WHOLE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert cell.requests[0].sampling.stop == ("END",)
    assert cell.prompts == [PROMPT]


async def test_official_client_gets_a_stream_with_usage(serve: Serve) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        stream = await server.openai().chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == WHOLE
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == len(shard.records[0].output_ids) == 5


async def test_usage_chunk_is_sent_only_when_asked_for(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        stream = (await server.post(stream=True)).text
    assert events(stream)[-1] == "[DONE]"
    assert "usage" not in stream


async def test_record_holds_what_was_sampled(serve: Serve) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell(version=8))) as server:
        await server.post()
    (record,) = shard.records
    assert record.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert len(record.logprobs) == 5
    assert record.version_spans == (VersionSpan(8, 5),)
    assert (record.run_id, record.cells, record.finish_reason, record.output_text) == (RUN, ("a",), "length", WHOLE)
    assert record.started_at_s <= record.ended_at_s
    assert shard.abandoned == []


async def test_concurrent_calls_do_not_mix(serve: Serve) -> None:
    shard = FakeShard(max_tokens=20)
    whole = "".join(word(index) for index in range(20))
    async with serve(FakeBackends(shard, a=FakeCell(dies_after=7), b=FakeCell(aborts_after=6), c=FakeCell())) as server:
        answers = await asyncio.gather(*(server.post(stream=index % 2 == 0) for index in range(40)))
    for index, answer in enumerate(answers):
        text = text_of(answer.text) if index % 2 == 0 else answer.json()["choices"][0]["message"]["content"]
        assert text == whole
    assert len({record.call_id for record in shard.records}) == 40


# --- durability ------------------------------------------------------------------------------------------------


async def test_last_chunk_is_sent_only_after_the_call_is_durable(serve: Serve) -> None:
    shard = FakeShard(append_gate=asyncio.Event())
    seen = ""
    async with (
        serve(FakeBackends(shard, a=FakeCell())) as server,
        server.http.stream("POST", f"/run/{KEY}/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        async for piece in response.aiter_text():
            seen += piece
            if text_of(seen).endswith(word(3)) and not shard.append_gate.is_set():  # type: ignore[union-attr]
                await shard.appending.wait()
                assert word(4) not in text_of(seen)
                assert 'finish_reason":"length' not in seen
                assert shard.records == []
                shard.append_gate.set()  # type: ignore[union-attr]
    assert text_of(seen) == WHOLE
    assert events(seen)[-1] == "[DONE]"


async def test_body_is_sent_only_after_the_call_is_durable(serve: Serve) -> None:
    shard = FakeShard(append_gate=asyncio.Event())
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        posting = asyncio.create_task(server.post())
        await shard.appending.wait()
        assert not posting.done()
        shard.append_gate.set()  # type: ignore[union-attr]
        assert (await posting).status_code == 200


async def test_call_that_could_not_be_stored_is_cut_not_ended(serve: Serve) -> None:
    shard = FakeShard(append_error=JobError("the shard is lost."))
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await server.post(stream=True)
        assert (await server.post()).status_code == 503


async def test_whole_answer_is_stored_though_the_harness_left_meanwhile(serve: Serve) -> None:
    shard = FakeShard(append_gate=asyncio.Event())
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        posting = asyncio.create_task(server.post(stream=True))
        await shard.appending.wait()
        posting.cancel()
        await asyncio.wait({posting})
        shard.append_gate.set()  # type: ignore[union-attr]
        await until(lambda: len(shard.records) == 1)
    assert shard.abandoned == []


# --- cells that are lost or drained ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [FakeCell(version=1, dies_after=2), FakeCell(version=1, aborts_after=2)])
@pytest.mark.parametrize("stream", [True, False])
async def test_call_goes_on_at_another_cell_with_no_token_lost_or_repeated(
    serve: Serve, first: FakeCell, stream: bool
) -> None:
    shard, second = FakeShard(), FakeCell(version=2)
    async with serve(FakeBackends(shard, a=first, b=second)) as server:
        answer = await server.post(stream=stream)
    text = text_of(answer.text) if stream else answer.json()["choices"][0]["message"]["content"]
    assert text == WHOLE
    (record,) = shard.records
    assert record.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert record.version_spans == (VersionSpan(1, 2), VersionSpan(2, 3))
    assert record.cells == ("a", "b")
    assert second.requests[-1].generated_ids == (0, 1)


async def test_call_whose_cell_was_lost_at_the_very_last_token_is_finished(serve: Serve) -> None:
    class AtTheEnd(FakeCell):
        async def generate(self, request, prompt_ref):  # type: ignore[no-untyped-def]
            async for chunk in super().generate(request, prompt_ref):
                yield type(chunk)(chunk.token_ids, chunk.logprobs, chunk.text, chunk.version)
            # ends without a finish reason

    shard = FakeShard()
    async with serve(FakeBackends(shard, a=AtTheEnd(), b=FakeCell())) as server:
        answer = (await server.post()).json()
    assert shard.records[0].output_ids.tolist() == [0, 1, 2, 3, 4]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == WHOLE


async def test_call_waits_until_a_cell_serves(serve: Serve) -> None:
    shard, cell = FakeShard(), FakeCell()
    backends = FakeBackends(shard, a=cell)
    backends.publish({"a": CellState.UPDATING})
    async with serve(backends) as server:
        posting = asyncio.create_task(server.post())
        await until(lambda: len(shard.requests) == 1)
        assert cell.requests == []
        backends.publish({"a": CellState.SERVING})
        assert (await posting).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_no_cell_in_time_gives_503_with_retry_after(serve: Serve, stream: bool) -> None:
    shard, cell = FakeShard(), FakeCell()
    backends = FakeBackends(shard, a=cell)
    backends.publish({"a": CellState.STALE})
    async with serve(backends, call_timeout_s=0.2) as server:
        answer = await server.post(stream=stream)
        with pytest.raises(openai.InternalServerError):
            await server.openai().chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"
    assert cell.requests == []
    assert len(shard.abandoned) == 2


async def test_stream_that_is_lost_midway_is_cut_and_never_looks_whole(serve: Serve) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell(hangs_after=2)), call_timeout_s=0.5) as server:
        pieces: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(pieces, server)
        seen = "".join(pieces)
        stream = await server.openai().chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[call-overload]
        with pytest.raises((httpx.RemoteProtocolError, openai.APIError)):
            _ = [chunk async for chunk in stream]
    assert text_of(seen) == word(0) + word(1)
    assert "[DONE]" not in seen
    assert len(shard.abandoned) == 2
    assert shard.records == []


def test_a_cut_is_no_fault_to_the_servers_log() -> None:
    def record(error: Exception) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "", None, (type(error), error, None))

    assert not is_no_cut(record(StreamCutError("lost")))
    assert is_no_cut(record(KeyError("x")))


@pytest.mark.parametrize("stream", [True, False])
async def test_harness_that_disconnects_aborts_its_call(serve: Serve, stream: bool) -> None:
    shard, cell = FakeShard(), FakeCell(hangs_after=2)
    async with serve(FakeBackends(shard, a=cell)) as server:
        posting = asyncio.create_task(server.post(stream=stream))
        await until(lambda: len(cell.requests) == 1)
        posting.cancel()
        await asyncio.wait({posting})
        await until(lambda: bool(cell.aborted and shard.abandoned))
    assert cell.aborted == [f"{RUN}-a0-c0"]
    assert shard.abandoned[0][0] == f"{RUN}-a0-c0"
    assert shard.records == []


async def test_silent_stream_carries_comments(serve: Serve) -> None:
    cell = FakeCell(stepping=asyncio.Semaphore(0))
    async with (
        serve(FakeBackends(FakeShard(), a=cell), keep_alive_s=0.05) as server,
        server.http.stream("POST", f"/run/{KEY}/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        seen = ""
        async for piece in response.aiter_text():
            seen += piece
            if seen.count(": keep-alive\n\n") == 2:
                for _ in range(5):
                    cell.stepping.release()  # type: ignore[union-attr]
    assert seen.startswith(": keep-alive\n\n")
    assert text_of(seen) == WHOLE


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [f"{RUN}.wrong", f"{RUN}.", RUN, "nonsense", "x.y", "g1.5"])
async def test_unknown_or_expired_key_is_refused_in_openais_form(serve: Serve, key: str) -> None:
    shard = FakeShard()
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        with pytest.raises(openai.AuthenticationError) as caught:
            await server.openai(key).chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]
        shard.keys.clear()  # the run has ended
        assert (await server.post(stream=True)).status_code == 401
    assert caught.value.code == "invalid_api_key"
    assert key not in str(caught.value)


async def test_key_may_come_as_bearer_and_the_path_wins(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:

        async def status(path: str, bearer: str) -> int:
            headers = {"authorization": f"Bearer {bearer}"}
            return (await server.http.post(f"{path}/chat/completions", json=chat(), headers=headers)).status_code

        assert await status("/v1", KEY) == 200
        assert await status("/v1", "wrong") == 401
        assert await status(f"/run/{KEY}/v1", "wrong") == 200
        assert await status("/run/wrong.key/v1", KEY) == 401
        assert (await server.http.post("/v1/chat/completions", json=chat())).status_code == 401


async def test_too_long_prompt_gets_the_context_length_error(serve: Serve) -> None:
    shard = FakeShard(num_prompt_tokens=5000)
    async with serve(FakeBackends(shard, a=FakeCell())) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            await server.openai().chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded"


async def test_no_more_than_so_many_requests_are_taken_at_once(serve: Serve) -> None:
    cell = FakeCell(hangs_after=0)
    async with serve(FakeBackends(FakeShard(), a=cell), max_ongoing_calls=1) as server:
        asking = asyncio.create_task(server.post())
        await until(lambda: bool(cell.requests))
        for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
            refused = await server.http.post(f"/run/{KEY}/v1/{path}", json=chat())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        asking.cancel()
        await until(lambda: bool(cell.aborted))
        counted = await server.http.post(f"/run/{KEY}/v1/messages/count_tokens", json=chat())
        assert counted.json() == {"input_tokens": 11}


async def test_every_refused_request_is_counted_by_its_kind(serve: Serve) -> None:
    kinds: dict[str, Any] = {
        "invalid_key": {"key": "g000001-r0.old"},
        "invalid_request": {"messages": []},
        "context_length": {},
    }
    before = {kind: num_refusals(kind) for kind in kinds}
    async with serve(FakeBackends(FakeShard(num_prompt_tokens=5000), a=FakeCell())) as server:
        for asked in kinds.values():
            await server.post(**asked)
    assert {kind: num_refusals(kind) - before[kind] for kind in kinds} == dict.fromkeys(kinds, 1)


def num_refusals(kind: str) -> float:
    labels = {"job": JOB, "kind": kind}
    return prometheus_client.REGISTRY.get_sample_value("tidegate_refusals_total", labels) or 0.0


async def test_messages_that_the_template_refuses_are_the_harnesss_fault(serve: Serve) -> None:
    class Refusing(FakeShard):
        async def match_call(self, run_id, key, request):  # type: ignore[no-untyped-def]
            raise TemplateError("roles must alternate")

    async with serve(FakeBackends(Refusing(), a=FakeCell())) as server:
        answer = await server.post()
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "roles must alternate"


async def test_fault_of_ours_is_a_500_in_openais_form(serve: Serve) -> None:
    class Broken(FakeShard):
        async def match_call(self, run_id, key, request):  # type: ignore[no-untyped-def]
            raise KeyError("oops")

    async with serve(FakeBackends(Broken(), a=FakeCell())) as server:
        answer = await server.post()
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("announced", [True, False])
async def test_larger_body_than_allowed_is_refused(serve: Serve, announced: bool) -> None:
    body = json.dumps(chat(padding="x" * 5000)).encode()

    async def pieces():  # type: ignore[no-untyped-def]
        yield body

    async with serve(FakeBackends(FakeShard(), a=FakeCell()), max_body_bytes=4096) as server:
        answer = await server.http.post(f"/run/{KEY}/v1/chat/completions", content=body if announced else pieces())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_body_that_does_not_come_is_refused_as_one_to_be_sent_again(serve: Serve, path: str) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell()), body_timeout_s=0.1) as server:
        url = httpx.URL(server.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /run/{KEY}/v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.readuntil(b"in time"), 20)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000])
async def test_body_that_is_no_json_object_is_refused(serve: Serve, body: bytes) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        answer = await server.http.post(f"/run/{KEY}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_paths_do_not_repeat_the_key(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        unknown = await server.http.post(f"/run/{KEY}/v1/embeddings", json={})
        wrong_method = await server.http.get(f"/run/{KEY}/v1/chat/completions")
    assert (unknown.status_code, wrong_method.status_code) == (404, 405)
    assert KEY not in unknown.text + wrong_method.text
    assert unknown.json()["error"]["type"] == "invalid_request_error"


async def test_models_probes_and_health(serve: Serve) -> None:
    async with serve(FakeBackends(FakeShard(), a=FakeCell())) as server:
        models = [model.id async for model in server.openai().models.list()]
        assert models == ["model-x"]
        assert (await server.http.head(f"/run/{KEY}")).status_code == 200
        socket = {"connection": "Upgrade", "upgrade": "websocket"}
        assert (await server.http.get(f"/run/{KEY}/v1/responses", headers=socket)).status_code == 426
        health = (await server.http.get("/healthz")).json()
    assert health == {"status": "ok", "job_id": "job-1", "epoch": 0, "num_cells": 1}


async def test_keys_are_never_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # the clients of this test, not the proxy
    logging.getLogger("httpcore").setLevel(logging.WARNING)
    logging.getLogger("openai").setLevel(logging.WARNING)
    cells = {"a": FakeCell(dies_after=1), "b": FakeCell(hangs_after=1)}
    async with serve(FakeBackends(FakeShard(), **cells), call_timeout_s=0.3) as server:
        await server.post()
        with pytest.raises(httpx.RemoteProtocolError):
            await server.post(stream=True)
        await server.post(key=f"{RUN}.wrongsecret")
        await server.http.post(f"/run/{KEY}/v1/embeddings", json={})
    assert "moves away" in caplog.text
    assert KEY.rpartition(".")[2] not in caplog.text
    assert "wrongsecret" not in caplog.text
