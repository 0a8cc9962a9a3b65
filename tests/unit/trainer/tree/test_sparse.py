"""Sparse attention by chunks is that of the whole sequence; which positions it sees depends on the scores alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.errors import ConfigError, TrainingError
from services.trainer.tree import states
from services.trainer.tree.adapters import LayerStates
from services.trainer.tree.adapters.sparse import NEAR_TIE, Candidates, SparseAttention, settle
from services.trainer.tree.attend import Page
from services.trainer.tree.states import ChunkContext
from services.trainer.tree.store import StateKey, StateStore, StoreBudget
from tests.unit.trainer.tree.models import FAMILIES, Unrounded, make_model, make_model_of
from tests.unit.trainer.tree.walk import attend, cuts, difference, random_states, through, walk

NUM_TOKENS = 24
NAMES = ["deepseek_v32", "glm_moe_dsa", "axk2"]
TOP_K = 6  # of the models of FAMILIES

# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_random_chunks_are_the_whole_sequence(name: str, seed: int) -> None:
    assert error_of(name, cuts(NUM_TOKENS, seed), seed) < 1e-12


@pytest.mark.parametrize("size", [1, NUM_TOKENS])
def test_equal_chunks_are_the_whole_sequence(size: int) -> None:
    assert error_of("deepseek_v32", [size] * (NUM_TOKENS // size)) < 1e-12


def test_more_choices_than_positions_are_full_attention() -> None:
    assert error_of("deepseek_v32", cuts(NUM_TOKENS, 3), index_topk=NUM_TOKENS + 5) < 1e-12
    assert error_of("deepseek_v32", cuts(NUM_TOKENS, 3), index_topk=NUM_TOKENS - 5) < 1e-12


def test_a_layer_that_shares_the_choice_of_the_one_before_is_exact() -> None:
    """Layers 1 and 2 of ``glm_moe_dsa``: the second has no indexer of its own."""
    ours, plain = installed(make_model("glm_moe_dsa")), make_model("glm_moe_dsa")
    assert ours.model.layers[2].self_attn.indexer is None
    hidden, gradient = random_states(NUM_TOKENS, 5)

    def pair(model: Any, x: Tensor, start: int, **kwargs: Any) -> Tensor:
        positions = torch.arange(start, start + x.shape[1])[None]
        arguments = {
            "attention_mask": None,
            "position_ids": positions,
            "position_embeddings": model.model.rotary_emb(x, position_ids=positions),
            **kwargs,
        }
        x, _, chosen = model.model.layers[1].self_attn(x, **arguments)
        output: Tensor = model.model.layers[2].self_attn(x, prev_topk_indices=chosen, **arguments)[0]
        return output

    def evaluate(x: Tensor, context: ChunkContext) -> Tensor:
        with context.active(), Unrounded():
            return pair(ours, x, context.start, past_key_values=context)

    walked = walk(evaluate, hidden, gradient, cuts(NUM_TOKENS, 5))
    leaf = hidden.clone().requires_grad_()
    mask = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()[None, None]
    with Unrounded():
        output = pair(plain, leaf, 0, attention_mask=mask)
    output.backward(gradient)
    assert leaf.grad is not None
    assert (walked.output - output).norm() < 1e-12 * output.norm()
    assert (walked.input_gradient - leaf.grad).norm() < 1e-12 * leaf.grad.norm()


def test_without_a_chunk_the_model_runs_as_before() -> None:
    ids = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    for name in ("deepseek_v32", "glm_moe_dsa"):
        ours, plain = installed(make_model(name)), make_model(name)
        assert torch.allclose(ours(ids).logits, plain(ids).logits, atol=1e-6)
        first = ours(ids[:, :12], use_cache=True)
        second = ours(ids[:, 12:], past_key_values=first.past_key_values, use_cache=True)
        assert torch.allclose(second.logits, plain(ids).logits[:, 12:], atol=1e-6)


def test_a_mask_is_refused() -> None:
    ours = installed(make_model("deepseek_v32"))
    context = make_context(StateStore(torch.device("cpu"), StoreBudget()), 4)
    with pytest.raises(ConfigError, match="mask"):
        attend(
            ours,
            0,
            random_states(4, 0)[0],
            0,
            past_key_values=context,
            attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool),
        )


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_the_positions_are_those_that_the_unchanged_indexer_chooses(name: str) -> None:
    ours, plain = installed(make_model(name)), make_model(name)
    hidden, gradient = random_states(NUM_TOKENS, 7)
    expected: list[Tensor] = []
    plain.model.layers[0].self_attn.indexer.register_forward_hook(lambda _m, _i, output: expected.append(output))
    mask = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()[None, None]
    attend(plain, 0, hidden, 0, attention_mask=mask)
    for chosen in (selections(ours, hidden, gradient, cuts(NUM_TOKENS, seed)) for seed in range(2)):
        for query, positions in enumerate(chosen):
            assert positions == sorted(p for p in expected[0][0, query].tolist() if p <= query)


@pytest.mark.parametrize("sizes", [[NUM_TOKENS], [1] * NUM_TOKENS, cuts(NUM_TOKENS, 0), cuts(NUM_TOKENS, 1)], ids=len)
def test_equal_scores_leave_the_lowest_positions_however_paged(sizes: list[int]) -> None:
    model = installed(make_model("deepseek_v32"))
    with torch.no_grad():
        model.model.layers[0].self_attn.indexer.weights_proj.weight.zero_()
    for query, positions in enumerate(selections(model, *random_states(NUM_TOKENS, 0), sizes)):
        assert positions == list(range(min(query + 1, TOP_K)))


@pytest.mark.parametrize("num_kept", [1, 7, 23, 60])
@pytest.mark.parametrize("num_values", [2, 10, 10**6])
def test_candidates_are_the_first_of_a_stable_sort(num_kept: int, num_values: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(0, num_values, (9, 50), generator=generator).float()
    scores[torch.rand(9, 50, generator=generator) < 0.1] = -torch.inf
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    for seed in range(3):
        best, first = Candidates(num_kept, 9, like=scores), 0
        for size in cuts(50, seed):
            best.add(scores[:, first : first + size], first)
            first += size
        for row in range(9):
            expected = [int(p) for p in order[row, :num_kept] if scores[row, p] > -torch.inf]
            assert [position for position in best.positions[row].tolist() if position >= 0] == sorted(expected)
            assert best.refused[row] == (ordered[row, num_kept] if num_kept < 50 else -torch.inf)


@pytest.mark.parametrize("num_values", [2, 10**6])
def test_candidates_of_several_ranks_merge_to_those_of_one(num_values: int) -> None:
    """Pages of eight positions, dealt out to three ranks in turn."""
    scores = torch.randint(0, num_values, (5, 48), generator=torch.Generator().manual_seed(1)).float()
    future = torch.ones(5, 48, dtype=torch.bool).triu(20)
    scores.masked_fill_(future, -torch.inf)
    whole = Candidates(11, 5, like=scores)
    whole.add(scores, 0)
    ranks = [Candidates(11, 5, like=scores) for _ in range(3)]
    for page in range(6):
        ranks[page % 3].add(scores[:, 8 * page : 8 * page + 8], 8 * page)
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = Candidates(11, 5, like=scores)
        for rank in order:
            merged.merge(*ranks[rank].padded())
        assert torch.equal(merged.positions, whole.positions)
        assert torch.equal(merged.refused, whole.refused)


def test_no_position_after_the_query_is_chosen() -> None:
    model = installed(make_model("deepseek_v32"))
    for query, positions in enumerate(selections(model, *random_states(NUM_TOKENS, 8), cuts(NUM_TOKENS, 8))):
        assert len(positions) == min(query + 1, TOP_K)
        assert len(set(positions)) == len(positions)
        assert max(positions) <= query


def test_scores_in_pieces_choose_as_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, gradient = random_states(NUM_TOKENS, 9)
    at_once = selections(installed(make_model("deepseek_v32")), hidden, gradient, [15, 9])
    monkeypatch.setattr("services.trainer.tree.adapters.sparse.SCORES_AT_ONCE", 16 * 9 * 3)
    assert selections(installed(make_model("deepseek_v32")), hidden, gradient, [15, 9]) == at_once


# -- the same choice again ---------------------------------------------------------------------------------------------


def test_a_near_tie_is_chosen_again_as_it_was() -> None:
    """Query 0: the last chosen and the first refused score exchange places. Query 1: far apart."""
    store = StateStore(torch.device("cpu"), StoreBudget())
    shift = NEAR_TIE / 2
    first = settle(make_context(store, 2), 0, candidates([[9.0, 5.0, 5.0 - shift], [9.0, 1.0, 5.0]]))
    assert first.tolist() == [[0, 1], [0, 2]]
    assert settle(make_context(store, 2), 0, candidates([[9.0, 5.0 - shift, 5.0], [9.0, 1.0, 5.0]])).tolist() == (
        first.tolist()
    )
    assert store.get(StateKey(0, 0, "choice.ties"))[0].tolist() == [[0, 0, 1]]


def test_another_choice_is_an_error_that_names_layer_and_chunk() -> None:
    store = StateStore(torch.device("cpu"), StoreBudget())
    settle(make_context(store, 2), 3, candidates([[9.0, 5.0, 4.0], [9.0, 1.0, 5.0]]))
    with pytest.raises(TrainingError, match=r"layer 3.*position 0"):
        settle(make_context(store, 2), 3, candidates([[9.0, 5.0, 4.0], [9.0, 5.0, 1.0]]))


def test_without_near_ties_nothing_is_kept_of_the_choice_but_a_digest() -> None:
    model = installed(make_model("deepseek_v32"))
    store = StateStore(torch.device("cpu"), StoreBudget())
    with torch.no_grad():
        through(model)(random_states(30, 1)[0], make_context(store, 30))
    assert store.get(StateKey(0, 0, "choice.digest"))[0].shape == (1,)
    assert store.get(StateKey(0, 0, "choice.ties"))[0].shape == (0, 1 + TOP_K)
    assert store.get(StateKey(0, 0, "index"))[0].shape == (30, 8)


def test_a_query_in_a_near_tie_survives_a_disturbed_recomputation() -> None:
    """All scores are equal at capture and differ a little in the recomputation: it sees the same positions."""
    model = installed(make_model("deepseek_v32"))
    weights = model.model.layers[0].self_attn.indexer.weights_proj.weight
    store, hidden = StateStore(torch.device("cpu"), StoreBudget()), random_states(12, 2)[0]
    outputs = []
    for weight in (0.0, 1e-9):
        with torch.no_grad():
            weights.fill_(weight)
            outputs.append(through(model)(hidden, make_context(store, 12)))
    assert torch.equal(*outputs)
    assert store.get(StateKey(0, 0, "choice.ties"))[0][:, 0].tolist() == list(range(TOP_K, 12))


# -- what is durable ---------------------------------------------------------------------------------------------------


def test_the_indexer_is_frozen() -> None:
    model = installed(make_model("glm_moe_dsa"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert frozen


def test_layers_without_an_indexer_keep_no_index_keys() -> None:
    config = make_model("glm_moe_dsa").config
    full = LayerStates(token_elements=16, frozen_token_elements=8)
    assert SparseAttention().layer_states(config) == (full, full, LayerStates(token_elements=16))
    assert SparseAttention().layer_states(make_model("deepseek_v32").config) == (full,) * 3


# -- helpers -----------------------------------------------------------------------------------------------------------


def error_of(name: str, sizes: list[int], seed: int = 0, **settings: Any) -> float:
    """The largest relative error of an architecture's attention in chunks of these sizes."""
    make: Callable[..., Any] = make_model if name in FAMILIES else make_variant
    return difference(installed(make(name, **settings)), make(name, **settings), random_states(NUM_TOKENS, seed), sizes)


