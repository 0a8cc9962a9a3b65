"""Configuration of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.trainer.tree.config import TreeConfig


class LoraConfig(BaseModel):
    """Train low-rank adapters; they are merged into the weights that are published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class FullConfig(BaseModel):
    """Train all weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["full"] = "full"


class ClippedLossConfig(BaseModel):
    """The clipped policy loss (PPO's surrogate; the lower and the upper bound may differ)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios are clipped at ``1 - clip_low``."""
    clip_high: float = Field(default=0.28, ge=0)
    """Ratios are clipped at ``1 + clip_high``."""
    ratio_max: float = Field(default=5.0, gt=1)
    """Importance weights above this are cut, whatever the advantage's sign (the QwenGyre paper's bound)."""
    old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
    """What ratios are taken against: the engine's log-probabilities, or those of the weights that the step starts from,
    which cost a forward pass more before the first backward; a target is then weighted by the ratio of the two."""


class OptimizerConfig(BaseModel):
    """AdamW."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up; constant afterwards."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm, after the division by the number of runs."""


class TrainerConfig(BaseModel):
    """How the cells train."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=10, ge=1)
    """Optimizer steps of the job."""
    tune: Annotated[LoraConfig | FullConfig, Field(discriminator="kind")] = FullConfig()
    loss: ClippedLossConfig = ClippedLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Micro-steps are joined up to this many tokens, so that small ones share a pass. A larger one goes alone and is
    never cut: what it needs of memory is up to ``tree``."""
    tree: TreeConfig = TreeConfig()
    satellites: bool = False
    """Start a training side for every cell but the standalone ones, so that cells that leave rollout train with the
    core. Otherwise only the core trains. Each training side holds the weights and a gradient of its own."""
    num_workers: int = Field(default=1, ge=1)
    """Training ranks of a cell."""
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads of a training rank on a CPU."""
    cpus_per_worker: float = Field(default=0.5, ge=0)
    gpus_per_worker: float = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the forward and backward; master weights are float32."""
    checkpoint_every: int = Field(default=5, ge=1)
    """Steps between checkpoints; one is also made for each held-out pass, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept; the best one is kept beside them."""
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of published weights; the one that is really used is reported with each update."""
    transfer_host: str = "127.0.0.1"
    """Address at which rollout cells reach the core for its weights."""
    step_timeout_s: float = Field(default=3600, gt=0)
    """A command to a cell's training ranks that takes longer has failed: part of a step that several cells share, a
    whole step otherwise. A satellite that is late gives its part back; a core that is late ends the job."""
    max_restarts: int = Field(default=2, ge=0)
    """Restarts of a cell's training ranks after a crash; the core's go on from the last checkpoint."""
