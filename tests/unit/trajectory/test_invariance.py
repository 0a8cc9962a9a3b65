"""Whatever a harness does with its history, and however a group is cut, loss and gradient are those of the plain sum.

The reference knows neither trees nor micro-steps: it sums over the answers that the policy sampled. A change of form
is anything that leaves those answers, their contexts and their rewards as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.config import ClippedLossConfig
from services.trainer.loss import clipped_policy_loss
from services.trainer.types import MicroStep
from services.trajectory.microstep import ScoredRun, build_micro_steps
from services.trajectory.select import select
from services.trajectory.tree import TrajectoryTree, TreeCall
from services.trajectory.types import CallRole
from tests.unit.trajectory.trees import make_call, make_tree, unhurried

LOSS = ClippedLossConfig()
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Run:
    """What a harness did, call by call, and what came of it."""

    run_id: str
    advantage: float
    calls: tuple[TreeCall, ...]


def token_number(run: int, call: int, position: int) -> int:
    """Each sampled token of a group has a number of its own; it travels as the behaviour log-probability."""
    return (run * 16 + call) * 8 + position


@st.composite
def groups(draw: st.DrawFn) -> list[Run]:
    runs = []
    for number in range(draw(st.integers(1, 3))):
        calls: list[TreeCall] = []
        for index in range(draw(st.integers(1, 6))):
            parent = draw(st.sampled_from([None, *(call.call_id for call in calls)]))
            size = draw(st.integers(0, 4))
            call = make_call(
                f"r{number}-c{index}",
                parent,
                draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)),
                draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)),
                ordinal=index,
                trainable=draw(st.sampled_from([True, True, False])),
                request_key=f"{number}/{index}",  # nothing is a retry but what a change of form makes one
            )
            numbers = [-token_number(number, index, position) / 1024 for position in range(size)]
            calls.append(replace(call, logprobs=np.asarray(numbers, dtype=np.float32)))
        runs.append(Run(f"g000000-r{number}", draw(st.floats(-2, 2)), tuple(calls)))
    return runs


# -- what a harness may do with its history --------------------------------------------------------------------------


def reroot(draw: st.DrawFn, calls: Sequence[TreeCall]) -> list[TreeCall]:
    """A call is not recognised as the continuation of its parent: its whole prompt comes again, as prompt tokens."""
    tree, made = make_tree(*calls), []
    for call in calls:
        if call.parent_call_id is not None and draw(st.booleans()):
            call = replace(call, parent_call_id=None, new_prompt_ids=tree.prompt_ids(call.call_id))
        made.append(call)
    return made


def cut(draw: st.DrawFn, calls: Sequence[TreeCall]) -> list[TreeCall]:
    """A prompt comes in two requests; nothing was sampled behind the first of them."""
    made: list[TreeCall] = []
    for call in calls:
        size = len(call.new_prompt_ids)
        if size > 1 and draw(st.booleans()):
            at = draw(st.integers(1, size - 1))
            before = replace(
                make_call(f"{call.call_id}-cut", call.parent_call_id, call.new_prompt_ids[:at].tolist(), [])
            )
            made.append(before)
            call = replace(call, parent_call_id=before.call_id, new_prompt_ids=call.new_prompt_ids[at:])
        made.append(call)
    return made


def duplicate(draw: st.DrawFn, calls: Sequence[TreeCall]) -> list[TreeCall]:
    """A request is made again, because its first answer got lost on the way: that answer trains nothing."""
    made: list[TreeCall] = []
    for call in calls:
        if len(call.output_ids) and draw(st.booleans()):
            call = replace(call, ordinal=call.ordinal * 100 + 1, request_key=f"again {call.call_id}")
            lost = replace(call, call_id=f"{call.call_id}-lost", ordinal=call.ordinal - 1)
            made.append(replace(lost, logprobs=np.full(len(call.output_ids), -1e3, dtype=np.float32)))
        made.append(call)
    return made


def disorder(draw: st.DrawFn, calls: Sequence[TreeCall]) -> list[TreeCall]:
    """Branches are interleaved in another order: every call still comes behind its parent."""
    waiting, made = list(calls), []
    while waiting:
        done = {call.call_id for call in made}
        ready = [call for call in waiting if call.parent_call_id is None or call.parent_call_id in done]
        call = draw(st.sampled_from(ready))
        waiting.remove(call)
        made.append(call)
    return made


def greet(draw: st.DrawFn, calls: Sequence[TreeCall]) -> list[TreeCall]:
    """Calls that sampled nothing, or greedily, at any place."""
    made: list[TreeCall] = []
    for call in calls:
        made.append(call)
        if draw(st.booleans()):
            output = draw(st.lists(st.integers(0, 2), max_size=3))
            made.append(make_call(f"{call.call_id}-side", call.call_id, [1, 2], output, trainable=False))
    return made


FORMS = {"reroot": reroot, "cut": cut, "duplicate": duplicate, "disorder": disorder, "side calls": greet}


# -- loss and gradient -----------------------------------------------------------------------------------------------


def reference(runs: Sequence[Run], logprobs: torch.Tensor) -> torch.Tensor:
    """The mean over runs with a target of ``sum over its sampled, trainable tokens / their number``."""
    losses = []
    for run in runs:
        numbers = [round(-x * 1024) for call in run.calls if call.trainable for x in call.logprobs.tolist()]
        if numbers:
            ratio = (logprobs[numbers] + torch.tensor(numbers, dtype=torch.float64) / 1024).exp()
            ratio = ratio.clamp(max=LOSS.ratio_max)
            clipped = ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high)
            losses.append(-torch.minimum(ratio * run.advantage, clipped * run.advantage).mean())
    return torch.stack(losses).mean() if losses else logprobs.sum() * 0


def computed(micro_steps: Sequence[MicroStep], logprobs: torch.Tensor) -> torch.Tensor:
    """What the trainer makes of micro-steps: unnormalised sums, divided once by the number of counted runs."""
    total = logprobs.sum() * 0
    for micro_step in micro_steps:
        for node in micro_step.nodes:
            behaviour = torch.from_numpy(node.logprobs[node.target_mask].astype(np.float64))
            if not len(behaviour):
                continue
            run = micro_step.runs[node.run]
            numbers = (-behaviour * 1024).round().long()
            total = (
                total
                + clipped_policy_loss(
                    logprobs[numbers],
                    behaviour,
                    torch.full_like(behaviour, run.advantage),
                    torch.full_like(behaviour, 1 / run.num_targets),
                    torch.zeros_like(behaviour),
                    LOSS,
                )[0]
            )
    num_runs = len({run.run_id for micro_step in micro_steps for run in micro_step.runs})
    return total / max(num_runs, 1)


def micro_steps_of(
    runs: Sequence[Run], max_tokens: int, *, limit: int | None = None, seed: int = 0
) -> tuple[list[ScoredRun], list[MicroStep]]:
    scored = []
    for run in runs:
        tree: TrajectoryTree = make_tree(*run.calls)
        selection = select(tree, {}, max_trajectories=limit, seed=seed, run_id=run.run_id)
        scored.append(ScoredRun(run.run_id, run.advantage, tree, selection))
    return scored, build_micro_steps("g000000", scored, max_tokens)


def with_gradient(value: torch.Tensor, logprobs: torch.Tensor) -> tuple[float, list[float]]:
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.item(), gradient.tolist()


def current_logprobs(seed: int) -> torch.Tensor:
    """Log-probabilities of the weights being trained, near those of the engine."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.arange(3 * 16 * 8, dtype=torch.float64)
    noise = torch.randn(len(numbers), generator=generator, dtype=torch.float64)
    return (-numbers / 1024 + 0.2 * noise).requires_grad_()


