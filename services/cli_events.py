"""``tidegate events`` and ``tidegate replay``: read a job's journal, while the job runs and afterwards."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from services.scheduler.types import LoggedEvent

_LATEST = Path("runs/latest")
_POLL_S = 0.5

FolderArgument = Annotated[Path, typer.Argument(help="The job's folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command()(events)
    app.command()(replay)


def events(
    job: FolderArgument = _LATEST,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends (or Ctrl-C).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    after: Annotated[int, typer.Option(min=0, help="Only records behind this number.")] = 0,
) -> None:
    """Print what a job's scheduler took in, and what it decided with the reasons."""
    from services.scheduler.journal import read_journal

    console = Console(soft_wrap=True, highlight=False)
    position, is_over = after, False
    while True:
        for record in read_journal(job, position):
            position, is_over = record.sequence, _ends(record)
            if as_json:
                sys.stdout.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
            else:
                console.print(_lines(record))
        if not follow or is_over:
            return
        sys.stdout.flush()
        try:
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            return


def replay(job: FolderArgument = _LATEST) -> None:
    """Feed a job's journal through the scheduler's core again: is every decision the same? Exit code 1 if not."""
    from services.scheduler.journal import read_journal
    from services.scheduler.recovery import Replay

    console = Console(soft_wrap=True, highlight=False)
    fed = Replay()
    started_s = time.perf_counter()
    num_events = num_decisions = num_starts = 0
    for record in read_journal(job):
        if difference := fed.take(record):
            console.print(Text(f"the decisions differ {difference}", style="red"))
            raise typer.Exit(1)
        num_starts += record.kind == "JobStarted"
        num_events += 1
        num_decisions += len(record.decisions)
    seconds = time.perf_counter() - started_s
    starts = "1 start" if num_starts == 1 else f"{num_starts} starts"
    console.print(
        f"{num_events} records of {starts}, {num_decisions} decisions: the core decides all of them alike "
        f"({seconds:.1f} s, {1e6 * seconds / max(num_events, 1):.0f} µs a record)"
    )


def _ends(record: LoggedEvent) -> bool:
    return any(decision.action == "FinishJob" for decision in record.decisions)


def _lines(record: LoggedEvent) -> Text:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at_s)) + f".{int(record.at_s * 1000) % 1000:03d}"
    text = Text(f"{record.sequence:>7} {at} ", style="dim")
    text.append(record.kind, style="bold not dim").append(f" {_fields(record.payload)}".rstrip(), style="not dim")
    for decision in record.decisions:
        text.append("\n        -> ", style="dim").append(decision.action, style="green not dim")
        text.append(f" {_fields(decision.payload)}".rstrip(), style="not dim").append(f": {decision.reason}", "dim")
    return text


def _fields(payload: dict[str, Any]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in payload.items() if name != "type")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"
