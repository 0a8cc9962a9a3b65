"""A simulation's configuration from a real job: its durations and its costs, as its journal tells them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from services.common.errors import ConfigError
from services.common.types import CellKind
from services.scheduler.codec import decode
from services.scheduler.journal import read_journal
from services.scheduler.options import JobOptions, PolicyMode
from services.scheduler.sim.config import SimConfig
from services.scheduler.sim.progress import RunProgress
from services.scheduler.types import LoggedEvent


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """A real job, ready to be simulated."""

    config: SimConfig
    hours: float
    """From its first publication to the end of its last step."""


def measure_job(folder: Path) -> MeasuredJob:
    """Measure a job from its journal.

    Raises ``NotFoundError`` for a folder without one, ``ConfigError`` for a job in which no step ended.
    """
    return measure(read_journal(folder), str(folder))


@dataclass(slots=True)
class _Log:
    """What the records of a job say."""

    options: JobOptions | None = None
    slots: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, CellKind] = field(default_factory=dict)
    first_publication_s: float | None = None
    step_end_s: list[float] = field(default_factory=list)
    progress: RunProgress = field(default_factory=RunProgress)
    lost_groups: list[str] = field(default_factory=list)
    pending: dict[tuple[str, Any], float] = field(default_factory=dict)
    """When an action was decided that has no answer yet, by its kind and what it is about."""
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds between actions of a kind and their answers."""
    groups_told: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of each step, the groups that came with each action."""
    work_s: list[float] = field(default_factory=list)
    """Seconds of training of each step, as the trainer told them."""
    overhead_s: list[float] = field(default_factory=list)
    """Of each step, what its answer took beyond the training of the groups that came last."""

    def take(self, record: LoggedEvent) -> None:
        at_s, said = record.at_s, record.payload
        self.progress.take(record)
        match record.kind:
            case "JobStarted" if self.options is None:
                self.options = decode(said["options"])
            case "CellJoined":
                self.slots[said["cell_id"]], self.kinds[said["cell_id"]] = said["slots"], CellKind(said["kind"])
            case "CellReported":
                self.slots[said["cell_id"]] = said["slots"]
            case "GroupScored":
                result = said["result"]
                self._answer("score", result["group_id"], at_s)
                if not result["ready"]:
                    self.lost_groups.append(result["group_id"])
            case "StepTrained":
                self._take_step(said["step"], said["seconds"], at_s)
            case "PublicationEnded":
                if self.first_publication_s is None:
                    self.first_publication_s = at_s
                    self.pending.pop(("publish", said["version"]), None)  # the first one compiles and warms up
                self._answer("publish", said["version"], at_s)
            case "CheckpointSaved":
                self._answer("save", said["step"], at_s)
            case "CellDrained":
                self._answer("to_train", said["cell_id"], at_s)
            case "CellAdmitted":
                self._answer("to_rollout", said["cell_id"], at_s)
        for decision in record.decisions:
            self._ask(decision.action, decision.payload, at_s)

    def _ask(self, action: str, said: dict[str, Any], at_s: float) -> None:
        match action:
            case "ScoreGroup":
                self.pending["score", said["group_id"]] = at_s
            case "TrainStep":
                self.groups_told[said["step"]].append(len(said["group_ids"]))
                self.pending["train", said["step"]] = at_s
            case "PublishWeights":
                self.pending["publish", said["version"]] = at_s
            case "SaveCheckpoint":
                self.pending["save", said["step"]] = at_s
            case "SwitchCell":
                self.pending[f"to_{said['role']}", said["cell_id"]] = at_s

    def _take_step(self, step: int, seconds: float, at_s: float) -> None:
        self.step_end_s.append(at_s)
        asked_s = self.pending.pop(("train", step), at_s)
        told = self.groups_told[step]
        work_s = seconds or at_s - asked_s
        self.work_s.append(work_s)
        if sum(told) > 0:
            self.overhead_s.append(at_s - asked_s - work_s * told[-1] / sum(told))

    def _answer(self, kind: str, about: Any, at_s: float) -> None:
        asked_s = self.pending.pop((kind, about), None)
        if asked_s is not None:
            self.took_s[kind].append(at_s - asked_s)

    def mean_s(self, kind: str) -> float:
        return fmean(self.took_s[kind]) if self.took_s[kind] else 0.0


def measure(records: Iterable[LoggedEvent], source: str) -> MeasuredJob:
    """Measure a job from its records. ``source`` names them in messages."""
    log = _Log()
    for record in records:
        log.take(record)
    options = log.options
    if options is None or log.first_publication_s is None or not log.step_end_s:
        raise ConfigError(f"in the job of {source} no step ended.", "Take one that trained.")
    groups_s = _durations_by_group(log)
    if not groups_s:
        raise ConfigError(f"in the job of {source} no run ended.", "Take one that trained.")
    cell_ids = sorted(log.slots, key=lambda cell_id: (list(CellKind).index(log.kinds[cell_id]), cell_id))
    config = SimConfig.model_validate(
        {
            "name": f"measured-{options.job_id}",
            "seed": options.seed,
            "steps": len(log.step_end_s),
            "pool": {
                "num_cells": len(cell_ids),
                "standalone_cells": sum(kind is CellKind.STANDALONE for kind in log.kinds.values()),
                "slots": [log.slots[cell_id] for cell_id in cell_ids],
                "max_concurrent_runs": options.max_concurrent_runs,
            },
            "scheduler": _scheduler_section(options),
            "workload": {
                "kind": "measured",
                "groups_s": groups_s,
                "lost_groups": log.lost_groups,
                "num_tasks": len(options.task_names),
            },
            "system": _system_section(log, options),
            "evaluation": {
                "num_tasks": len(options.eval_task_names),
                "every": options.eval_every,
                "group_size": options.eval_group_size,
                "at_start": options.eval_at_start,
                "at_end": options.eval_at_end,
            },
        }
    )
    return MeasuredJob(config, (log.step_end_s[-1] - log.first_publication_s) / 3600)


def _durations_by_group(log: _Log) -> dict[str, list[float]]:
    """In the order of their runs; runs and groups that never ended are left out."""
    by_group: dict[str, dict[int, float]] = defaultdict(dict)
    for run_id, seconds in log.progress.duration_s.items():
        group_id, _, index = run_id.rpartition("-r")
        by_group[group_id][int(index)] = seconds
    return {group_id: [runs[index] for index in sorted(runs)] for group_id, runs in sorted(by_group.items())}


def _scheduler_section(options: JobOptions) -> dict[str, Any]:
    chosen = options.policy
    policy: dict[str, Any] = {"mode": chosen.mode.value, "streaming": chosen.streaming}
    if chosen.mode is PolicyMode.ASYNC:
        policy["train_cells"] = chosen.train_cells
    elif chosen.mode is PolicyMode.ELASTIC:
        policy |= {"rule": chosen.rule.value, "window_bursts": chosen.window_bursts}
    return {
        "policy": policy,
        "groups_per_step": options.groups_per_step,
        "group_size": options.group_size,
        "steps_per_burst": options.steps_per_burst,
        "carry_over_steps": options.carry_over_steps,
        "max_staleness_steps": options.max_staleness_steps,
        "at_staleness_bound": options.at_staleness_bound.value,
        "on_lost_group": options.on_lost_group.value,
        "max_lost_groups": options.max_lost_groups,
        "drain_timeout_s": options.drain_timeout_s,
    }


def _system_section(log: _Log, options: JobOptions) -> dict[str, float]:
    """Costs. What updates and moves cost the runs is in their durations already."""
    step_rollout_s = fmean(log.progress.duration_s.values()) * options.groups_per_step * options.group_size
    return {
        "switch_to_train_s": log.mean_s("to_train"),
        "switch_to_rollout_s": log.mean_s("to_rollout"),
        "publish_s": log.mean_s("publish"),
        "train_per_rollout": fmean(log.work_s) / step_rollout_s if step_rollout_s > 0 else 0.0,
        "optimizer_s": max(0.0, fmean(log.overhead_s or [0.0])),
        "score_s": log.mean_s("score"),
        "checkpoint_s": log.mean_s("save"),
        "checkpoint_every": options.checkpoint_every,
    }
