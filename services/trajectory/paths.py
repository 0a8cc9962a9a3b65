"""The stored calls of a run seen as a tree: who follows whom, what became of each, which paths it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.trajectory.encoding import CallRow
from services.trajectory.records import is_trainable, tree_call
from services.trajectory.roles import roles_of
from services.trajectory.tree import TrajectoryTree
from services.trajectory.types import CallRole, RunSelection


class Fate(StrEnum):
    """What became of the sampled tokens of a call. One call has one fate."""

    TARGET = "target"
    """They are trained."""
    LEFT_OUT = "left_out"
    """They could be, but lie on no selected path."""
    NOT_TRAINABLE = "not_trainable"
    """Made greedily or under a forced choice, or cut from outside."""
    SUPERSEDED = "superseded"
    """The same request was made again, and nothing went on from this answer."""
    OPEN = "open"
    """They could be trained, but nothing was selected of the run: it is unfinished, or does not count."""
    NOTHING = "nothing"
    """The call sampled no token."""


@dataclass(frozen=True, slots=True)
class RunCalls:
    """The calls of one attempt, parents before their children."""

    rows: tuple[CallRow, ...]
    selection: RunSelection | None
    by_id: dict[str, CallRow]
    children: dict[str, tuple[str, ...]]
    """The calls that continue a call, in order."""
    roles: dict[str, CallRole]
    fates: dict[str, Fate]
    num_fresh_tokens: dict[str, int]
    """Prompt tokens that no earlier call of the run has at their place."""
    num_tokens: int
    """Unique tokens of the run."""

    def parent(self, call_id: str) -> str | None:
        """The call that this one continues; None for one that begins a conversation, or whose parent is not here."""
        parent_id = self.by_id[call_id].record.parent_call_id
        return parent_id if parent_id in self.by_id else None

    def is_continued(self, call_id: str) -> bool:
        """Whether another call goes on with its conversation. A side call goes on with one of side calls only."""
        is_side = self.roles[call_id] is CallRole.SIDE
        return any(is_side or self.roles[child] is not CallRole.SIDE for child in self.children[call_id])

    def path(self, call_id: str) -> tuple[CallRow, ...]:
        """The calls from the first of the conversation to this one."""
        found = []
        at: str | None = call_id
        while at is not None:
            found.append(self.by_id[at])
            at = self.parent(at)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A path from the first call of a conversation to one that nothing follows."""

    index: int
    """Position among the run's trajectories, in the order of their last calls."""
    calls: tuple[CallRow, ...]
    role: CallRole
    draw: int | None
    """Position in the draw of the selection; None: not selected."""

    @property
    def is_selected(self) -> bool:
        return self.draw is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole path, flattened."""
        last = self.calls[-1]
        return last.num_prompt_tokens + len(last.record.output_ids)


def calls_of_run(rows: Sequence[CallRow], selection: RunSelection | None) -> RunCalls:
    """The tree of a run's calls: O(unique tokens)."""
    tree = TrajectoryTree()
    num_fresh: dict[str, int] = {}
    for row in rows:
        before = tree.num_tokens
        tree.append(tree_call(row))
        num_fresh[row.record.call_id] = tree.num_tokens - before - len(row.record.output_ids)
    superseded = {tree.segments[index].call_id for index in tree.superseded()}
    targets = None if selection is None else frozenset(selection.target_call_ids)
    by_id = {row.record.call_id: row for row in rows}
    children: dict[str, list[str]] = {call_id: [] for call_id in by_id}
    for row in rows:
        if row.record.parent_call_id in children:
            children[row.record.parent_call_id].append(row.record.call_id)
    return RunCalls(
        rows=tuple(rows),
        selection=selection,
        by_id=by_id,
        children={call_id: tuple(found) for call_id, found in children.items()},
        roles=roles_of([row.record for row in rows]),
        fates={row.record.call_id: _fate(row, targets, superseded) for row in rows},
        num_fresh_tokens=num_fresh,
        num_tokens=tree.num_tokens,
    )


def trajectories_of(run: RunCalls) -> list[Trajectory]:
    """All paths of a run; those that were selected know their place in the draw.

    A selected path is named by its last call that sampled something. Where several paths have the same one, the first
    is the selected one: the others add nothing to train. Side calls do not go on with a conversation.
    """
    draws = {} if run.selection is None else {leaf: at for at, leaf in enumerate(run.selection.leaf_call_ids)}
    found: list[Trajectory] = []
    for row in run.rows:
        if run.is_continued(row.record.call_id):
            continue
        calls = run.path(row.record.call_id)
        last_sampled = next((one.record.call_id for one in reversed(calls) if len(one.record.output_ids)), "")
        draw = draws.pop(last_sampled, None)
        role = run.roles[last_sampled or row.record.call_id]
        if draw is not None and run.selection is not None:
            role = run.selection.leaf_roles[draw]
        found.append(Trajectory(len(found), calls, role, draw))
    return found


def _fate(row: CallRow, targets: frozenset[str] | None, superseded: set[str | None]) -> Fate:
    record = row.record
    if not len(record.output_ids):
        return Fate.NOTHING
    if targets is not None and record.call_id in targets:
        return Fate.TARGET
    if not is_trainable(record):
        return Fate.NOT_TRAINABLE
    if record.call_id in superseded:
        return Fate.SUPERSEDED
    return Fate.OPEN if targets is None else Fate.LEFT_OUT
