"""``tidegate simulate`` and ``tidegate plan``: what a job would take, without running it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from services.scheduler.sim.config import SimConfig
    from services.scheduler.sim.plan import PlanAnswer, PlanQuestion, PlanRow
    from services.scheduler.sim.result import SimResult

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="dotted.key=value, any number of them.")
]

_MODE_KEY = "scheduler.policy.mode"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command()(simulate)
    app.command()(plan)


def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="The simulation's configuration (YAML).", show_default=False)
    ] = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="Simulate the real job of this folder instead.", show_default=False)
    ] = None,
    overrides: SetOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw cells, runs and steps over time.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a job: the scheduler's own decisions, with modelled runs, cells and training."""
    from services.common.config import parse_config
    from services.scheduler.sim.config import SimConfig, load_sim_config
    from services.scheduler.sim.durations import rows_of
    from services.scheduler.sim.engine import simulate as run
    from services.scheduler.sim.plot import check_plot_path, plot_result

    if (config is None) == (job is None):
        raise ConfigError("give either a configuration or --job.", "Example: tidegate simulate examples/sim/tiny.yaml")
    measured_hours = None
    if config is not None:
        sim_config = load_sim_config(config, list(overrides or ()))
    else:
        from services.scheduler.sim.measured import measure_job

        assert job is not None
        measured = measure_job(job)
        data = _for_other_mode(measured.config.model_dump(mode="json"), list(overrides or ()))
        sim_config = parse_config(SimConfig, data, list(overrides or ()), str(job))
        measured_hours = measured.hours
    if plot is not None:
        check_plot_path(plot)
    rows = rows_of(sim_config.workload)
    started_s = time.perf_counter()
    result = run(sim_config, rows, is_recorded=plot is not None)
    wall_s = time.perf_counter() - started_s
    if plot is not None:
        plot_result(result, sum(sim_config.pool.slots_by_cell), plot)
    if as_json:
        answer = result.to_json()
        if measured_hours is not None:
            answer["measured_hours"] = measured_hours
        answer["wall"] = {"seconds": wall_s, "seconds_per_event": wall_s / result.num_events}
        typer.echo(json.dumps(answer, indent=2))
    else:
        _console().print(_result_table(result, sim_config, wall_s, measured_hours))
        if plot is not None:
            _console().print(f"drawn: {plot}", highlight=False, markup=False)
    if result.status != "finished":
        raise typer.Exit(1)


