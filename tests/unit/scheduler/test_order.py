"""Which task comes next."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler import policy
from services.scheduler.order import TaskOrder


def learned(order: TaskOrder, seconds: list[float]) -> TaskOrder:
    for task_index, slowest_s in enumerate(seconds):
        order.durations.note(task_index, slowest_s)
    return order


def test_without_a_window_tasks_come_as_the_policy_has_them() -> None:
    order = TaskOrder(5, seed=3, position=0, given_back=())
    assert order.take(12) == [policy.task_at(position, 5, 3) for position in range(12)]
    assert order.position == 12


def test_tasks_that_were_given_back_come_first() -> None:
    order = TaskOrder(5, seed=3, position=5, given_back=(4, 2))
    order.give_back(0)
    assert order.take(4) == [4, 2, 0, policy.task_at(5, 5, 3)]
    assert order.waiting == ()


def test_the_expected_duration_is_the_mean_of_the_task_or_else_of_all() -> None:
    order = TaskOrder(3, seed=0, position=0, given_back=())
    assert order.durations.expected_s(1) == 0.0
    for task_index, seconds in ((0, 10.0), (0, 20.0), (2, 30.0)):
        order.durations.note(task_index, seconds)
    assert order.durations.expected_s(0) == 15.0
    assert order.durations.expected_s(1) == 20.0
    assert not order.durations.is_known(1)


def test_a_window_goes_up_and_the_next_one_down() -> None:
    order = learned(TaskOrder(4, 0, 0, (), window_size=4, num_wanted=8), [30.0, 10.0, 40.0, 20.0])
    taken = [order.take(1)[0] for _ in range(8)]
    assert taken == [1, 3, 0, 2, 2, 0, 3, 1]


def test_inside_one_dispatch_the_longest_come_first() -> None:
    order = learned(TaskOrder(4, 0, 0, (), window_size=4, num_wanted=8), [30.0, 10.0, 40.0, 20.0])
    assert order.take(2) == [3, 1]
    assert order.take(2) == [2, 0]


def test_the_known_share_counts_the_next_tasks_and_takes_none() -> None:
    order = TaskOrder(4, 0, 0, (), window_size=4, num_wanted=8)
    first = policy.task_at(0, 4, 0)
    order.durations.note(first, 5.0)
    assert order.known_share(4) == 0.25
    assert sorted(order.take(4)) == [0, 1, 2, 3]


@given(
    num_tasks=st.integers(1, 12),
    num_wanted=st.integers(1, 60),
    window_size=st.integers(0, 20),
    seed=st.integers(0, 5),
    takes=st.lists(st.integers(1, 7), max_size=40),
    seconds=st.lists(st.floats(1, 1000), max_size=40),
)
def test_a_job_trains_the_same_tasks_whatever_the_window(
    num_tasks, num_wanted, window_size, seed, takes, seconds
) -> None:
    order = TaskOrder(num_tasks, seed, 0, (), window_size=window_size, num_wanted=num_wanted)
    taken: list[int] = []
    for number in [*takes, num_wanted]:
        number = min(number, num_wanted - len(taken))
        order.known_share(number + 3)
        batch = order.take(number)
        for task_index, slowest_s in zip(batch, seconds, strict=False):
            order.durations.note(task_index, slowest_s)
        taken += batch
    assert Counter(taken) == Counter(policy.task_at(position, num_tasks, seed) for position in range(num_wanted))


@given(phi=st.floats(0, 4), mu=st.integers(1, 6))
def test_the_homogeneous_cadence_keeps_the_mean_staleness(phi, mu) -> None:
    new_phi, new_mu = policy.homogeneous_cadence(phi, mu)
    assert abs(new_phi + (new_mu - 1) / 2 - (phi + (mu - 1) / 2)) < 1e-6
    assert 0 <= new_phi < 0.5 + 1e-6
