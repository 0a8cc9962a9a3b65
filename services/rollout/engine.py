"""A vLLM engine: token ids in, token ids and log-probabilities out. The only module that knows vLLM's API.

vLLM is imported inside functions: importing this module is quick and works where vLLM is not installed. ``AsyncLLM``
always runs its core in a process of its own. On a CPU the worker lives in that same process, which saves one import
of torch and vLLM at every start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from pydantic import ValidationError

from services.common.answer_formats import structure_tokens
from services.common.errors import ConfigError, EngineError, MachineError, RequestError
from services.rollout.config import EngineConfig, RolloutConfig
from services.trainer.types import WeightManifest

WORKER_EXTENSION = "services.rollout.worker_extension.WorkerExtension"
OWNER_VARIABLE = "TIDEGATE_ENGINE_OWNER"
"""Environment variable of an engine's processes: process id of the cell that owns them. They die with it."""
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
_SCHEMA_HINT = "Leave out what is rare in it: patterns, formats, conditions."
_SHUTDOWN_TIMEOUT_S = 0.5  # it has nothing to save, and its own goodbye takes seconds
_OOM_HINT = (
    "Lower rollout.engine.kv_cache_bytes, max_model_len or max_num_seqs, take a smaller model, or free memory; the "
    "engine's own message is in the cell's log."
)


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Newly sampled tokens. Equal lengths; log-probabilities are those of the distribution that was sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    """None while it goes on; then 'stop' (an end-of-sequence token, the last of ``token_ids``), 'length', 'abort'."""
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """What one worker of the engine says of a weight update."""

    error: str = ""
    """Empty if the weights were pulled, loaded and read back; else what went wrong."""
    loaded: bool = False
    """Whether the weights were put into the engine, right or wrong."""
    transport: str = ""
    """The transport that the worker's transfer engine really uses."""
    pull_s: float = 0.0
    load_s: float = 0.0
    num_equal: int = 0
    """Parameters that equal what was sent, compared whole, bit for bit."""
    num_probed: int = 0
    """Packed matrices of which columns were compared bit for bit."""
    num_unread: int = 0
    """Parameters in a layout that cannot be read back."""


