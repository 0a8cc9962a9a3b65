"""``tidegate runs``: look at the runs of a job, in its folder or over gRPC; take them out, and take them in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.common.errors import ConfigError

if TYPE_CHECKING:
    from services.trajectory.files import Format
    from services.trajectory.source import RunSource

JobOption = Annotated[Path | None, typer.Option("--job", help="The job's folder.", show_default="runs/latest")]
AddressOption = Annotated[
    str, typer.Option("--address", help="HOST:PORT of a running job's scheduler: ask it instead of reading the folder.")
]
TokenOption = Annotated[
    str,
    typer.Option("--token", envvar="TIDEGATE_TOKEN", show_default=False, help="Its token; else from the job's folder."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RunArgument = Annotated[str, typer.Argument(help="A run, as g000003-r1.", show_default=False)]
AttemptOption = Annotated[int | None, typer.Option("--attempt", min=0, help="An attempt; else the newest.")]
OutcomeOption = Annotated[str, typer.Option(help="Only runs with this outcome ('unfinished' for live ones).")]
GroupOption = Annotated[str, typer.Option("--group", help="Only runs of this group.")]
TaskOption = Annotated[str, typer.Option("--task", help="Only runs on this task.")]

_MAX_NAMED = 10
runs_app = typer.Typer(help="Read the runs of a job, while it goes on and afterwards.", no_args_is_help=True)


class FormatName(StrEnum):
    """Formats of an export, as they are typed."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    ATIF = "atif"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.add_typer(runs_app, name="runs")


@runs_app.command("list")
def runs_list(
    job: JobOption = None,
    limit: Annotated[int, typer.Option(min=0, help="Newest runs shown; 0: all.")] = 50,
    outcome: OutcomeOption = "",
    group: GroupOption = "",
    task: TaskOption = "",
    as_json: JsonOption = False,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """List a job's runs, newest last."""
    from services.cli_runs_view import runs_table
    from services.trajectory.source import filter_of

    filters = filter_of(group_id=group, task_name=task, outcome=outcome)
    with _source(job, address, token) as source:
        summaries = source.list_runs(filters)
        job_id = source.job_id
    shown = summaries[-limit:] if limit else summaries
    if as_json:
        _print_json({"job_id": job_id, "num_runs": len(summaries), "runs": [asdict(run) for run in shown]})
        return
    console = _console()
    console.print(runs_table(shown))
    if len(shown) < len(summaries):
        console.print(f"{len(summaries) - len(shown)} older runs not shown (--limit 0 shows all)")


@runs_app.command("show")
def runs_show(
    run_id: RunArgument,
    job: JobOption = None,
    attempt: AttemptOption = None,
    as_json: JsonOption = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="With --json: token ids and log-probabilities too.")] = False,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Show one run: its outcome and every call, with the reasoning, text and tool calls of its answer."""
    from services.cli_runs_view import call_data, show_run
    from services.trajectory.paths import calls_of_run

    if tokens and not as_json:
        raise typer.BadParameter("they are for scripts: give --json too.", param_hint="--tokens")
    with _source(job, address, token) as source:
        summary, rows = source.read_calls(run_id, attempt)
        group, score = source.group(summary.group_id), source.score(summary)
    run = calls_of_run(rows, summary.selection if attempt in (None, summary.attempt) else None)
    if as_json:
        calls = [call_data(row, run, tokens=tokens) for row in rows]
        _print_json({"run": asdict(summary), "group": asdict(group), "score": asdict(score), "calls": calls})
        return
    show_run(_console(), summary, group, score, run)


@runs_app.command("tree")
def runs_tree(
    run_id: RunArgument,
    job: JobOption = None,
    attempt: AttemptOption = None,
    every_call: Annotated[bool, typer.Option("--all", help="Every call; else long rows of them are folded.")] = False,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Draw a run's tree: calls with roles, tokens and versions, what was selected and what was not, and why."""
    from services.cli_runs_view import tree_of, tree_totals
    from services.trajectory.draw import draw_tree
    from services.trajectory.paths import calls_of_run

    with _source(job, address, token) as source:
        summary, rows = source.read_calls(run_id, attempt)
    run = calls_of_run(rows, summary.selection if attempt in (None, summary.attempt) else None)
    view = draw_tree(run, fold=not every_call)
    console = _console()
    console.print(tree_of(summary, view))
    console.print(tree_totals(view, run.selection))


