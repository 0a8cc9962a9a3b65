"""A cell's training side as it runs: Ray Train ranks, a mailbox, real weights published over the transfer engine."""

from __future__ import annotations

import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from services.common.errors import TidegateError, TrainingError
from services.common.models import resolve_model
from services.common.names import RAY_NAMESPACE
from services.common.transfer import open_transfer_engine
from services.trainer import checkpoint as checkpoints
from services.trainer.cell import run_training
from services.trainer.commands import Publish, SaveCheckpoint, Stop, TrainStep
from services.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from services.trainer.mailbox import Mailbox
from services.trainer.rank import TrainingSpec
from services.trainer.types import StepReport, WeightManifest
from tests.unit.trainer.forests import make_micro_step

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    temp_dir = tempfile.mkdtemp(prefix="tgt-", dir="/tmp")  # unix sockets want a short path
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        namespace=RAY_NAMESPACE,
        log_to_driver=False,
        _temp_dir=temp_dir,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(resolve_model("tiny-qwen3", tmp_path_factory.mktemp("models")))


class Cell:
    """A mailbox with its training ranks."""

    def __init__(self, name: str, model_path: str, folder: Path, **settings: Any) -> None:
        config = TrainerConfig(
            **{"optimizer": OptimizerConfig(learning_rate=1e-3), "cpus_per_worker": 0.5, "max_restarts": 2, **settings}
        )
        self.checkpoint_dir = folder / "checkpoints"
        spec = TrainingSpec(name, model_path, config, str(self.checkpoint_dir))
        self.mailbox = ray.remote(Mailbox).options(name=name, namespace=RAY_NAMESPACE, num_cpus=0).remote(120.0)
        self.training = ray.remote(run_training).options(num_cpus=0).remote(spec, str(folder / "ray"))

    def submit(self, command: Any) -> Any:
        return ray.get(self.mailbox.submit.remote(command), timeout=150)

    def train(self, step: int, seeds: tuple[int, ...] = (1, 2, 3)) -> StepReport:
        report: StepReport = self.submit(train_step(step, seeds))
        return report

    def stop(self) -> None:
        self.submit(Stop())
        ray.get(self.training, timeout=60)
        ray.kill(self.mailbox)


def train_step(step: int, seeds: tuple[int, ...] = (1, 2, 3)) -> TrainStep:
    return TrainStep(step, -1, 0.9, tuple(ray.put(make_micro_step(seed + 10 * step)) for seed in seeds))


def training_ranks() -> list[psutil.Process]:
    """Processes of Ray Train workers among our own descendants."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError("condition did not become true")


def pull(manifest: WeightManifest) -> dict[str, np.ndarray[Any, Any]]:
    engine = open_transfer_engine("tcp", "127.0.0.1")
    buffer = np.zeros(manifest.size_bytes, dtype=np.uint8)
    engine.pull(manifest.segment, manifest.address, buffer)
    engine.close()
    tensors = {}
    for slot in manifest.tensors:
        part = buffer[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
        assert zlib.crc32(part.data) == slot.checksum
        tensors[slot.name] = part.view(np.float32).reshape(slot.shape)
    return tensors


def test_steps_publication_and_checkpoint(cluster: None, model_path: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    cell = Cell("steps/core", model_path, tmp_path)
    reports = [cell.train(step) for step in (1, 2)]
    assert [report.step for report in reports] == [1, 2]
    assert all(report.num_runs == 9 and report.grad_norm > 0 for report in reports)
    manifest = cell.submit(Publish(2))
    assert manifest.transport == "tcp"
    assert manifest.version == 2
    tensors = pull(manifest)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    assert any(not np.array_equal(tensors[name], p.detach().numpy()) for name, p in model.named_parameters())
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)
    ids = torch.tensor([manifest.canary.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert manifest.canary.logprobs == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert cell.submit(SaveCheckpoint(2, 2, is_best=True)).endswith("step-000002")
    assert checkpoints.latest_step(cell.checkpoint_dir) == 2
    best = AutoModelForCausalLM.from_pretrained(cell.checkpoint_dir / "best")
    assert all(np.array_equal(tensors[name], p.detach().numpy()) for name, p in best.named_parameters())
    with pytest.raises(TidegateError, match="cannot be taken"):
        cell.train(7)
    assert cell.train(3).step == 3  # an order that cannot be done harms nothing
    cell.stop()
    assert not training_ranks()


def test_killed_rank_is_restarted_and_the_step_is_completed(cluster: None, model_path: str, tmp_path: Path) -> None:
    expected = Cell("undisturbed/core", model_path, tmp_path / "a")
    for step in (1, 2, 3, 4):
        last = expected.train(step)
    undisturbed = pull(expected.submit(Publish(4)))
    expected.stop()

    cell = Cell("killed/core", model_path, tmp_path / "b")
    for step in (1, 2):
        cell.train(step)
    cell.submit(SaveCheckpoint(2, 2))
    cell.train(3)  # after the checkpoint: must be taken again

    @ray.remote(num_cpus=0)
    def slow(micro_step: Any, gate: Any) -> Any:
        while not Path(gate).exists():
            time.sleep(0.02)
        return micro_step

    gate = str(tmp_path / "gate")
    command = train_step(4)
    held = (*command.micro_steps[:2], slow.remote(command.micro_steps[2], gate))
    answer = cell.mailbox.submit.remote(TrainStep(4, -1, 0.9, held))
    (rank,) = wait_for(training_ranks)
    time.sleep(0.5)  # it now waits in the middle of the step for its last micro-step
    rank.kill()
    Path(gate).touch()
    report = ray.get(answer, timeout=150)
    assert report.step == 4
    assert report.loss == pytest.approx(last.loss, abs=1e-6)
    published = pull(cell.submit(Publish(4)))
    for name, tensor in undisturbed.items():
        np.testing.assert_allclose(published[name], tensor, atol=1e-7)
    cell.stop()


def test_ranks_that_die_too_often_end_the_training(cluster: None, model_path: str, tmp_path: Path) -> None:
    cell = Cell("dying/core", model_path, tmp_path, max_restarts=0)
    cell.train(1)
    (rank,) = training_ranks()
    rank.kill()
    with pytest.raises(TrainingError):
        cell.train(2)
    with pytest.raises(TrainingError):
        ray.get(cell.training, timeout=60)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_two_ranks_equal_one(cluster: None, model_path: str, tmp_path: Path, tune: str) -> None:
    settings: dict[str, Any] = {"tune": LoraConfig(rank=4)} if tune == "lora" else {}
    published, reports = [], []
    for num_workers in (1, 2):
        name = f"{tune}-{num_workers}/core"
        cell = Cell(name, model_path, tmp_path / str(num_workers), num_workers=num_workers, **settings)
        reports.append([cell.train(step) for step in (1, 2)])
        published.append(pull(cell.submit(Publish(2))))
        cell.stop()
    for one, two in zip(*reports, strict=True):
        assert two.loss == pytest.approx(one.loss, abs=1e-5)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (two.num_runs, two.num_targets, two.num_tokens) == (one.num_runs, one.num_targets, one.num_tokens)
        assert two.entropy == pytest.approx(one.entropy, abs=1e-5)
    for name, tensor in published[0].items():
        np.testing.assert_allclose(published[1][name], tensor, atol=2e-5)


def test_model_that_cannot_be_trained_fails_the_first_command(cluster: None, tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    cell = Cell("refused/core", str(tmp_path / "model"), tmp_path)
    with pytest.raises(TrainingError, match="linear_attention"):
        cell.train(1)
    ray.get(cell.training, timeout=60)
