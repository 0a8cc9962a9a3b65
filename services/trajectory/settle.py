"""What becomes of a group once all its runs are final: counted, selected, weighed, ready or lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.rollout.types import RunResult
from services.trajectory.advantage import group_advantages
from services.trajectory.config import TrajectoryConfig
from services.trajectory.microstep import ScoredRun, cut_group, forest_tokens
from services.trajectory.outcome import OUTCOME_TABLE, CallTrouble, Outcome
from services.trajectory.select import select
from services.trajectory.tree import TrajectoryTree
from services.trajectory.types import CallRole, GroupResult, GroupSpec, LossReason, RunSelection


@dataclass(frozen=True, slots=True)
class FinalRun:
    """A run whose outcome is final, with the tree of its last attempt."""

    result: RunResult
    tree: TrajectoryTree
    roles: Mapping[str, CallRole] = field(default_factory=dict)
    """Of its calls."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A settled group."""

    result: GroupResult
    runs: tuple[ScoredRun, ...]
    """The counted runs of a ready group, those without targets included; empty for a lost one."""
    advantages: Mapping[str, float]
    """Of the counted runs; empty where there is no baseline."""

    @property
    def settled(self) -> dict[str, tuple[float, RunSelection | None]]:
        """The advantage of each counted run, and what was selected of it."""
        selections = {run.run_id: run.selection.report for run in self.runs}
        return {run_id: (advantage, selections.get(run_id)) for run_id, advantage in self.advantages.items()}


def settle_group(
    spec: GroupSpec, runs: Sequence[FinalRun], config: TrajectoryConfig, *, drop_equal_rewards: bool, seed: int = 0
) -> Settlement:
    """Decide whether a group is ready to be trained, and with what.

    Runs whose outcome does not count, or that have no valid reward, are no part of the baseline and have no target. A
    run that could not be set up is a placeholder where the job wants it so (QwenGyre): reward 0 in the baseline, and
    no target; not in a held-out group, whose mean it would pull down. A held-out group is never ready: it is scored
    only. ``seed`` is that of the selection.
    """
    placeholder = 0.0 if config.setup_failure == "placeholder" and not spec.is_eval else None
    rewards = {run.result.run_id: one for run in runs if (one := counted_reward(run.result, placeholder)) is not None}
    if spec.is_eval:
        return _lost(spec, rewards, runs, LossReason.HELD_OUT, "held out: scored, never trained")
    if len(rewards) < config.min_counted_runs:
        reason = f"{len(rewards)} of {len(spec.run_ids)} runs count, {config.min_counted_runs} must"
        return _lost(spec, rewards, runs, LossReason.TOO_FEW_COUNTED, reason)
    advantages = group_advantages(rewards, config.advantage)
    if advantages.equal_rewards and drop_equal_rewards:
        reason = f"all {len(rewards)} counted rewards are equal"
        return _lost(spec, rewards, runs, LossReason.EQUAL_REWARDS, reason, advantages.by_run)
    counted = [run for run in runs if run.result.run_id in rewards]
    scored = tuple(_scored(run, advantages.by_run[run.result.run_id], config, seed) for run in counted)
    pieces = cut_group(scored, config.micro_step_tokens)
    if not pieces:
        reason = "no run has a token to train"
        return _lost(spec, rewards, runs, LossReason.NOTHING_TO_TRAIN, reason, advantages.by_run)
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
        num_left_out=sum(run.selection.report.num_left_out for run in scored),
    )
    return Settlement(result, scored, advantages.by_run)


def settle_outcome(outcome: Outcome, trouble: CallTrouble | None) -> Outcome:
    """The outcome of an attempt, given why its last call was not completed.

    A runner sees only how the harness took that: it gave up in an orderly way, it crashed, or it waited too long.
    """
    ended = outcome in (Outcome.FINISHED, Outcome.HARNESS_CRASH)
    waited = outcome in (Outcome.HARNESS_TIMEOUT, Outcome.WALL_TIMEOUT)
    unscored = outcome in (Outcome.VERIFIER_FAILURE, Outcome.VERIFIER_TIMEOUT)
    match trouble:
        case CallTrouble.ENGINE_LOST if ended or waited or unscored:  # cut short, it says nothing of the verifier
            return Outcome.ENGINE_LOSS
        case CallTrouble.TURN_LIMITED if ended or waited:
            return Outcome.TURN_LIMIT
        case CallTrouble.CONTEXT_OVERFLOWED if ended:
            return Outcome.CONTEXT_LIMIT
    return outcome


def counted_reward(result: RunResult, placeholder: float | None) -> float | None:
    """The reward with which a run counts in its group's baseline; None if it does not count.

    ``placeholder``: that of a run that could not be set up.
    """
    if result.outcome is Outcome.SETUP_FAILURE:
        return placeholder
    is_valid = result.reward is not None and math.isfinite(result.reward)
    return result.reward if OUTCOME_TABLE[result.outcome].counted and is_valid else None


def _scored(run: FinalRun, advantage: float, config: TrajectoryConfig, seed: int) -> ScoredRun:
    run_id = run.result.run_id
    tree = run.tree if OUTCOME_TABLE[run.result.outcome].trained else TrajectoryTree()
    limit = config.max_trajectories
    selection = select(tree, run.roles, max_trajectories=limit, seed=seed, run_id=run_id)
    return ScoredRun(run_id, advantage, tree, selection)


def _lost(
    spec: GroupSpec,
    rewards: Mapping[str, float],
    runs: Iterable[FinalRun],
    loss_reason: LossReason,
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
        loss_reason=loss_reason,
    )
    return Settlement(result, (), advantages or {})
