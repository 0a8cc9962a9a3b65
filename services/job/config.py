"""The configuration of a job: one section a service, each defined beside its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.common.config import load_config
from services.common.errors import ConfigError
from services.common.ids import CellId, is_job_name, make_cell_id
from services.proxy.config import ProxyConfig, refuse_public_bind, refuse_weak_token
from services.rollout.config import RolloutConfig
from services.scheduler.config import AsyncPolicy, SchedulerConfig
from services.trainer.config import TrainerConfig
from services.trajectory.config import TrajectoryConfig


class ModelConfig(BaseModel):
    """The model that is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = "smollm2-135m"
    """A Hugging Face folder, or a model that the project can make: 'smollm2-135m', 'tiny-qwen3'."""


class TasksConfig(BaseModel):
    """Folders of tasks in Harbor's format, relative to the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: str
    """Folder whose subfolders are the training tasks."""
    heldout: str = ""
    """Empty: no held-out passes."""


class EvalConfig(BaseModel):
    """Passes over the held-out tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int = Field(default=0, ge=0)
    """Steps between passes; 0: none. A pass also runs before the first and after the last step."""
    group_size: int = Field(default=4, ge=1)
    """Runs of each held-out task; pass@k is estimated from them."""
    pass_reward: float = 1.0
    """A run with at least this reward has passed."""


class RayConfig(BaseModel):
    """The Ray cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = ""
    """Cluster to join; empty: the one that this process belongs to (a Ray job), else a new local one."""
    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs that a new local cluster offers; None: as many as the machine has, at least 4 (actors share cores)."""
    object_store_bytes: int = Field(default=256 << 20, ge=80 << 20)
    """Object store of a new local cluster."""
    dashboard: bool = False
    """Start the dashboard (and with it the job API) of a new local cluster."""
    temp_dir: str = ""
    """Folder of Ray's session files; empty: Ray's default."""


class OutputConfig(BaseModel):
    """Where results go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: str = "runs"
    """Each job gets a folder in it; ``latest`` links to the newest. A relative path starts where the command is run."""
    keep_workspaces: bool = False
    """Keep every run's workspace; otherwise only those stay whose evaluation failed or whose sandbox died (logs and
    tokens always do)."""
    wandb_project: str = ""
    """Also log to this Weights & Biases project (needs the extra ``wandb``)."""


class JobConfig(BaseModel):
    """A training job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "job"
    """Part of the job's id, and the model name that harnesses are given; ``--resume`` finds a job by it."""
    seed: int = 0
    """Seed of the task order, the sampling and the model's own randomness (``trajectory.seed``: the selection)."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig
    eval: EvalConfig = EvalConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    proxy: ProxyConfig = ProxyConfig()
    trajectory: TrajectoryConfig = TrajectoryConfig()
    ray: RayConfig = RayConfig()
    output: OutputConfig = OutputConfig()

    @field_validator("name")
    @classmethod
    def _name_fits_everywhere(cls, name: str) -> str:
        if not is_job_name(name):
            raise ValueError("use lower-case letters, digits and hyphens, at most 41, a letter or digit first")
        return name


def training_cells(config: JobConfig) -> list[CellId]:
    """Cells that have a training side: the core, and the satellites if they are to train."""
    cells = config.rollout.cells
    num_cells = cells.num_cells - cells.standalone_cells if config.trainer.satellites else 1
    return [make_cell_id(index) for index in range(num_cells)]


def public_config(config: JobConfig) -> dict[str, Any]:
    """The configuration as it may be stored and sent on: JSON-ready, without its tokens."""
    return config.model_dump(mode="json", exclude={"scheduler": {"grpc_token"}, "proxy": {"admin_token"}})


def load_job_config(path: Path, overrides: list[str]) -> JobConfig:
    """Load and check a job's configuration. Raises ``ConfigError`` with the key that is wrong."""
    config = load_config(JobConfig, path, overrides)
    refuse_public_bind(config.proxy)
    if config.scheduler.grpc_token:  # else a random one is made
        for key, host in (
            ("scheduler.grpc_host", config.scheduler.grpc_host),
            ("rollout.cells.grpc_host", config.rollout.cells.grpc_host),
        ):
            refuse_weak_token(key, host, "scheduler.grpc_token", config.scheduler.grpc_token)
    if config.proxy.port and config.proxy.port == config.scheduler.grpc_port:
        raise ConfigError(
            f"proxy.port and scheduler.grpc_port are both {config.proxy.port}.", "Change one, or set it to 0."
        )
    longest = config.rollout.sampling.max_tokens
    if longest >= config.rollout.engine.max_model_len:
        raise ConfigError(
            f"rollout.sampling.max_tokens ({longest}) leaves no room for a prompt in rollout.engine.max_model_len "
            f"({config.rollout.engine.max_model_len}).",
            "Lower the first or raise the second.",
        )
    if config.rollout.sampling.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature is 0: greedy answers have nothing to learn from.", "Use 0.7 to 1.0."
        )
    policy, num_cells = config.scheduler.policy, config.rollout.cells.num_cells
    if isinstance(policy, AsyncPolicy) and policy.train_cells >= num_cells:
        raise ConfigError(
            f"scheduler.policy.train_cells is {policy.train_cells} of {num_cells} cells (rollout.cells.num_cells): no "
            "cell is left to serve.",
            "Lower it, raise rollout.cells.num_cells, or choose colocate or elastic, where the same cells do both.",
        )
    if isinstance(policy, AsyncPolicy) and policy.train_cells > len(training_cells(config)):
        raise ConfigError(
            f"scheduler.policy.train_cells is {policy.train_cells}, and {len(training_cells(config))} of the cells "
            "can train.",
            "Set trainer.satellites to true, lower train_cells or rollout.cells.standalone_cells, or raise num_cells.",
        )
    if config.eval.every and not config.tasks.heldout:
        raise ConfigError("eval.every is set, but tasks.heldout is empty.", "Name a folder of held-out tasks.")
    return config