@pytest.mark.parametrize("form", FORMS)
@unhurried
@given(data=st.data(), runs=groups(), max_tokens=st.integers(1, 60), seed=st.integers(0, 9))
def test_no_change_of_form_and_no_cut_changes_loss_or_gradient(
    form: str, data: st.DataObject, runs: list[Run], max_tokens: int, seed: int
) -> None:
    changed = [replace(run, calls=tuple(FORMS[form](data.draw, run.calls))) for run in runs]
    logprobs = current_logprobs(seed)
    loss, gradient = with_gradient(reference(runs, logprobs), logprobs)
    _, micro_steps = micro_steps_of(changed, max_tokens)
    same_loss, same_gradient = with_gradient(computed(micro_steps, logprobs), logprobs)
    assert same_loss == pytest.approx(loss, abs=TOLERANCE)
    assert same_gradient == pytest.approx(gradient, abs=TOLERANCE)


@unhurried
@given(data=st.data(), runs=groups(), max_tokens=st.integers(1, 60))
def test_all_changes_of_form_together_change_nothing(data: st.DataObject, runs: list[Run], max_tokens: int) -> None:
    changed = []
    for run in runs:
        calls: Sequence[TreeCall] = run.calls
        for form in ("reroot", "side calls", "duplicate", "cut", "disorder"):
            calls = FORMS[form](data.draw, calls)
        changed.append(replace(run, calls=tuple(calls)))
    logprobs = current_logprobs(0)
    loss, gradient = with_gradient(reference(runs, logprobs), logprobs)
    _, micro_steps = micro_steps_of(changed, max_tokens)
    same_loss, same_gradient = with_gradient(computed(micro_steps, logprobs), logprobs)
    assert same_loss == pytest.approx(loss, abs=TOLERANCE)
    assert same_gradient == pytest.approx(gradient, abs=TOLERANCE)


