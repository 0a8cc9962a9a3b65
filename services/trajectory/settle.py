"""What becomes of a group once all its runs are final: counted, selected, weighed, ready or lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.rollout.types import RunResult
from services.trajectory.advantage import group_advantages
from services.trajectory.config import TrajectoryConfig
from services.trajectory.microstep import ScoredRun, cut_group, forest_tokens
from services.trajectory.outcome import OUTCOME_TABLE, Outcome
from services.trajectory.select import select
from services.trajectory.tree import TrajectoryTree
from services.trajectory.types import GroupResult, GroupSpec


@dataclass(frozen=True, slots=True)
class FinalRun:
    """A run whose outcome is final, with the tree of its last attempt."""

    result: RunResult
    tree: TrajectoryTree


@dataclass(frozen=True, slots=True)
class Settlement:
    """A settled group."""

    result: GroupResult
    runs: tuple[ScoredRun, ...]
    """The counted runs of a ready group, those without targets included; empty for a lost one."""
    advantages: Mapping[str, float]
    """Of the counted runs; empty where there is no baseline."""


def settle_group(
    spec: GroupSpec, runs: Sequence[FinalRun], config: TrajectoryConfig, *, drop_equal_rewards: bool, seed: int = 0
) -> Settlement:
    """Decide whether a group is ready to be trained, and with what.

    Runs whose outcome does not count, or that have no valid reward, are no part of the baseline and have no target.
    A held-out group is never ready: it is scored only. ``seed`` is that of the selection.
    """
    counted = [run for run in runs if _is_counted(run.result)]
    rewards = {run.result.run_id: run.result.reward for run in counted if run.result.reward is not None}
    if spec.is_eval:
        return _lost(spec, rewards, runs, "held out: scored, never trained")
    if len(rewards) < config.min_counted_runs:
        return _lost(
            spec, rewards, runs, f"{len(rewards)} of {len(spec.run_ids)} runs count, {config.min_counted_runs} must"
        )
    advantages = group_advantages(rewards, config.advantage)
    if advantages.equal_rewards and drop_equal_rewards:
        return _lost(spec, rewards, runs, f"all {len(rewards)} counted rewards are equal", advantages.by_run)
    scored = tuple(_scored(run, advantages.by_run[run.result.run_id], config, seed) for run in counted)
    pieces = cut_group(scored, config.micro_step_tokens)
    if not pieces:
        return _lost(spec, rewards, runs, "no run has a token to train", advantages.by_run)
    targets = [run.tree.segments[index] for run in scored for index in run.selection.targets]
    result = GroupResult(
        group_id=spec.group_id,
        ready=True,
        reason="",
        num_runs=len(spec.run_ids),
        num_counted=len(rewards),
        num_targets=sum(run.selection.num_targets for run in scored),
        num_tokens=sum(forest_tokens(piece) for piece in pieces),
        reward_mean=sum(rewards.values()) / len(rewards),
        rewards=tuple(rewards.values()),
        version_min=min(span.version for segment in targets for span in segment.version_spans),
    )
    return Settlement(result, scored, advantages.by_run)


def settle_outcome(outcome: Outcome, *, context_overflowed: bool, engine_lost: bool) -> Outcome:
    """The outcome of an attempt, given whether its last call no longer fitted the model's context, and whether no
    cell could complete it.

    A runner sees only how the harness took that: it gave up in an orderly way, it crashed, or it waited too long.
    """
    if engine_lost and outcome in (Outcome.FINISHED, Outcome.HARNESS_CRASH, Outcome.HARNESS_TIMEOUT):
        return Outcome.ENGINE_LOSS
    if context_overflowed and outcome in (Outcome.FINISHED, Outcome.HARNESS_CRASH):
        return Outcome.CONTEXT_LIMIT
    return outcome


def _is_counted(result: RunResult) -> bool:
    is_valid = result.reward is not None and math.isfinite(result.reward)
    return OUTCOME_TABLE[result.outcome].counted and is_valid


def _scored(run: FinalRun, advantage: float, config: TrajectoryConfig, seed: int) -> ScoredRun:
    run_id = run.result.run_id
    tree = run.tree if OUTCOME_TABLE[run.result.outcome].trained else TrajectoryTree()
    selection = select(tree, max_trajectories=config.max_trajectories, seed=seed, run_id=run_id)
    return ScoredRun(run_id, advantage, tree, selection)


def _lost(
    spec: GroupSpec,
    rewards: Mapping[str, float],
    runs: Iterable[FinalRun],
    reason: str,
    advantages: Mapping[str, float] | None = None,
) -> Settlement:
    versions = [span.version for run in runs for segment in run.tree.segments for span in segment.version_spans]
    result = GroupResult(
        group_id=spec.group_id,
        ready=False,
        reason=reason,
        num_runs=len(spec.run_ids),
        num_counted=len(rewards),
        num_targets=0,
        num_tokens=0,
        reward_mean=sum(rewards.values()) / len(rewards) if rewards else None,
        rewards=tuple(rewards.values()),
        version_min=min(versions, default=None),
    )
    return Settlement(result, (), advantages or {})
