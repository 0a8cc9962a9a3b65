"""The tree executor: ``python -m benchmarks.tree --json`` prints one object.

Small random models train forests of token segments by the executor and, to compare, as flattened rows: a row for each
leaf, one after another, with Hugging Face's activation checkpointing (scaled dot product attention) and the same
chunked head. Each measurement is made in a process of its own with one thread; times are processor time, medians of
ways that are taken in turns, without the allocation tracker; memory is the peak of live tensors, weights and their
gradients included. Plans are those that the trainer makes, but where a figure needs a certain one.

- grad_rel_err_max: largest relative error of a parameter's gradient against plain autograd over whole rows, an
  agent-like tree and a group, walked with recomputed and with kept chunks and as the trainer's plan wants. Models with
  experts, recurrent layers or sparse attention are compared in float64, the others in float32; ``exactness`` has each.
- speedup_group8: a prompt of 8192 tokens, 8 responses of 256; speedup_tree: an agent-like tree of 20 branches. Of the
  models measured (``speed``) the one that gains least.
- memory_g8_over_g2: peak of a walk over 8 responses to a prompt, over that of 2.
- context_ratio: longest context of the hybrid model within a budget of memory and page files, over that of flattened
  rows which may take the whole sum as memory; both ends are run within their budgets. ``contexts`` has the model of
  full attention only, whose states take as much as what rows keep of a token.
- exact_over_detached_time: a step with the prompt's gradient, over one without it (LongStraw), in walks that recompute
  their chunks. detached_grad_rel_err: the error of the whole gradient without it, norm over norm.
- predicted_over_measured_memory: the plan's peak, from measured costs, over the measured one: the worst of
  ``predictions``.

``--million`` takes one step over a million positions instead, in ``--folder``; started again, it goes on from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_PRELOADED = (
    "benchmarks.tree_context",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("qwen3", "qwen3_5", "qwen3_moe", "deepseek_v3", "deepseek_v32")
    ),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    group: tuple[int, int, int] = (8192, 256, 8)
    """Tokens of the prompt, tokens of a response, responses."""
    repetitions: int = 3
    attention: Mapping[str, Any] = field(default_factory=dict)
    hybrid: Mapping[str, Any] = field(default_factory=dict)
    chunk_tokens: int = 1024
    live_bytes: int = 12 * _MIB
    disk_bytes: int = 12 * _MIB
    families: tuple[str, ...] = ("attention", "window", "hybrid", "moe", "latent", "sparse")


FULL = Size()
SMALL = Size((384, 32, 8), 1, {"hidden": 32}, {"hidden": 32}, 128, 6 * _MIB, 4 * _MIB, ("attention",))


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement."""

    function: str
    """``module.name`` within ``benchmarks``."""
    arguments: dict[str, Any]


MakeAll = Callable[[Mapping[str, Task]], dict[str, Any]]
"""Makes measurements; their results by their names."""


class Bench:
    """Makes measurements, some at a time, each in a process of its own.

    The processes are forks of one that has imported everything and computed nothing.
    """

    def __init__(self, num_jobs: int) -> None:
        os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        self._pool = ProcessPoolExecutor(num_jobs, context, max_tasks_per_child=1)

    def all(self, tasks: Mapping[str, Task]) -> dict[str, Any]:
        """The results of some tasks, by their names."""
        futures = {self._pool.submit(make, task): name for name, task in tasks.items()}
        results = {}
        for future in as_completed(futures):
            name = futures[future]
            results[name], seconds = future.result()
            print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        return {name: results[name] for name in tasks}


def make(task: Task) -> tuple[Any, float]:
    """One measurement, in its own process, and the seconds that it took."""
    import torch

    torch.set_num_threads(1)
    started_s = time.monotonic()
    module, _, name = task.function.rpartition(".")
    result = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**task.arguments)
    return result, time.monotonic() - started_s


