"""A plan visits every chunk in an order that is exact, within the budget, with no more work than it has to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.trainer.packing import plan_batches
from services.trainer.tree.costs import Budget, ChunkBytes, Knot, ModelCosts, PackBytes, PairCost
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.plan import (
    Mode,
    ModeChoice,
    Plan,
    PlanOptions,
    PrefixGradient,
    Recompute,
    VisitKind,
    make_plan,
)
from tests.unit.trainer.forests import make_micro_step, make_node

COSTS = ModelCosts(
    constant_bytes=10_000,
    weight_bytes=10_000,
    state_bytes_per_token=8,
    layer_state_bytes_per_token=2,
    accumulation_bytes_per_token=16,
    boundary_bytes=20,
    boundary_accumulation_bytes=40,
    attended_bytes_per_token=6,
    capture=ChunkBytes.linear(100, 20, 1),
    graph=ChunkBytes.linear(200, 100, 2, 0.5),
    backward=ChunkBytes.linear(300, 30, 3),
    layer_input_bytes_per_token=16,
    num_layers=4,
    layer_graph=ChunkBytes.linear(50, 5),
    layer_backward=ChunkBytes.linear(100, 40, 3, 0.1),
    pack=PackBytes(0, 140),
    can_pack=True,
    row_bytes=8,
    head_base_bytes=100,
    head_bytes_per_row=90,
    flops_per_token=1e6,
    head_flops_per_target=1e5,
    pairs=(PairCost(1e3), PairCost(5e2, visible=7)),
)
WALK = PlanOptions(mode=ModeChoice.WALK, min_chunk_tokens=2, max_chunk_tokens=8, spare_share=0.0)
SEEDS = st.integers(0, 2000)
some = settings(max_examples=40, deadline=None)
WAYS = st.builds(
    PlanOptions,
    prefix_gradient=st.sampled_from(PrefixGradient),
    recompute=st.sampled_from(Recompute),
    mode=st.just(ModeChoice.WALK),
    min_chunk_tokens=st.just(2),
    max_chunk_tokens=st.integers(2, 20),
    alignment_tokens=st.integers(1, 4),
)


def forest_of(*seeds: int) -> Forest:
    micro_steps = [make_micro_step(seed, num_runs=1 + seed % 4, max_tokens=15) for seed in seeds]
    (batch,) = plan_batches(micro_steps, 100_000)
    return make_forest(batch.nodes)


def group(num_runs: int, prompt_tokens: int = 200, response_tokens: int = 21) -> Forest:
    """A prompt with responses of equal lengths, all of whose tokens are targets."""
    rng = np.random.default_rng(0)
    own = [make_node(rng, 0, run, response_tokens, target_share=1.0) for run in range(num_runs)]
    return make_forest([make_node(rng, -1, -1, prompt_tokens), *own])


def path(plan: Plan, chunk: int) -> list[int]:
    """The chunks before one, oldest first."""
    before: list[int] = []
    while (chunk := plan.chunks[chunk].parent) >= 0:
        before.insert(0, chunk)
    return before


# The order of visits


@some
@given(SEEDS, WAYS)
def test_chunks_cut_the_segments_in_order(seed: int, options: PlanOptions) -> None:
    forest = forest_of(seed)
    plan = make_plan(forest, COSTS, Budget(), options)
    place = 0
    for index, segment in enumerate(forest.segments):
        own = [chunk for chunk in plan.chunks if chunk.segment == index]
        assert list(plan.chunks[place : place + len(own)]) == own
        assert sum(chunk.num_tokens for chunk in own) == segment.num_tokens
        assert [chunk.first for chunk in own] == np.cumsum([0] + [c.num_tokens for c in own])[:-1].tolist()
        assert [chunk.start - segment.start for chunk in own] == [chunk.first for chunk in own]
        limit = max(options.alignment_tokens, options.max_chunk_tokens)
        assert all(0 < chunk.num_tokens <= limit for chunk in own)
        assert sum(chunk.num_tokens % options.alignment_tokens > 0 for chunk in own) <= 1
        parents = [chunk.parent for chunk in own]
        above = [i for i, chunk in enumerate(plan.chunks) if chunk.segment == segment.parent]
        assert parents == [above[-1] if above else -1, *range(place, place + len(own) - 1)]
        place += len(own)


@some
@given(st.lists(SEEDS, min_size=1, max_size=2), WAYS)
def test_every_chunk_is_evaluated_once_and_pushed_back_once(seeds: list[int], options: PlanOptions) -> None:
    forest = forest_of(*seeds)
    plan = make_plan(forest, COSTS, Budget(), options)
    kinds = Counter((visit.chunk, visit.kind) for visit in plan.visits)
    for index, chunk in enumerate(plan.chunks):
        detached = options.prefix_gradient is PrefixGradient.DETACHED and forest.segments[chunk.segment].is_shared
        is_leaf_end = index not in {other.parent for other in plan.chunks}
        expected = [VisitKind.CAPTURE, VisitKind.RELEASE if detached else VisitKind.BACKWARD]
        expected = [VisitKind.REPLAY] if is_leaf_end else expected
        assert {kind: count for (own, kind), count in kinds.items() if own == index} == dict.fromkeys(expected, 1)


@some
@given(st.lists(SEEDS, min_size=1, max_size=2), WAYS)
def test_states_exist_whenever_a_descendant_is_visited(seeds: list[int], options: PlanOptions) -> None:
    plan = make_plan(forest_of(*seeds), COSTS, Budget(), options)
    present: set[int] = set()
    finished: set[int] = set()
    for visit in plan.visits:
        assert set(path(plan, visit.chunk)) <= present
        if visit.kind is VisitKind.CAPTURE:
            present.add(visit.chunk)
        else:
            below = {index for index in range(len(plan.chunks)) if visit.chunk in path(plan, index)}
            assert below <= finished
            present.discard(visit.chunk)
            finished.add(visit.chunk)
    assert not present
    assert len(finished) == len(plan.chunks)


@some
@given(SEEDS, WAYS)
def test_graphs_are_kept_only_where_they_are_used(seed: int, options: PlanOptions) -> None:
    plan = make_plan(forest_of(seed), COSTS, Budget(), options)
    kept = {visit.chunk for visit in plan.visits if visit.keep_graph}
    pushed = {visit.chunk for visit in plan.visits if visit.kind is VisitKind.BACKWARD}
    assert kept <= pushed
    assert kept == (set() if options.recompute is Recompute.CHUNK else pushed)
    assert all(visit.kind is VisitKind.CAPTURE for visit in plan.visits if visit.keep_graph)


def test_last_chunk_of_a_leaf_is_as_long_as_it_may_be() -> None:
    plan = make_plan(group(1, prompt_tokens=9, response_tokens=21), COSTS, Budget(), WALK)
    sizes = [[chunk.num_tokens for chunk in plan.chunks if chunk.segment == segment] for segment in (0, 1)]
    assert sizes == [[5, 4], [4, 8, 8]]


def test_same_input_gives_the_same_plan() -> None:
    budget = Budget(live_bytes=30_000, host_bytes=5_000, disk_bytes=None)
    assert make_plan(group(3), COSTS, budget, WALK) == make_plan(group(3), COSTS, budget, WALK)


def test_deep_trees_need_no_recursion() -> None:
    rng = np.random.default_rng(0)
    nodes = [make_node(rng, -1, -1, 3)]
    for depth in range(600):
        nodes.append(make_node(rng, 2 * depth, 0, 2, target_share=1.0))
        nodes.append(make_node(rng, 2 * depth, 0, 2, target_share=1.0))
    assert make_plan(make_forest(nodes), COSTS, Budget(), WALK).visits


# Work


@pytest.mark.parametrize(("recompute", "inner"), [(Recompute.CHUNK, 4.0), (Recompute.KEEP, 3.0)])
def test_inner_token_costs_four_forwards_or_three_and_the_end_of_a_leaf_three(
    recompute: Recompute, inner: float
) -> None:
    costs = ModelCosts(flops_per_token=7.0)
    forest = group(4, prompt_tokens=40, response_tokens=21)  # 20 tokens each: the last target predicts nothing
    predicted = make_plan(forest, costs, Budget(), replace(WALK, recompute=recompute)).predicted
    inner_tokens, last_tokens = 40 + 4 * 12, 4 * 8
    assert predicted.work.flops == 7 * (inner * inner_tokens + 3 * last_tokens)
    assert predicted.forwards == pytest.approx((inner * inner_tokens + 3 * last_tokens) / forest.num_tokens)
    assert predicted.work.forward_flops == 7 * forest.num_tokens
    assert predicted.work.evaluated_tokens == forest.num_tokens + (inner_tokens if inner == 4 else 0)
    assert predicted.unique_tokens == forest.num_tokens
    assert predicted.flat_tokens == 4 * 60
    assert predicted.speedup == pytest.approx(7 * 4 * 4 * 60 / predicted.work.flops)


def test_detached_prefix_costs_one_forward() -> None:
    forest = group(4, prompt_tokens=40, response_tokens=21)
    options = replace(WALK, prefix_gradient=PrefixGradient.DETACHED, recompute=Recompute.CHUNK)
    work = make_plan(forest, ModelCosts(flops_per_token=1.0), Budget(), options).predicted.work
    assert work.flops == 40 + 4 * (12 * 4 + 8 * 3)


def test_bytes_are_linear_between_knots_and_beyond() -> None:
    bytes_ = ChunkBytes((Knot(10, 100.0, 1.0), Knot(20, 200.0, 3.0), Knot(40, 200.0, 3.0)))
    values = {n: bytes_.at(n, 50) for n in (5, 10, 15, 20, 30, 40, 80)}
    assert values == {5: 50.0, 10: 150.0, 15: 250.0, 20: 350.0, 30: 350.0, 40: 350.0, 80: 350.0}
    assert ChunkBytes((Knot(10, 100.0),)).at(99, 99) == 100.0
    assert ChunkBytes.linear(-5.0, 1.0).at(3, 3) == 0.0
    assert ChunkBytes.linear(1.0, 2.0, 3.0, 4.0).at(10, 20) == 1 + 2 * 10 + 3 * 20 + 4 * 200


def test_pairs_count_what_each_token_sees() -> None:
    for visible in (None, 1, 5, 100):
        for start in (0, 3, 30):
            for num_tokens in (1, 4, 50):
                seen = [min(position + 1, visible or 10**9) for position in range(start, start + num_tokens)]
                assert PairCost(2.0, visible).flops(start, num_tokens) == 2.0 * sum(seen)


def test_recomputed_layers_cost_a_forward_more() -> None:
    costs = ModelCosts(
        flops_per_token=1.0, graph=ChunkBytes.linear(per_token=1000), layer_graph=ChunkBytes.linear(per_token=1)
    )
    forest = group(2, prompt_tokens=40, response_tokens=9)
    plan = make_plan(forest, costs, Budget(live_bytes=900), replace(WALK, recompute=Recompute.CHUNK))
    assert plan.recompute_layers
    assert plan.predicted.work.flops == 40 * 5 + 2 * 8 * 4


def test_attention_is_kept_where_it_dominates_and_fits() -> None:
    costs = ModelCosts(
        state_bytes_per_token=4, attended_bytes_per_token=8, flops_per_token=1.0, pairs=(PairCost(1.0),), num_layers=1
    )
    options = replace(WALK, recompute=Recompute.CHUNK)
    forest = group(2)
    plenty, short = (make_plan(forest, costs, Budget(live_bytes=size), options) for size in (5000, 1200))
    assert plenty.keep_attended
    assert not short.keep_attended
    assert plenty.predicted.work.flops < short.predicted.work.flops


# Memory


@some
@given(SEEDS, WAYS, st.integers(12_000, 40_000), st.sampled_from([0, 1_000, None]), st.sampled_from([0, 2_000, None]))
def test_budgets_are_kept_by_prediction(
    seed: int, options: PlanOptions, live_bytes: int, host_bytes: int | None, disk_bytes: int | None
) -> None:
    budget = Budget(live_bytes, host_bytes, disk_bytes)
    try:
        predicted = make_plan(forest_of(seed), COSTS, budget, options).predicted
    except ConfigError:
        return
    assert predicted.live_bytes <= live_bytes
    assert host_bytes is None or predicted.host_bytes <= host_bytes
    assert disk_bytes is None or predicted.disk_bytes <= disk_bytes
    if predicted.store_limit_bytes is None:
        assert predicted.host_bytes == predicted.disk_bytes == 0
    else:
        moved = predicted.host_bytes + predicted.disk_bytes
        assert predicted.stored_bytes - moved <= predicted.store_limit_bytes + 1


@pytest.mark.parametrize("recompute", [Recompute.CHUNK, Recompute.KEEP])
@pytest.mark.parametrize("response_tokens", [5, 60])
def test_peak_does_not_grow_with_the_group(recompute: Recompute, response_tokens: int) -> None:
    peaks = {
        make_plan(
            group(num, 200, response_tokens), COSTS, Budget(), replace(WALK, recompute=recompute)
        ).predicted.live_bytes
        for num in (2, 4, 8, 16)
    }
    assert len(peaks) == 1


def test_peak_is_that_of_the_worst_visit() -> None:
    costs = replace(COSTS, attended_bytes_per_token=0.0, pairs=())
    plan = make_plan(group(2, 16, 5), costs, Budget(), replace(WALK, recompute=Recompute.CHUNK))
    assert [chunk.num_tokens for chunk in plan.chunks] == [8, 8, 4, 4]
    states, gradients = 16 * 8 + 2 * 20, 16 * 16 + 40
    graph, backward = 200 + 8 * 100 + 8 * 2 + 8 * 8 * 0.5, 300 + 8 * 30 + 8 * 3
    assert plan.predicted.live_bytes == 10_000 + states + gradients + graph + backward
    assert plan.predicted.stored_bytes == states + gradients + 40  # the first chunk's boundary, as the graph goes


def test_plans_leave_a_share_of_the_device_free() -> None:
    full = make_plan(group(2), COSTS, Budget(live_bytes=15_000, disk_bytes=None), WALK).predicted
    some = make_plan(
        group(2), COSTS, Budget(live_bytes=15_000, disk_bytes=None), replace(WALK, spare_share=0.1)
    ).predicted
    assert 14_900 <= full.live_bytes <= 15_000
    assert 13_400 <= some.live_bytes <= 13_500


def test_larger_budget_gives_no_slower_plan() -> None:
    forest = group(4)
    budgets = [Budget(live_bytes=size, disk_bytes=None) for size in range(11_500, 60_000, 1_500)]
    seconds = [make_plan(forest, COSTS, budget, WALK).predicted.seconds for budget in budgets]
    assert all(later <= earlier * 1.0001 for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]


def test_graphs_are_kept_as_far_as_they_fit_the_last_chunks_first() -> None:
    forest = group(2)
    few = make_plan(forest, COSTS, Budget(live_bytes=34_000), WALK)
    kept = [visit.keep_graph for visit in few.visits if visit.kind is VisitKind.CAPTURE]
    prompt = kept[: sum(chunk.segment == 0 for chunk in few.chunks)]
    assert 0 < sum(prompt) < len(prompt)
    assert prompt == sorted(prompt)
    assert few.predicted.live_bytes <= 34_000


def test_states_move_to_host_memory_before_disk() -> None:
    forest = group(2, prompt_tokens=400)
    enough = make_plan(forest, COSTS, Budget(live_bytes=15_000, host_bytes=None), WALK).predicted
    assert enough.host_bytes > 0
    assert enough.disk_bytes == 0
    short = make_plan(forest, COSTS, Budget(live_bytes=15_000, host_bytes=500, disk_bytes=None), WALK).predicted
    assert short.host_bytes == 500
    assert short.disk_bytes > 0


def test_layers_are_recomputed_where_whole_chunks_do_not_fit() -> None:
    costs = replace(COSTS, graph=ChunkBytes.linear(0, 5000))
    plan = make_plan(group(2), costs, Budget(live_bytes=16_000, disk_bytes=None), WALK)
    assert plan.recompute_layers
    assert not make_plan(group(2), costs, Budget(), WALK).recompute_layers


def test_nothing_fits_names_the_numbers_and_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"10\.00 kB of it always.*10\.50 kB on the device") as raised:
        make_plan(group(2), COSTS, Budget(live_bytes=10_500, host_bytes=None), WALK)
    assert "min_chunk_tokens (2)" in raised.value.hint
    with pytest.raises(
        ConfigError, match=r"states, but there are 13\.00 kB on the device, 100 bytes of host"
    ) as raised:
        make_plan(group(2), COSTS, Budget(live_bytes=13_000, host_bytes=100), WALK)
    assert "shorten the context" in raised.value.hint


# Packing


def test_small_forest_of_an_attention_model_is_packed() -> None:
    forest = group(3)
    options = PlanOptions()
    plan = make_plan(forest, COSTS, Budget(), options)
    assert plan.mode is Mode.PACK
    assert not plan.visits
    assert [chunk.num_tokens for chunk in plan.chunks] == [segment.num_tokens for segment in forest.segments]
    assert make_plan(forest, replace(COSTS, can_pack=False), Budget(), options).mode is Mode.WALK
    assert make_plan(forest, COSTS, Budget(live_bytes=30_000), options).mode is Mode.WALK
    assert make_plan(forest, COSTS, Budget(), replace(options, max_pack_tokens=99)).mode is Mode.WALK
    detached = replace(options, prefix_gradient=PrefixGradient.DETACHED)
    assert make_plan(forest, COSTS, Budget(), detached).mode is Mode.WALK


def test_packing_that_cannot_be_is_refused_when_asked_for() -> None:
    options = PlanOptions(mode=ModeChoice.PACK)
    assert make_plan(group(3), COSTS, Budget(), options).mode is Mode.PACK
    with pytest.raises(ConfigError, match="packed forest of 260 tokens needs"):
        make_plan(group(3), COSTS, Budget(live_bytes=30_000), options)
    with pytest.raises(ConfigError, match="not all attention"):
        make_plan(group(3), replace(COSTS, can_pack=False), Budget(), options)
    with pytest.raises(ConfigError, match="detaching"):
        make_plan(group(3), COSTS, Budget(), replace(options, prefix_gradient=PrefixGradient.DETACHED))
