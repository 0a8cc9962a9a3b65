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

from services import __version__, cli_cells, cli_events, cli_sim
from services.common.errors import NotFoundError, TidegateError

app = typer.Typer(
    help="Online reinforcement learning of LLM agents through unmodified harnesses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
runs_app = typer.Typer(help="Read the runs of a job, while it goes on and afterwards.", no_args_is_help=True)
app.add_typer(runs_app, name="runs")
cli_cells.register(app)
cli_events.register(app)
cli_sim.register(app)

console = Console(width=None if sys.stdout.isatty() else 140)
JobFolder = Annotated[Path, typer.Option("--job", help="The job's folder.")]
_LATEST = Path("runs/latest")


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


@runs_app.command("list")
def runs_list(
    job: JobFolder = _LATEST,
    limit: Annotated[int, typer.Option(help="Newest runs shown; 0: all.")] = 50,
    outcome: Annotated[str, typer.Option(help="Only runs with this outcome ('unfinished' for live ones).")] = "",
) -> None:
    """List a job's runs, newest last."""
    from services.trajectory.outcome import Outcome
    from services.trajectory.store import list_runs

    known = [str(name) for name in Outcome] + ["unfinished"]
    if outcome and outcome not in known:
        raise NotFoundError(f"no outcome {outcome!r}.", f"Outcomes are {', '.join(known)}.")
    summaries = list_runs(_store_of(job))
    if outcome:
        summaries = [run for run in summaries if (run.outcome or "unfinished") == outcome]
    shown = summaries[-limit:] if limit else summaries
    table = Table(
        "run", "task", "outcome", "reward", "advantage", "calls", "tokens in", "out", "versions", "s", box=None
    )
    for run in shown:
        versions = "-" if run.version_min is None else f"{run.version_min}-{run.version_max}"
        table.add_row(
            run.run_id,
            escape(run.task_name),
            run.outcome or "unfinished",
            _number(run.reward),
            _number(run.advantage),
            str(run.num_calls),
            str(run.num_prompt_tokens),
            str(run.num_output_tokens),
            versions,
            _number(run.wall_s, 1),
        )
    console.print(table)
    if len(shown) < len(summaries):
        console.print(f"{len(summaries) - len(shown)} older runs not shown (--limit 0 shows all)")


@runs_app.command("show")
def runs_show(run_id: str, job: JobFolder = _LATEST) -> None:
    """Show one run: its outcome and every call, with the texts that were sampled."""
    from services.trajectory.store import read_run

    run, calls = read_run(_store_of(job), run_id)
    console.print(
        f"[bold]{run.run_id}[/bold] {escape(run.task_name)}: {run.outcome or 'unfinished'}, "
        f"reward {_number(run.reward)}, advantage {_number(run.advantage)}"
        + (f" ({escape(run.detail)})" if run.detail else "")
    )
    for call in calls:
        spans = ", ".join(f"{span.num_tokens} at version {span.version}" for span in call.version_spans)
        console.rule(f"{call.call_id} (after {call.parent_call_id or 'nothing'})", align="left")
        console.print(
            f"{len(call.prompt_ids)} prompt tokens, {len(call.output_ids)} sampled ({spans}), "
            f"{call.finish_reason}, on {', '.join(call.cells)}, mean log-probability "
            f"{float(call.logprobs.mean()) if len(call.logprobs) else 0:.3f}"
        )
        messages = call.request.get("messages", [])
        if messages:
            console.print(f"[dim]{messages[-1].get('role')}:[/dim]", end=" ")
            console.print(str(messages[-1].get("content", "")), markup=False, highlight=False)
        console.print("[dim]assistant:[/dim]", end=" ")
        console.print(call.output_text, markup=False, highlight=False)


def _store_of(job: Path) -> str:
    store = job / "trajectory"
    if not store.is_dir():
        raise NotFoundError(f"{job} holds no runs.", "Name a job's folder with --job, as runs/NAME-DATE-TIME-ID.")
    return str(store)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


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
