"""What users may ask of a running job, and why not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.common.errors import ConfigError, NotFoundError, RefusedError, TidegateError
from services.common.types import CellKind, CellRole
from services.scheduler.cells import Cell
from services.scheduler.events import DrainRequested, PolicyRequested, Request, SwitchRequested, UndrainRequested
from services.scheduler.options import JobOptions, PolicyMode
from services.scheduler.placement import may_leave_now, next_to_leave, switch, why_not_now

if TYPE_CHECKING:
    from services.scheduler.state import JobState


def refusal(state: JobState, request: Request) -> TidegateError | None:
    """Why a request cannot be, as the error to be raised; None if it can.

    ``NotFoundError``: no such cell. ``ConfigError``: numbers that cannot be. ``RefusedError``: an invariant of the
    scheduler would break.
    """
    if state.planned_end is not None or state.status.is_final:
        return RefusedError(f"the job is {state.status}: {state.reason}", "Nothing of it can be changed any more.")
    if isinstance(request, PolicyRequested):
        return _policy_refusal(state, request)
    cell = state.cells.find(request.cell_id)
    if cell is None:
        known = ", ".join(cell.cell_id for cell in state.cells) or "none has joined yet"
        return NotFoundError(f"no cell {request.cell_id!r} in this job.", f"Its cells: {known}.")
    if not cell.is_live:
        return RefusedError(f"{cell.cell_id} is down: {cell.reason}", "It can be steered when it is back.")
    if isinstance(request, DrainRequested):
        return _drain_refusal(state, cell)
    if isinstance(request, UndrainRequested):
        return None if cell.is_draining else RefusedError(f"{cell.cell_id} is not drained.", "Nothing is to be done.")
    return _switch_refusal(state, cell, request.role)


def apply(state: JobState, request: Request) -> None:
    """Do what a request asks for. Raises what ``refusal`` says."""
    error = refusal(state, request)
    if error is not None:
        raise error
    _APPLY[type(request)](state, request)


# -- drain ------------------------------------------------------------------------------------------------------------


def _drain_refusal(state: JobState, cell: Cell) -> TidegateError | None:
    if cell.is_core:
        return RefusedError(
            f"{cell.cell_id} is the core: it alone holds the optimizer's state, so it cannot be drained.",
            "Cancel the job (it can be resumed), or drain a satellite.",
        )
    if not any(other.can_serve for other in state.cells if other is not cell):
        return RefusedError(
            f"{cell.cell_id} is the last cell that can serve.", f"Bring another one up first: {state.cells.describe()}"
        )
    return None


def _drain(state: JobState, request: DrainRequested) -> None:
    cell = state.cells.get(request.cell_id)
    if cell.is_draining:
        return
    cell.set_draining(True)
    if cell.role is CellRole.ROLLOUT:
        state.cells.move_runs_off(cell)


def _undrain(state: JobState, request: UndrainRequested) -> None:
    cell = state.cells.get(request.cell_id)
    cell.set_draining(False)
    cell.is_held = state.is_inside_burst
    cell.note_update_attempts(0)
    if cell.version != state.version:
        holds = f"version {cell.version}" if cell.version >= 0 else "no weights"
        cell.mark_stale(f"was drained, holds {holds}")


# -- switch -----------------------------------------------------------------------------------------------------------


def _switch_refusal(state: JobState, cell: Cell, role: CellRole) -> TidegateError | None:
    if role is CellRole.TRAIN:
        why = _why_not_to_training(state, cell)
    elif role is CellRole.ROLLOUT:
        why = _why_not_to_rollout(state, cell)
    else:
        return ConfigError(f"a cell cannot be told to go to {role}.", "Say train or rollout.")
    if not why:
        return None
    return RefusedError(f"{cell.cell_id} cannot go to {role}: {why}.", "Nothing was changed.")


def _why_not_to_training(state: JobState, cell: Cell) -> str:
    if cell.kind is CellKind.STANDALONE:
        return "it is a standalone cell, which has no training side"
    if cell.role is not CellRole.ROLLOUT:
        return f"it is {cell.role}"
    if cell.is_draining:
        return "it is drained"
    if state.options.policy.mode is not PolicyMode.ELASTIC:
        return f"in {state.options.policy.mode} mode cells are not moved one by one"
    if state.burst_left == 0 or state.wanted_version is not None:
        return "the burst is over"
    following = next_to_leave(state)
    if following is not cell:
        return "cells leave in fixed order" + (f", {following.cell_id} is next" if following else "")
    if why := why_not_now(state, cell):
        return why
    may_leave, why = may_leave_now(state, cell)
    return "" if may_leave else why


def _why_not_to_rollout(state: JobState, cell: Cell) -> str:
    if cell.role is not CellRole.TRAIN:
        return f"it is {cell.role}"
    if state.options.policy.mode is not PolicyMode.ELASTIC:
        return f"in {state.options.policy.mode} mode cells are not moved one by one"
    last = state.cells.in_training[-1]
    if last is not cell:
        return f"cells return in reverse order, {last.cell_id} is first"
    if cell.is_core and state.training_step is not None:
        return f"it is the core and trains step {state.training_step.step}"
    if cell.is_core and state.checkpoint is not None:
        return f"it is the core and saves the checkpoint of step {state.checkpoint.step}"
    return ""


def _switch(state: JobState, request: SwitchRequested) -> None:
    cell = state.cells.get(request.cell_id)
    if request.role is CellRole.TRAIN:
        _, why = may_leave_now(state, cell)
        switch(state, cell, CellRole.TRAIN, f"a user wants it, and {why}")
    else:
        state.departures_are_over = True
        cell.is_held = True
        switch(state, cell, CellRole.ROLLOUT, "a user wants it")


# -- policy -----------------------------------------------------------------------------------------------------------


def _policy_refusal(state: JobState, request: PolicyRequested) -> TidegateError | None:
    phi, mu = request.carry_over_steps, request.steps_per_burst
    if phi is not None and not (math.isfinite(phi) and phi >= 0):
        return ConfigError(f"carry_over_steps (phi) is {phi:g}.", "Give a number of steps, 0 or more.")
    if mu is not None and mu < 1:
        return ConfigError(f"steps_per_burst (mu) is {mu}.", "Give a number of steps, 1 or more.")
    try:
        changed = with_policy(state.next_options, request)
    except ConfigError as error:
        return error
    num_cells, num_training = len(state.cells), changed.policy.train_cells
    if changed.policy.mode is PolicyMode.ASYNC and num_cells <= num_training:
        return RefusedError(
            f"async needs a cell that serves beside the {num_training} that train; the job has {num_cells} in all.",
            "Stay with elastic or colocate.",
        )
    return None


def _set_policy(state: JobState, request: PolicyRequested) -> None:
    before = state.pending_policy or PolicyRequested()
    state.pending_policy = PolicyRequested(
        *(
            new if new is not None else old
            for new, old in zip(dataclasses.astuple(request), dataclasses.astuple(before), strict=True)
        )
    )


def with_policy(options: JobOptions, request: PolicyRequested) -> JobOptions:
    """The options as a request changes them. Raises ``ConfigError`` for numbers that cannot work together."""
    phi, mu, mode = request.carry_over_steps, request.steps_per_burst, request.mode
    return dataclasses.replace(
        options,
        carry_over_steps=options.carry_over_steps if phi is None else phi,
        steps_per_burst=options.steps_per_burst if mu is None else mu,
        policy=options.policy if mode is None else dataclasses.replace(options.policy, mode=mode),
    )


_APPLY: dict[type[Any], Callable[[JobState, Any], None]] = {
    DrainRequested: _drain,
    UndrainRequested: _undrain,
    SwitchRequested: _switch,
    PolicyRequested: _set_policy,
}
