"""``tidegate longctx``: what a step over a long shared prompt takes, and, if asked, one such step."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.common.sizes import parse_size


class DtypeName(StrEnum):
    """Data types of the forward and backward."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceName(StrEnum):
    """Where a step is to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class PrefixGradientName(StrEnum):
    """As ``trainer.tree.prefix_gradient``."""

    EXACT = "exact"
    DETACHED = "detached"


class RecomputeName(StrEnum):
    """As ``trainer.tree.recompute``."""

    AUTO = "auto"
    CHUNK = "chunk"
    KEEP = "keep"


class ModeName(StrEnum):
    """As ``trainer.tree.mode``."""

    AUTO = "auto"
    PACK = "pack"
    WALK = "walk"


def _size(text: str) -> int:
    return parse_size(text)


SizeOption = int | None


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command()(longctx)


def longctx(
    model: Annotated[
        str, typer.Option(help="A model's folder, its config.json, or smollm2-135m, tiny-qwen3.", show_default=False)
    ],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens that all runs share.")] = 8192,
    response_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each run's answer.")] = 256,
    group: Annotated[int, typer.Option(min=1, help="Runs that answer the prompt.")] = 8,
    data: Annotated[
        Path | None, typer.Option(help="Runs of a `tidegate runs export` instead of made-up ones.", show_default=False)
    ] = None,
    memory: Annotated[
        SizeOption,
        typer.Option(
            parser=_size, metavar="SIZE", help="Of a rank's device, weights included.", show_default="no limit"
        ),
    ] = None,
    host_memory: Annotated[
        SizeOption,
        typer.Option(parser=_size, metavar="SIZE", help="For states, beside an accelerator.", show_default="none"),
    ] = None,
    page_dir: Annotated[
        Path | None, typer.Option(help="Folder for states that fit neither.", show_default=False)
    ] = None,
    page_bytes: Annotated[
        SizeOption,
        typer.Option(parser=_size, metavar="SIZE", help="Most bytes there.", show_default="90% of what is free"),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of forward and backward.")] = DtypeName.BFLOAT16,
    lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Train adapters of this rank.", show_default="all weights")
    ] = None,
    prefix_gradient: Annotated[
        PrefixGradientName, typer.Option(help="Whether the prompt gets its gradient.")
    ] = PrefixGradientName.EXACT,
    recompute: Annotated[
        RecomputeName, typer.Option(help="Evaluate chunks again, or keep their graphs.")
    ] = RecomputeName.AUTO,
    mode: Annotated[ModeName, typer.Option(help="One packed pass, or chunk by chunk.")] = ModeName.AUTO,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Chunks have at most so many tokens.")] = 8192,
    ranks: Annotated[int, typer.Option(min=1, help="On paper: ranks that share each chunk.")] = 1,
    weight_ranks: Annotated[int, typer.Option(min=1, help="On paper: ranks that share the weights.")] = 1,
    expert_ranks: Annotated[int, typer.Option(min=1, help="On paper: ranks that share the experts.")] = 1,
    weight_bits: Annotated[
        float | None, typer.Option(min=1, help="On paper: bits of a weight.", show_default="32, the torch backend's")
    ] = None,
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(min=0, help="On paper: bytes beside each trained weight.", show_default="gradient and AdamW"),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(min=1e-6, help="Speed of a rank for the guess of time.", show_default="by device")
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where it runs or would run.")] = DeviceName.AUTO,
    run: Annotated[bool, typer.Option("--run", help="Run one forward and backward, and measure it.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Plan with measured costs: loads the model.")] = False,
    find_longest: Annotated[bool, typer.Option("--find-longest", help="Say which prompt would just fit.")] = False,
    resume_dir: Annotated[
        Path | None,
        typer.Option(
            help="With --run: save progress there and go on from it (walks that recompute).", show_default=False
        ),
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between two saves there.")] = 300.0,
    temperature: Annotated[float, typer.Option(min=1e-3, help="Of the sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of made-up tokens and advantages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a step over a long shared prompt takes: chunks, memory, work. With --run, take one and measure it."""
    from services.cli_longctx_answer import Asked, check, find_answer
    from services.cli_longctx_table import answer_json, print_answer
    from services.trainer.tree.plan import ModeChoice, PlanOptions, PrefixGradient, Recompute

    asked = Asked(
        model=model,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        group_size=group,
        data=data,
        memory_bytes=memory,
        host_bytes=host_memory,
        page_dir=page_dir,
        page_bytes=page_bytes,
        dtype=str(dtype),
        lora_rank=lora_rank,
        device=_device(device, num_ranks=max(ranks, weight_ranks, expert_ranks)),
        context_ranks=ranks,
        weight_ranks=weight_ranks,
        expert_ranks=expert_ranks,
        weight_bits=weight_bits,
        optimizer_bytes=optimizer_bytes,
        tflops=tflops,
        options=PlanOptions(
            prefix_gradient=PrefixGradient(prefix_gradient),
            recompute=Recompute(recompute),
            mode=ModeChoice(mode),
            min_chunk_tokens=min(64, chunk_tokens),
            max_chunk_tokens=chunk_tokens,
        ),
        is_run=run,
        is_measured=measure,
        resume_dir=resume_dir,
        finds_longest=find_longest,
        save_every_s=save_every,
        temperature=temperature,
        seed=seed,
    )
    check(asked)
    answer = find_answer(asked)
    if as_json:
        typer.echo(json.dumps(answer_json(asked, answer), indent=2))
    else:
        print_answer(asked, answer)


def _device(choice: DeviceName, *, num_ranks: int) -> str:
    """On paper several ranks are accelerators."""
    if choice is not DeviceName.AUTO:
        return str(choice)
    if num_ranks > 1:
        return "cuda"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
