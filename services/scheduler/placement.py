"""Rules that move cells between rollout and training. Each returns whether it decided anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.types import CellRole, CellState
from services.scheduler import policy
from services.scheduler.actions import SwitchCell
from services.scheduler.cells import Cell
from services.scheduler.options import PolicyMode

if TYPE_CHECKING:
    from services.scheduler.state import JobState


def switch(state: JobState, cell: Cell, role: CellRole, reason: str) -> None:
    """Start the move of a cell; to training, its runs go to others at once."""
    if role is CellRole.TRAIN:
        cell.move_to(CellRole.TO_TRAIN)
        state.cells.move_runs_off(cell)
    else:
        cell.move_to(CellRole.TO_ROLLOUT)
    state.decide(SwitchCell(cell.cell_id, role, state.options.drain_timeout_s), reason)


# -- to training ------------------------------------------------------------------------------------------------------


def leave_rollout(state: JobState) -> bool:
    """Cells go to training, as the mode has it."""
    if state.burst_left == 0 or state.wanted_version is not None or state.at_boundary:
        return False
    mode = state.options.policy.mode
    if mode is PolicyMode.COLOCATE:
        return _leave_together(state)
    if mode is PolicyMode.ASYNC:
        return _take_fixed_part(state)
    return _leave_in_order(state)


def _leave_in_order(state: JobState) -> bool:
    """Elastic: the next cell of the switching order, if Eq. 5 holds and no other is on its way."""
    cell = next_to_leave(state)
    if cell is None or state.book.water_level > state.cells.rollout_slots - cell.rollout_slots:
        return False  # (the same as Eq. 5 below: most events end here, and a reason costs more than the comparison)
    if why_not_now(state, cell):
        return False
    leaves, why = may_leave_now(state, cell)
    if leaves:
        switch(state, cell, CellRole.TRAIN, f"{_name(cell)} leaves rollout: {why}")
    return leaves


def next_to_leave(state: JobState) -> Cell | None:
    """The first cell of the switching order that does not train; None if no further one may in this burst."""
    core = state.cells.core
    if core is not None and core.role is CellRole.ROLLOUT:
        return core
    if state.departures_are_over or (core is not None and core.role not in (CellRole.TRAIN, CellRole.DOWN)):
        return None
    in_rollout = (cell for cell in state.cells.switching_order if cell.role is CellRole.ROLLOUT and not cell.is_held)
    return next((cell for cell in in_rollout if not cell.is_core), None)


def why_not_now(state: JobState, cell: Cell) -> str:
    """What a cell has to wait for before it may leave, whatever the water level; empty: nothing."""
    if state.cells.leaving:
        return "another cell is on its way to training, and they go one at a time"
    if state.publication is not None and cell.cell_id in state.publication.cell_ids:
        return f"it takes in version {state.publication.version}"
    return ""


def may_leave_now(state: JobState, cell: Cell) -> tuple[bool, str]:
    """Eq. 5, and whether there is something to train."""
    level, slots = state.book.water_level, state.cells.rollout_slots
    if not cell.is_core:
        return policy.satellite_may_leave_rollout(level, slots, cell.rollout_slots, state.num_unclaimed)
    return policy.core_may_leave_rollout(
        level, slots, cell.rollout_slots, len(state.admissible(state.seats_left)), state.num_ready_needed
    )


def _leave_together(state: JobState) -> bool:
    """Colocation: all cells of the switching order, when the groups of the whole burst are ready."""
    core, is_training = state.cells.core, bool(state.cells.in_training)
    pool_has_left = core.role is not CellRole.ROLLOUT if core is not None and core.is_live else is_training
    if pool_has_left or state.cells.in_transition or state.publication is not None:
        return False
    num_needed = state.seats_left + (state.burst_left - 1) * state.options.groups_per_step
    leaves, why = policy.pool_may_leave_rollout(len(state.book.ready), num_needed)
    if not leaves or not state.admissible(state.seats_left):
        return False
    cells = [cell for cell in state.cells.switching_order if cell.role is CellRole.ROLLOUT]
    for cell in cells:
        switch(state, cell, CellRole.TRAIN, f"the pool leaves rollout, {_name(cell)} of {len(cells)} cells: {why}")
    return bool(cells)


def _take_fixed_part(state: JobState) -> bool:
    """``async``: the first cells go to training once and stay there. A core that is alone leaves by Eq. 5."""
    wanted = fixed_part(state)
    for cell in wanted:
        if cell.role is CellRole.ROLLOUT and not why_not_now(state, cell):
            names = f"{len(wanted)} of {len(state.cells.switching_order)} cells only train"
            switch(state, cell, CellRole.TRAIN, f"{_name(cell)} leaves rollout: a fixed split, {names}")
            return True
    return False if wanted else _leave_in_order(state)


def fixed_part(state: JobState) -> tuple[Cell, ...]:
    """``async``: the cells that only train. One cell is left to serve."""
    order = state.cells.switching_order
    number = min(state.options.policy.train_cells, len(order))
    serving = [cell for cell in state.cells if cell.can_serve]
    while number and all(cell in order[:number] for cell in serving):
        number -= 1
    return order[:number]


# -- back to rollout --------------------------------------------------------------------------------------------------


def return_after_burst(state: JobState) -> bool:
    """The burst is over: satellites serve again (the core's place is decided when its weights are published)."""
    if state.wanted_version is None or state.training_step is not None or state.burst_left > 0:
        return False
    stays = fixed_part(state) if state.options.policy.mode is PolicyMode.ASYNC and state.steps_left > 0 else ()
    cells = [cell for cell in state.cells.live if cell.role is CellRole.TRAIN and not cell.is_core]
    cells = [cell for cell in cells if cell not in stays]
    for cell in cells:
        switch(state, cell, CellRole.ROLLOUT, f"{cell.cell_id} returns: the burst is over at step {state.step}")
    return bool(cells)


def return_drained(state: JobState) -> bool:
    """A satellite that a user drains leaves training; what it has not handed in is trained by others."""
    cells = state.cells.to_be_returned
    for cell in cells:
        switch(state, cell, CellRole.ROLLOUT, f"{cell.cell_id} is drained")
    return bool(cells)


def rescue_rollout(state: JobState) -> bool:
    """With no rollout capacity left and runs unfinished, the satellite that joined last goes back; at last the core,
    as soon as its step ends or lacks groups that only those runs can give (its gradient is kept)."""
    if state.book.water_level == 0 or state.publication is not None or state.cells.in_transition:
        return False
    if any(cell.role is CellRole.ROLLOUT and cell.can_serve for cell in state.cells.live):
        return False
    if state.options.policy.mode is PolicyMode.COLOCATE and not _is_starved(state):
        return False
    training = [cell for cell in state.cells.live if cell.role is CellRole.TRAIN]
    if not training:
        return False
    cell = max(training, key=lambda cell: cell.index)
    step = state.training_step
    if cell.is_core and ((step is not None and step.is_closed) or state.checkpoint is not None):
        return False
    if cell.is_core and state.can_train_now:
        return False  # it does that first
    state.departures_are_over = not cell.is_core
    level = state.book.water_level
    switch(state, cell, CellRole.ROLLOUT, f"no other cell can serve and w={level} runs are unfinished")
    return True


def _is_starved(state: JobState) -> bool:
    """Colocation: the pool trains, but the next step lacks groups (some were dropped)."""
    is_training = state.training_step is not None and state.training_step.is_closed
    if is_training or state.checkpoint is not None:
        return False
    if state.wanted_version is not None:  # held-out runs of the last version still need a cell
        return True
    return state.burst_left > 0 and not state.can_train_now


def place_core_after_burst(state: JobState, num_missing_runs: int) -> None:
    """Eq. 6, at a burst's boundary. Outside of elastic mode: back to rollout, or stay in the fixed part."""
    core = state.cells.core
    if core is None or core.role is not CellRole.TRAIN:
        return
    if state.steps_left == 0:
        if state.evaluation is not None:
            reason = f"all {state.options.steps} steps are trained and a held-out pass runs"
            switch(state, core, CellRole.ROLLOUT, reason)
        return
    mode = state.options.policy.mode
    if mode is PolicyMode.ASYNC and core in fixed_part(state):
        return
    if mode is PolicyMode.COLOCATE:
        switch(state, core, CellRole.ROLLOUT, f"core returns with its pool: the burst is over at step {state.step}")
        return
    others = sum(
        cell.slots
        for cell in state.cells.live
        if not cell.is_core and not cell.is_draining and cell.state is not CellState.STALE
    )
    stays, why = policy.core_stays_in_training(
        state.book.water_level, len(state.book.ready), num_missing_runs, others, state.options.groups_per_step
    )
    if not stays:
        switch(state, core, CellRole.ROLLOUT, f"core returns to rollout: {why}")


def _name(cell: Cell) -> str:
    return "core" if cell.is_core else cell.cell_id