def make_variant(name: str, **settings: Any) -> Any:
    """A small model in float64 of an architecture that is not one of FAMILIES."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **{**FAMILIES["deepseek_v32"].settings, **settings})
    return make_model_of(config, torch.float64)


def installed(model: Any) -> Any:
    """The model with its attention made to use chunks; a second time changes nothing."""
    SparseAttention().install(model)
    SparseAttention().install(model)
    return model


def selections(model: Any, hidden: Tensor, gradient: Tensor, sizes: list[int]) -> list[list[int]]:
    """The positions that each query of layer 0 sees, the same at capture and in the recomputation."""
    seen: dict[int, list[list[int]]] = {}

    def see(_module: Any, _inputs: Any, output: Tensor) -> None:
        context = states.current()
        assert context is not None
        for row, chosen in enumerate(output[0].tolist()):
            seen.setdefault(context.start + row, []).append([position for position in chosen if position >= 0])

    model.model.layers[0].self_attn.indexer.register_forward_hook(see)
    walk(through(model), hidden, gradient, sizes)
    assert all(first == again for first, again in seen.values())
    return [seen[query][0] for query in range(hidden.shape[1])]


def make_context(store: StateStore, num_tokens: int) -> ChunkContext:
    """Of a root chunk, with chunks below it."""
    return ChunkContext(
        store, [], Page(0, 0, num_tokens, has_gradient=True), is_recorded=False, is_inner=True, anchor=torch.zeros(())
    )


def candidates(scores: list[list[float]]) -> Candidates:
    """The two best of three positions."""
    values = torch.tensor(scores)
    best = Candidates(2, len(scores), like=values)
    best.add(values, 0)
    return best
