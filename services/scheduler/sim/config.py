"""Configuration of a simulation: a pool, a scheduler, a workload and the costs of what the system does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.config import load_config
from services.scheduler.config import AsyncPolicy, SchedulerConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PoolConfig(_Section):
    """The cells. The first one is the core."""

    num_cells: int = Field(default=8, ge=1)
    standalone_cells: int = Field(default=0, ge=0)
    """How many of the cells, the last ones, only serve rollout."""
    slots: int | tuple[int, ...] = 8
    """Runs that a cell can serve at once: one number, or one for each cell."""
    max_concurrent_runs: int | None = Field(default=None, ge=1)
    """Runs that may run at once, whatever the slots; None: no limit but the slots."""

    @model_validator(mode="after")
    def _cells_fit(self) -> PoolConfig:
        if self.standalone_cells >= self.num_cells:
            raise ValueError(f"standalone_cells must be below num_cells ({self.num_cells}): the core is not standalone")
        if isinstance(self.slots, tuple) and len(self.slots) != self.num_cells:
            raise ValueError(f"slots has {len(self.slots)} numbers for {self.num_cells} cells")
        if min(self.slots_by_cell) < 1:
            raise ValueError("slots must be at least 1")
        return self

    @property
    def slots_by_cell(self) -> tuple[int, ...]:
        return self.slots if isinstance(self.slots, tuple) else (self.slots,) * self.num_cells


class LognormalPart(_Section):
    """A lognormal distribution of durations: log-duration = mu + task effect + run effect."""

    mean_s: float = Field(gt=0)
    """Mean duration before the cut at the timeout, seconds."""
    task_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation of the task's effect: what the runs of a group share."""
    run_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation of the effect of each run."""


class LognormalWorkload(LognormalPart):
    """All tasks are of one kind."""

    kind: Literal["lognormal"] = "lognormal"
    timeout_s: float | None = Field(default=None, gt=0)
    """Runs that would take longer end here; None: no timeout."""
    num_tasks: int = Field(default=64, ge=1)


class MixturePart(LognormalPart):
    """One kind of tasks of a mixture."""

    weight: float = Field(gt=0)
    """Share of the tasks, relative to the other parts."""


class MixtureWorkload(_Section):
    """Tasks of several kinds: each task belongs to one part."""

    kind: Literal["mixture"]
    parts: tuple[MixturePart, ...] = Field(min_length=1)
    timeout_s: float | None = Field(default=None, gt=0)
    """Runs that would take longer end here; None: no timeout."""
    num_tasks: int = Field(default=64, ge=1)


class CsvWorkload(_Section):
    """Measured durations of a CSV file with a header, drawn with replacement."""

    kind: Literal["csv"]
    path: Path
    """Relative to the configuration file."""
    duration_column: str = "duration_s"
    """Seconds."""
    task_column: str = ""
    """With it, the runs of a group are drawn from the rows of one task, and there are as many tasks as names in it."""
    num_tasks: int = Field(default=64, ge=1)
    """Without a task column."""


class MeasuredWorkload(_Section):
    """The durations of a real job's runs, group by group."""

    kind: Literal["measured"]
    groups_s: dict[str, tuple[float, ...]] = Field(min_length=1)
    """Durations of the runs of each group, by its id; further groups repeat a drawn one."""
    lost_groups: tuple[str, ...] = ()
    """Ids of groups that were not ready when they were scored."""
    num_tasks: int = Field(default=64, ge=1)


WorkloadConfig = Annotated[
    LognormalWorkload | MixtureWorkload | CsvWorkload | MeasuredWorkload, Field(discriminator="kind")
]


class SystemConfig(_Section):
    """What things cost. The defaults of the switches are QwenGyre's published means."""

    switch_to_train_s: float = Field(default=8.52, ge=0)
    switch_to_rollout_s: float = Field(default=3.46, ge=0)
    publish_s: float = Field(default=0.0, ge=0)
    """A whole publication, whose cells are updated one after the other."""
    update_pause_s: float = Field(default=0.0, ge=0)
    """How long a cell's runs stand still in its update. A publication takes at least this long for each cell."""
    prefill_s: float = Field(default=0.0, ge=0)
    """Added to a run when its cell changes weights under it, and when it moves to another cell."""
    train_per_rollout: float = Field(default=0.02, ge=0)
    """Cell-seconds of training for each second of a run's duration. A run is one micro-step."""
    batch_overhead: float = Field(default=1.0, ge=1)
    """Factor on the training time where the policy does not stream."""
    optimizer_s: float = Field(default=0.0, ge=0)
    """Each step, after its last micro-step."""
    score_s: float = Field(default=0.0, ge=0)
    """From the end of a group's last run to its score."""
    checkpoint_s: float = Field(default=0.0, ge=0)
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only the last step is saved."""
    group_loss_probability: float = Field(default=0.0, ge=0, lt=1)
    """That a scored group is not ready (filtered)."""
    run_loss_probability: float = Field(default=0.0, ge=0, lt=1)
    """That an attempt ends early, through no fault of the policy."""
    cell_mtbf_s: float = Field(default=0.0, ge=0)
    """Mean time between two failures of a cell (exponential); 0: none fails. The core loses only its rollout side."""
    cell_repair_s: float = Field(default=600.0, ge=0)


class EvaluationConfig(_Section):
    """Held-out passes, whose runs occupy slots too."""

    num_tasks: int = Field(default=0, ge=0)
    """0: no passes."""
    every: int = Field(default=0, ge=0)
    """Steps between passes; 0: none but those at the start and the end."""
    group_size: int = Field(default=2, ge=1)
    at_start: bool = False
    at_end: bool = False


class SimConfig(_Section):
    """A simulated job."""

    name: str = "simulation"
    seed: int = 0
    """Of the order of tasks, the durations and the failures. Two policies with one seed see the same runs."""
    steps: int = Field(default=48, ge=1)
    steps_after: int = Field(default=0, ge=0)
    """Further steps behind them, which are not measured: a job's last steps are unlike the others, for nothing is
    dispatched any more that they could not train."""
    pool: PoolConfig = PoolConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    workload: WorkloadConfig = LognormalWorkload(mean_s=1800.0)
    system: SystemConfig = SystemConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _one_cell_serves(self) -> SimConfig:
        policy, pool = self.scheduler.policy, self.pool
        num_trainable = pool.num_cells - pool.standalone_cells
        if isinstance(policy, AsyncPolicy) and policy.train_cells > num_trainable - (pool.standalone_cells == 0):
            raise ValueError(
                f"scheduler.policy.train_cells is {policy.train_cells}, but of {pool.num_cells} cells "
                f"{num_trainable} can train, and one has to serve"
            )
        return self


def load_sim_config(path: Path, overrides: list[str]) -> SimConfig:
    """Load and check a simulation's configuration. Raises ``ConfigError`` with the key that is wrong."""
    config = load_config(SimConfig, path, overrides)
    if isinstance(config.workload, CsvWorkload):
        absolute = config.workload.model_copy(update={"path": path.parent / config.workload.path})
        config = config.model_copy(update={"workload": absolute})
    return config
