"""Random micro-steps for tests, and the plain reference that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.common.types import VersionSpan
from services.trainer.config import ClippedLossConfig
from services.trainer.types import MicroStep, Node, RunWeight

VOCAB_SIZE = 96


def make_node(
    rng: np.random.Generator, parent: int, run: int, num_tokens: int, *, target_share: float = 0.6, version: int = 0
) -> Node:
    """A node with random tokens; about ``target_share`` of them are targets. A shared node has none."""
    mask = rng.random(num_tokens) < target_share if run >= 0 else np.zeros(num_tokens, dtype=np.bool_)
    if parent < 0 and num_tokens:
        mask[0] = False
    logprobs = np.where(mask, rng.normal(-4.5, 0.4, num_tokens), 0.0).astype(np.float32)
    spans = (VersionSpan(version, int(mask.sum())),) if mask.any() else ()
    return Node(parent, run, rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32), mask, logprobs, spans)


def make_micro_step(
    seed: int, *, num_runs: int = 3, max_nodes_per_run: int = 4, max_tokens: int = 7, prompt_tokens: int = 9
) -> MicroStep:
    """A group whose runs share a prompt (sometimes in two pieces) and branch below it."""
    rng = np.random.default_rng(seed)
    nodes = [make_node(rng, -1, -1, prompt_tokens)]
    if rng.random() < 0.5:
        nodes.append(make_node(rng, 0, -1, int(rng.integers(1, max_tokens + 1))))
    shared = list(range(len(nodes)))
    runs = []
    for run in range(num_runs):
        own: list[int] = []
        for _ in range(int(rng.integers(1, max_nodes_per_run + 1))):
            parent = int(rng.choice(own)) if own and rng.random() < 0.7 else int(rng.choice(shared))
            own.append(len(nodes))
            nodes.append(make_node(rng, parent, run, int(rng.integers(1, max_tokens + 1))))
        if not any(nodes[index].target_mask.any() for index in own):
            last = nodes[own[-1]]
            mask = np.ones(len(last.token_ids), dtype=np.bool_)
            logprobs = rng.normal(-4.5, 0.4, len(mask)).astype(np.float32)
            nodes[own[-1]] = replace(
                last, target_mask=mask, logprobs=logprobs, version_spans=(VersionSpan(0, len(mask)),)
            )
        num_targets = sum(int(nodes[index].target_mask.sum()) for index in own)
        runs.append(RunWeight(f"g{seed}-r{run}", float(rng.normal()), num_targets))
    return MicroStep(f"m{seed}", f"g{seed}", tuple(nodes), tuple(runs))


def path_to(nodes: Sequence[Node], index: int) -> list[int]:
    """The nodes from the root to ``index``."""
    path: list[int] = []
    while index >= 0:
        path.insert(0, index)
        index = nodes[index].parent
    return path


def reference_loss(
    model: Any, micro_steps: Sequence[MicroStep], config: ClippedLossConfig, temperature: float
) -> Tensor:
    """The unnormalised loss, written down plainly: every node with targets is a row of its own, with full logits."""
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for micro_step in micro_steps:
        for index, node in enumerate(micro_step.nodes):
            if not node.target_mask.any():
                continue
            run = micro_step.runs[node.run]
            ids = np.concatenate([micro_step.nodes[n].token_ids for n in path_to(micro_step.nodes, index)])
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
            logprobs = (logits / temperature).log_softmax(-1)
            first = len(ids) - len(node.token_ids)
            for offset in np.flatnonzero(node.target_mask):
                logprob = logprobs[first + offset - 1, int(ids[first + offset])]
                ratio = torch.exp(logprob - float(node.logprobs[offset]))
                if ratio > config.ratio_max:
                    ratio = torch.tensor(config.ratio_max)
                low, high = 1 - config.clip_low, 1 + config.clip_high
                bounded = torch.clamp(ratio, low, high)
                surrogate = min(ratio * run.advantage, bounded * run.advantage)
                total = total - surrogate.double() / run.num_targets
    return total
