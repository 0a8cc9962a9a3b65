"""Random trajectory trees, and the reference that their micro-steps are held against."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from services.common.types import VersionSpan
from services.trainer.types import MicroStep
from services.trajectory.microstep import ScoredRun
from services.trajectory.select import select
from services.trajectory.tree import TrajectoryTree, TreeCall

unhurried = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("TIDEGATE_EXAMPLES", "100")),
)
"""For property tests: a busy machine is no failure."""


def make_call(
    call_id: str,
    parent: str | None,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    ordinal: int = 0,
    trainable: bool = True,
    request_key: str = "",
    version: int = 0,
    first_logprob: float = -0.5,
) -> TreeCall:
    return TreeCall(
        call_id=call_id,
        parent_call_id=parent,
        ordinal=ordinal,
        new_prompt_ids=np.asarray(prompt, dtype=np.int32),
        output_ids=np.asarray(output, dtype=np.int32),
        logprobs=np.asarray([first_logprob - 0.01 * i for i in range(len(output))], dtype=np.float32),
        version_spans=(VersionSpan(version, len(output)),) if output else (),
        trainable=trainable,
        request_key=request_key,
    )


def make_tree(*calls: TreeCall) -> TrajectoryTree:
    tree = TrajectoryTree()
    for call in calls:
        tree.append(call)
    return tree


@st.composite
def tree_calls(draw: st.DrawFn, run: int = 0, max_calls: int = 7) -> list[TreeCall]:
    """The calls of a run: continued, branched, retried, re-rooted; few different ids, so that prompts overlap."""
    token = st.integers(0, 2)
    calls: list[TreeCall] = []
    for index in range(draw(st.integers(1, max_calls))):
        parent = draw(st.sampled_from([None, *[call.call_id for call in calls]]))
        calls.append(
            make_call(
                f"run{run}-c{index}",
                parent,
                draw(st.lists(token, min_size=1, max_size=6)),
                draw(st.lists(token, max_size=4)),
                ordinal=index,
                trainable=draw(st.booleans()) or draw(st.booleans()),
                request_key=draw(st.sampled_from(["a", "b"])),
                version=index // 3,
                first_logprob=-1.0 - run - 0.1 * index,
            )
        )
    return calls


@st.composite
def scored_runs(draw: st.DrawFn, max_runs: int = 4) -> list[ScoredRun]:
    """A group: runs that share the beginning of their first prompt."""
    shared = draw(st.lists(st.integers(3, 4), max_size=5))
    limit = draw(st.sampled_from([1, 2, None]))
    runs = []
    for number in range(draw(st.integers(1, max_runs))):
        tree = TrajectoryTree()
        for call in draw(tree_calls(run=number)):
            first = np.asarray([*shared, *call.new_prompt_ids], dtype=np.int32)
            tree.append(call if call.parent_call_id else make_first(call, first))
        run_id = f"g000000-r{number}"
        selection = select(tree, {}, max_trajectories=limit, seed=draw(st.integers(0, 3)), run_id=run_id)
        runs.append(ScoredRun(run_id, draw(st.floats(-2, 2)), tree, selection))
    return runs


def make_first(call: TreeCall, prompt: np.ndarray) -> TreeCall:
    return TreeCall(
        call.call_id,
        None,
        call.ordinal,
        prompt,
        call.output_ids,
        call.logprobs,
        call.version_spans,
        call.trainable,
        call.request_key,
    )


@dataclass(frozen=True)
class Row:
    """One flattened trajectory of a run."""

    run_id: str
    token_ids: tuple[int, ...]
    target_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    weight: float
    """Advantage over n_run: what multiplies each target's term."""


def flatten(micro_step: MicroStep) -> list[Row]:
    """Root-to-leaf rows; a target on several rows is one in the first of them only."""
    nodes = micro_step.nodes
    parents = {node.parent for node in nodes}
    used: set[int] = set()
    rows = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = []
        index = leaf
        while index != -1:
            path.append(index)
            index = nodes[index].parent
        path.reverse()
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for index in path:
            node = nodes[index]
            fresh = index not in used
            ids += node.token_ids.tolist()
            mask += [bool(bit) and fresh for bit in node.target_mask]
            logprobs += node.logprobs.tolist()
        used.update(path)
        run = micro_step.runs[nodes[leaf].run]
        rows.append(Row(run.run_id, tuple(ids), tuple(mask), tuple(logprobs), run.advantage / run.num_targets))
    return rows


def loss(micro_steps: Sequence[MicroStep]) -> float:
    """The sum over runs of ``advantage / n_run * sum over targets``, of a made-up term of token and logprob."""
    return sum(
        row.weight * sum((token + 1) * logprob for token, bit, logprob in zip(*row_columns(row), strict=True) if bit)
        for micro_step in micro_steps
        for row in flatten(micro_step)
    )


def row_columns(row: Row) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
    return row.token_ids, row.target_mask, row.logprobs
