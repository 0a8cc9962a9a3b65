"""What the tree benchmarks train: small random models, groups and agent-like trees, and the ways to train them.

Every way takes the gradient of the same loss, the sum over all targets of ``-advantage / targets of the run`` times the
log-probability, so that gradients can be compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.common.types import VersionSpan
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest
from services.trainer.tree.head import backward_through_head
from services.trainer.tree.plan import Plan
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StoreBudget
from services.trainer.types import Node

VOCAB_SIZE = 512
HEAD_ROWS = 1024
LAYERS = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
"""Full attention is not last: its gradient has to pass through what stands behind it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that answer one prompt."""

    prompt_tokens: int
    response_tokens: int
    size: int

    @property
    def num_positions(self) -> int:
        return self.prompt_tokens + self.size * self.response_tokens


def hybrid_config(hidden: int = 64, heads: int = 1, kv_heads: int = 1, head_dim: int = 32, **more: Any) -> Any:
    """Qwen3.5: three layers of linear attention, one of full attention."""
    linear = {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    sizes = _sizes(hidden, heads, kv_heads, head_dim, len(LAYERS))
    return _config("Qwen3_5TextConfig", {**sizes, **linear, "layer_types": list(LAYERS), **more})


def attention_config(
    hidden: int = 128, heads: int = 2, kv_heads: int = 1, head_dim: int = 64, layers: int = 2, **more: Any
) -> Any:
    """Qwen3: softmax attention with grouped heads."""
    return _config("Qwen3Config", {**_sizes(hidden, heads, kv_heads, head_dim, layers), **more})


def window_config() -> Any:
    """Qwen3 with a sliding window in every other layer."""
    kinds = ["sliding_attention", "full_attention"]
    return attention_config(layer_types=kinds, use_sliding_window=True, sliding_window=48)


def moe_config() -> Any:
    """Qwen3-MoE."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return _config("Qwen3MoeConfig", {**_sizes(128, 4, 2, 32, 2), **experts})


def latent_config(**more: Any) -> Any:
    """DeepSeek-V3: latents instead of heads, and experts behind the first layer."""
    latents = {
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    }
    sizes = _sizes(128, 4, 4, 32, 2)
    del sizes["head_dim"]
    return _config(more.pop("kind", "DeepseekV3Config"), {**sizes, **latents, **more})


def sparse_config() -> Any:
    """DeepSeek-V3.2: each token attends to the positions that an indexer selects.

    With few index heads many scores are exactly zero, and which of equal ones are selected is anybody's choice.
    """
    return latent_config(kind="DeepseekV32Config", index_topk=96, index_n_heads=16, index_head_dim=32)


CONFIGS: dict[str, Callable[..., Any]] = {
    "attention": attention_config,
    "window": window_config,
    "hybrid": hybrid_config,
    "moe": moe_config,
    "latent": latent_config,
    "sparse": sparse_config,
}
IN_FLOAT64 = frozenset({"hybrid", "moe", "latent", "sparse"})
"""Compared in float64: small differences can change which experts and positions a token chooses, and add up in a
recurrence."""


def _sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1 << 22,
    }


def _config(kind: str, settings: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, kind)(**settings, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def make_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model whose layers keep the size of what they are given, so that no gradient is next to nothing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # states that live for tens of tokens
                parameter.copy_(torch.rand_like(parameter).mul(0.4).add(0.02).log())
            elif parameter.dim() >= 2:
                gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "lm_head")) else 1.0
                parameter.copy_(gain * torch.randn_like(parameter) / math.sqrt(parameter[0].numel()))
    return model.eval()


# -- forests ----------------------------------------------------------------------------------------------------------


def group_nodes(group: Group, seed: int = 0) -> tuple[Node, ...]:
    """A prompt without targets, and a response for each run, all targets."""
    rng = np.random.default_rng(seed)
    prompt = _node(rng, -1, -1, group.prompt_tokens, is_target=False)
    return prompt, *(_node(rng, 0, run, group.response_tokens, is_target=True) for run in range(group.size))