def measure(size: Size, make_all: MakeAll) -> dict[str, Any]:
    """The benchmark's object."""
    group, models = list(size.group), {"attention": dict(size.attention), "hybrid": dict(size.hybrid)}
    base = {config: {"config": config, "settings": settings} for config, settings in models.items()}
    tasks: dict[str, Task] = {}
    for config, of in base.items():
        timed = {**of, "repetitions": size.repetitions}
        tasks[f"group8/{config}"] = Task("tree_measures.speedup", {**timed, "forest": group})
        tasks[f"tree/{config}"] = Task("tree_measures.speedup", {**timed, "forest": "agent"})
        tasks[f"detached/{config}"] = Task("tree_measures.detached", {**timed, "forest": group})
        for members in (2, 8):
            arguments = {**of, "forest": [*group[:2], members], "chunk_tokens": size.chunk_tokens}
            tasks[f"memory/{config}/{members}"] = Task("tree_measures.group_memory", arguments)
        budget = {"live_bytes": size.live_bytes, "disk_bytes": size.disk_bytes}
        tasks[f"longest/{config}/tree"] = Task("tree_context.longest_tree", {**of, **budget})
        both = {"budget_bytes": size.live_bytes + size.disk_bytes}
        tasks[f"longest/{config}/flattened"] = Task("tree_context.longest_flattened", {**of, **both})
    tasks |= {f"exact/{family}": Task("tree_measures.exactness", {"config": family}) for family in size.families}
    tasks |= {f"prediction/{name}": task for name, task in predictions(size).items()}
    done = make_all(tasks)
    check_contexts(make_all, base, done, size)
    return summary(list(base), done, size)


