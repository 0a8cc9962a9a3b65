"""What a rank publishes is what its version says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import TrainingError
from services.common.models import resolve_model
from services.trainer import rank as rank_module
from services.trainer.commands import Order, Publish, TrainStep
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