def agent_nodes(num_branches: int = 20, seed: int = 0, *, shrink: int = 1) -> tuple[Node, ...]:
    """Two runs of an agent below one prompt: turns of tool output and answer on a main line, which subagents leave at
    random turns with a task of their own, and to which they do not come back. ``num_branches`` leaves; ``shrink``
    divides all lengths."""
    rng = np.random.default_rng(seed)
    nodes = [_node(rng, -1, -1, 2048 // shrink, is_target=False)]
    lines: list[list[int]] = [[], []]
    for run, line in enumerate(lines):
        parent = 0
        for _ in range(9):
            parent = _add_turn(rng, nodes, parent, run, tool_tokens=384 // shrink, answer_tokens=96 // shrink)
            line.append(parent)
    for branch in range(num_branches - len(lines)):
        run = branch % len(lines)
        parent = int(rng.choice(lines[run][:-1]))
        for _ in range(2):
            parent = _add_turn(rng, nodes, parent, run, tool_tokens=192 // shrink, answer_tokens=64 // shrink)
    return tuple(nodes)


def _add_turn(
    rng: np.random.Generator, nodes: list[Node], parent: int, run: int, *, tool_tokens: int, answer_tokens: int
) -> int:
    nodes.append(_node(rng, parent, run, tool_tokens, is_target=False))
    nodes.append(_node(rng, len(nodes) - 1, run, answer_tokens, is_target=True))
    return len(nodes) - 1


def _node(rng: np.random.Generator, parent: int, run: int, num_tokens: int, *, is_target: bool) -> Node:
    return Node(
        parent,
        run,
        rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
        np.full(num_tokens, is_target),
        np.full(num_tokens, -6.0 if is_target else 0.0, dtype=np.float32),
        (VersionSpan(0, num_tokens),) if is_target else (),
    )


@dataclass(frozen=True, slots=True)
class Loss:
    """The slopes of the loss at the log-probabilities, by run."""

    slopes: Tensor
    """[runs]"""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Loss:
        """Advantages with both signs."""
        num_targets = np.zeros(max(node.run for node in nodes) + 1)
        for node in nodes:
            if node.run >= 0:
                num_targets[node.run] += node.target_mask.sum()
        advantages = np.random.default_rng(1).normal(size=len(num_targets))
        return cls(torch.from_numpy(-advantages / num_targets).float())

    def slopes_of(self, runs: Tensor, total: Tensor, part: Any, logprobs: Tensor, _entropy: Tensor) -> Tensor:
        """The slopes of some targets, whose loss is added to ``total``. ``runs``: of all; ``part``: which of them."""
        slopes = self.slopes[runs[part]].to(logprobs.dtype)
        total.add_((slopes.double() * logprobs.double()).sum())
        return slopes


# -- ways to train ----------------------------------------------------------------------------------------------------


def make_executor(model: Any, budget: StoreBudget | None = None) -> Executor:
    """The executor of a model, its states in memory unless ``budget`` says otherwise."""
    return Executor(model, adapter_for(model.config), budget=budget or StoreBudget())


def train_tree(executor: Executor, forest: Forest, plan: Plan, loss: Loss, progress: Progress | None = None) -> float:
    """One step by the executor, the gradients left in the parameters. Returns the loss."""
    total = torch.zeros((), dtype=torch.float64)
    if progress is not None:
        progress.sums = {**progress.sums, "loss": total}
    objective = partial(loss.slopes_of, torch.from_numpy(forest.target_runs).long(), total)
    executor.train(forest, plan, 1.0, objective, progress=progress)
    return float(total)


def train_flattened(model: Any, nodes: Sequence[Node], *, checkpointing: bool = True) -> float:
    """One step over a row for each leaf, one row after another, with Hugging Face's activation checkpointing and the
    head of the executor. Returns the loss."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(checkpointing)
    loss, head = Loss.of(nodes), model.get_output_embeddings()
    total = torch.zeros((), dtype=torch.float64)
    for row in leaf_rows(nodes):
        hidden = model.base_model(input_ids=torch.from_numpy(row.token_ids)[None], use_cache=False).last_hidden_state
        rows = hidden[0, torch.from_numpy(row.positions) - 1]
        slope_of = partial(loss.slopes_of, torch.from_numpy(row.runs), total)
        ids = torch.from_numpy(row.target_ids)
        rows.backward(backward_through_head(rows.detach(), head, ids, 1.0, HEAD_ROWS, slope_of))
    return float(total)


@contextlib.contextmanager
def unrounded_recurrence() -> Iterator[None]:
    """Hugging Face's gated delta rule rounds to float32 inside, also in a model of float64: a plain one stands in."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = _gated_delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = theirs


def _gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Token by token (Yang et al., arXiv 2412.06464, equation 10). All ``[1, T, heads, ...]``."""
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    matrices = value.new_zeros(1, key.shape[2], key.shape[-1], value.shape[-1])
    rows = []
    for token in range(query.shape[1]):
        one_key = key[:, token, :, :, None]
        matrices = matrices * g[:, token, :, None, None].exp()
        wrong = value[:, token] - (matrices * one_key).sum(-2)
        matrices = matrices + one_key * (beta[:, token, :, None] * wrong)[:, :, None]
        rows.append((matrices * query[:, token, :, :, None]).sum(-2))
    return torch.stack(rows, 1), None


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Copies of a model's gradients, by parameter, in float64."""
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient: norm of the difference over norm."""
    if ours.keys() != reference.keys():
        return math.inf
    return max(float((ours[name] - of).norm() / of.norm()) for name, of in reference.items() if of.any())


@dataclass(frozen=True, slots=True)
class FlatRow:
    """A path from a root to a leaf, up to its last target, with the targets that no row before it has."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    """[m] Of the targets on the path."""
    target_ids: NDArray[np.int64]
    runs: NDArray[np.int64]
    """[m]"""


def leaf_rows(nodes: Sequence[Node]) -> Iterator[FlatRow]:
    """The rows that a trainer without trees makes of a forest."""
    parents = {node.parent for node in nodes}
    done: set[int] = set()
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path = [leaf]
        while nodes[path[-1]].parent >= 0:
            path.append(nodes[path[-1]].parent)
        path.reverse()
        ids = np.concatenate([nodes[index].token_ids for index in path]).astype(np.int64)
        is_target = np.concatenate([nodes[n].target_mask & (n not in done) for n in path])
        runs = np.concatenate([np.full(len(nodes[n].token_ids), nodes[n].run) for n in path])
        done.update(path)
        positions = np.flatnonzero(is_target)
        if len(positions):
            yield FlatRow(ids[: positions[-1]], positions, ids[positions], runs[positions])
