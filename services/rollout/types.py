"""Types of the rollout service: what goes into an engine and what comes out; a run and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.common.packed import Packed
from services.common.types import CellState
from services.trajectory.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Sampling(Packed):
    """The job's sampling parameters. They win over what a harness asks for."""

    temperature: float = 1.0
    """The only transformation of the logits: the trainer must be able to compute the same distribution."""
    max_tokens: int = 256
    """Counts what an interrupted call already generated."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | None = None
    """A JSON schema that the answer is made to satisfy by a grammar mask; its tokens are not trained. None: free."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest(Packed):
    """One call for an engine. The prompt's ids travel apart, as an object ref."""

    call_id: str
    run_id: str
    sampling: Sampling
    generated_ids: tuple[int, ...] = ()
    """Tokens that another cell already produced for this call; generation goes on behind them."""
    hold_s: float = 0.0
    """For so long tokens may be held back, to be sent together: each chunk costs its reader."""


@dataclass(frozen=True, slots=True)
class GenerateChunk(Packed):
    """A piece of an answer. ``token_ids`` and ``logprobs`` have the same length."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural logarithms, of the distribution that was sampled (after temperature)."""
    text: str
    """The text that these tokens add, detokenised incrementally; the stop token's own text is left out."""
    version: int
    """Version of the weights that made these tokens, stamped when they were made."""
    finish_reason: str | None = None
    """None while it goes on; then 'stop', 'length' or 'abort'."""
    num_cached_tokens: int = 0
    """Prompt tokens that came out of the prefix cache (reported with the first chunk)."""
    stop_string: str = ""
    """With 'stop': the stop string that ended it; empty: an end-of-turn token did."""


@dataclass(frozen=True, slots=True)
class CellStatus:
    """What a rollout cell says of itself."""

    cell_id: str
    state: CellState
    version: int
    admitting: bool
    num_calls: int
    slots: int
    reason: str = ""
    """Why the cell is STALE, if it is."""
    generated_tokens: int = 0
    """Since the cell started."""
    prompt_tokens: int = 0
    rss_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What came of a weight update on one cell."""

    cell_id: str
    version: int
    ok: bool
    reason: str
    seconds: float
    size_bytes: int
    transport: str
    canary_abs_diff_max: float
    """Largest absolute difference between the trainer's and the engine's log-probabilities of the canary."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task folder in Harbor's format, as loaded."""

    name: str
    path: str
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    memory_bytes: int
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything a runner needs to execute one attempt of a run."""

    run_id: str
    attempt: int
    task: Task
    base_url: str
    """The proxy's URL for this run, without the dialect's own suffix (``/v1``)."""
    api_key: str
    model_name: str
    run_dir: str
    """Folder on the runner's node for the workspace, the logs and the transcript of this attempt."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one attempt of a run ended. ``reward`` is None unless the scorer gave a valid one."""

    run_id: str
    attempt: int
    outcome: Outcome
    reward: float | None
    wall_s: float
    harness_s: float
    verifier_s: float
    exit_code: int | None
    detail: str = ""
    """One line for people: why the outcome is what it is."""
    workspace: str = ""
    """Folder of the agent's work; empty once it is removed."""
    peak_rss_bytes: int = 0
    evaluated_ref: str = ""
    """What was scored: a digest of the workspace tree. Empty where nothing was."""
    score_details: dict[str, Any] = field(default_factory=dict)
    """What the scorer said besides the reward, JSON-ready."""
