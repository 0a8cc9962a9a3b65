"""What a person sees while a job runs: one live panel, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PLAIN_EVERY_S = 15.0
_NO_CELL = "the cells are starting"


class Progress:
    """Shows snapshots of a job. Use as a context manager."""

    def __init__(self, console: Console, job_id: str, steps: int) -> None:
        self._console = console
        self._job_id = job_id
        self._steps = steps
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._started = time.monotonic()
        self._last_plain = -_PLAIN_EVERY_S
        self._last_tokens = (time.monotonic(), 0)
        self._tokens_per_s = 0.0
        self._seen_step = -1

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        stamp = time.strftime("%H:%M:%S")
        self._console.print(f"[dim]{stamp}[/dim] {text}", highlight=False)

    def show(self, snapshot: dict[str, Any], sampled_tokens: int, last_step: dict[str, Any] | None) -> None:
        """Show the scheduler's snapshot, with the tokens sampled so far and the last step's line."""
        self._update_rate(sampled_tokens)
        if last_step is not None and last_step["step"] != self._seen_step:
            self._seen_step = last_step["step"]
            self.note(step_line(last_step, self._steps))
        if self._live is not None:
            self._live.update(self._panel(snapshot, last_step))
        elif time.monotonic() - self._last_plain >= _PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.note(self._plain(snapshot))

    def _update_rate(self, sampled_tokens: int) -> None:
        now, (before, tokens) = time.monotonic(), self._last_tokens
        if now - before >= 2.0:
            self._tokens_per_s = max(0.0, sampled_tokens - tokens) / (now - before)
            self._last_tokens = (now, sampled_tokens)

    def _plain(self, snapshot: dict[str, Any]) -> str:
        roles = " ".join(f"{cell['cell_id']}={cell['role']}/{cell['state']}" for cell in snapshot["cells"])
        return (
            f"step {snapshot['step']}/{self._steps}, version {snapshot['version']}, "
            f"runs {snapshot['ended']} ended of {snapshot['dispatched']} (water level {snapshot['water_level']}), "
            f"ready groups {snapshot['ready_groups']}, {self._tokens_per_s:.0f} tokens/s, "
            f"{roles or _NO_CELL}"
        )

    def _panel(self, snapshot: dict[str, Any], last_step: dict[str, Any] | None) -> Panel:
        cells = Table("cell", "role", "state", "version", "runs/slots", box=None, padding=(0, 2))
        for cell in sorted(snapshot["cells"], key=lambda cell: str(cell["cell_id"])):
            name = f"{cell['cell_id']}{' (core)' if cell['kind'] == 'core' else ''}"
            cells.add_row(
                name, cell["role"], cell["state"], str(cell["version"]), f"{cell['num_runs']}/{cell['slots']}"
            )
        elapsed = time.monotonic() - self._started
        mean = last_step["reward_mean"] if last_step else None
        reward = "-" if mean is None else f"{mean:.3f}"
        lines = Text(
            f"step {snapshot['step']}/{self._steps}   version {snapshot['version']}   "
            f"{int(elapsed // 60)}:{int(elapsed % 60):02d}\n"
            f"runs: {snapshot['started']} started, {snapshot['ended']} ended of {snapshot['dispatched']}   "
            f"water level {snapshot['water_level']}   ready groups {snapshot['ready_groups']}   "
            f"lost {snapshot['lost_groups']}\n"
            f"mean reward {reward}   {self._tokens_per_s:.0f} tokens/s sampled"
        )
        below = cells if snapshot["cells"] else Text(_NO_CELL)
        return Panel(Group(lines, Text(), below), title=self._job_id, title_align="left")


def step_line(line: dict[str, Any], steps: int) -> str:
    """One optimizer step in one line."""
    reward = "-" if line["reward_mean"] is None else f"{line['reward_mean']:.3f}"
    error = "" if line["reward_sem"] is None else f" ± {line['reward_sem']:.3f}"
    return (
        f"step {line['step']}/{steps}: reward {reward}{error} ({line['num_scored_runs']} runs), "
        f"loss {line['loss']:+.4f}, gradient {line['grad_norm']:.2f}, "
        f"{line['train_tokens']} tokens in {line['train_s']:.1f} s"
    )
