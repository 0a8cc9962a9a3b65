"""A picture of a simulated job: what every cell did, the water level, ready groups and steps, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.scheduler.sim.pool import CellMode
from services.scheduler.sim.result import SimResult

SUFFIXES = (".png", ".pdf", ".svg")
_COLOURS = {
    CellMode.SERVING: "#4c8eda",
    CellMode.TRAINING: "#e07b39",
    CellMode.WAITING: "#f3d2b3",
    CellMode.SWITCHING: "#8c8c8c",
    CellMode.DOWN: "#2b2b2b",
}
_LABELS = {CellMode.SERVING: "rollout", CellMode.WAITING: "in training, no work"}


def check_plot_path(path: Path) -> None:
    """Raise ``ConfigError`` for a file that could not be written, before the work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} has no suffix of a picture.", f"Give one of {', '.join(SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist.", "Make it first.")


def plot_result(result: SimResult, total_slots: int, path: Path) -> None:
    """Draw a result that was recorded."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    timeline = result.timeline
    if timeline is None:
        raise ValueError("the result was not recorded")
    num_cells = len(timeline.cells)
    figure, (cells, level, ready) = pyplot.subplots(
        3, 1, sharex=True, figsize=(12, 4.5 + 0.3 * num_cells), dpi=120, height_ratios=(0.3 * num_cells + 0.6, 2, 1.2)
    )
    _draw_cells(cells, result)
    ends_h = [_hours(result, end_s) for end_s in result.step_end_s]
    for series, axes, name, colour in (
        (timeline.water_level, level, "unfinished runs", "#4c8eda"),
        (timeline.ready_groups, ready, "ready groups", "#3a9d5d"),
    ):
        times = [_hours(result, at_s) for at_s, _ in series]
        axes.step(times, [value for _, value in series], where="post", color=colour, linewidth=1.2)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for end_h in ends_h:
            axes.axvline(end_h, color="#e07b39", linewidth=0.6, alpha=0.6)
    level.axhline(total_slots, color="#8c8c8c", linestyle="--", linewidth=0.9)
    level.annotate("all slots", (0.0, total_slots), fontsize=7, color="#5c5c5c", va="bottom")
    ready.set_xlabel("hours since the first publication (vertical lines: ends of steps)")
    ready.set_xlim(0.0, max([*ends_h, 1e-9]))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_cells(axes: Any, result: SimResult) -> None:
    from matplotlib.patches import Patch

    assert result.timeline is not None
    for row, cell in enumerate(result.timeline.cells):
        for mode in CellMode:
            spans = [
                (_hours(result, start_s), (end_s - start_s) / 3600)
                for name, start_s, end_s in cell.intervals
                if name == mode
            ]
            if spans:
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=_COLOURS[mode])
    axes.set_yticks(range(len(result.timeline.cells)), [cell.cell_id for cell in result.timeline.cells], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{result.name}: {len(result.step_end_s)} steps in {result.hours:.2f} h", loc="left")
    patches = [Patch(color=colour, label=_LABELS.get(mode, mode.value)) for mode, colour in _COLOURS.items()]
    axes.legend(handles=patches, ncol=len(patches), fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _hours(result: SimResult, at_s: float) -> float:
    return (at_s - result.start_s) / 3600
