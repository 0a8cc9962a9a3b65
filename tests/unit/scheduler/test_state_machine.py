"""The whole state machine in random worlds: whatever happens, the counts hold and the job ends."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.types import CellKind, CellRole
from services.scheduler.events import (
    CancelRequested,
    CellReported,
    DrainRequested,
    PolicyRequested,
    SwitchRequested,
    Tick,
    UndrainRequested,
)
from services.scheduler.options import AtStalenessBound, JobOptions, OnLostGroup, Policy, PolicyMode
from services.scheduler.types import JobStatus
from tests.unit.scheduler.world import World, options


def reward_of(seed: int) -> Callable[[int], float]:
    """Held-out rewards that go up, down and nowhere."""
    return lambda version: random.Random(f"{seed}/{version}").choice([0.2, 0.4, 0.6, 0.8])


def random_policy(rng: random.Random, num_cells: int) -> Policy:
    mode = rng.choice(list(PolicyMode))
    if num_cells == 1 and mode is PolicyMode.ASYNC:
        mode = PolicyMode.ELASTIC
    return Policy(mode, streaming=rng.random() < 0.5, train_cells=rng.randint(1, max(1, num_cells - 1)))


def random_options(rng: random.Random, num_cells: int, **changes: object) -> JobOptions:
    mu, phi = rng.randint(1, 3), rng.choice([0.0, 0.5, 1.0, 2.0])
    return options(
        num_cells=num_cells,
        steps_per_burst=mu,
        carry_over_steps=phi,
        max_staleness_steps=math.ceil(phi + mu) - 1 + rng.choice([0, 1, 5]),
        at_staleness_bound=rng.choice(list(AtStalenessBound)),
        on_lost_group=rng.choice(list(OnLostGroup)),
        policy=random_policy(rng, num_cells),
        **changes,
    )


@pytest.mark.parametrize("seed", range(120))
def test_a_job_without_faults_finishes_all_its_steps(seed: int) -> None:
    rng = random.Random(seed)
    num_cells = rng.randint(1, 4)
    job = random_options(
        rng,
        num_cells,
        steps=rng.randint(1, 6),
        eval_task_names=rng.choice([(), ("e0", "e1")]),
        eval_every=rng.choice([0, 1, 2]),
        eval_at_start=rng.random() < 0.5,
        eval_at_end=rng.random() < 0.5,
        max_concurrent_runs=rng.choice([1, 5, 100]),
    )
    slots = tuple(rng.randint(1, 6) for _ in range(num_cells))
    world = World(job, slots, others=rng.choice([CellKind.SATELLITE, CellKind.SATELLITE, CellKind.STANDALONE]))
    world.eval_reward = reward_of(seed)
    world.join_all()
    end = world.play(rng)
    assert end.status is JobStatus.FINISHED
    assert world.step == job.steps
    assert world.checkpoints[-1].step == job.steps


@pytest.mark.parametrize("seed", range(120))
def test_a_job_with_faults_ends(seed: int) -> None:
    rng = random.Random(1000 + seed)
    num_cells = rng.randint(2, 4)
    job = random_options(rng, num_cells, steps=4, eval_task_names=("e0",), eval_every=2, max_lost_groups=40)
    slots = tuple(rng.randint(1, 6) for _ in range(num_cells))
    world = World(job, slots, others=rng.choice([CellKind.SATELLITE, CellKind.SATELLITE, CellKind.STANDALONE]))
    world.eval_reward = reward_of(seed)
    world.join_all()
    assert world.play(rng, faults=True).status in (JobStatus.FINISHED, JobStatus.FAILED)


class AnyWorld(RuleBasedStateMachine):
    """Answers in any order, cells that die and return, timeouts, cancellation."""

    @initialize(
        seed=st.integers(0, 10_000),
        slots=st.lists(st.integers(1, 5), min_size=1, max_size=5),
        steps=st.integers(1, 6),
        evals=st.integers(0, 2),
        max_runs=st.sampled_from([2, 100]),
        checkpoint_every=st.integers(1, 3),
        others=st.sampled_from([CellKind.SATELLITE, CellKind.SATELLITE, CellKind.STANDALONE]),
    )
    def begin(self, seed, slots, steps, evals, max_runs, checkpoint_every, others) -> None:
        job = random_options(
            random.Random(seed),
            len(slots),
            steps=steps,
            eval_task_names=tuple(f"e{index}" for index in range(evals)),
            eval_every=1,
            eval_at_start=True,
            eval_at_end=True,
            max_concurrent_runs=max_runs,
            max_lost_groups=30,
            checkpoint_every=checkpoint_every,
        )
        self.world = World(job, tuple(slots), others=others)
        self.world.eval_reward = reward_of(steps)
        self.world.join_all()

    @property
    def is_over(self) -> bool:
        return self.world.finish is not None

    @rule(index=st.integers(0, 1000), seed=st.integers(0, 10_000), faults=st.booleans())
    def answer(self, index, seed, faults) -> None:
        if self.world.pending and not self.is_over:
            self.world.answer(index, random.Random(seed), faults=faults)

    @rule(count=st.integers(1, 40), seed=st.integers(0, 10_000))
    def answer_many(self, count, seed) -> None:
        rng = random.Random(seed)
        for _ in range(count):
            self.answer(rng.randrange(1000), rng.randrange(1000), False)

    @rule(index=st.integers(0, 1000))
    def fail_an_action(self, index) -> None:
        if self.world.pending and not self.is_over:
            self.world.fail_one(index)

    @rule(index=st.integers(0, 4))
    def lose_cell(self, index) -> None:
        name = f"cell-{index}"
        if name in self.world.cells and self.world.cells[name].role is not CellRole.DOWN and not self.is_over:
            self.world.lose(name)

    @rule(index=st.integers(0, 4))
    def return_cell(self, index) -> None:
        name = f"cell-{index}"
        if name in self.world.cells and self.world.cells[name].role is CellRole.DOWN and not self.is_over:
            self.world.join(name)

    @rule(index=st.integers(0, 4))
    def make_stale(self, index) -> None:
        name = f"cell-{index}"
        if name in self.world.cells and self.world.cells[name].role is not CellRole.DOWN and not self.is_over:
            self.world.make_stale(name)

    @rule(index=st.integers(0, 4), back=st.booleans())
    def drain(self, index, back) -> None:
        if not self.is_over:
            self.world.ask((UndrainRequested if back else DrainRequested)(f"cell-{index}"))

    @rule(index=st.integers(0, 4), role=st.sampled_from([CellRole.TRAIN, CellRole.ROLLOUT]))
    def switch(self, index, role) -> None:
        if not self.is_over:
            self.world.ask(SwitchRequested(f"cell-{index}", role))

    @rule(
        phi=st.sampled_from([None, 0.0, 0.5, 1.0, 3.0, -1.0, math.nan]),
        mu=st.sampled_from([None, 0, 1, 2]),
        mode=st.sampled_from([None, *PolicyMode]),
    )
    def set_policy(self, phi, mu, mode) -> None:
        if not self.is_over:
            self.world.ask(PolicyRequested(phi, mu, mode))

    @rule(index=st.integers(0, 4), slots=st.integers(1, 6))
    def change_slots(self, index, slots) -> None:
        cell = self.world.cells.get(f"cell-{index}")
        if cell is not None and cell.role is not CellRole.DOWN and not self.is_over:
            cell.slots = slots
            self.world.feed(CellReported(f"cell-{index}", slots, self.world.state.cells.get(f"cell-{index}").version))

    @rule()
    def wait_long(self) -> None:
        if not self.is_over:
            self.world.now_s += 1000
            self.world.give_up_late_starts()
            self.world.feed(Tick())

    @precondition(lambda self: self.world.step >= 1)
    @rule()
    def cancel(self) -> None:
        if not self.is_over:
            self.world.feed(CancelRequested("the test wants it"))

    @invariant()
    def routes_name_only_cells_in_rollout(self) -> None:
        if not hasattr(self, "world"):
            return
        table = self.world.state.routes()
        names = {route.cell_id for route in table.cells}
        assert all(self.world.cells[name].role is CellRole.ROLLOUT for name in names)
        assert {cell_id for _, cell_id in table.affinity} <= names

    def teardown(self) -> None:
        failed_before = sys.exc_info()[0] is not None
        if hasattr(self, "world") and not failed_before:
            self.world.play(random.Random(1))


NUM_EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "150"))
"""About 60 events each; ``make test-scheduler`` runs enough for 100,000."""

AnyWorld.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnyWorld = AnyWorld.TestCase
