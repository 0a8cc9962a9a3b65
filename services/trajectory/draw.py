"""What ``tidegate runs tree`` shows: the calls of a run as lines with branches, long lines folded, and the totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from services.trajectory.encoding import CallRow
from services.trajectory.paths import Fate, RunCalls, trajectories_of
from services.trajectory.types import CallRole

NUM_FOLDED_AT_LEAST = 4
"""Fewer alike calls in a row are shown one by one."""


class Branch(StrEnum):
    """Why a line does not simply go on from the one above it."""

    FIRST = ""
    """The conversation that the run began with."""
    COMPACTION = "compaction"
    """The main conversation, begun anew from a summary."""
    SUMMARY = "summary"
    SUBAGENT = "subagent"
    SIDE = "side"
    """A title, a memory, a check: no part of the conversation."""
    RETRY = "retry"
    """Left behind by a later request that is the same."""
    BRANCH = "branch"
    """Another way on from the same call."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One call, or several alike ones in a row (``num_calls`` > 1)."""

    call_id: str
    """Of folded ones the first."""
    num_calls: int
    role: CallRole
    fate: Fate
    num_prompt_tokens: int
    """Tokens of the prompt that no earlier call of the run has; of folded ones the sum."""
    num_sampled_tokens: int
    num_path_tokens: int
    """All tokens from the root to the end of the (last) answer."""
    version_min: int | None
    version_max: int | None
    finish_reason: str
    """Of folded ones that of the last."""
    draw: int | None = None
    """Position in the draw of the selected path that ends here."""
    branches: tuple[LineView, ...] = ()
    """Other lines that go on from this call."""


@dataclass(frozen=True, slots=True)
class LineView:
    """Calls that follow each other."""

    branch: Branch
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """A run in numbers. Tokens by fate are sampled ones."""

    num_calls: int
    num_trajectories: int
    num_selected: int
    num_unique_tokens: int
    num_flat_tokens: int
    """Tokens of all trajectories, each flattened."""
    num_sampled_tokens: int
    by_fate: dict[Fate, int]

    @property
    def dedup_ratio(self) -> float:
        """How many times a token would be stored and trained if every trajectory were flattened."""
        return self.num_flat_tokens / self.num_unique_tokens if self.num_unique_tokens else 1.0


@dataclass(frozen=True, slots=True)
class TreeView:
    """A run, ready to be drawn."""

    lines: tuple[LineView, ...]
    """One for each conversation that begins anew."""
    totals: Totals


def draw_tree(run: RunCalls, *, fold: bool = True) -> TreeView:
    """The tree of a run. With ``fold``, long rows of alike calls without a branch are one node.

    A line goes on with the call of the same role that most calls follow; other calls are branches of it. Nothing but a
    side call goes on with side calls. So a long conversation with many of them stays one straight line.
    """
    trajectories = trajectories_of(run)
    draws = {one.calls[-1].record.call_id: one.draw for one in trajectories if one.draw is not None}
    lines = _Lines(run, draws, fold)
    by_fate = dict.fromkeys(Fate, 0)
    for row in run.rows:
        by_fate[run.fates[row.record.call_id]] += len(row.record.output_ids)
    totals = Totals(
        num_calls=len(run.rows),
        num_trajectories=len(trajectories),
        num_selected=len(draws),
        num_unique_tokens=run.num_tokens,
        num_flat_tokens=sum(one.num_tokens for one in trajectories),
        num_sampled_tokens=sum(by_fate.values()),
        by_fate=by_fate,
    )
    return TreeView(lines.roots(), totals)


