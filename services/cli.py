"""The ``tidegate`` command."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services import __version__, cli_cells, cli_events, cli_longctx, cli_runs, cli_sim
from services.common.errors import TidegateError

app = typer.Typer(
    help="Online reinforcement learning of LLM agents through unmodified harnesses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
cli_runs.register(app)
cli_cells.register(app)
cli_events.register(app)
cli_sim.register(app)
cli_longctx.register(app)

console = Console(width=None if sys.stdout.isatty() else 140)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="The job's configuration (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, any number of them.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; short for trainer.steps=N.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest job of this name from its last checkpoint.")
    ] = False,
) -> None:
    """Train a model on tasks through a harness."""
    # what checks a configuration is imported before what needs PyTorch and Ray: a mistake shows at once
    from services.job.config import load_job_config

    given = list(overrides or ())
    if steps is not None:
        given.append(f"trainer.steps={steps}")
    job_config = load_job_config(config, given)
    from services.job.plan import plan_job

    plan = plan_job(job_config, config, resume=resume)
    console.print(plan.table())
    if dry_run:
        return
    console.print("starting Ray")
    from services.job.launch import run_job

    raise typer.Exit(run_job(plan, console))


@app.command()
def doctor() -> None:
    """Check this machine, and say what to do about what it lacks."""
    from services.job.doctor import Verdict, examine

    table = Table(box=None, show_header=False)
    worst_is_failure = False
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    for finding in examine():
        worst_is_failure |= finding.verdict is Verdict.FAIL
        detail = escape(finding.detail) + (f"\n[bold]{escape(finding.hint)}[/bold]" if finding.hint else "")
        table.add_row(finding.name, f"[{colours[finding.verdict]}]{finding.verdict}[/]", detail)
    console.print(table)
    raise typer.Exit(3 if worst_is_failure else 0)


def main() -> None:
    """Entry point: errors become one clear message and an exit code that is not 0."""
    try:
        app()
    except TidegateError as error:
        message = Console(stderr=True)
        # soft_wrap: a message is broken by the terminal, or not at all in a log
        message.print(f"error: {error.message}", style="red", markup=False, highlight=False, soft_wrap=True)
        if error.hint:
            message.print(error.hint, markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        Console(stderr=True).print("error: the name of a file or folder is too long. Check the path.", style="red")
        sys.exit(1)


if __name__ == "__main__":
    main()
