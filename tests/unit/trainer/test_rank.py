"""What a rank publishes is what its version says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import TrainingError
from services.common.models import resolve_model
from services.trainer import checkpoint as checkpoints
from services.trainer import rank as rank_module
from services.trainer.commands import MarkBest, Order, Publish, SaveCheckpoint, TrainStep
from services.trainer.config import TrainerConfig
from services.trainer.rank import TrainingRank, TrainingSpec
from services.trainer.types import MicroStep, WeightManifest
from tests.unit.trainer.forests import make_micro_step
from tests.unit.trainer.local_engine import LocalEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(resolve_model("tiny-qwen3", tmp_path_factory.mktemp("models")))


@pytest.fixture
def rank(model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingRank:
    monkeypatch.setattr(rank_module, "open_transfer_engine", lambda protocol, host: LocalEngine())
    spec = TrainingSpec("none", model_path, TrainerConfig(), str(tmp_path / "saved"))
    return TrainingRank(spec, rank=0, world_size=1, device=torch.device("cpu"))


def do(rank: TrainingRank, command: Any, micro_steps: list[MicroStep] | None = None) -> Any:
    return rank.do(Order(1, command), micro_steps or [])


def test_weights_are_published_under_their_own_step_only(rank: TrainingRank) -> None:
    with pytest.raises(TrainingError, match="stand at step 0"):
        do(rank, Publish(1))
    assert do(rank, Publish(0)).version == 0


def test_version_published_last_can_be_asked_for_again_after_a_step(rank: TrainingRank) -> None:
    first: WeightManifest = do(rank, Publish(0))
    micro_step = make_micro_step(1)
    do(rank, TrainStep(1, -1, 1.0, (micro_step,)), [micro_step])
    assert do(rank, Publish(0)) == first
    second: WeightManifest = do(rank, Publish(1))
    assert [slot.checksum for slot in second.tensors] != [slot.checksum for slot in first.tensors]
    with pytest.raises(TrainingError):  # its bytes are gone
        do(rank, Publish(0))


def test_step_out_of_order_is_refused(rank: TrainingRank) -> None:
    with pytest.raises(TrainingError, match="stand at step 0"):
        do(rank, TrainStep(2, -1, 1.0, ()))


def take_step(rank: TrainingRank) -> None:
    micro_step = make_micro_step(rank.step + 1)
    do(rank, TrainStep(rank.step + 1, -1, 1.0, (micro_step,)), [micro_step])


def test_best_holds_the_weights_of_its_own_step(rank: TrainingRank, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    take_step(rank)
    do(rank, SaveCheckpoint(1, 0, export=True))
    weights = {name: tensor.clone() for name, tensor in rank._backend.merged_weights()}
    take_step(rank)
    do(rank, SaveCheckpoint(2, 1, kept_steps=(1,)))
    assert checkpoints.best_of(tmp_path / "saved") is None
    do(rank, MarkBest(1, 0.5))  # its held-out pass ended after the next step
    assert checkpoints.best_of(tmp_path / "saved") == checkpoints.Best(1, 0.5)
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "best")
    assert all(torch.equal(best.get_parameter(name), tensor) for name, tensor in weights.items())


def test_only_exports_that_can_still_be_the_best_stay(rank: TrainingRank, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for step in (1, 2, 3, 4):
        take_step(rank)
        do(rank, SaveCheckpoint(step, step - 1, export=True))
        if step == 1:
            do(rank, MarkBest(1, 0.5))
    paths = checkpoints.list_checkpoints(saved)
    assert [path.name for path in paths] == ["step-000001", "step-000003", "step-000004"]
    assert [path.name for path in paths if (path / "hugging-face").exists()] == ["step-000001", "step-000004"]
    do(rank, MarkBest(4, 0.6))
    assert [path.name for path in checkpoints.list_checkpoints(saved)] == ["step-000003", "step-000004"]


def test_a_step_that_is_on_disk_gets_its_export_later(rank: TrainingRank, tmp_path: Path) -> None:
    take_step(rank)
    do(rank, SaveCheckpoint(1, 0))
    with pytest.raises(TrainingError, match="no export"):
        do(rank, MarkBest(1, 0.5))
    do(rank, SaveCheckpoint(1, 1, export=True))
    do(rank, MarkBest(1, 0.5))
    assert (tmp_path / "saved" / "best" / "config.json").exists()