class _Lines:
    """Builds lines from the last call to the first, so that no depth of a tree needs a deep call stack."""

    def __init__(self, run: RunCalls, draws: dict[str, int], fold: bool) -> None:
        self._run, self._draws, self._fold = run, draws, fold
        self._size: dict[str, int] = {}
        self._reversed: dict[str, list[NodeView]] = {}
        for row in reversed(run.rows):
            self._add(row)

    def roots(self) -> tuple[LineView, ...]:
        lines: list[LineView] = []
        is_summarised = False  # what is main behind a summary goes on from it
        for row in self._run.rows:
            call_id = row.record.call_id
            role = self._run.roles[call_id]
            if self._run.parent(call_id) is None:
                branch = self._branch_of(call_id)
                if branch is Branch.BRANCH and not any(line.branch is Branch.FIRST for line in lines):
                    branch = Branch.FIRST
                elif branch is Branch.BRANCH and is_summarised:
                    branch = Branch.COMPACTION
                lines.append(self._line(call_id, branch))
            is_summarised |= role == CallRole.MAIN_SUMMARY
        return tuple(lines)

    def _add(self, row: CallRow) -> None:
        call_id = row.record.call_id
        children = self._run.children[call_id]
        self._size[call_id] = 1 + sum(self._size[child] for child in children)
        roles = self._run.roles
        is_side = roles[call_id] == CallRole.SIDE
        following = [child for child in children if is_side or roles[child] != CallRole.SIDE]
        next_id = max(following, key=lambda child: self._rank(child, call_id), default=None)
        branches = tuple(self._line(child, self._branch_of(child)) for child in children if child != next_id)
        line = self._reversed.pop(next_id) if next_id is not None else []
        line.append(self._node(row, branches))
        self._reversed[call_id] = line

    def _rank(self, child: str, parent: str) -> tuple[bool, bool, int]:
        roles = self._run.roles
        return self._run.fates[child] != Fate.SUPERSEDED, roles[child] == roles[parent], self._size[child]

    def _line(self, call_id: str, branch: Branch) -> LineView:
        nodes = self._reversed.pop(call_id)[::-1]
        return LineView(branch, tuple(fold_nodes(nodes) if self._fold else nodes))

    def _branch_of(self, call_id: str) -> Branch:
        if self._run.fates[call_id] == Fate.SUPERSEDED:
            return Branch.RETRY
        match self._run.roles[call_id]:
            case CallRole.MAIN_SUMMARY | CallRole.SUBAGENT_SUMMARY:
                return Branch.SUMMARY
            case CallRole.SUBAGENT:
                return Branch.SUBAGENT
            case CallRole.SIDE:
                return Branch.SIDE
        return Branch.BRANCH

    def _node(self, row: CallRow, branches: tuple[LineView, ...]) -> NodeView:
        record = row.record
        versions = [span.version for span in record.version_spans]
        return NodeView(
            call_id=record.call_id,
            num_calls=1,
            role=self._run.roles[record.call_id],
            fate=self._run.fates[record.call_id],
            num_prompt_tokens=self._run.num_fresh_tokens[record.call_id],
            num_sampled_tokens=len(record.output_ids),
            num_path_tokens=row.num_prompt_tokens + len(record.output_ids),
            version_min=min(versions, default=None),
            version_max=max(versions, default=None),
            finish_reason=record.finish_reason,
            draw=self._draws.get(record.call_id),
            branches=branches,
        )


def fold_nodes(nodes: Sequence[NodeView]) -> list[NodeView]:
    """A line in which long rows of alike calls are one node. Its first and last call, calls with branches and ends of
    selected paths stand alone."""
    folded: list[NodeView] = []
    row: list[NodeView] = []

    def end_row() -> None:
        folded.extend([_joined(row)] if len(row) >= NUM_FOLDED_AT_LEAST else row)
        row.clear()

    for at, node in enumerate(nodes):
        stands_alone = at in (0, len(nodes) - 1) or bool(node.branches) or node.draw is not None
        if row and (stands_alone or (row[-1].role, row[-1].fate) != (node.role, node.fate)):
            end_row()
        if stands_alone:
            folded.append(node)
        else:
            row.append(node)
    end_row()
    return folded


def _joined(row: Sequence[NodeView]) -> NodeView:
    versions = [version for node in row for version in (node.version_min, node.version_max) if version is not None]
    return replace(
        row[0],
        num_calls=len(row),
        num_prompt_tokens=sum(node.num_prompt_tokens for node in row),
        num_sampled_tokens=sum(node.num_sampled_tokens for node in row),
        num_path_tokens=row[-1].num_path_tokens,
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        finish_reason=row[-1].finish_reason,
    )