def engine_env(config: RolloutConfig, cell_index: int) -> dict[str, str]:
    """Environment of a process that runs an engine; it must be set before that process imports torch."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_PROCESS_NAME_PREFIX": f"tidegate-cell-{cell_index}",  # what ps shows
    }
    if config.cells.gpus_per_cell > 0:
        return common
    return {
        **common,
        # vLLM's own choice binds the first engine of every process to the same core; the operating system does better
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.engine.num_threads),
        # the worker inside the engine's core process, not in one more process
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


class Engine:
    """One engine. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig, model_path: str, host: str = "127.0.0.1") -> None:
        self._config = config
        self._model_path = model_path
        self._host = host
        self._llm: Any = None
        self._tokenizer: Any = None
        self._hidden_ids: frozenset[int] = frozenset()
        self._num_requests = 0
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that end an answer."""
        self.num_kv_tokens = 0
        """Tokens that the KV pool holds."""

    async def start(self) -> None:
        """Start it. Raises ``EngineError`` (did not start, out of memory) or ``MachineError`` (no vLLM)."""
        if importlib.util.find_spec("vllm") is None:
            raise MachineError("vLLM is not installed.", "Install tidegate with its extra 'cpu' or 'gpu'.")
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        try:
            with _sockets_folder():
                async with asyncio.timeout(self._config.start_timeout_s):
                    # a thread: the start blocks for seconds, and the cell must answer meanwhile
                    self._llm = await asyncio.to_thread(self._start)
                    await self._llm.get_supported_tasks()
        except TimeoutError as error:
            self._kill_children(others)
            raise EngineError(
                f"the engine was not up after {self._config.start_timeout_s:g} s.",
                "Raise rollout.engine.start_timeout_s, or see the cell's log.",
            ) from error
        except (ConfigError, EngineError):
            raise
        except Exception as error:  # whatever vLLM raises at start, the job must end with one clear error
            self._kill_children(others)
            raise EngineError(f"the engine did not start ({_first_line(error)}).", _OOM_HINT) from error
        self._tokenizer = self._llm.get_tokenizer()
        cache = self._llm.vllm_config.cache_config
        self.num_kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self.stop_ids = self._stop_ids()
        self._hidden_ids = hidden_ids(self._tokenizer, self.stop_ids)

    def _start(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        config = self._config
        arguments: dict[str, Any] = {
            "model": self._model_path,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "block_size": config.block_size,
            "tensor_parallel_size": config.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
        }
        if current_platform.is_cpu():
            _check_memory(config.kv_cache_bytes)
            arguments["enforce_eager"] = True
            if config.tensor_parallel_size == 1:
                arguments["distributed_executor_backend"] = "uni"
        unknown = config.extra.keys() - AsyncEngineArgs.__dataclass_fields__.keys()
        if unknown:
            raise ConfigError(
                f"rollout.engine.extra has arguments that vLLM does not know: {', '.join(sorted(unknown))}.",
                "Use names of vLLM's AsyncEngineArgs.",
            )
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**{**arguments, **config.extra}))

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    @property
    def dead(self) -> bool:
        """Whether the engine's process is gone."""
        return self._llm is not None and bool(self._llm.errored)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; of special ones only those that set reasoning and tool calls apart."""
        shown = [token for token in token_ids if token not in self._hidden_ids]
        return self._tokenizer.decode(shown, skip_special_tokens=False) if shown else ""

    def new_request_id(self, call_id: str) -> str:
        """An id that no request of this engine had before: a call that was aborted comes again under another."""
        self._num_requests += 1
        return f"{call_id}#{self._num_requests}"

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        temperature: float,
        max_tokens: int,
        seed: int | None,
        json_schema: str | None = None,
    ) -> AsyncGenerator[EngineOutput, None]:
        """Sample until a stop token, ``max_tokens``, the end of the context, or ``abort(request_id)``.

        ``json_schema``: a mask makes the new tokens satisfy it, from the first of them on. The request is known to the
        engine before the first suspension, so no ``abort`` can miss it. Raises
        ``EngineError`` when the engine dies, ``RequestError`` when it refuses the request.
        """
        from vllm.inputs import tokens_input

        with _engine_errors():
            sampling = self._sampling(temperature, max_tokens, seed, json_schema)
            outputs = self._llm.generate(tokens_input(list(prompt_ids)), sampling, request_id)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    new = output.outputs[0]
                    if new.finish_reason == "error" and json_schema is not None:
                        raise RequestError("the engine cannot enforce the JSON schema.", _SCHEMA_HINT)
                    if new.finish_reason == "error":
                        raise EngineError(f"the engine failed on request {request_id}.", _OOM_HINT)
                    logprobs = [
                        row[token].logprob for row, token in zip(new.logprobs or (), new.token_ids, strict=True)
                    ]
                    yield EngineOutput(
                        tuple(new.token_ids), tuple(logprobs), new.finish_reason, output.num_cached_tokens or 0
                    )

    def _sampling(self, temperature: float, max_tokens: int, seed: int | None, json_schema: str | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=0,  # of the sampled token only
            detokenize=False,  # the cell makes the text, across engines and versions
            structured_outputs=StructuredOutputsParams(json=json_schema) if json_schema is not None else None,
            output_kind=RequestOutputKind.DELTA,
        )

    def _stop_ids(self) -> frozenset[int]:
        from vllm import SamplingParams

        params = SamplingParams()
        params.update_from_generation_config(
            self._llm.input_processor.generation_config_fields, self._tokenizer.eos_token_id
        )
        return frozenset(params.all_stop_token_ids)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities at temperature 1: element ``i`` is that of ``token_ids[i + 1]`` given those before it."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        result: Any = None
        with _engine_errors():
            request_id = self.new_request_id("score")
            async for output in self._llm.generate(tokens_input(list(token_ids)), params, request_id):
                result = output
        rows = result.prompt_logprobs[1:]
        return [row[token].logprob for row, token in zip(rows, token_ids[1:], strict=True)]

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` ends with 'abort'. Does nothing for an unknown one."""
        with _engine_errors():
            await self._llm.abort(request_id)

    async def pause(self) -> None:
        """Schedule nothing until ``resume``. Nothing may be running: vLLM frees KV of aborted requests late."""
        with _engine_errors():
            await self._llm.pause_generation(mode="wait", clear_cache=True)

    async def resume(self) -> None:
        with _engine_errors():
            await self._llm.resume_generation()

    async def update_weights(self, manifest: WeightManifest) -> list[WorkerUpdate]:
        """Have every worker pull, load and read back; one result each."""
        request = json.dumps({"manifest": asdict(manifest), "host": self._host})
        with _engine_errors():
            results = await self._llm.collective_rpc("tidegate_update", args=(request,))
        return [WorkerUpdate(**result) for result in results]

    async def reset_prefix_cache(self) -> None:
        """Drop all cached KV. Raises ``EngineError`` if some of it is still in use."""
        with _engine_errors():
            if not await self._llm.reset_prefix_cache():
                raise EngineError("the prefix cache could not be emptied: a request still holds blocks of it.")

    def rss_bytes(self) -> int:
        """Resident memory of this process and the engine's."""
        total = 0
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def shutdown(self) -> None:
        """End the engine and its processes."""
        if self._llm is not None:
            self._llm.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
            self._llm = None
            gc.collect()  # vLLM's destructor shuts down once more, which fails noisily when the interpreter ends

    def _kill_children(self, others: set[int]) -> None:
        """End what a start that failed left behind: every child of this process but ``others``."""
        self.shutdown()
        for process in psutil.Process().children(recursive=True):
            if process.pid not in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def hidden_ids(tokenizer: Any, stop_ids: frozenset[int]) -> frozenset[int]:
    """The tokens whose text is left out of an answer's: those that end it, and the special ones, without which an
    answer can still be told apart into reasoning, text and tool calls."""
    shown = structure_tokens()
    special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special |= {token_id: str(token) for token_id, token in added.items() if token.special}
    return stop_ids | {token_id for token_id, text in special.items() if text not in shown}


