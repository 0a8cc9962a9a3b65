"""A step goes on from its saved progress as if its process had lived on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.errors import ConfigError
from services.trainer.tree.adapters import adapter_for
from services.trainer.tree.executor import Executor
from services.trainer.tree.forest import Forest, make_forest
from services.trainer.tree.plan import Plan, Recompute, VisitKind
from services.trainer.tree.resume import Progress
from services.trainer.tree.store import StoreBudget
from tests.unit.trainer.tree.forests import make_batch
from tests.unit.trainer.tree.models import make_model
from tests.unit.trainer.tree.reference import gradients_of
from tests.unit.trainer.tree.walks import Way


class Killed(BaseException):
    """Stands for the end of the process."""


class SavedAfter(Progress):
    """Saved after some visits only, since the disk takes its time."""

    def __init__(self, folder: Path, sums: dict[str, Tensor], *visits: int) -> None:
        super().__init__(folder, every_s=0, max_share=math.inf, sums=sums)
        self._visits = visits

    def note(self, num_visits: int, *arguments: Any, **settings: Any) -> None:
        if num_visits in self._visits:
            super().note(num_visits, *arguments, **settings)


class Step:
    """One step of a model over a forest, as a process that starts anew would take it."""

    def __init__(self, family: str, way: Way, seed: int = 3, budget: StoreBudget | None = None) -> None:
        self.forest: Forest = make_forest(make_batch(seed).nodes)
        self.plan: Plan = way.plan(self.forest)
        self.model: Any = make_model(family, torch.float32)
        self.logprobs = torch.zeros(self.forest.num_targets)
        self._executor = Executor(self.model, adapter_for(self.model.config), budget=budget or StoreBudget())

    @property
    def num_visits(self) -> int:
        return len(self.plan.visits)

    def progress(self, folder: Path, *visits: int) -> Progress:
        """It is saved after these visits."""
        return SavedAfter(folder, {"logprobs": self.logprobs}, *visits)

    def train(self, progress: Progress | None = None, temperature: float = 1.0) -> dict[str, Tensor]:
        def objective(index: Tensor, logprobs: Tensor, entropy: Tensor) -> Tensor:
            self.logprobs[index] = logprobs
            return torch.sin(index.to(logprobs.dtype) + 1)

        self._executor.train(self.forest, self.plan, temperature, objective, progress=progress)
        return gradients_of(self.model)

    @contextmanager
    def killed_in_forward(self, number: int) -> Iterator[None]:
        """The process ends as the model is asked for the ``number``-th time."""
        asked = 0

        def count(*_: Any) -> None:
            nonlocal asked
            asked += 1
            if asked == number:
                raise Killed

        handle = self.model.base_model.register_forward_pre_hook(count)
        with pytest.raises(Killed):
            yield
        handle.remove()


def assert_same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "deepseek_v32"])
def test_a_step_killed_anywhere_gives_the_same_gradient_bit_for_bit(family: str, tmp_path: Path) -> None:
    way = Way(keep_attended=True, recompute_layers=True)
    whole = Step(family, way)
    gradients = whole.train()
    for number in range(1, whole.num_visits, max(1, whole.num_visits // 3)):
        folder = tmp_path / str(number)
        killed = Step(family, way)
        with killed.killed_in_forward(number):
            killed.train(killed.progress(folder, number - 1))
        again = Step(family, way)
        progress = again.progress(folder)
        assert_same(again.train(progress), gradients)
        assert progress.resumed_visits == number - 1
        assert torch.equal(again.logprobs, whole.logprobs)


def test_a_step_may_be_killed_again_and_again(tmp_path: Path) -> None:
    whole = Step("qwen3", Way())
    gradients = whole.train()
    before = 0
    for number in (2, 3, whole.num_visits // 2):
        killed = Step("qwen3", Way())
        with killed.killed_in_forward(number - before + 1):
            killed.train(killed.progress(tmp_path, number))
        before = number
    again = Step("qwen3", Way())
    assert_same(again.train(again.progress(tmp_path)), gradients)


def test_states_in_page_files_come_back(tmp_path: Path) -> None:
    way, budget = Way(chunk_tokens=3), StoreBudget(host_bytes=4096, folder=tmp_path)
    gradients = Step("qwen3", way).train()
    killed = Step("qwen3", way, budget=budget)
    number = killed.num_visits // 2
    with killed.killed_in_forward(number):
        killed.train(killed.progress(tmp_path / "step", number - 1))
    again = Step("qwen3", way, budget=budget)
    assert_same(again.train(again.progress(tmp_path / "step")), gradients)


def test_a_finished_step_is_there_until_it_is_cleared(tmp_path: Path) -> None:
    step = Step("qwen3", Way())
    gradients = step.train(Progress(tmp_path))
    again = Step("qwen3", Way())
    progress = Progress(tmp_path)
    again.model.base_model.register_forward_pre_hook(lambda *_: pytest.fail("it was evaluated again"))
    assert_same(again.train(progress), gradients)
    progress.clear()
    assert not list(tmp_path.iterdir())


def test_nothing_is_saved_while_graphs_are_kept(tmp_path: Path) -> None:
    step = Step("qwen3", Way(recompute=Recompute.KEEP))
    noted: list[int] = []

    class Noted(Progress):
        def note(self, num_visits: int, *_: Any, **__: Any) -> None:
            noted.append(num_visits)

    step.train(Noted(tmp_path))
    kept, expected = 0, []
    for number, visit in enumerate(step.plan.visits, 1):
        kept += visit.keep_graph - (visit.kind is VisitKind.BACKWARD)
        if kept == 0:
            expected.append(number)
    assert noted == expected
    assert noted[-1] == step.num_visits


@pytest.mark.parametrize("change", ["tokens", "plan", "weights", "temperature"])
def test_the_progress_of_another_step_is_refused(change: str, tmp_path: Path) -> None:
    step = Step("qwen3", Way())
    with step.killed_in_forward(2):
        step.train(step.progress(tmp_path, 1))
    other = Step("qwen3", Way(chunk_tokens=4) if change == "plan" else Way(), seed=4 if change == "tokens" else 3)
    if change == "weights":
        with torch.no_grad():
            next(iter(other.model.parameters())).mul_(1.5)
    with pytest.raises(ConfigError, match="another step"):
        other.train(Progress(tmp_path), temperature=0.5 if change == "temperature" else 1.0)


def test_a_save_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    gradients = Step("qwen3", Way()).train()
    killed = Step("qwen3", Way())
    with killed.killed_in_forward(4):
        killed.train(killed.progress(tmp_path, 2))
    (tmp_path / ".visit-00000003.tmp" / "states").mkdir(parents=True)
    again = Step("qwen3", Way())
    assert_same(again.train(Progress(tmp_path)), gradients)
    assert [path.name for path in tmp_path.iterdir()] == [f"visit-{again.num_visits:08d}"]
