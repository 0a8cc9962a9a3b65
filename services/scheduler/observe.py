"""The scheduler's metric series, set from what the core took in and decided."""

from __future__ import annotations

from services.common.metrics import metric
from services.common.types import CellRole
from services.scheduler.actions import Decision
from services.scheduler.events import CellStale, Event
from services.scheduler.state import JobState


class Observer:
    """Turns the state's totals into increments of counters."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._job = str(state.options.job_id)
        self._counted: dict[tuple[str, str], int] = {}
        self._roles: dict[str, CellRole] = {}
        """As they were told last."""
        self._num_steps_seen = len(state.reward_mean_by_step)
        self._count(is_first=True)

    def observe(self, event: Event, decisions: list[Decision]) -> None:
        """After each event."""
        job, state = self._job, self._state
        metric("tidegate_step").set(state.step, job=job)
        metric("tidegate_version").set(state.version, job=job)
        metric("tidegate_water_level").set(state.book.water_level, job=job)
        metric("tidegate_ready_groups").set(len(state.book.ready), job=job)
        for cell in state.cells:
            if self._roles.get(cell.cell_id) is cell.role:
                continue
            self._roles[cell.cell_id] = cell.role
            for role in CellRole:
                metric("tidegate_cell_role").set(float(cell.role is role), job=job, cell=cell.cell_id, role=role.value)
        if isinstance(event, CellStale):
            metric("tidegate_cell_stale_total").inc(job=job, cell=event.cell_id)
        for decision in decisions:
            metric("tidegate_decisions_total").inc(job=job, action=type(decision.action).__name__)
        self._count()
        if len(state.reward_mean_by_step) > self._num_steps_seen:
            self._num_steps_seen = len(state.reward_mean_by_step)
            reward = state.reward_mean_by_step[-1]
            if reward is not None:
                metric("tidegate_reward_mean").set(reward, job=job)

    def _count(self, *, is_first: bool = False) -> None:
        """``is_first``: what the state was given with (a resumed or recovered job) was counted before."""
        book = self._state.book
        for outcome, count in book.num_outcomes.items():
            self._count_up_to("tidegate_runs_total", outcome, count, is_first=is_first)
        for outcome, count in book.num_retries.items():
            self._count_up_to("tidegate_run_retries_total", outcome, count, is_first=is_first)
        self._count_up_to("tidegate_groups_lost_total", "", book.num_lost, is_first=is_first)

    def _count_up_to(self, name: str, outcome: str, total: int, *, is_first: bool = False) -> None:
        key = (name, str(outcome))
        increment = total - self._counted.get(key, 0)
        self._counted[key] = total
        if increment and not is_first:
            labels = {"outcome": str(outcome)} if outcome else {}
            metric(name).inc(increment, job=self._job, **labels)
