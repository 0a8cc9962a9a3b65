"""Which task the next group works on: an endless order of the tasks, and what was learned of how long each takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.scheduler import policy


@dataclass(slots=True)
class TaskDurations:
    """How long the slowest run of a task's group takes, from the groups that ended so far. Seconds."""

    _by_task: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Task -> number of groups, their mean."""
    _total: tuple[int, float] = (0, 0.0)

    def note(self, task_index: int, slowest_s: float) -> None:
        """A group of a task ended."""
        self._by_task[task_index] = _with(self._by_task.get(task_index, (0, 0.0)), slowest_s)
        self._total = _with(self._total, slowest_s)

    def is_known(self, task_index: int) -> bool:
        """A group of the task has ended."""
        return task_index in self._by_task

    def expected_s(self, task_index: int) -> float:
        """The mean of a task's groups; of all groups for a task that was never seen."""
        return self._by_task.get(task_index, self._total)[1]


def _with(number_and_mean: tuple[int, float], value: float) -> tuple[int, float]:
    number, mean = number_and_mean
    return number + 1, mean + (value - mean) / (number + 1)


class TaskOrder:
    """Hands out tasks: those that were given back first, then a fresh permutation of all tasks each epoch.

    With ``window_size`` > 0 the order is rearranged inside windows of so many tasks: by expected duration, upwards in
    one window and downwards in the next, so that tasks that are dispatched together take about as long. Every task
    still comes once an epoch, at most a window early or late; and no window reaches over the ``num_wanted`` tasks that
    the job needs, so that it trains the same ones as without.
    """

    def __init__(
        self,
        num_tasks: int,
        seed: int,
        position: int,
        given_back: tuple[int, ...],
        *,
        window_size: int = 0,
        num_wanted: int = 0,
    ) -> None:
        self.position = position
        """Tasks taken from the endless order so far."""
        self.durations = TaskDurations()
        self._num_tasks, self._seed = num_tasks, seed
        self._given_back = deque(given_back)
        self.window_size = window_size
        """May change at a burst boundary."""
        self._num_wanted = num_wanted
        self._window: list[int] = []
        self._is_upward = False

    @property
    def waiting(self) -> tuple[int, ...]:
        """Taken from the endless order, but not handed out (again) yet: a resumed job hands them out first."""
        return (*self._given_back, *self._window)

    def give_back(self, task_index: int) -> None:
        """A task whose group will not be trained comes again, before all others."""
        self._given_back.append(task_index)

    def known_share(self, number: int) -> float:
        """Of the next tasks, as far as the job needs them, the share whose duration is known."""
        wanted = len(self.waiting) + max(0, self._num_wanted - self.position)
        number = min(number, wanted)
        return sum(map(self.durations.is_known, self._following(number))) / max(1, number)

    def take(self, number: int) -> list[int]:
        """The next tasks. Inside one dispatch those that are expected to take longest come first."""
        tasks = self._following(number)
        num_given_back = min(number, len(self._given_back))
        for _ in range(num_given_back):
            self._given_back.popleft()
        del self._window[: number - num_given_back]
        if self.window_size > 0:
            tasks.sort(key=self.durations.expected_s, reverse=True)
        return tasks

    def _following(self, number: int) -> list[int]:
        """The next tasks, which stay where they are. What is left of a window is sorted by what is known now."""
        missing = number - len(self._given_back)
        if self.window_size > 0:
            self._sort_window()
        while len(self._window) < missing:
            size = max(1, min(self.window_size, self._num_wanted - self.position))
            left, self._window = self._window, [self._draw() for _ in range(size)]
            if self.window_size > 0:
                self._is_upward = not self._is_upward
                self._sort_window()
            self._window = left + self._window
        given_back = [task % self._num_tasks for task in self._given_back]
        return [*given_back, *self._window[: max(0, missing)]][:number]

    def _sort_window(self) -> None:
        self._window.sort(key=self.durations.expected_s, reverse=not self._is_upward)

    def _draw(self) -> int:
        self.position += 1
        return policy.task_at(self.position - 1, self._num_tasks, self._seed)
