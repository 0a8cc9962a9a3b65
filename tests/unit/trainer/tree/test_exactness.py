"""The tree executor's gradients are those of plain autograd over whole sequences, for every architecture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from services.trainer.packing import Batch
from services.trainer.tree.plan import PrefixGradient, Recompute
from tests.unit.trainer.tree import reference
from tests.unit.trainer.tree.forests import Shape, chain, make_batch
from tests.unit.trainer.tree.models import FAMILIES, Unrounded, draw_settings, make_model
from tests.unit.trainer.tree.walks import Outcome, Way, by_forest, make_executor, train

Mode = Callable[[], contextlib.AbstractContextManager[object]]

NUM_EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "2"))


@dataclass(frozen=True, slots=True)
class Precision:
    """A kind of numbers, and how exact gradients and log-probabilities have to be in it."""

    dtype: torch.dtype
    gradient: float
    logprob: float
    ours: Mode = contextlib.nullcontext
    plain: Mode = contextlib.nullcontext
    is_injected: bool = True
    """The reference chooses the experts and positions that the executor chose."""


FLOAT64_THROUGHOUT = Precision(torch.float64, 1e-9, 1e-10, Unrounded, Unrounded)
PRECISIONS = {
    "float32": Precision(torch.float32, 2e-5, 2e-5),
    # Hugging Face's norms and rotary embeddings round to float32 here, ours being theirs. So does their gated delta
    # rule, which is not ours; its gradients are then wrong by up to 1e-5, so it is kept from that.
    "float64": Precision(torch.float64, 2e-6, 2e-6, plain=partial(Unrounded, "gateddelta"), is_injected=False),
    "float64_throughout": FLOAT64_THROUGHOUT,
}


def draw_shape(rng: np.random.Generator) -> Shape:
    num_roots = int(rng.integers(1, 3))
    return Shape(num_roots, num_roots, max_own_nodes=int(rng.integers(2, 6)), prompt_tokens=7, long_tokens=10)


def draw_way(rng: np.random.Generator) -> Way:
    return Way(
        chunk_tokens=int(rng.choice([2, 3, 4, 5, 7, 11, 100])),
        recompute=Recompute(rng.choice(["chunk", "keep", "auto"])),
        recompute_layers=bool(rng.random() < 0.4),
        keep_attended=bool(rng.random() < 0.4),
        alignment_tokens=int(rng.choice([1, 2])),
        head_rows=int(rng.choice([1, 3, 1000])),
        temperature=float(rng.choice([0.7, 1.0])),
    )


def check(outcome: Outcome, expected: reference.Result, batch: Batch, precision: Precision) -> None:
    """Losses, log-probabilities (while training, and scored before) and all gradients."""
    logprobs = by_forest(batch, outcome.forest, expected.logprobs)
    entropy = by_forest(batch, outcome.forest, expected.entropy)
    pairs = [(outcome.logprobs, logprobs)]
    if outcome.scores is not None:
        pairs += [(outcome.scores.logprobs, logprobs), (outcome.scores.entropy, entropy)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=precision.logprob)
    assert outcome.loss == pytest.approx(expected.loss, rel=100 * precision.logprob, abs=10 * precision.logprob)
    error, worst = reference.gradient_error(outcome.gradients, expected.gradients)
    assert error <= precision.gradient, worst


CASES = [
    (name, kind, seed)
    for name in FAMILIES
    for kind, precision in PRECISIONS.items()
    for seed in range(NUM_EXAMPLES if precision is FLOAT64_THROUGHOUT else NUM_EXAMPLES // 2)
]


@pytest.mark.parametrize(("name", "kind", "seed"), CASES)
def test_gradients_are_those_of_plain_autograd(name: str, kind: str, seed: int) -> None:
    precision = PRECISIONS[kind]
    rng = np.random.default_rng([seed, *name.encode()])
    batch, way = make_batch(int(rng.integers(1 << 30)), draw_shape(rng)), draw_way(rng)
    settings = draw_settings(name, rng) if precision is FLOAT64_THROUGHOUT and seed else {}
    ours, plain = (make_model(name, precision.dtype, seed, **settings) for _ in range(2))
    with precision.ours():
        outcome = train(make_executor(ours), batch, way, with_scores=seed % 2 == 0)
    with precision.plain():
        expected = reference.run(
            plain,
            batch,
            temperature=way.temperature,
            rows=reference.leaf_rows(batch),
            experts=outcome.experts if precision.is_injected else None,
            selected=outcome.selected if precision.is_injected else None,
        )
    check(outcome, expected, batch, precision)


@pytest.mark.parametrize("seed", range(max(1, NUM_EXAMPLES // 4)))
@pytest.mark.parametrize("name", FAMILIES)
def test_detached_prefixes_are_states_that_were_computed_without_autograd(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed + 1000, *name.encode()])
    batch, way = make_batch(int(rng.integers(1 << 30)), draw_shape(rng)), draw_way(rng)
    detached = Way(way.chunk_tokens, way.recompute, way.recompute_layers, prefix_gradient=PrefixGradient.DETACHED)
    with Unrounded():
        outcome = train(make_executor(make_model(name)), batch, detached)
        expected = reference.run(
            make_model(name),
            batch,
            temperature=detached.temperature,
            rows=reference.node_rows(batch, detach_shared=True),
            experts=outcome.experts,
            selected=outcome.selected,
        )
    check(outcome, expected, batch, FLOAT64_THROUGHOUT)


@pytest.mark.parametrize("name", ["qwen3_window", "qwen3_next", "deepseek_v32"])
def test_chunks_of_any_size_give_the_same(name: str) -> None:
    batch = chain(17, (5, 6))
    executor = make_executor(make_model(name))
    with Unrounded():
        expected = reference.run(make_model(name), batch, temperature=0.9)
        for chunk_tokens in (1, 3, 4, 7, 15, 16):
            outcome = train(executor, batch, Way(chunk_tokens), with_scores=chunk_tokens < 4)
            check(outcome, expected, batch, FLOAT64_THROUGHOUT)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_sequences_longer_than_the_kernels_blocks_are_exact(name: str) -> None:
    """Recurrences in PyTorch work in blocks of 64 tokens, attention kernels in blocks of 32 to 512."""
    batch = chain(200, (80, 131))
    executor = make_executor(make_model(name))
    with Unrounded():
        expected = reference.run(make_model(name), batch, temperature=0.9, rows=reference.leaf_rows(batch))
        for chunk_tokens in (67, 150):
            outcome = train(executor, batch, Way(chunk_tokens, head_rows=50), with_scores=True)
            check(outcome, expected, batch, FLOAT64_THROUGHOUT)