def _for_other_mode(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A job's configuration without the policy's keys that only its own mode has, where ``overrides`` set another."""
    policy = data["scheduler"]["policy"]
    modes = [value for key, _, value in (override.partition("=") for override in overrides) if key == _MODE_KEY]
    if modes and modes[-1] != policy["mode"]:
        data["scheduler"]["policy"] = {"streaming": policy["streaming"]}
    return data


def _result_table(result: SimResult, config: SimConfig, wall_s: float, measured_hours: float | None) -> Table:
    staleness, counts, shares, bound = result.staleness, result.counts, result.utilisation, result.lower_bound
    policy = config.scheduler.policy
    title = f"{result.name}: {policy.mode}{', streaming' if policy.streaming else ''}: {result.status}"
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(name, Text(value))

    if result.status != "finished":
        row("reason", result.reason)
    row("time", f"{result.hours:.2f} h for {len(result.step_end_s)} steps")
    if measured_hours is not None:
        row("measured", f"{measured_hours:.4f} h (simulated {result.hours / measured_hours - 1:+.1%})")
    over = f", {result.hours / bound.hours:.2f} times that were needed" if bound.hours > 0 else ""
    row("lower bound", f"{bound.hours:.2f} h ({bound.binding}){over}")
    row(
        "staleness",
        f"mean {staleness.mean_after_first_burst:.3f} steps after the first burst, at most {staleness.maximum}; "
        "groups by their slowest run, shortest first: "
        + "  ".join(f"{mean:.2f}" for mean in staleness.mean_by_slowest_run_quartile),
    )
    row(
        "cells",
        f"{shares.serving:.1%} rollout (slots {shares.slot_occupancy:.1%} busy), {shares.training:.1%} training, "
        f"{shares.waiting:.1%} waiting for work, {shares.switching:.1%} switching, {shares.down:.1%} down; "
        f"{result.num_switches} switches",
    )
    row("training with no run going on", f"{result.exposed_training_s / 3600:.2f} h")
    row(
        "runs",
        f"{counts.dispatched_runs} dispatched, {counts.ended_runs} ended, {counts.trained_runs} trained; "
        f"{counts.lost_attempts} attempts lost, {counts.moved_runs} moves",
    )
    row(
        "groups",
        f"{counts.dispatched_groups} dispatched, {counts.trained_groups} trained, {counts.lost_groups} lost",
    )
    row("a run", f"{result.run_mean_s:.4g} s; the slowest of a group {result.slowest_of_group_mean_s:.4g} s")
    row("simulated in", f"{wall_s:.2f} s, {result.num_events} events of {wall_s / result.num_events * 1e6:.0f} us")
    return table


def plan(
    durations: Annotated[Path, typer.Option(help="CSV file with one line for each run.", show_default=False)],
    cells: Annotated[int, typer.Option(min=1, help="Cells that there are.", show_default=False)],
    slots: Annotated[int, typer.Option(min=1, help="Runs that a cell can serve at once.", show_default=False)],
    group_size: Annotated[int, typer.Option(min=2, help="Runs of a group.", show_default=False)],
    groups_per_step: Annotated[int, typer.Option(min=1, help="Groups of a step.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps that are simulated.")] = 24,
    column: Annotated[str, typer.Option(help="Column of the durations, seconds.")] = "duration_s",
    task_column: Annotated[str, typer.Option(help="Column of the tasks, if there is one.")] = "",
    staleness: Annotated[float, typer.Option(min=0, help="Mean staleness of the trained groups, steps.")] = 1.0,
    train_per_rollout: Annotated[
        float | None,
        typer.Option(min=0, help="Cell-seconds of training for each second of a run.", show_default="0.3 / slots"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulations.")] = 0,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many hours async, colocate and elastic would take with measured durations, and which setting is best."""
    from services.common.config import parse_config
    from services.scheduler.sim.config import SimConfig
    from services.scheduler.sim.durations import rows_of
    from services.scheduler.sim.engine import simulate as run
    from services.scheduler.sim.plan import PlanQuestion, assumed_train_per_rollout, candidates, conclude

    data: dict[str, Any] = {
        "name": "plan",
        "seed": seed,
        "steps": steps,
        "pool": {"num_cells": cells, "slots": slots},
        "scheduler": {"groups_per_step": groups_per_step, "group_size": group_size},
        "workload": {"kind": "csv", "path": str(durations), "duration_column": column, "task_column": task_column},
        "system": {
            "train_per_rollout": assumed_train_per_rollout(slots) if train_per_rollout is None else train_per_rollout
        },
    }
    base = parse_config(SimConfig, data, list(overrides or ()), "the plan's options")
    rows = rows_of(base.workload)
    question = PlanQuestion(base, staleness)
    errors = Console(stderr=True)
    settings = candidates(question)
    simulated = []
    with errors.status("") as progress:
        for number, candidate in enumerate(settings, start=1):
            progress.update(f"simulating setting {number} of {len(settings)}: {candidate.label}")
            simulated.append((candidate, run(candidate.config, rows)))
    answer = conclude(question, simulated, [seconds for row in rows for seconds in row])
    if as_json:
        typer.echo(json.dumps(answer.to_json(), indent=2))
        return
    _print_answer(answer, question, is_assumed=train_per_rollout is None)


def _print_answer(answer: PlanAnswer, question: PlanQuestion, *, is_assumed: bool) -> None:
    console = _console()
    table = Table("policy", "cells x slots", "phi", "mu", "hours", "staleness", "at most", "training", box=None)
    shown: dict[tuple[str, float, int], PlanRow] = {}
    best_of_policy: set[str] = set()
    for row in answer.rows:  # of each policy and (phi, mu): the fastest split
        shown.setdefault((row.policy, row.carry_over_steps, row.steps_per_burst), row)
    for row in shown.values():
        name = row.policy if row.train_cells is None else f"{row.policy} ({row.train_cells} train)"
        table.add_row(
            name,
            f"{row.num_cells} x {row.slots}",
            f"{row.carry_over_steps:g}",
            str(row.steps_per_burst),
            f"{row.hours:.2f}",
            f"{row.mean_staleness_steps:.2f}",
            str(row.max_staleness_steps),
            f"{row.training_share:.0%}",
            style=None if row.policy in best_of_policy else "bold",
        )
        best_of_policy.add(row.policy)
    console.print(table)
    if len(shown) < len(answer.rows):
        console.print(
            f"of each policy, phi and mu the fastest number of cells; all {len(answer.rows)} settings: --json",
            highlight=False,
        )
    row = answer.recommended
    console.print(
        f"recommended: {row.policy}, {row.num_cells} cells of {row.slots} slots, carry_over_steps="
        f"{row.carry_over_steps:g}, steps_per_burst={row.steps_per_burst}"
        + (f", train_cells={row.train_cells}" if row.train_cells is not None else "")
        + f": {row.hours:.2f} h for {question.base.steps} steps (lower bound {answer.lower_bound_hours:.2f} h); "
        f"elastic against the faster of async and colocate: {answer.gain_over_others:+.1%} of its hours saved",
        highlight=False,
        markup=False,
    )
    if is_assumed:
        console.print(
            f"assumed: {question.base.system.train_per_rollout:.4g} cell-seconds of training for each second of a run; "
            "measure yours and give it with --train-per-rollout",
            highlight=False,
            markup=False,
        )
    for warning in answer.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, markup=False)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)