@unhurried
@given(runs=groups(), max_tokens=st.integers(1, 60), limit=st.integers(1, 3), seed=st.integers(0, 5))
def test_with_a_limit_the_loss_is_that_of_the_selected_answers_however_the_group_is_cut(
    runs: list[Run], max_tokens: int, limit: int, seed: int
) -> None:
    scored, micro_steps = micro_steps_of(runs, max_tokens, limit=limit, seed=seed)
    selected = [
        replace(run, calls=tuple(call for call in run.calls if call.call_id in one.selection.report.target_call_ids))
        for run, one in zip(runs, scored, strict=True)
    ]
    logprobs = current_logprobs(seed)
    loss, gradient = with_gradient(reference(selected, logprobs), logprobs)
    same_loss, same_gradient = with_gradient(computed(micro_steps, logprobs), logprobs)
    assert same_loss == pytest.approx(loss, abs=TOLERANCE)
    assert same_gradient == pytest.approx(gradient, abs=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
@unhurried
@given(data=st.data(), runs=groups(), limit=st.sampled_from([1, 2, None]), max_tokens=st.integers(1, 60))
def test_each_sampled_token_is_a_target_at_most_once_and_no_other_token_ever_is(
    form: str, data: st.DataObject, runs: list[Run], limit: int | None, max_tokens: int
) -> None:
    changed = [replace(run, calls=tuple(FORMS[form](data.draw, run.calls))) for run in runs]
    scored, micro_steps = micro_steps_of(changed, max_tokens, limit=limit)
    targets = [
        round(-x * 1024)
        for micro_step in micro_steps
        for node in micro_step.nodes
        for x in node.logprobs[node.target_mask].tolist()
    ]
    assert len(set(targets)) == len(targets)
    sampled = {round(-x * 1024) for run in runs for call in run.calls if call.trainable for x in call.logprobs.tolist()}
    assert set(targets) <= sampled
    for one in scored:
        assert limit is None or len(one.selection.leaves) <= limit
        order = [list(CallRole).index(role) for role in one.selection.report.leaf_roles]
        assert order == sorted(order)
