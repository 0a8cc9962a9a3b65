"""Runs exported from a source to a file, one run in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.common.errors import ConfigError, NotFoundError
from services.trajectory.atif import AgentName, atif_documents
from services.trajectory.export import ExportFilter, GroupFacts, ScoreFacts, rows_of_run, wanted
from services.trajectory.files import Format, JsonlWriter, ParquetWriter, RowWriter, json_bytes, new_file, new_folder
from services.trajectory.paths import RunCalls, calls_of_run
from services.trajectory.source import RunSource
from services.trajectory.store import RunFilter
from services.trajectory.types import RunSummary


@dataclass
class ExportReport:
    """What was written."""

    num_runs: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    skipped: list[str] = field(default_factory=list)
    """Runs that could not be read any more: deleted by retention, or replaced meanwhile."""


def export_runs(
    source: RunSource,
    filters: ExportFilter,
    out: Path,
    kind: Format,
    *,
    force: bool = False,
    agent: AgentName | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Export runs in order of dispatch. Nothing stands at ``out`` until all is written.

    ``NotFoundError`` if no run is wanted, ``ConfigError`` for an output that exists or cannot be written. Documents of
    ATIF make a folder, the other formats a file. ``on_progress`` hears how many runs of how many are done.
    """
    runs = wanted(source.list_runs(RunFilter()), filters)
    if not runs:
        raise NotFoundError("no run is as the filters want it.", "See `tidegate runs list`; nothing was written.")
    report = ExportReport()
    with new_folder(out, force=force) if kind is Format.ATIF else new_file(out, force=force) as part:
        take, close = _taker(kind, part, filters, agent or AgentName(), report, source.job_id)
        try:
            for done, run in enumerate(runs, 1):
                _export(source, run, take, report)
                on_progress(done, len(runs))
        finally:
            close()
    return report


_Take = Callable[[RunSummary, RunCalls, GroupFacts, ScoreFacts], None]


def _taker(
    kind: Format, part: Path, filters: ExportFilter, agent: AgentName, report: ExportReport, job_id: str
) -> tuple[_Take, Callable[[], None]]:
    """What takes the runs one by one, and what ends the output."""
    if kind is Format.ATIF:

        def write_documents(summary: RunSummary, run: RunCalls, group: GroupFacts, score: ScoreFacts) -> None:
            documents = atif_documents(summary, run, agent, score, selected_only=filters.selected_only)
            for name, document in documents.items():
                if Path(name).name != name:  # runs may come from another machine
                    raise ConfigError(f"run {summary.run_id!r} has an id that names no file.", "Export it as JSONL.")
                (part / name).write_bytes(json_bytes(document, for_any_reader=True))
                report.num_trajectories += 1 + len(document.get("subagent_trajectories", ()))
            report.num_tokens += run.num_tokens
            report.num_targets += 0 if run.selection is None else run.selection.num_targets

        return write_documents, lambda: None
    writer: RowWriter = JsonlWriter(part) if kind is Format.JSONL else ParquetWriter(part)

    def write_rows(summary: RunSummary, run: RunCalls, group: GroupFacts, score: ScoreFacts) -> None:
        for row in rows_of_run(job_id, summary, run, group, score, selected_only=filters.selected_only):
            writer.write([row])
            report.num_trajectories += bool(row.calls)
            report.num_tokens += len(row.token_ids)
            report.num_targets += int(row.target_mask.sum())

    return write_rows, writer.close


def _export(source: RunSource, listed: RunSummary, take: _Take, report: ExportReport) -> None:
    try:
        summary, calls = source.read_calls(listed.run_id)
        group, score = source.group(summary.group_id), source.score(summary)
    except NotFoundError:
        report.skipped.append(listed.run_id)
        return
    take(summary, calls_of_run(calls, summary.selection), group, score)
    report.num_runs += 1
