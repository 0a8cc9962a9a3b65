"""Trajectory trees: the calls of one attempt of a run, every token kept once.

A call is its new prompt tokens and its sampled tokens, below the call whose conversation it continues. Calls that
share a prompt share its segment; where two prompts part, the segment is split by the longest common prefix of
ids. Sampled segments are never split and never shared: the same tokens sampled twice are two samples. Appending
costs O(new tokens), however long the history is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.common.errors import InvariantError, NotFoundError
from services.common.types import VersionSpan

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]

ROOT = -1
"""The parent of a first segment."""


_NO_LOGPROBS: Logprobs = np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class Segment:
    """A maximal run of tokens of one kind. Segments that others hang below end where those begin."""

    parent: int
    """Index of the segment that this one follows, ``ROOT`` for a first one."""
    token_ids: TokenIds
    """int32 ``[n]``, n > 0."""
    end: int
    """Tokens from the root through this segment's last."""
    call_id: str | None = None
    """The call that sampled these tokens; None for prompt tokens."""
    logprobs: Logprobs = field(default_factory=lambda: _NO_LOGPROBS)
    """float32 ``[n]`` of a sampled segment, empty for prompt tokens."""
    version_spans: tuple[VersionSpan, ...] = ()
    trainable: bool = False
    """Whether these tokens may become targets. Never for prompt tokens."""
    prompt_children: dict[int, int] | None = None
    """First token -> segment: no two prompt segments below one segment start alike. None: there is none."""
    sampled_children: list[int] | None = None

    @property
    def is_sampled(self) -> bool:
        return self.call_id is not None

    @property
    def is_leaf(self) -> bool:
        return not (self.prompt_children or self.sampled_children)

    @property
    def children(self) -> list[int]:
        return [*(self.prompt_children or {}).values(), *(self.sampled_children or ())]


class SegmentForest:
    """Segments in which prompts share their common beginnings."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        """Indices are stable: a split gives the lower part the old index."""
        self.num_tokens = 0
        """Unique tokens."""
        self._roots: dict[int, int] = {}

    @property
    def roots(self) -> list[int]:
        return list(self._roots.values())

    def insert_prompt(self, parent: int, token_ids: TokenIds) -> int:
        """Lay prompt tokens below a segment, sharing what is there; the segment that ends where they end."""
        rest = token_ids
        while len(rest):
            children = self._prompt_children(parent)
            child = children.get(int(rest[0]))
            if child is None:
                return self._add(Segment(parent, rest, self._end(parent) + len(rest)), children)
            num_common = common_prefix(self.segments[child].token_ids, rest)
            parent = child if num_common == len(self.segments[child].token_ids) else self._split(child, num_common)
            rest = rest[num_common:]
        return parent

    def add_sampled(
        self,
        parent: int,
        call_id: str,
        token_ids: TokenIds,
        logprobs: Logprobs,
        version_spans: tuple[VersionSpan, ...],
        trainable: bool,
    ) -> int:
        """Add the answer of a call below the segment that ends its prompt."""
        if parent == ROOT:
            raise InvariantError(f"the answer of call {call_id} has no prompt")
        end = self._end(parent) + len(token_ids)
        index = self._add(Segment(parent, token_ids, end, call_id, logprobs, version_spans, trainable))
        above = self.segments[parent]
        if above.sampled_children is None:
            above.sampled_children = []
        above.sampled_children.append(index)
        return index

    def path(self, index: int) -> list[int]:
        """The segments from the root to ``index``."""
        path = []
        while index != ROOT:
            path.append(index)
            index = self.segments[index].parent
        return path[::-1]

    def pieces(self, index: int) -> tuple[TokenIds, ...]:
        """The token ids from the root through segment ``index``, segment by segment: no copy."""
        return tuple(self.segments[one].token_ids for one in self.path(index))

    def ids(self, index: int) -> TokenIds:
        """All token ids from the root through segment ``index``: int32 ``[segment.end]``."""
        return np.empty(0, dtype=np.int32) if index == ROOT else np.concatenate(self.pieces(index))

    def preorder(self) -> Iterator[int]:
        """Every segment, parents before their children."""
        stack = self.roots[::-1]
        while stack:
            index = stack.pop()
            yield index
            stack.extend(self.segments[index].children[::-1])

    def leaves(self) -> list[int]:
        """The segments that nothing follows, in preorder; each ends a trajectory."""
        return [index for index in self.preorder() if self.segments[index].is_leaf]

    def _prompt_children(self, parent: int) -> dict[int, int]:
        if parent == ROOT:
            return self._roots
        above = self.segments[parent]
        if above.prompt_children is None:
            above.prompt_children = {}
        return above.prompt_children

    def _end(self, index: int) -> int:
        return 0 if index == ROOT else self.segments[index].end

    def _add(self, segment: Segment, prompt_children: dict[int, int] | None = None) -> int:
        index = len(self.segments)
        self.segments.append(segment)
        self.num_tokens += len(segment.token_ids)
        if prompt_children is not None:
            prompt_children[int(segment.token_ids[0])] = index
        return index

    def _split(self, lower: int, num_tokens: int) -> int:
        """Cut a prompt segment behind its first ``num_tokens``; the new upper segment's index."""
        segment = self.segments[lower]
        ids = segment.token_ids
        upper = len(self.segments)
        end = segment.end - len(ids) + num_tokens
        self.segments.append(
            Segment(segment.parent, ids[:num_tokens], end, prompt_children={int(ids[num_tokens]): lower})
        )
        self._prompt_children(segment.parent)[int(ids[0])] = upper
        segment.parent = upper
        segment.token_ids = ids[num_tokens:]
        return upper


