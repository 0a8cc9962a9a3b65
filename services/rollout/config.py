"""Configuration of the rollout service: engines, cells, the harness, its sandbox and its scorer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.rollout.scoring.config import HarborScoring, ScoringConfig

_OWN_ARGUMENTS = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "block_size",
        "tensor_parallel_size",
        "logprobs_mode",
    }
)
"""vLLM's arguments that other parts of a job rely on."""


class EngineConfig(BaseModel):
    """The vLLM engine of a cell."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the weights and activations."""
    max_model_len: int = Field(default=2048, ge=16)
    """Longest prompt plus answer, tokens."""
    max_num_seqs: int = Field(default=32, ge=1)
    """Most calls in one engine batch."""
    kv_cache_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory of the KV pool."""
    block_size: int = Field(default=32, ge=1)
    """Tokens of a KV block."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Accelerators of a cell's engine."""
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads of a CPU engine."""
    start_timeout_s: float = Field(default=300, gt=0)
    """An engine that is not up by then has failed."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs; those that the fields above set are refused here."""

    @field_validator("extra")
    @classmethod
    def _extra_overrules_nothing(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(extra.keys() & _OWN_ARGUMENTS)
        if taken:
            raise ValueError(
                f"{', '.join(taken)} cannot stand here: the job sets it by another key, or needs it as it is"
            )
        return extra


class CellsConfig(BaseModel):
    """The cells of the pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_cells: int = Field(default=2, ge=1)
    """K. Cell 0 is the core."""
    standalone_cells: int = Field(default=0, ge=0)
    """The last cells that serve rollout always and have no training side."""
    slots_per_cell: int = Field(default=16, ge=1)
    """Runs that a cell may serve at once (an upper bound; the KV pool may allow fewer)."""
    cpus_per_cell: float = Field(default=0, ge=0)
    """Ray CPUs reserved for the rollout side of a cell."""
    gpus_per_cell: float = Field(default=0, ge=0)
    """Ray GPUs of a cell, shared by both sides."""
    canary_tolerance: float = Field(default=1e-3, gt=0)
    """Largest canary log-probability difference at which updated weights are accepted (float32: 1e-3;
    bfloat16 engines need about 0.1)."""
    grpc_host: str = "127.0.0.1"
    """Address of a cell's gRPC server and of its side of the transfer engine; one for all cells."""
    update_timeout_s: float = Field(default=300, gt=0)
    """A weight update that takes longer has failed and leaves the cell STALE."""

    @model_validator(mode="after")
    def _the_core_is_not_standalone(self) -> CellsConfig:
        if self.standalone_cells >= self.num_cells:
            raise ValueError(f"standalone_cells ({self.standalone_cells}) must be below num_cells ({self.num_cells})")
        return self


class SamplingConfig(BaseModel):
    """The job's sampling parameters; they win over the harness's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.7, ge=0)
    max_tokens: int = Field(default=128, ge=1)
    """Most tokens of one answer (a harness may ask for fewer)."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Temperature of held-out passes; None: the same."""


class SandboxConfig(BaseModel):
    """Limits of the sandboxes in which harness and verifier run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["bubblewrap", "none"] = "bubblewrap"
    """'none' gives a harness the whole machine and network: only for harnesses that you trust."""
    memory_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Most resident memory of one sandbox."""
    max_processes: int = Field(default=64, ge=4)
    """Most processes of one sandbox."""
    workspace_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Most bytes that a workspace may hold."""


class HarnessConfig(BaseModel):
    """The agent harness: any command, with a task and a base URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[str, ...] = ()
    """Command and arguments. ``{instruction}``, ``{instruction_file}``, ``{workspace}``, ``{base_url}``,
    ``{api_key}``, ``{model}``, ``{config_dir}``, ``{logs_dir}`` (writable, kept) are replaced. Empty: mini-swe-agent
    with the project's config."""
    config_dir: str = ""
    """Folder mounted read-only for the harness (its own configuration), relative to the job's config file."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables; the same replacements hold."""
    readonly_paths: tuple[str, ...] = ()
    """Further host paths that the harness may read (its installation)."""
    timeout_s: float = Field(default=120, gt=0)
    """Wall time of one run of the harness (a task's own limit, if smaller, wins)."""
    max_concurrent_runs: int = Field(default=8, ge=1)
    """Harness processes at once on the runners."""


class RolloutConfig(BaseModel):
    """Engines, cells, sampling, harness, sandbox, scoring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineConfig = EngineConfig()
    cells: CellsConfig = CellsConfig()
    sampling: SamplingConfig = SamplingConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    scoring: ScoringConfig = HarborScoring()
    run_timeout_s: float | None = Field(default=None, gt=0)
    """Limit of a whole attempt of a run before its scoring: workspace, sandbox and harness. Its work is salvaged and
    scored, as at the harness's own limit. None: no other limit than that one."""

    @field_validator("scoring", mode="before")
    @classmethod
    def _is_harbor_by_default(cls, value: object) -> object:
        """Keys of the default scorer need no ``kind``."""
        return {"kind": "harbor", **value} if isinstance(value, dict) else value
