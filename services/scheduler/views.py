"""What clients and the job's summary see of the state machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from services.scheduler.options import JobOptions

if TYPE_CHECKING:
    from services.scheduler.state import JobState


def make_snapshot(state: JobState) -> dict[str, Any]:
    """The state of a job as JSON-ready data. Counters of runs include held-out ones, which also stand apart."""
    book = state.book
    training, evaluation = book.training, book.evaluation
    return {
        "job_id": str(state.options.job_id),
        "status": state.status.value,
        "reason": state.reason,
        "step": state.step,
        "steps_target": state.options.steps,
        "version": state.version,
        "dispatched": training.dispatched + evaluation.dispatched,
        "started": training.started + evaluation.started,
        "ended": training.ended + evaluation.ended,
        "water_level": book.water_level,
        "queued_runs": book.num_queued,
        "active_runs": book.num_active_runs,
        "scoring_runs": book.num_scoring_runs,
        "ready_groups": len(book.ready),
        "outstanding_groups": book.num_outstanding,
        "trained_groups": book.num_trained,
        "lost_groups": book.num_lost,
        "outcomes": {str(outcome): count for outcome, count in book.num_outcomes.items()},
        "retries": {str(outcome): count for outcome, count in book.num_retries.items()},
        "reward_mean_by_step": list(state.reward_mean_by_step),
        "train_tokens": state.train_tokens,
        "evaluation": {
            "running_version": None if state.evaluation is None else state.evaluation.version,
            "last_step": state.last_eval_step,
            "last_reward_mean": state.last_eval_reward,
            "best_step": state.best_eval_step,
            "best_reward_mean": state.best_eval_reward,
            "dispatched": evaluation.dispatched,
            "started": evaluation.started,
            "ended": evaluation.ended,
        },
        "policy": _policy(state),
        "cells": [asdict(cell.view()) for cell in state.cells],
    }


def _policy(state: JobState) -> dict[str, Any]:
    """The policy with its numbers; ``pending``: what changes at the next burst boundary."""
    now, following = _numbers(state.options), _numbers(state.next_options)
    changes = {name: value for name, value in following.items() if value != now[name]}
    return {**now, "pending": changes or None, "pending_from_step": state.step + state.burst_left}


def _numbers(options: JobOptions) -> dict[str, Any]:
    return {
        "mode": options.policy.mode.value,
        "streaming": options.policy.streaming,
        "rule": options.policy.rule.value,
        "train_cells": options.policy.train_cells,
        "carry_over_steps": options.carry_over_steps,
        "steps_per_burst": options.steps_per_burst,
    }
