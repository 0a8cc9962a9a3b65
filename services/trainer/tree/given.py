"""Trajectories given as flat paths of tokens, as exports hold them, laid into a forest that shares what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.types import VersionSpan
from services.trainer.types import Node


@dataclass(frozen=True, slots=True)
class TokenPath:
    """One trajectory of a run. All arrays are ``[n]``."""

    run: int
    token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    target_mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]
    versions: np.ndarray[tuple[int], np.dtype[np.int32]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, first: int, stop: int | None = None) -> TokenPath:
        own = slice(first, stop)
        return TokenPath(self.run, self.token_ids[own], self.target_mask[own], self.logprobs[own], self.versions[own])


@dataclass(slots=True)
class _Branch:
    tokens: TokenPath
    run: int
    """-1: several runs share it."""
    children: list[_Branch]


def nodes_of_paths(paths: Sequence[TokenPath]) -> tuple[Node, ...]:
    """A forest of trajectories: paths share what they have in common, if no run's target is another run's context.

    Each target is marked on one path of its run, as ``tidegate runs export`` does.
    """
    top = _Branch(_no_tokens(), -1, [])
    for path in paths:
        _insert(top, path)
    nodes: list[Node] = []
    stack = [(child, -1) for child in reversed(top.children)]
    while stack:
        branch, parent = stack.pop()
        nodes.append(_node_of(branch, parent))
        stack += [(child, len(nodes) - 1) for child in reversed(branch.children)]
    return tuple(nodes)


def _insert(top: _Branch, path: TokenPath) -> None:
    above, rest = top, path
    while len(rest):
        common, child = max(
            ((_num_common(child, rest), child) for child in above.children), key=lambda pair: pair[0], default=(0, None)
        )
        if child is None or not common:
            above.children.append(_Branch(rest, rest.run, []))
            return
        if common < len(child.tokens):
            child.children = [_Branch(child.tokens.part(common), child.run, child.children)]
            child.tokens = child.tokens.part(0, common)
        if child.run != rest.run:
            child.run = -1
        child.tokens = _with_targets(child.tokens, rest.part(0, common))
        above, rest = child, rest.part(common)


def _num_common(branch: _Branch, path: TokenPath) -> int:
    """Tokens at the beginning of both that may be one: a target is one run's only, and no two targets are."""
    limit = min(len(branch.tokens), len(path))
    left, right = branch.tokens.target_mask[:limit], path.target_mask[:limit]
    is_other = (left & right) if branch.run == path.run else (left | right)
    is_other = is_other | (branch.tokens.token_ids[:limit] != path.token_ids[:limit])
    return int(np.argmax(is_other)) if is_other.any() else limit


def _with_targets(tokens: TokenPath, more: TokenPath) -> TokenPath:
    new = more.target_mask
    if not new.any():
        return tokens
    return TokenPath(
        tokens.run,
        tokens.token_ids,
        tokens.target_mask | new,
        np.where(new, more.logprobs, tokens.logprobs),
        np.where(new, more.versions, tokens.versions),
    )


def _no_tokens() -> TokenPath:
    ids = np.zeros(0, dtype=np.int32)
    return TokenPath(-1, ids, np.zeros(0, dtype=np.bool_), np.zeros(0, dtype=np.float32), ids)


def _node_of(branch: _Branch, parent: int) -> Node:
    tokens = branch.tokens
    versions = tokens.versions[tokens.target_mask]
    changes = np.flatnonzero(np.diff(versions)) + 1
    spans = tuple(VersionSpan(int(part[0]), len(part)) for part in np.split(versions, changes) if len(part))
    return Node(
        parent=parent,
        run=branch.run,
        token_ids=tokens.token_ids,
        target_mask=tokens.target_mask,
        logprobs=np.where(tokens.target_mask, tokens.logprobs, 0.0).astype(np.float32),
        version_spans=spans,
    )
