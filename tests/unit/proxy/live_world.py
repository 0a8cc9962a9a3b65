"""The production listener, the real app, parser and shard, and a scripted model: a proxy as harnesses see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from fastapi import FastAPI
from ray import cloudpickle

from services.common.errors import EngineError, JobError
from services.common.ids import JobId, RunId
from services.common.types import CellState
from services.proxy.app import create_app
from services.proxy.backends import Shard
from services.proxy.config import ProxyConfig
from services.proxy.listener import HttpListener, reserve_port
from services.proxy.parsing.vllm_parser import Extracted, VllmParser, VllmParsers
from services.proxy.responses import StreamCutError
from services.rollout.types import GenerateChunk, GenerateRequest, Sampling
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.store import read_run
from services.trajectory.types import CallRecord, GroupSpec
from tests.unit.proxy.fakes import FakeBackends, FakeCell, FakeShard
from tests.unit.proxy.templates import CHATML, renderer

DEADLINE_S = 20.0
IM_END = 2
TOOL_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la", "at": [1, {"x": "é"}]}}\n</tool_call>'
ANSWERS = (
    "Plain text, nothing else.",
    f"<think>\nfirst I think about it\n</think>\n\nI look.\n{TOOL_CALL}",
    f"{TOOL_CALL}\n{TOOL_CALL}",
    '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>',
    "<think>thought without an end",
    "",
)

_T = TypeVar("_T")
_PIECES = re.compile(r"\s*\S+|\s+")
_CALLS = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class HermesByHand(VllmParsers):
    """Reads Hermes' calls as vLLM's parser does, without vLLM."""

    def __init__(self) -> None:
        super().__init__("", "hermes", "qwen3")

    @property
    def is_loaded(self) -> bool:
        return True

    def warm(self) -> None:
        pass

    def load(self) -> None:
        pass

    def tool_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> Extracted:
        found = [json.loads(call) for call in _CALLS.findall(text)]
        calls = tuple((call["name"], json.dumps(call["arguments"])) for call in found)
        return Extracted(calls, _CALLS.sub("", text) if calls else text)


def hermes_parser() -> VllmParser:
    """The proxy's own parser for a model that writes ``<think>`` and Hermes' ``<tool_call>``."""
    return VllmParser(HermesByHand(), "hermes", "qwen3")


class Model(FakeCell):
    """Answers with what ``script`` gives for a prompt, a piece of text at a time, and ends its turn.

    ``stepping``, ``hangs_after`` and ``dies_after`` count pieces, whatever was made before elsewhere. What has died
    stays dead until ``dies_after`` is None again.
    """

    def __init__(self, script: Callable[[bytes], str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.is_hanging = False
        self.death: type[JobError] = EngineError
        """What it raises when it dies: others may go on with the call, or (``JobError``) nobody."""
        self.script = script or (lambda prompt: ANSWERS[zlib.crc32(prompt) % len(ANSWERS)])

    async def generate(self, request: GenerateRequest, prompt_ref: Any) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        self.prompts.append(prompt_ref)
        is_array = hasattr(prompt_ref, "tobytes")
        text = self.script(prompt_ref.tobytes() if is_array else b"")
        if request.sampling.json_schema is not None:
            text = '{"command": "ls"}'
        made = 0
        for number, (ids, piece, reason) in enumerate(self._pieces(text, request)):
            if number == self.dies_after:
                self.dies_after = 0
                raise self.death("the cell is lost.")
            if number == self.hangs_after:
                self.is_hanging = True
                try:
                    await asyncio.Event().wait()
                finally:
                    self.is_hanging = False
            if self.stepping is not None:
                await self.stepping.acquire()
            made += len(ids)
            yield GenerateChunk(ids, (-0.25,) * len(ids), piece, self.version, reason, 3 if number == 0 else 0)

    @staticmethod
    def _pieces(text: str, request: GenerateRequest) -> list[tuple[tuple[int, ...], str, str | None]]:
        """What is still to be made: token ids, their text, the finish reason with the last."""
        made = [(tuple(renderer(CHATML).encode(piece)), piece) for piece in _PIECES.findall(text)]
        made.append(((IM_END,), ""))
        pieces: list[tuple[tuple[int, ...], str, str | None]] = []
        at, behind, limit = 0, len(request.generated_ids), request.sampling.max_tokens
        for number, (ids, piece) in enumerate(made):
            kept = ids[: limit - at]
            is_end = number == len(made) - 1 and len(kept) == len(ids)
            is_cut = at + len(kept) >= limit
            reason = "stop" if is_end else "length" if is_cut else None
            if at >= behind:
                pieces.append((kept, piece if len(kept) == len(ids) else "", reason))
            at += len(kept)
            if reason is not None:
                break
        return pieces or [((), "", "length")]


class _AcrossProcesses:
    """A shard as a proxy replica reaches it: requests, answers and errors are pickled on their way."""

    def __init__(self, shard: TrajectoryShard) -> None:
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._shard, name)

        async def ask(*arguments: Any, **options: Any) -> Any:
            arguments, options = cloudpickle.loads(cloudpickle.dumps((arguments, options)))
            try:
                return cloudpickle.loads(cloudpickle.dumps(await method(*arguments, **options)))
            except Exception as error:
                raise cloudpickle.loads(cloudpickle.dumps(error)) from None

        return ask


_LEFT_CLIENT = "AsyncClient.aclose"
"""A vendor's client that another test let go closes itself in whatever loop turns then, and complains of its own."""