@contextlib.contextmanager
def _sockets_folder() -> Iterator[None]:
    """While an engine starts, its processes find each other by sockets in a folder of their own. vLLM never removes
    its socket files; once all are connected nobody needs their names."""
    before = os.environ.get(_SOCKETS_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="tidegate-", ignore_cleanup_errors=True) as folder:
        os.environ[_SOCKETS_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(_SOCKETS_VARIABLE)
            if before is not None:
                os.environ[_SOCKETS_VARIABLE] = before


def _check_memory(kv_cache_bytes: int) -> None:
    available_bytes = psutil.virtual_memory().available
    if kv_cache_bytes > available_bytes:
        raise EngineError(
            f"out of memory: the KV pool needs {kv_cache_bytes >> 20} MiB, {available_bytes >> 20} MiB are free.",
            "Lower rollout.engine.kv_cache_bytes, or free memory.",
        )


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineError("the engine died.", "Its last words are in the cell's log.") from error
    except VLLMClientError as error:
        raise RequestError(f"the engine refused the request ({_first_line(error)}).") from error
    except EngineGenerateError as error:
        raise EngineError(f"the engine failed ({_first_line(error.__cause__ or error)}).", _OOM_HINT) from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):  # its first line only counts what is wrong
        lines = ["; ".join(problem["msg"] for problem in error.errors(include_url=False))]
    else:
        lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
