"""``tidegate status``, ``tidegate cells`` and ``tidegate policy``: look at a running job and steer it, over gRPC."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

if TYPE_CHECKING:
    from services.job.access import Access
    from services.scheduler.client import SchedulerClient

T = TypeVar("T")

JobArgument = Annotated[Path | None, typer.Argument(help="The job's folder.", show_default="runs/latest")]
CellArgument = Annotated[str, typer.Argument(help="A cell, as cell-1.", show_default=False)]
AddressOption = Annotated[
    str, typer.Option("--address", help="HOST:PORT of the job's scheduler; else from the job's folder.")
]
TokenOption = Annotated[
    str,
    typer.Option("--token", envvar="TIDEGATE_TOKEN", show_default=False, help="Its token; else from the job's folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

cells_app = typer.Typer(help="Look at the cells of a running job, and move them.", no_args_is_help=True)
policy_app = typer.Typer(help="Change how a running job shares its pool.", no_args_is_help=True)


class Target(StrEnum):
    """Where a cell can be sent."""

    TRAIN = "train"
    ROLLOUT = "rollout"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command()(status)
    app.add_typer(cells_app, name="cells")
    app.add_typer(policy_app, name="policy")


def status(
    job: JobArgument = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends (or Ctrl-C).")] = False,
    as_json: JsonOption = False,
    num_decisions: Annotated[
        int, typer.Option("--decisions", min=0, max=200, help="Newest decisions shown, alike ones in one line.")
    ] = 10,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Show where a running job stands: its policy, its cells, its runs and what was decided, with the reasons."""
    if watch and as_json:
        raise typer.BadParameter("--json prints one object, it does not follow the job.", param_hint="--watch")
    from services.cli_status import fetch, follow, show

    access = _access(job, address, token)
    if watch:
        follow(lambda: _access(job, address, token), _console(), num_decisions)
        return
    state, decisions = _ask(access, lambda client: fetch(client))
    if as_json:
        newest = decisions[-num_decisions:] if num_decisions else []
        typer.echo(json.dumps({**asdict(state), "decisions": [asdict(decision) for decision in newest]}, indent=2))
        return
    _console().print(show(state, decisions, num_decisions))


@cells_app.command("list")
def cells_list(
    job: JobArgument = None, as_json: JsonOption = False, address: AddressOption = "", token: TokenOption = ""
) -> None:
    """List the cells with kind, role, state, version and runs."""
    from services.cli_status import cells_table

    state = _ask(_access(job, address, token), lambda client: client.cluster_state())
    if as_json:
        typer.echo(json.dumps({"job_id": state.job_id, "cells": [asdict(cell) for cell in state.cells]}, indent=2))
        return
    _console().print(cells_table(state.cells))


@cells_app.command("drain")
def cells_drain(
    cell: CellArgument, job: JobArgument = None, address: AddressOption = "", token: TokenOption = ""
) -> None:
    """Let a cell be quiet, without runs and without training, until it is undrained. Its runs go on elsewhere."""
    _steer(_access(job, address, token), cell, lambda client: client.drain_cell(cell))


@cells_app.command("undrain")
def cells_undrain(
    cell: CellArgument, job: JobArgument = None, address: AddressOption = "", token: TokenOption = ""
) -> None:
    """Give a drained cell back to the job; it serves again once its weights are the newest."""
    _steer(_access(job, address, token), cell, lambda client: client.undrain_cell(cell))


@cells_app.command("switch")
def cells_switch(
    cell: CellArgument,
    to: Annotated[Target, typer.Option("--to", help="What the cell is to do.", show_default=False)],
    job: JobArgument = None,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Move a cell now. Refused, with the numbers, where it would break a rule of the scheduler."""
    from services.common.types import CellRole

    _steer(_access(job, address, token), cell, lambda client: client.switch_cell(cell, CellRole(to.value)))


@policy_app.command("set")
def policy_set(
    job: JobArgument = None,
    phi: Annotated[float | None, typer.Option(help="carry_over_steps: steps of groups beyond the burst.")] = None,
    mu: Annotated[int | None, typer.Option(help="steps_per_burst: steps between two publications.")] = None,
    mode: Annotated[str | None, typer.Option(help="async, colocate or elastic.")] = None,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Change the policy from the next burst boundary on."""
    if phi is None and mu is None and mode is None:
        raise typer.BadParameter("nothing to set.", param_hint="--phi, --mu or --mode")
    from services.cli_status import policy_line

    async def change(client: SchedulerClient) -> str:
        from_step = await client.set_policy(carry_over_steps=phi, steps_per_burst=mu, mode=mode)
        state = await client.cluster_state()
        return f"it holds from step {from_step} on (now at step {state.step})\n{policy_line(state.policy)}"

    _console().print(_ask(_access(job, address, token), change), highlight=False, markup=False)


def _steer(access: Access, cell_id: str, request: Callable[[SchedulerClient], Awaitable[None]]) -> None:
    """Send a request about a cell, and show the cell as it is after it."""
    from services.cli_status import cells_table

    async def steer(client: SchedulerClient) -> None:
        await request(client)
        state = await client.cluster_state()
        _console().print(cells_table([cell for cell in state.cells if cell.cell_id == cell_id]))

    _ask(access, steer)


def _access(job: Path | None, address: str, token: str) -> Access:
    from services.job.access import find_access

    return find_access(job, address, token)


def _ask(access: Access, question: Callable[[SchedulerClient], Awaitable[T]]) -> T:
    from services.job.access import connected

    async def ask() -> T:
        async with connected(access) as client:
            return await question(client)

    return asyncio.run(ask())


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)
