"""What ``tidegate longctx`` prints: a table, or one object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.sizes import size_text

if TYPE_CHECKING:
    from services.cli_longctx_answer import Answer, Asked


def print_answer(asked: Asked, answer: Answer) -> None:
    """Print what was found out."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    rank = " a rank" if asked.num_ranks > 1 else ""
    title = f"{asked.model} ({answer.architecture}), {asked.dtype}, {_tuning(asked)}: a step{rank} on {asked.device}"
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(asked, answer):
        table.add_row(name, Text(value))
    console.print(table)
    if answer.measured is not None:
        _print_measured(console, answer)
    for warning in answer.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _tuning(asked: Asked) -> str:
    return "all weights trained" if asked.lora_rank is None else f"LoRA of rank {asked.lora_rank}"


def _rows(asked: Asked, answer: Answer) -> Iterator[tuple[str, str]]:
    from services.trainer.tree.longctx import memory_parts

    forest, plan, budget, held = answer.forest, answer.plan, answer.budget, answer.held
    predicted = plan.predicted
    yield (
        "tokens",
        f"{forest.num_tokens:,} unique, {predicted.flat_tokens:,} as rows of their own; longest path "
        f"{forest.longest_path:,}; {forest.num_targets:,} targets of {len(answer.runs):,} runs",
    )
    kept = ", attention's output kept" if plan.keep_attended else ""
    layers = ", layer by layer in backward" if plan.recompute_layers else ""
    yield "mode", f"{plan.mode}, prefix gradient {asked.options.prefix_gradient}{layers}{kept}"
    yield "why", plan.reason
    yield (
        "memory of the device",
        f"{size_text(predicted.live_bytes)} at the peak of {_limit(budget.live_bytes)}; always there "
        f"{size_text(held.total)}: weights {size_text(held.weights)}, gradients {size_text(held.gradients)}, "
        f"optimizer {size_text(held.optimizer)}",
    )
    if asked.device != "cpu":
        yield "memory of the host", f"{size_text(predicted.host_bytes)} of {_limit(budget.host_bytes)}"
    yield "page files", f"{size_text(predicted.disk_bytes)} of {_limit(budget.disk_bytes)}"
    parts = memory_parts(forest, plan, answer.costs, asked.options.prefix_gradient)
    yield (
        "at most, by purpose",
        f"states {size_text(parts.states)}, their gradients {size_text(parts.gradients)}, one chunk's graph "
        f"{size_text(parts.graph)}, its backward {size_text(parts.backward)}, head {size_text(parts.head)}",
    )
    work = predicted.work
    yield (
        "work",
        f"{predicted.forwards:.2f} F (forwards of the unique tokens): {work.flops:.3g} operations{_each(asked)}, "
        f"{work.recompute_flops / (work.flops or 1):.0%} of them again",
    )
    yield "against flattened rows", f"{predicted.speedup:.2f} times less work (they recompute their activations too)"
    speed = "measured" if asked.is_measured else "assumed"
    yield (
        "time, roughly",
        f"{_time(predicted.seconds)} at {answer.costs.speeds.flops_per_s / 1e12:.3g} TFLOP/s{_each(asked)} ({speed})",
    )
    if asked.finds_longest:
        found = answer.longest
        yield (
            "longest prompt that fits",
            "none" if found is None else f"{found.prompt_tokens:,} tokens: {found.plan.reason}",
        )
    memory = max(0, (budget.live_bytes or predicted.live_bytes) - int(held.total))
    yield "as configuration", f"trainer.tree.memory_bytes={memory} (beside weights, gradients and optimizer)"


def _print_measured(console: Console, answer: Answer) -> None:
    measured, predicted = answer.measured, answer.plan.predicted
    assert measured is not None
    table = Table("", "predicted", "measured", "", box=None, title="the step", title_justify="left")

    def row(name: str, expected: float, found: float) -> None:
        ratio = f"{expected / found:.3f}" if found and expected else ""
        table.add_row(name, size_text(expected), size_text(found), ratio)

    row("live tensors, no optimizer", predicted_for_run(answer), measured.live_bytes)
    row("host memory", predicted.host_bytes, measured.host_bytes)
    row("page files", predicted.disk_bytes, measured.disk_bytes)
    table.add_row(
        "time", _time(predicted.seconds), _time(measured.seconds), f"{predicted.seconds / (measured.seconds or 1):.3f}"
    )
    console.print(table)
    resumed = f"; {measured.resumed_share:.1%} of it by an earlier process" if measured.resumed_share else ""
    console.print(
        f"loss {measured.loss:.6g}, gradient norm {measured.grad_norm:.6g}{resumed}; nothing was updated",
        highlight=False,
    )


def _each(asked: Asked) -> str:
    return " a rank" if asked.num_ranks > 1 else ""


def _limit(size_bytes: int | None) -> str:
    return "any" if size_bytes is None else size_text(size_bytes)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def predicted_for_run(answer: Answer) -> float:
    """Live bytes without an optimizer, which ``--run`` has not."""
    return answer.plan.predicted.live_bytes - answer.held.optimizer


def answer_json(asked: Asked, answer: Answer) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes."""
    from services.trainer.tree.longctx import memory_parts

    plan, forest = answer.plan, answer.forest
    parts = memory_parts(forest, plan, answer.costs, asked.options.prefix_gradient)
    predicted = asdict(plan.predicted) | {"parts": asdict(parts), "always_held": asdict(answer.held)}
    predicted["live_bytes_without_optimizer"] = predicted_for_run(answer)
    longest = answer.longest
    return {
        "model": asked.model,
        "architecture": answer.architecture,
        "device": asked.device,
        "ranks": asked.num_ranks,
        "tokens": {
            "unique": forest.num_tokens,
            "longest_path": forest.longest_path,
            "targets": forest.num_targets,
            "runs": len(answer.runs),
        },
        "budget": asdict(answer.budget),
        "plan": {
            "mode": str(plan.mode),
            "reason": plan.reason,
            "num_chunks": len(plan.chunks),
            "chunk_tokens": max((chunk.num_tokens for chunk in plan.chunks), default=0),
            "num_visits": len(plan.visits),
            "num_kept_graphs": sum(visit.keep_graph for visit in plan.visits),
            "recompute_layers": plan.recompute_layers,
            "keep_attended": plan.keep_attended,
            "head_rows": plan.head_rows,
        },
        "predicted": predicted,
        "longest": None if longest is None else {"prompt_tokens": longest.prompt_tokens, "reason": longest.plan.reason},
        "measured": None if answer.measured is None else asdict(answer.measured),
        "warnings": answer.warnings,
    }