class _Faults(logging.Handler):
    """Keeps what the process under test says of faults of its own. A cut stream is none."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        is_cut = isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], StreamCutError)
        if (record.exc_info or record.levelno >= logging.ERROR) and not is_cut:
            told = logging.Formatter().format(record)
            if _LEFT_CLIENT not in told:
                self.told.append(told)


class LiveProxy:
    """A proxy on a port of its own, serving one run at a time. Everything of it runs in the listener's loop."""

    def __init__(
        self,
        folder: Path,
        template: str = CHATML,
        *,
        max_model_len: int = 4096,
        max_tokens: int = 200,
        model: Model | None = None,
        **config: Any,
    ) -> None:
        self.shard: TrajectoryShard
        self.model = model or Model()
        self.folder = folder
        self.run_id, self.key = RunId(""), ""
        self._template, self._max_model_len, self._max_tokens = template, max_model_len, max_tokens
        self._num_groups = 0
        self._closing = contextlib.ExitStack()
        port = self._closing.enter_context(reserve_port("127.0.0.1", 0)).getsockname()[1]
        self.address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self.faults = _Faults()
        self.backends = FakeBackends(FakeShard(), a=self.model)
        backends = self.backends
        backends.shard_for = lambda run_id: cast(Shard, _AcrossProcesses(self.shard))  # type: ignore[method-assign]
        settings = ProxyConfig(**{"port": port, **config})
        app = create_app(JobId("job-1"), settings, "model-x", backends, hermes_parser(), self._lifespan)
        self._listener = HttpListener(app, settings)
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def __enter__(self) -> LiveProxy:
        logging.getLogger().addHandler(self.faults)
        self._listener.start()
        self.begin_run()
        return self

    def __exit__(self, *_error: object) -> None:
        self.http.close()
        self._listener.stop()
        self._closing.close()
        logging.getLogger().removeHandler(self.faults)

    def begin_run(self) -> None:
        """A new run of a new group; its key is the one that holds."""
        self._num_groups += 1
        group = f"g{self._num_groups:06d}"
        self.run_id = RunId(f"{group}-r0")
        self.in_loop(self.shard.open_group(GroupSpec(group, "task", (self.run_id, f"{group}-r1"), version=0)))
        self.key = self.in_loop(self.shard.open_attempt(self.run_id, 0))

    def in_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something in the loop of the proxy and the shard."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def publish(self, state: CellState) -> None:
        """A new route table, with the model's cell in another state."""

        async def offer() -> None:
            self.backends.publish({"a": state})

        self.in_loop(offer())

    def let_run(self, num_pieces: int = 1000) -> None:
        """Let a model that is ``stepping`` make so many pieces."""

        async def release() -> None:
            for _ in range(num_pieces):
                assert self.model.stepping is not None
                self.model.stepping.release()

        self.in_loop(release())

    @property
    def calls(self) -> list[CallRecord]:
        """The run's calls, as a reader of the store finds them."""
        return read_run(str(self.folder), self.run_id)[1]

    def new_shard(self) -> TrajectoryShard:
        """A shard over the store, as it is made when one was lost."""
        sampling = Sampling(max_tokens=self._max_tokens)
        using = renderer(self._template)
        return TrajectoryShard(
            "job-1",
            0,
            TrajectoryConfig(),
            str(self.folder),
            "",
            sampling,
            self._max_model_len,
            key_secret="s",
            renderer=using,
        )

    def restart_shard(self) -> None:
        """Close the shard and take up its store with a new one."""

        async def restart() -> None:
            await self.shard.close()
            self.shard = self.new_shard()

        self.in_loop(restart())

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.shard = self.new_shard()
        yield
        await self.shard.close()