@dataclass(frozen=True, slots=True)
class TreeCall:
    """A completed call as the tree takes it: only what is new."""

    call_id: str
    parent_call_id: str | None
    """The call whose prompt and answer this call's prompt begins with."""
    ordinal: int
    """Order in which the calls of an attempt were made."""
    new_prompt_ids: TokenIds
    """int32: the prompt behind the parent's prompt and answer; the whole prompt without a parent."""
    output_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    trainable: bool
    request_key: str = ""
    """Equal for requests that differ in nothing but (perhaps) their prompts."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a call lies in the tree."""

    prompt_end: int
    answer_end: int
    """Equal to ``prompt_end`` for a call without output."""
    ordinal: int
    request_key: str


class TrajectoryTree(SegmentForest):
    """The tree of one attempt of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, _Placed] = {}

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._calls

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def append(self, call: TreeCall) -> None:
        """Add a call below its parent. Its arrays are copied: O(new tokens).

        Raises ``InvariantError`` for a call that is there already, ``NotFoundError`` for an unknown parent.
        """
        if call.call_id in self._calls:
            raise InvariantError(f"call {call.call_id} is in the tree already")
        above = ROOT if call.parent_call_id is None else self._place(call.parent_call_id).answer_end
        prompt_end = self.insert_prompt(above, np.array(call.new_prompt_ids, dtype=np.int32))
        answer_end = prompt_end
        if len(call.output_ids):
            answer_end = self.add_sampled(
                prompt_end,
                call.call_id,
                np.array(call.output_ids, dtype=np.int32),
                np.array(call.logprobs, dtype=np.float32),
                call.version_spans,
                call.trainable,
            )
        self._calls[call.call_id] = _Placed(prompt_end, answer_end, call.ordinal, call.request_key)

    def history(self, call_id: str) -> tuple[TokenIds, ...]:
        """The prompt and the answer of a call in pieces, int32: what a call that continues it begins with."""
        return self.pieces(self._place(call_id).answer_end)

    def last_sampled_id(self, call_id: str) -> int:
        """The last token of a call's answer, -1 if it is empty."""
        segment = self.segments[self._place(call_id).answer_end]
        return int(segment.token_ids[-1]) if segment.call_id == call_id else -1

    def prompt_ids(self, call_id: str) -> TokenIds:
        """The prompt of a call: int32 ``[num_prompt_tokens]``."""
        return self.ids(self._place(call_id).prompt_end)

    def superseded(self) -> frozenset[int]:
        """Answers that nobody went on from, of requests that were made again later: retries left them behind."""
        return frozenset(
            index
            for prompt_end in {placed.prompt_end for placed in self._calls.values()}
            for index in self._superseded_below(self.segments[prompt_end].sampled_children or ())
        )

    def _superseded_below(self, answers: Sequence[int]) -> Iterator[int]:
        latest: dict[str, int] = {}
        for index in answers:
            placed = self._sampled_by(index)
            latest[placed.request_key] = max(placed.ordinal, latest.get(placed.request_key, placed.ordinal))
        for index in answers:
            placed = self._sampled_by(index)
            if self.segments[index].is_leaf and placed.ordinal < latest[placed.request_key]:
                yield index

    def _sampled_by(self, index: int) -> _Placed:
        return self._place(self.segments[index].call_id or "")

    def _place(self, call_id: str) -> _Placed:
        placed = self._calls.get(call_id)
        if placed is None:
            raise NotFoundError(f"no call {call_id} in this tree")
        return placed


def common_prefix(first: TokenIds, second: TokenIds) -> int:
    """Number of leading ids that two arrays share."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
