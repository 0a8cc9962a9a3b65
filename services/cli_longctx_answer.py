"""The work of ``tidegate longctx``: checks, the plan, the longest prompt, the step."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.common.errors import ConfigError, MachineError
from services.common.sizes import size_text

if TYPE_CHECKING:
    from services.trainer.tree.costs import Budget, ModelCosts
    from services.trainer.tree.forest import Forest
    from services.trainer.tree.longctx import AlwaysHeld, Longest
    from services.trainer.tree.longload import Loaded
    from services.trainer.tree.longrun import Measured
    from services.trainer.tree.plan import Plan, PlanOptions
    from services.trainer.types import RunWeight

_FREE_SHARE = 0.9
"""Of memory or a disk that is free, what is used where no size is given."""
_MAX_TOKENS = 1 << 26
"""Of made-up runs, whose tokens are held here: about 20 bytes each."""
_RESUME_FILE = "longctx.json"
_BLOCK_TOKENS = 64
"""As in the ``torch`` backend: recurrent layers work in blocks of so many tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options, checked."""

    model: str
    prompt_tokens: int
    response_tokens: int
    group_size: int
    data: Path | None
    memory_bytes: int | None
    host_bytes: int | None
    page_dir: Path | None
    page_bytes: int | None
    dtype: str
    lora_rank: int | None
    device: str
    context_ranks: int
    weight_ranks: int
    expert_ranks: int
    weight_bits: float | None
    optimizer_bytes: float | None
    tflops: float | None
    options: PlanOptions
    is_run: bool
    is_measured: bool
    resume_dir: Path | None
    finds_longest: bool
    save_every_s: float
    temperature: float
    seed: int

    @property
    def num_ranks(self) -> int:
        return max(self.context_ranks, self.weight_ranks, self.expert_ranks)


@dataclass(slots=True)
class Answer:
    """What is printed."""

    architecture: str
    forest: Forest
    costs: ModelCosts
    held: AlwaysHeld
    budget: Budget
    plan: Plan
    runs: tuple[RunWeight, ...]
    longest: Longest | None = None
    measured: Measured | None = None
    warnings: list[str] = field(default_factory=list)


def check(asked: Asked) -> None:
    """Raise ``ConfigError`` for options that contradict each other, before anything is loaded."""
    loads = asked.is_run or asked.is_measured
    what = "--run" if asked.is_run else "--measure"
    on_paper = asked.num_ranks > 1 or asked.weight_bits is not None or asked.optimizer_bytes is not None
    if loads and on_paper:
        raise ConfigError(
            "--ranks, --weight-ranks, --expert-ranks, --weight-bits and --optimizer-bytes are for plans on paper.",
            f"Leave {what} out, or leave them out: the step runs in this process, with weights in float32.",
        )
    if loads and asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MachineError("there is no GPU that PyTorch can use here.", "Give --device cpu.")
    if asked.device == "cpu" and asked.host_bytes:
        raise ConfigError("on a CPU the device's memory is the host's.", "Give all of it as --memory.")
    if asked.page_bytes is not None and asked.page_dir is None:
        raise ConfigError("--page-bytes are those of files in a folder.", "Give the folder too: --page-dir.")
    if asked.page_dir is not None and not asked.page_dir.is_dir():
        raise ConfigError(f"no folder {asked.page_dir}.", "Make it first, on a fast local disk.")
    if asked.resume_dir is not None and not asked.is_run:
        raise ConfigError("--resume-dir is for a step that runs.", "Give --run too.")
    if asked.resume_dir is not None and asked.is_measured:
        raise ConfigError(
            "measured costs differ a little each time, and so would the plan of a step that goes on.",
            "Leave --measure out with --resume-dir.",
        )
    if asked.resume_dir is not None and asked.options.recompute == "keep":
        raise ConfigError(
            "progress cannot be saved while graphs are kept.", "Give --recompute chunk with --resume-dir."
        )
    if asked.resume_dir is not None and asked.options.mode == "pack":
        raise ConfigError("the progress of one pass cannot be saved.", "Give --mode walk with --resume-dir.")
    num_tokens = asked.prompt_tokens + asked.group_size * asked.response_tokens
    if asked.data is None and num_tokens > _MAX_TOKENS:
        raise ConfigError(
            f"{num_tokens:,} tokens are more than are made up: {_MAX_TOKENS:,}.",
            "Lower --prompt-tokens, --response-tokens or --group.",
        )
    if asked.data is not None and asked.finds_longest:
        raise ConfigError("--find-longest asks for made-up prompts.", "Leave --data out.")
    _check_free(asked.page_dir, asked.page_bytes)


def _check_free(folder: Path | None, size_bytes: float | None) -> None:
    if folder is None or size_bytes is None:
        return
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise MachineError(
            f"{folder} has {size_text(free)} free, not {size_text(size_bytes)}.",
            "Free some, name a folder on another disk, or ask for less.",
        )


# The answer


def find_answer(asked: Asked) -> Answer:
    from services.common.models import load_architecture
    from services.trainer.tree.adapters import adapter_for
    from services.trainer.tree.forest import make_forest
    from services.trainer.tree.longctx import longest_prompt, plan_longctx
    from services.trainer.tree.longload import load_model_to_run
    from services.trainer.tree.plan import ModeChoice, Recompute

    folder = _model_folder(asked)
    with _busy("reading the model's configuration"):
        config = load_architecture(folder)
        adapter = adapter_for(config)
    if not adapter.is_attention_only:
        asked = replace(asked, options=replace(asked.options, alignment_tokens=_BLOCK_TOKENS))
    if asked.resume_dir is not None:  # what is saved lies between visits, and holds no graph
        asked = replace(asked, options=replace(asked.options, mode=ModeChoice.WALK, recompute=Recompute.CHUNK))
    nodes, runs = _nodes(asked, config.get_text_config().vocab_size)
    forest = make_forest(nodes)
    loaded = None
    if asked.is_run or asked.is_measured:
        with _busy("loading the model"):
            loaded = load_model_to_run(_loading(asked), folder)
    with _busy("measuring what it costs" if asked.is_measured else "counting what it costs"):
        costs, held = _costs(asked, config, loaded)
    budget = _budget(asked, free_memory=asked.is_run, always=held.total)
    with _busy("planning"):
        try:
            plan = plan_longctx(forest, costs, budget, asked.options)
        except ConfigError as error:
            raise _with_what_fits(error, asked, costs, budget) from None
    answer = Answer(config.get_text_config().model_type, forest, costs, held, budget, plan, runs)
    answer.warnings = _warnings(forest, config.get_text_config())
    if asked.finds_longest:
        with _busy("looking for the longest prompt"):
            answer.longest = longest_prompt(_shape(asked), costs, budget, asked.options)
    if asked.is_run:
        assert loaded is not None
        answer.measured = _run(asked, answer, loaded)
    return answer


def _model_folder(asked: Asked) -> Path:
    """The folder of the model; only its configuration has to be there, unless it is loaded."""
    from services.common.models import resolve_model

    path = Path(asked.model).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if not path.exists() and asked.model in ("smollm2-135m", "tiny-qwen3"):
        with _busy(f"looking for {asked.model}"):
            return resolve_model(asked.model)
    if not path.is_dir():
        raise ConfigError(
            f"no model at {path}.",
            "Give a folder in Hugging Face's layout (config.json is enough to plan), or smollm2-135m or tiny-qwen3.",
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json.", "Give the folder that holds it.")
    if (asked.is_run or asked.is_measured) and not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} has no *.safetensors: the model cannot be loaded.", "Leave --run and --measure out to plan only."
        )
    return path.resolve()


def _shape(asked: Asked) -> Any:
    from services.trainer.tree.longctx import Shape

    return Shape(asked.prompt_tokens, asked.response_tokens, asked.group_size)


def _nodes(asked: Asked, vocab_size: int) -> tuple[Any, tuple[RunWeight, ...]]:
    from services.trainer.tree.longrun import random_weights

    if asked.data is None:
        counts = [asked.response_tokens] * asked.group_size
        return _shape(asked).nodes(vocab_size, asked.seed), random_weights(counts, asked.seed)
    from services.trainer.tree.given import TokenPath, nodes_of_paths
    from services.trainer.types import RunWeight
    from services.trajectory.files import read_rows

    places: dict[str, int] = {}
    weights: list[RunWeight] = []
    paths: list[TokenPath] = []
    with _busy(f"reading {asked.data}"):
        for place, row in read_rows(asked.data):
            if row.n_run == 0 or not row.target_mask.any():
                continue
            if row.token_ids.max(initial=0) >= vocab_size:
                raise ConfigError(
                    f"{place}: token {row.token_ids.max()} is beyond the model's vocabulary of {vocab_size}.",
                    "Give the model that made these runs.",
                )
            if row.run_id not in places:
                places[row.run_id] = len(weights)
                weights.append(RunWeight(row.run_id, row.advantage or 0.0, row.n_run))
            arrays = (row.token_ids, row.target_mask, row.logprobs, row.versions)
            paths.append(TokenPath(places[row.run_id], *arrays))
    if not paths:
        raise ConfigError(f"{asked.data} has no selected trajectory with a target.", "Export a job that has trained.")
    return nodes_of_paths(paths), tuple(weights)


# Costs and budgets


def _loading(asked: Asked) -> Any:
    from services.trainer.tree.longload import Loading
    from services.trainer.tree.store import StoreBudget

    host_bytes = None if asked.device == "cpu" else asked.host_bytes or 0
    budget = StoreBudget(host_bytes=host_bytes, folder=asked.page_dir, disk_bytes=asked.page_bytes)
    return Loading(asked.device, asked.dtype, asked.lora_rank, asked.seed, budget)


def _costs(asked: Asked, config: Any, loaded: Loaded | None) -> tuple[ModelCosts, AlwaysHeld]:
    """What one rank pays, and what it holds always: the ``constant_bytes`` of the costs."""
    from services.trainer.tree.longload import costs_of_loaded, costs_on_paper

    if loaded is not None:
        costs, held = costs_of_loaded(loaded, is_measured=asked.is_measured)
    else:
        costs, held = costs_on_paper(
            config,
            asked.dtype,
            on_cpu=asked.device == "cpu",
            context_ranks=asked.context_ranks,
            weight_ranks=asked.weight_ranks,
            expert_ranks=asked.expert_ranks,
            weight_bits=asked.weight_bits,
            lora_rank=asked.lora_rank,
            trained_bytes=asked.optimizer_bytes,
        )
    if asked.tflops:
        costs = replace(costs, speeds=replace(costs.speeds, flops_per_s=asked.tflops * 1e12))
    return costs, held


def _budget(asked: Asked, *, free_memory: bool, always: float) -> Budget:
    """As given; what is not given of a step that runs is what is free, or what it was when the step began."""
    from services.trainer.tree.costs import Budget

    memory, disk = asked.memory_bytes, asked.page_bytes
    if asked.page_dir is not None and disk is None:
        disk = int(_FREE_SHARE * shutil.disk_usage(asked.page_dir).free)
    if memory is None and free_memory:
        memory = int(_FREE_SHARE * _free_memory(asked.device) + always)
    budget = Budget(memory, asked.host_bytes or 0, disk or 0)
    return budget if asked.resume_dir is None else _same_budget(asked, budget)


def _free_memory(device: str) -> int:
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _same_budget(asked: Asked, budget: Budget) -> Budget:
    """A step that goes on needs the plan that it began with."""
    from services.trainer.tree.costs import Budget

    assert asked.resume_dir is not None
    path = asked.resume_dir / _RESUME_FILE
    try:
        asked.resume_dir.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.write_text(json.dumps(asdict(budget)), encoding="utf-8")
        before = Budget(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used ({error}).", "Name another folder as --resume-dir.") from None
    given = {"live_bytes": asked.memory_bytes, "host_bytes": asked.host_bytes, "disk_bytes": asked.page_bytes}
    return replace(before, **{name: value for name, value in given.items() if value is not None})


def _with_what_fits(error: ConfigError, asked: Asked, costs: ModelCosts, budget: Budget) -> ConfigError:
    from services.trainer.tree.longctx import longest_prompt

    if budget.live_bytes is None or asked.data is not None:
        return error
    with _busy("looking for what would fit"):
        longest = longest_prompt(_shape(asked), costs, budget, asked.options)
    fits = "Not even one token would fit." if longest is None else f"{longest.prompt_tokens:,} prompt tokens would fit."
    return ConfigError(error.message, f"{error.hint} {fits}")


def _warnings(forest: Forest, config: Any) -> list[str]:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or forest.longest_path <= positions:
        return []
    return [
        f"the longest path has {forest.longest_path:,} positions, the model was made for {positions:,}: "
        "time and memory are right, the model's answers there may not be"
    ]


# The step


def _run(asked: Asked, answer: Answer, loaded: Loaded) -> Measured:
    from services.trainer.tree.longrun import run_step

    _check_room(asked, answer)
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=1.0)
        return run_step(
            loaded.executor,
            answer.forest,
            answer.plan,
            answer.costs,
            answer.runs,
            temperature=asked.temperature,
            observe=lambda share: progress.update(task, completed=share),
            resume_dir=asked.resume_dir,
            every_s=asked.save_every_s,
        )


def _check_room(asked: Asked, answer: Answer) -> None:
    """Raise ``MachineError`` if the machine lacks what the step is predicted to take."""
    predicted, held = answer.plan.predicted, answer.held
    needed = predicted.live_bytes - held.weights - held.optimizer  # weights are there, an optimizer never is
    free = _free_memory(asked.device)
    if needed > free:
        raise MachineError(
            f"the step needs {size_text(needed)} beside the weights; {size_text(free)} are free.",
            "Give a smaller --memory and a --page-dir, a shorter prompt, or end other programs.",
        )
    _check_free(asked.page_dir, predicted.disk_bytes)
    # a save stands beside the one before it
    _check_free(asked.resume_dir, 2 * (predicted.stored_bytes + held.gradients))


@contextmanager
def _busy(what: str) -> Iterator[None]:
    """Say on stderr what takes a moment, if a person looks."""
    with Console(stderr=True).status(what) if sys.stderr.isatty() else _nothing():
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield
