"""The rules of elastic scheduling, each a function of numbers that returns its answer with the reason.

w is the water level (unfinished runs), C_R the slots of all cells now in rollout, C_e those of the candidate,
B the groups of a step, mu the steps of a burst, phi the steps of carry-over, Q the target of outstanding groups.
Equations are those of the QwenGyre paper (arXiv 2609.33848).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellLoad:
    """A cell as the choice of a run's cell sees it."""

    cell_id: str
    index: int
    """Position in the switching order."""
    slots: int
    num_runs: int

    @property
    def num_free(self) -> int:
        return self.slots - self.num_runs


def outstanding_target(
    groups_per_step: int, steps_per_burst: int, carry_over_steps: float, steps_left: int
) -> tuple[int, str]:
    """Q = (phi + mu) * B, rounded up; never more groups than the steps that are left can train."""
    target = math.ceil((carry_over_steps + steps_per_burst) * groups_per_step - 1e-9)
    useful = steps_left * groups_per_step
    if useful < target:
        return useful, f"Q = {useful}: {steps_left} steps are left, of {groups_per_step} groups each"
    return target, f"Q = (phi + mu) * B = ({carry_over_steps:g} + {steps_per_burst}) * {groups_per_step} = {target}"


def groups_to_dispatch(target: int, num_outstanding: int) -> tuple[int, str]:
    """Groups that top the outstanding ones (unfinished, or ready but untrained) up to Q at a burst boundary."""
    missing = max(0, target - num_outstanding)
    return missing, f"{num_outstanding} groups are outstanding, Q = {target}"


def may_leave_rollout(water_level: int, rollout_slots: int, cell_slots: int) -> tuple[bool, str]:
    """Eq. 5: a cell may leave rollout when ``w <= C_R - C_e``. ``rollout_slots`` (C_R) includes the candidate."""
    others = rollout_slots - cell_slots
    holds = water_level <= others
    return holds, f"w={water_level} {'<=' if holds else '>'} C_R - C_e = {others}"


def core_may_leave_rollout(
    water_level: int, rollout_slots: int, core_slots: int, num_ready: int, groups_per_step: int
) -> tuple[bool, str]:
    """Eq. 5 for the core, which also needs something to train.

    A step is trained in one piece, when all its B groups are ready; so the core needs B ready groups.
    """
    ready = f"{min(num_ready, groups_per_step)} of {groups_per_step} groups are ready"
    may_leave, why = may_leave_rollout(water_level, rollout_slots, core_slots)
    return may_leave and num_ready >= groups_per_step, f"{why.replace('C_e', 'C_core')} and {ready}"


def core_stays_in_training(
    water_level: int, num_ready: int, num_missing_runs: int, other_slots: int, groups_per_step: int
) -> tuple[bool, str]:
    """Eq. 6, after a burst: ready groups >= B, and the others can take all runs, those about to start included.

    ``num_missing_runs`` is ``group_size * (Q - outstanding groups)``, ``other_slots`` is ``C_all - C_core``.
    """
    demand = water_level + num_missing_runs
    enough, fits = num_ready >= groups_per_step, demand <= other_slots
    return enough and fits, (
        f"ready={num_ready} {'>=' if enough else '<'} B={groups_per_step}, w + new runs = {water_level} + "
        f"{num_missing_runs} {'<=' if fits else '>'} C_all - C_core = {other_slots}"
    )


def too_stale(step: int, version: int, max_staleness_steps: int) -> tuple[bool, str]:
    """Whether a group that was dispatched under ``version`` may no longer be trained once ``step`` steps are done."""
    staleness = step - version
    stale = staleness > max_staleness_steps
    return stale, f"staleness {staleness} = step {step} - version {version}, max {max_staleness_steps}"


def choose_cell_for_run(cells: Iterable[CellLoad], *, needs_free_slot: bool = True) -> tuple[str | None, str]:
    """The cell with most free slots; among equals the one that leaves rollout last. ``cells`` serve rollout.

    ``needs_free_slot=False`` is for runs that already run and must go somewhere: it may overfill a cell.
    """
    best = max(cells, key=lambda cell: (cell.num_free, cell.index), default=None)
    if best is None:
        return None, "no cell serves"
    if needs_free_slot and best.num_free <= 0:
        return None, f"no free slot: {best.cell_id} has {best.num_runs} runs in {best.slots} slots"
    return best.cell_id, f"{best.cell_id} has most free slots: {best.num_free} of {best.slots}"


def task_at(position: int, num_tasks: int, seed: int) -> int:
    """The task at a position of the endless order of tasks: a fresh permutation each epoch."""
    epoch, offset = divmod(position, num_tasks)
    return _permutation(epoch, num_tasks, seed)[offset]


@functools.lru_cache(maxsize=8)
def _permutation(epoch: int, num_tasks: int, seed: int) -> tuple[int, ...]:
    order = list(range(num_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


def evaluation_is_due(step: int, last_eval_step: int, steps: int, every: int, *, at_start: bool, at_end: bool) -> bool:
    """Whether weights that were published (made at ``step``) get a held-out pass. -1: none was made yet."""
    if step == last_eval_step:
        return False
    if step >= steps:
        return at_end
    if step == 0:
        return at_start
    return every > 0 and step // every > max(last_eval_step, 0) // every


def is_new_best(reward: float, step: int, best_reward: float | None, best_step: int) -> tuple[bool, str]:
    """Whether the held-out reward of ``step`` is the highest so far. Of equal ones the older stays."""
    what = f"held-out mean reward {reward:.4g} at step {step}"
    if best_reward is None:
        return True, f"{what} is the first"
    beats = reward > best_reward
    return beats, f"{what} {'beats' if beats else 'does not beat'} {best_reward:.4g} at step {best_step}"
