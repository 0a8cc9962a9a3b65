"""Types of the trainer: the micro-step (made by trajectory, claimed and run here), weights, step reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.common.types import VersionSpan


@dataclass(frozen=True, slots=True)
class Node:
    """A maximal token segment of a trajectory tree.

    ``token_ids`` int32 ``[n]``, ``target_mask`` bool ``[n]``, ``logprobs`` float32 ``[n]`` (the engine's
    behaviour log-probabilities, 0 where there is no target). Its first token stands at the position that
    follows its parent's last one.
    """

    parent: int
    """Index of the parent in the forest, -1 for a root; parents stand before their children."""
    run: int
    """Index into ``MicroStep.runs`` of the run whose tokens these are; -1 for a segment that runs share."""
    token_ids: NDArray[np.int32]
    target_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...] = ()
    """Versions of the targets, in order."""


@dataclass(frozen=True, slots=True)
class RunWeight:
    """A run's part in the loss: ``advantage`` for each of its targets, each weighted ``1 / num_targets``."""

    run_id: str
    advantage: float
    num_targets: int
    """``n_run``: fixed at selection, however the run is split later."""


@dataclass(frozen=True, slots=True)
class MicroStep:
    """The unit of training work that a cell claims: whole runs, never a part of one."""

    micro_step_id: str
    group_id: str
    nodes: tuple[Node, ...]
    runs: tuple[RunWeight, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_targets(self) -> int:
        return sum(run.num_targets for run in self.runs)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies in a published buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A torch dtype's name: 'float32', 'bfloat16'."""
    offset_bytes: int
    size_bytes: int
    checksum: int
    """CRC-32 of the tensor's bytes."""


@dataclass(frozen=True, slots=True)
class Canary:
    """A fixed token sequence with the trainer's log-probabilities, to check an engine against.

    ``logprobs[i]`` is that of ``token_ids[i + 1]`` given ``token_ids[:i + 1]``, at temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Everything a rollout cell needs to pull and verify one published version of the weights."""

    version: int
    segment: str
    """Address of the publisher in the transfer engine (``host:port``)."""
    address: int
    """Base address of the buffer in the publisher's memory."""
    size_bytes: int
    transport: str
    """The transport that the publisher's transfer engine really uses: 'tcp', 'rdma'."""
    tensors: tuple[TensorSlot, ...]
    canary: Canary


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_runs: int
    num_targets: int
    num_tokens: int
    clip_fraction: float
    """Share of targets whose ratio was clipped."""
    ratio_mean: float
    kl_behaviour: float
    """Mean of behaviour minus current log-probability over the targets, nats."""
    entropy: float
    """Mean over the targets, nats."""
    logprob_abs_diff_max: float
    """Largest |engine - trainer| over the targets whose tokens were made by the weights that this step starts
    from (its version equals the version published last), so no policy change is in it. -1 if there is none."""
    seconds: float
    extra: dict[str, float] = field(default_factory=dict)
