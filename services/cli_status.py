"""What ``tidegate status`` shows of a running job, once or live."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.common.errors import MachineError
from services.job.access import Access, connected
from services.scheduler.client import SchedulerClient
from services.scheduler.types import CellView, ClusterState, LoggedDecision, PolicyView

_NUM_KEPT = 200  # decisions
_REFRESH_S = 0.5  # the least time between two looks at the state
_RETRY_S = 1.0
_LOST_TIMEOUT_S = 30.0  # how long a scheduler may be away before it is given up


async def fetch(client: SchedulerClient) -> tuple[ClusterState, list[LoggedDecision]]:
    """The state with the newest decisions, oldest first."""
    return await client.cluster_state(), await client.decisions(_NUM_KEPT)


# -- what is shown ----------------------------------------------------------------------------------------------------


def show(state: ClusterState, decisions: Iterable[LoggedDecision], num_lines: int) -> RenderableType:
    """The whole picture: the job, its cells, the newest decisions."""
    parts: list[RenderableType] = [job_table(state), Text(), cells_table(state.cells)]
    if num_lines:
        parts += [Text(), decisions_table(decisions, num_lines)]
    return Group(*parts)


def job_table(state: ClusterState) -> Table:
    """The job in a few lines."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("job", Text(state.job_id, style="bold"))
    table.add_row("status", Text(state.status + (f": {state.reason}" if state.reason else "")))
    table.add_row("step", f"{state.step} of {state.steps_target}, version {state.version} is published")
    table.add_row("policy", Text(policy_line(state.policy)))
    table.add_row(
        "runs",
        f"water level {state.water_level} = {state.dispatched} dispatched - {state.ended} ended; "
        f"{state.queued_runs} queued, {state.running_runs} running",
    )
    table.add_row(
        "groups", f"{state.ready_groups} ready, {state.outstanding_groups} outstanding, {state.lost_groups} lost"
    )
    return table


def policy_line(policy: PolicyView) -> str:
    """The policy in one line, with what is pending and from which step."""
    details = ["streaming" if policy.streaming else "whole steps"]
    if policy.mode == "async":
        details.append(f"{policy.train_cells} cells only train")
    if policy.mode == "elastic":
        details.append(f"rule {policy.rule}")
    line = f"{policy.mode} ({', '.join(details)}), phi {policy.carry_over_steps:g}, mu {policy.steps_per_burst}"
    if policy.pending_from_step is None:
        return line
    names = {"carry_over_steps": "phi", "steps_per_burst": "mu"}
    changes = ", ".join(f"{names.get(name, name)} {_plain(value)}" for name, value in policy.pending.items())
    return f"{line}; from step {policy.pending_from_step} on: {changes}"


def cells_table(cells: Iterable[CellView]) -> Table:
    """One row a cell."""
    table = Table("cell", "kind", "role", "state", "version", "runs/slots", "reason", box=None, padding=(0, 2, 0, 0))
    for cell in sorted(cells, key=lambda cell: (cell.kind != "core", len(cell.cell_id), cell.cell_id)):
        table.add_row(
            cell.cell_id,
            cell.kind.value,
            cell.role.value,
            cell.state.value,
            str(cell.version) if cell.version >= 0 else "-",
            f"{cell.num_runs}/{cell.slots}",
            Text("; ".join(filter(None, ("drained by a user" if cell.is_draining else "", cell.reason)))),
        )
    return table


def decisions_table(decisions: Iterable[LoggedDecision], num_lines: int) -> Table:
    """The newest decisions with their reasons; neighbours that do the same share a line, with the newest's reason."""
    table = Table("at", "decision", "about", "why", box=None, padding=(0, 2, 0, 0))
    for alike in fold(decisions)[-num_lines:]:
        newest = alike[-1]
        table.add_row(_clock(newest.at_s), newest.action, Text(_subject(alike)), Text(newest.reason))
    return table


def _subject(alike: list[LoggedDecision]) -> str:
    more = f" (+{len(alike) - 1})" if len(alike) > 1 else ""
    return subject_of(alike[-1]) + more


def fold(decisions: Iterable[LoggedDecision]) -> list[list[LoggedDecision]]:
    """Neighbours with the same action, but for those that move cells: each of these stands alone."""
    folded: list[list[LoggedDecision]] = []
    for decision in decisions:
        if folded and folded[-1][-1].action == decision.action != "SwitchCell":
            folded[-1].append(decision)
        else:
            folded.append([decision])
    return folded