@runs_app.command("export")
def runs_export(
    out: Annotated[Path, typer.Option("--out", help="File to write; for atif a folder.", show_default=False)],
    kind: Annotated[
        FormatName | None, typer.Option("--format", help="Else by the name: .parquet or .jsonl.", show_default=False)
    ] = None,
    job: JobOption = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="Only these runs; may be repeated.")] = None,
    group: GroupOption = "",
    task: TaskOption = "",
    outcome: OutcomeOption = "",
    min_reward: Annotated[float | None, typer.Option(help="Only runs with at least this reward.")] = None,
    selected_only: Annotated[
        bool, typer.Option("--selected-only", help="Only trajectories that were selected for training.")
    ] = False,
    no_eval: Annotated[bool, typer.Option("--no-eval", help="No held-out runs.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what stands at --out.")] = False,
    address: AddressOption = "",
    token: TokenOption = "",
) -> None:
    """Write runs to a file that other trainers read: one row a trajectory, each target masked once."""
    from services.trajectory.export import ExportFilter
    from services.trajectory.exporting import export_runs

    filters = ExportFilter(tuple(run or ()), group, task, outcome, min_reward, selected_only, no_eval)
    chosen = _format(kind, out)
    with _source(job, address, token) as source, _progress("runs written") as advance:
        report = export_runs(source, filters, out, chosen, force=force, agent=_agent(job, address), on_progress=advance)
    console = _console()
    console.print(
        f"wrote {report.num_trajectories} trajectories of {report.num_runs} runs to {escape(str(out))}: "
        f"{report.num_tokens} tokens, {report.num_targets} targets",
        highlight=False,
        soft_wrap=True,
    )
    if report.skipped:
        console.print(f"left out, for their calls are deleted: {_named(report.skipped)}", soft_wrap=True)


def _named(run_ids: Sequence[str]) -> str:
    """The first of many runs, and how many more there are."""
    more = f" and {len(run_ids) - _MAX_NAMED} more" if len(run_ids) > _MAX_NAMED else ""
    return ", ".join(run_ids[:_MAX_NAMED]) + more


@runs_app.command("import")
def runs_import(
    file: Annotated[Path, typer.Argument(help="What `runs export` wrote as Parquet or JSONL.", show_default=False)],
    into: Annotated[Path, typer.Option("--into", help="A job's folder; made if it is not there.", show_default=False)],
) -> None:
    """Take exported runs into a job folder, for offline work: all of a file, or nothing if anything in it is wrong."""
    from services.trajectory.imports import import_file

    with _progress("runs") as advance:
        report = import_file(file, into, on_progress=lambda phase, num_runs: advance(num_runs, None, f"runs {phase}"))
    _console().print(
        f"imported {report.num_runs} runs of {report.num_groups} groups with {report.num_calls} calls; "
        f"`tidegate runs list --job {escape(str(into))}` lists them",
        highlight=False,
        soft_wrap=True,
    )


# -- helpers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _source(job: Path | None, address: str, token: str) -> Iterator[RunSource]:
    from services.job.access import LATEST, find_access

    if address:
        from services.job.remote_runs import RemoteSource

        with RemoteSource(find_access(job, address, token)) as remote:
            yield remote
        return
    from services.trajectory.source import StoreSource

    yield StoreSource(job or LATEST)


def _format(kind: FormatName | None, out: Path) -> Format:
    from services.trajectory.files import Format

    if kind is not None:
        return Format(kind.value)
    by_suffix = {".parquet": Format.PARQUET, ".jsonl": Format.JSONL}
    if out.suffix not in by_suffix:
        raise ConfigError(f"the name {out.name} tells no format.", "Give --format parquet, jsonl or atif.")
    return by_suffix[out.suffix]


def _agent(job: Path | None, address: str) -> Any:
    """Harness and model of a job, as its folder tells."""
    from services.job.access import LATEST
    from services.trajectory.atif import AgentName

    if address and job is None:
        return AgentName()
    try:
        config = json.loads(((job or LATEST) / "job.json").read_text(encoding="utf-8"))["config"]
        command = config["rollout"]["harness"]["command"] or ("mini-swe-agent",)
        return AgentName(Path(command[0]).name, model_name=str(config["name"]))
    except (OSError, ValueError, LookupError, TypeError):
        return AgentName()


@contextmanager
def _progress(what: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal's error stream, nothing elsewhere; gone when all is done."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int | None = None, description: str = what) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield advance


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)