def predictions(size: Size) -> dict[str, Task]:
    """Steps whose memory is foretold: models, forests, ways and budgets of all kinds."""
    group = [size.group[0] // 4, size.group[1] // 2, size.group[2]]
    walk = {"mode": "walk", "max_chunk_tokens": size.chunk_tokens}
    attention, hybrid = ("attention", dict(size.attention)), ("hybrid", dict(size.hybrid))
    tight = {"live_bytes": size.live_bytes, "disk_bytes": 4 * size.disk_bytes}
    loose = {"live_bytes": 4 * size.live_bytes, "disk_bytes": 0}
    cases: dict[str, tuple[tuple[str, dict[str, Any]], Any, dict[str, Any], dict[str, Any]]] = {
        "attention, all kept": (attention, group, {**walk, "recompute": "keep"}, {}),
        "attention, all recomputed": (attention, group, {**walk, "recompute": "chunk"}, {}),
        "attention, tight, with page files": (attention, group, walk, tight),
        "attention, packed": (attention, group, {"mode": "pack"}, {}),
        "attention, agent, packed": (attention, "agent", {"mode": "pack"}, {}),
        "hybrid, loose": (hybrid, group, walk, loose),
        "hybrid, tight, with page files": (hybrid, group, walk, tight),
        "hybrid, agent, all recomputed": (hybrid, "agent", {**walk, "recompute": "chunk"}, {}),
        "moe, loose": (("moe", {}), group, walk, loose),
        "latent, loose": (("latent", {}), group, walk, loose),
        "sparse, loose": (("sparse", {}), group, walk, loose),
    }
    if len(size.families) == 1:
        cases = {name: case for name, case in cases.items() if case[0] is attention and case[1] is group}
    return {
        name: Task(
            "tree_measures.prediction",
            {"config": config, "settings": settings, "forest": forest, "options": options, "budget": budget},
        )
        for name, ((config, settings), forest, options, budget) in cases.items()
    }


def check_contexts(make_all: MakeAll, base: Mapping[str, dict[str, Any]], done: dict[str, Any], size: Size) -> None:
    """Run both ends of the longest contexts: within the budgets, and the rows not a step longer."""
    budget = {"live_bytes": size.live_bytes, "disk_bytes": size.disk_bytes}
    tasks = {}
    for config, of in base.items():
        longest = done[f"longest/{config}/flattened"]["context_tokens"]
        lengths = {"tree": done[f"longest/{config}/tree"]["context_tokens"], "flattened": longest}
        for name, way, context in (
            ("tree", "tree", lengths["tree"]),
            ("flattened", "flattened", longest),
            ("longer", "flattened", longest + 64),
        ):
            arguments = {**of, **budget, "way": way, "context_tokens": context}
            tasks[f"context/{config}/{name}"] = Task("tree_context.run", arguments)
    done |= make_all(tasks)


def contexts(configs: Sequence[str], done: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """The longest contexts, and whether their runs stayed within the budgets."""
    total = size.live_bytes + size.disk_bytes
    found = {}
    for config in configs:
        tree, flat, longer = (done[f"context/{config}/{name}"] for name in ("tree", "flattened", "longer"))
        lengths = {way: done[f"longest/{config}/{way}"]["context_tokens"] for way in ("tree", "flattened")}
        found[config] = {
            "ratio": lengths["tree"] / lengths["flattened"],
            "tree_tokens": lengths["tree"],
            "flattened_tokens": lengths["flattened"],
            "memory_mib": size.live_bytes / _MIB,
            "page_files_mib": size.disk_bytes / _MIB,
            "tree_live_mib": tree["live_bytes"] / _MIB,
            "tree_page_files_mib": tree["disk_bytes"] / _MIB,
            "flattened_live_mib": flat["live_bytes"] / _MIB,
            "is_within": tree["live_bytes"] <= size.live_bytes
            and tree["disk_bytes"] <= size.disk_bytes
            and flat["live_bytes"] <= total < longer["live_bytes"],
            "plan": tree["plan"],
        }
    return found


def summary(configs: Sequence[str], done: Mapping[str, Any], size: Size) -> dict[str, Any]:
    """The benchmark's object, from all measurements."""

    def of(kind: str) -> dict[str, Any]:
        return {name.split("/", 1)[1]: result for name, result in done.items() if name.startswith(f"{kind}/")}

    memory = {
        config: done[f"memory/{config}/8"]["live_bytes"] / done[f"memory/{config}/2"]["live_bytes"]
        for config in configs
    }
    predicted = of("prediction")
    exact = {name: result["grad_rel_err"] for name, result in of("exact").items()}
    detached = of("detached")
    longest = contexts(configs, done, size)
    return {
        "grad_rel_err_max": max(exact.values()),
        "speedup_group8": min(result["speedup"] for result in of("group8").values()),
        "speedup_tree": min(result["speedup"] for result in of("tree").values()),
        "memory_g8_over_g2": max(memory.values()),
        "context_ratio": longest["hybrid"]["ratio"],
        "detached_grad_rel_err": max(result["grad_rel_err"] for result in detached.values()),
        "exact_over_detached_time": max(result["exact_over_detached_time"] for result in detached.values()),
        "predicted_over_measured_memory": max((p["ratio"] for p in predicted.values()), key=lambda r: abs(r - 1)),
        "exactness": exact,
        "speed": {"group8": of("group8"), "tree": of("tree")},
        "memory": {"g8_over_g2": memory, **of("memory")},
        "contexts": longest,
        "detached": detached,
        "predictions": predicted,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--small", action="store_true", help="a short run, for tests; no figures to compare")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="measurements at a time")
    million = parser.add_argument_group("one step over a million positions")
    million.add_argument("--million", action="store_true", help="take it, or go on with it")
    million.add_argument("--folder", type=Path, default=Path("bench-million"), help="where its progress is saved")
    million.add_argument("--positions", type=int, default=1_000_000)
    million.add_argument("--every", type=float, default=300.0, help="seconds between saves")
    million.add_argument("--chunk", type=int, default=8192, help="tokens of a chunk")
    million.add_argument("--verify", type=int, metavar="POSITIONS", help="compare a short one with plain autograd")
    given = parser.parse_args()
    indent = None if given.json else 2
    if given.verify or given.million:
        from benchmarks import tree_million

        if given.verify:
            result = tree_million.verify(given.verify, given.chunk)
        else:
            result = tree_million.million(given.folder, given.positions, given.every, given.chunk)
    else:
        result = measure(SMALL if given.small else FULL, Bench(given.jobs).all)
    print(json.dumps(result, indent=indent))


if __name__ == "__main__":
    main()
