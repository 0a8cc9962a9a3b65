"""Measured durations of runs, from a CSV file."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from services.common.errors import ConfigError
from services.scheduler.sim.config import CsvWorkload, WorkloadConfig


def read_durations(path: Path, duration_column: str = "duration_s", task_column: str = "") -> list[list[float]]:
    """Durations in seconds, one list for each task in the order of the file (one list without a task column).

    The first line names the columns. Raises ``ConfigError`` naming the line that is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(csv.DictReader(file), path, duration_column, task_column)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", "Name a CSV file with a header.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}.", "Save it as UTF-8 text with commas.") from None


def rows_of(workload: WorkloadConfig) -> list[list[float]]:
    """What the file of a CSV workload holds; empty for any other workload."""
    if not isinstance(workload, CsvWorkload):
        return []
    return read_durations(workload.path, workload.duration_column, workload.task_column)


def _read(reader: csv.DictReader[str], path: Path, duration_column: str, task_column: str) -> list[list[float]]:
    columns = list(reader.fieldnames or ())
    if not columns:
        raise ConfigError(f"{path} is empty.", f"Its first line names the columns, one of them {duration_column}.")
    for column in filter(None, (duration_column, task_column)):
        if column not in columns:
            raise ConfigError(
                f"{path} has no column {column!r}; its first line names {', '.join(columns)}.",
                "Name the columns that it has.",
            )
    rows: dict[str, list[float]] = {}
    for row in reader:
        seconds = _seconds(row[duration_column], path, reader.line_num)
        rows.setdefault((row[task_column] or "") if task_column else "", []).append(seconds)
    if not rows:
        raise ConfigError(f"{path} has no line behind its header.", "One line for each run is needed.")
    return list(rows.values())


def _seconds(text: str | None, path: Path, line: int) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(
            f"{path}, line {line}: {text!r} is not a duration.", "Durations are seconds, numbers of at least 0."
        )
    return seconds