def subject_of(decision: LoggedDecision) -> str:
    """What a decision is about, in a word or two."""
    payload = decision.payload
    match decision.action:
        case "SwitchCell":
            return f"{payload['cell_id']} -> {payload['role']}"
        case "TrainStep":
            missing = f", {payload['num_missing']} missing" if payload.get("num_missing") else ""
            return f"step {payload['step']} ({len(payload['group_ids'])} groups{missing})"
        case "PublishWeights":
            return f"version {payload['version']} to {len(payload['cell_ids'])} cells"
        case "OpenGroup":
            return str(payload["spec"]["group_id"])
        case "AbortRuns":
            return f"{len(payload['attempts'])} runs"
        case "RecordEvaluation":
            return f"version {payload['version']}"
    for key in ("run_id", "group_id", "cell_id", "status"):
        if key in payload:
            return str(payload[key])
    return f"step {payload['step']}" if "step" in payload else ""


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- following a job --------------------------------------------------------------------------------------------------


def follow(find: Callable[[], Access], console: Console, num_lines: int) -> None:
    """Show a job's state and keep it fresh until the job ends or the user has seen enough (Ctrl-C).

    Where there is no terminal: a line a decision, neighbours that do the same in one. ``find`` is asked again when the
    scheduler was away.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Watch(find, console, num_lines).run())


@dataclass
class _Watch:
    """A picture that is kept fresh: the job's event stream says when to look at its state again."""

    find: Callable[[], Access]
    console: Console
    num_lines: int
    live: Live | None = None
    """None where there is no terminal."""
    state: ClusterState | None = None
    decisions: deque[LoggedDecision] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    lost_at_s: float | None = None
    """When the scheduler stopped answering."""

    async def run(self) -> None:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
        with self.live or contextlib.nullcontext():
            while True:
                async with connected(self.find()) as client:
                    if await self._is_over(client):
                        break
                await asyncio.sleep(_RETRY_S)
        if self.live is None and self.state is not None:
            self.console.print(job_table(self.state))
        self.console.print(Text(f"the job is over: {self._end() or 'see its folder'}"), soft_wrap=True)

    async def _is_over(self, client: SchedulerClient) -> bool:
        """Follow the job to its end; False: the connection was lost, and may come back."""
        try:
            await self._follow(client)
        except MachineError:
            if self._end():
                return True
            now_s = time.monotonic()
            self.lost_at_s = now_s if self.lost_at_s is None else self.lost_at_s
            if self.state is None or now_s - self.lost_at_s > _LOST_TIMEOUT_S:
                raise
            self._draw("the scheduler does not answer; trying again")
            return False
        return True

    async def _follow(self, client: SchedulerClient) -> None:
        state, decisions = await fetch(client)
        self.lost_at_s = None
        seen = self.decisions[-1].sequence if self.decisions else 0
        self._take([decision for decision in decisions if decision.sequence > seen])
        self._note(state)
        changed = asyncio.Event()
        listener = asyncio.create_task(self._listen(client, changed))
        try:
            while not listener.done():
                await changed.wait()
                changed.clear()
                self._note(await client.cluster_state())
                await asyncio.sleep(_REFRESH_S)
            await listener
            self._note(await client.cluster_state())
        except MachineError:
            await asyncio.wait([listener], timeout=_RETRY_S)  # the stream may still bring how the job ended
            raise
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self, client: SchedulerClient, changed: asyncio.Event) -> None:
        try:
            async for event in client.watch_events(self.decisions[-1].sequence if self.decisions else 0):
                self._take(event.decisions)
                changed.set()
        finally:
            changed.set()

    def _take(self, decisions: Iterable[LoggedDecision]) -> None:
        self.decisions.extend(decisions)
        if self.live is not None or self.state is None:
            return
        for alike in fold(decisions):
            line = f"{_clock(alike[-1].at_s)} {alike[-1].action} {_subject(alike)}: {alike[-1].reason}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _note(self, state: ClusterState) -> None:
        if self.live is None and self.state is None:
            self.console.print(show(state, self.decisions, self.num_lines))
        self.state = state
        self._draw()

    def _draw(self, message: str = "") -> None:
        if self.live is not None and self.state is not None:
            picture = show(self.state, self.decisions, self.num_lines)
            self.live.update(Group(picture, Text(message, style="yellow")), refresh=True)
        elif message:
            self.console.print(message)

    def _end(self) -> str:
        """How the job ended, if it did."""
        ends = [decision.payload for decision in self.decisions if decision.action == "FinishJob"]
        return f"{ends[-1]['status']}: {ends[-1]['reason']}" if ends else ""
