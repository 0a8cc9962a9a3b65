"""From micro-steps to batches of whole ones, by their number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.trainer.types import MicroStep, Node, RunWeight


@dataclass(frozen=True, slots=True)
class Batch:
    """What goes through one forward and backward: whole runs, with the segments that they share."""

    nodes: tuple[Node, ...]
    runs: tuple[RunWeight, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes)


def plan_batches(micro_steps: Sequence[MicroStep], max_tokens: int) -> list[Batch]:
    """Whole micro-steps, joined in order while they have at most ``max_tokens`` together. A larger one goes alone.

    Raises:
        ValueError: a micro-step's forest contradicts its runs (see ``check_micro_step``).
    """
    batches: list[list[MicroStep]] = []
    num_tokens = 0
    for micro_step in micro_steps:
        check_micro_step(micro_step)
        if micro_step.num_targets == 0:
            continue
        if not batches or num_tokens + micro_step.num_tokens > max_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(micro_step)
        num_tokens += micro_step.num_tokens
    return [_merge(batch) for batch in batches]


def check_micro_step(micro_step: MicroStep) -> None:
    """Raise ``ValueError`` unless each target belongs to one run and ``num_targets`` counts the run's targets."""
    counts = [0] * len(micro_step.runs)
    for index, node in enumerate(micro_step.nodes):
        if not len(node.token_ids) == len(node.target_mask) == len(node.logprobs):
            raise ValueError(f"{micro_step.micro_step_id}: node {index} has ids, mask and logprobs of unequal length")
        num_targets = int(node.target_mask.sum())
        if node.run < 0 and num_targets:
            raise ValueError(f"{micro_step.micro_step_id}: node {index} is shared by runs but has targets")
        if node.run >= 0:
            counts[node.run] += num_targets
        if node.parent >= 0 and micro_step.nodes[node.parent].run not in (-1, node.run):
            raise ValueError(f"{micro_step.micro_step_id}: node {index} hangs below a node of another run")
    for run, count in zip(micro_step.runs, counts, strict=True):
        if run.num_targets != count:
            raise ValueError(
                f"{micro_step.micro_step_id}: run {run.run_id} has {count} targets here, {run.num_targets} at selection"
            )


def count_runs(micro_steps: Sequence[MicroStep]) -> int:
    """Runs that the optimizer step divides by: those with a target."""
    return sum(run.num_targets > 0 for micro_step in micro_steps for run in micro_step.runs)


def _merge(parts: Sequence[MicroStep]) -> Batch:
    nodes: list[Node] = []
    runs: list[RunWeight] = []
    for part in parts:
        first_node, first_run = len(nodes), len(runs)
        nodes += [
            replace(
                node,
                parent=node.parent + first_node if node.parent >= 0 else -1,
                run=node.run + first_run if node.run >= 0 else -1,
            )
            for node in part.nodes
        ]
        runs += part.runs
    return Batch(tuple(nodes), tuple(runs))
