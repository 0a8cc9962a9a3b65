"""The rules of elastic scheduling, each a function of numbers that returns its answer with the reason.

w is the water level (unfinished runs), C_R the slots of all cells now in rollout, C_e those of the candidate,
B the groups of a step, mu the steps of a burst, phi the steps of carry-over, Q the target of outstanding groups.
Equations are those of the QwenGyre paper (arXiv 2609.33848).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping


def outstanding_target(
    groups_per_step: int, steps_per_burst: int, carry_over_steps: float, steps_left: int
) -> tuple[int, str]:
    """Q = (phi + mu) * B, rounded up; never more groups than the steps that are left can train."""
    target = math.ceil((carry_over_steps + steps_per_burst) * groups_per_step - 1e-9)
    useful = steps_left * groups_per_step
    if useful < target:
        return useful, f"Q = {useful}: {steps_left} steps are left, of {groups_per_step} groups each"
    return target, f"Q = (phi + mu) * B = ({carry_over_steps:g} + {steps_per_burst}) * {groups_per_step} = {target}"


def homogeneous_cadence(carry_over_steps: float, steps_per_burst: int) -> tuple[float, int]:
    """(phi, mu) with the same mean staleness ``phi + (mu - 1)/2`` and as little carry-over as there can be.

    A burst without carry-over waits for its slowest group, which costs little where its groups take about as long;
    and all of its groups run at once, which is more of them than with carry-over.
    """
    mean_staleness = carry_over_steps + (steps_per_burst - 1) / 2
    steps = math.floor(2 * mean_staleness + 1e-9) + 1
    return max(0.0, mean_staleness - (steps - 1) / 2), steps


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
    water_level: int, rollout_slots: int, core_slots: int, num_ready: int, num_needed: int
) -> tuple[bool, str]:
    """Eq. 5 for the core, which also needs something to train.

    ``num_needed``: 1 if groups are trained as they become ready; all groups of a step if that is trained in one piece.
    """
    ready = f"{num_ready} groups are ready of the {num_needed} that it needs"
    may_leave, why = may_leave_rollout(water_level, rollout_slots, core_slots)
    return may_leave and num_ready >= num_needed, f"{why.replace('C_e', 'C_core')} and {ready}"


def satellite_may_leave_rollout(
    water_level: int, rollout_slots: int, cell_slots: int, num_unclaimed: int
) -> tuple[bool, str]:
    """Eq. 5 for a satellite, which also needs work of the step in flight that no cell has claimed."""
    may_leave, why = may_leave_rollout(water_level, rollout_slots, cell_slots)
    return may_leave and num_unclaimed > 0, f"{why} and {num_unclaimed} micro-steps are unclaimed"


def pool_may_leave_rollout(num_ready: int, num_needed: int) -> tuple[bool, str]:
    """Colocation: the whole pool switches when all groups that the burst still needs are ready."""
    return num_ready >= num_needed, f"{num_ready} groups are ready of the {num_needed} that the burst needs"


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


def newest_admissible_version(
    step: int, num_seats: int, groups_per_step: int, max_staleness_steps: int, num_by_version: Mapping[int, int]
) -> tuple[int | None, str]:
    """Which groups may take a seat of the step that is being filled, so that none grows too old in waiting.

    A group of version v has to be trained before more than ``v + max_staleness_steps`` steps are done. As long as
    fewer groups are due within k further steps than these have seats, any group may be trained; at equality only
    those that are due. ``step`` steps are done, ``num_seats`` seats are left in the next one, ``num_by_version``
    counts the groups that are outstanding and in no step. Returns None (any), or the newest version that may.
    """
    num_due = 0
    for version in sorted(num_by_version):
        num_due += num_by_version[version]
        num_steps_behind = max(0, version + max_staleness_steps - step)
        if num_due >= num_seats + num_steps_behind * groups_per_step:
            return version, (
                f"{num_due} groups of version {version} or older are due within {num_steps_behind + 1} steps "
                f"(max staleness {max_staleness_steps}), which have no seat for others"
            )
    return None, "no group is due"


def preference_of_cell(num_free_slots: int, index: int) -> tuple[int, int]:
    """Order in which cells are taken for a run, the smallest first: most free slots; then that which leaves last."""
    return -num_free_slots, -index


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
