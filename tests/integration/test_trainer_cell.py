"""A cell's training side as it runs: Ray Train ranks, a mailbox, real weights published over the transfer engine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
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
from services.trainer.commands import (
    Absorb,
    Accumulate,
    Collect,
    Load,
    MarkBest,
    MicroStepRef,
    Order,
    Publish,
    SaveCheckpoint,
    Snapshot,
    Stop,
    TrainStep,
    Update,
)
from services.trainer.config import OptimizerConfig, TrainerConfig
from services.trainer.mailbox import Mailbox
from services.trainer.rank import TrainingRank, TrainingSpec
from services.trainer.step import Listener, Portion, TrainedStep
from services.trainer.team import TrainingTeam
from services.trainer.types import StepReport, WeightManifest
from tests.ray_cluster import start_ray
from tests.unit.trainer.forests import make_micro_step
from tests.waiting import until, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    temp_dir = tempfile.mkdtemp(prefix="tgt-", dir="/tmp")  # unix sockets want a short path
    start_ray(
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


def make_config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(
        **{"optimizer": OptimizerConfig(learning_rate=1e-3), "cpus_per_worker": 0.5, "max_restarts": 2, **settings}
    )


class Cell:
    """A mailbox with its training ranks."""

    def __init__(
        self, name: str, model_path: str, folder: Path, *, is_satellite: bool = False, **settings: Any
    ) -> None:
        self.checkpoint_dir = folder / "checkpoints"
        checkpoint_dir = "" if is_satellite else str(self.checkpoint_dir)
        spec = TrainingSpec(name, model_path, make_config(**settings), checkpoint_dir)
        self.mailbox = ray.remote(Mailbox).options(name=name, namespace=RAY_NAMESPACE, num_cpus=0).remote(120.0)
        self.training = ray.remote(run_training).options(num_cpus=0).remote(spec, str(folder / "ray"))

    def submit(self, command: Any) -> Any:
        return ray.get(self.mailbox.submit.remote(command), timeout=150)

    def train(self, step: int) -> StepReport:
        report: StepReport = self.submit(train_step(step))
        return report

    def stop(self) -> None:
        self.submit(Stop())
        ray.get(self.training, timeout=60)
        ray.kill(self.mailbox)


def train_step(step: int) -> TrainStep:
    return TrainStep(step, -1, 0.9, tuple(ray.put(make_micro_step(seed)) for seed in seeds_of(step)))


def seeds_of(step: int) -> list[int]:
    return [10 * step + offset for offset in (1, 2, 3)]


@ray.remote(num_cpus=0)
def held_back(micro_step: Any, gate: str) -> Any:
    """A micro-step that is there when the file ``gate`` is."""
    deadline_s = time.monotonic() + 120
    while not Path(gate).exists():
        assert time.monotonic() < deadline_s, "the test never let it go"
        time.sleep(0.02)
    return micro_step


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


def in_this_process(model_path: str, folder: Path, num_steps: int) -> tuple[list[StepReport], dict[str, Any]]:
    """Reports and weights of one rank that nobody disturbs."""
    spec = TrainingSpec("none", model_path, make_config(), str(folder))
    rank = TrainingRank(spec, rank=0, world_size=1, device=torch.device("cpu"))
    reports = []
    for step in range(1, num_steps + 1):
        micro_steps = [make_micro_step(seed) for seed in seeds_of(step)]
        reports.append(rank.do(Order(step, TrainStep(step, -1, 0.9, tuple(micro_steps))), micro_steps))
    weights = pull(rank.do(Order(0, Publish(num_steps)), []))
    rank.close()
    return reports, weights


def test_steps_publication_checkpoint_and_the_end(cluster: None, model_path: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    cell = Cell("steps/core", model_path, tmp_path, max_restarts=0)
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
    assert cell.submit(SaveCheckpoint(2, 2, export=True)).endswith("step-000002")
    cell.submit(MarkBest(2, 0.5))
    saved = checkpoints.load_latest(cell.checkpoint_dir)
    assert saved is not None
    assert saved.step == 2
    best = AutoModelForCausalLM.from_pretrained(cell.checkpoint_dir / "best")
    assert all(np.array_equal(tensors[name], p.detach().numpy()) for name, p in best.named_parameters())
    with pytest.raises(TidegateError, match="cannot be taken"):
        cell.train(7)
    assert cell.train(3).step == 3  # an order that cannot be done harms nothing

    (rank,) = training_ranks()
    rank.kill()  # it may not be restarted: whoever waits is told
    with pytest.raises(TrainingError):
        cell.train(4)
    with pytest.raises(TrainingError):
        ray.get(cell.training, timeout=60)


def test_killed_rank_is_restarted_and_the_step_is_completed(cluster: None, model_path: str, tmp_path: Path) -> None:
    reports, undisturbed = in_this_process(model_path, tmp_path / "undisturbed", 4)
    cell = Cell("killed/core", model_path, tmp_path)
    for step in (1, 2):
        cell.train(step)
    cell.submit(SaveCheckpoint(2, 2))
    cell.train(3)  # after the checkpoint: must be taken again

    gate = tmp_path / "gate"
    command = train_step(4)
    micro_steps = (*command.micro_steps[:2], held_back.remote(command.micro_steps[2], str(gate)))
    answer = cell.mailbox.submit.remote(TrainStep(4, -1, 0.9, micro_steps))
    wait_until(lambda: ray.get(cell.mailbox.status.remote()).num_taken == 1)
    (rank,) = training_ranks()
    rank.kill()
    gate.touch()
    report = ray.get(answer, timeout=150)
    assert report.step == 4
    assert report.loss == pytest.approx(reports[3].loss, abs=1e-6)
    published = pull(cell.submit(Publish(4)))
    for name, tensor in undisturbed.items():
        np.testing.assert_allclose(published[name], tensor, atol=1e-7)
    cell.stop()
    assert not training_ranks()


def test_two_ranks_equal_one(cluster: None, model_path: str, tmp_path: Path) -> None:
    """A step taken whole, and one taken in parts that go out of the cell and come back."""
    reports, expected = in_this_process(model_path, tmp_path / "one", 2)
    cell = Cell("two/core", model_path, tmp_path, num_workers=2)
    refs = tuple(MicroStepRef(str(seed), ray.put(make_micro_step(seed))) for seed in seeds_of(2))
    whole = cell.train(1)
    cell.submit(Load(cell.submit(Snapshot(2))))
    assert cell.submit(Accumulate(2, 1, -1, 0.9, refs[:2])).keys == {refs[0].key, refs[1].key}
    refused = cell.submit(Update(2, 1, -1, 0.9, refs))
    assert refused.keys == {refs[0].key, refs[1].key}  # one is missing: nothing was done
    given = cell.submit(Collect(2, 1))
    assert cell.submit(Accumulate(2, 1, -1, 0.9, refs[2:])).keys == {refs[2].key}
    assert cell.submit(Absorb(2, 1, given)).keys == {ref.key for ref in refs}
    for one, two in zip(reports, [whole, cell.submit(Update(2, 1, -1, 0.9, refs))], strict=True):
        assert two.loss == pytest.approx(one.loss, abs=1e-5)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (two.num_runs, two.num_targets, two.num_tokens) == (one.num_runs, one.num_targets, one.num_tokens)
        assert two.entropy == pytest.approx(one.entropy, abs=1e-5)
    for name, tensor in pull(cell.submit(Publish(2))).items():
        np.testing.assert_allclose(tensor, expected[name], atol=2e-5)
    cell.stop()


async def test_a_satellite_shares_steps_and_dies_in_one(cluster: None, model_path: str, tmp_path: Path) -> None:
    reports, expected = in_this_process(model_path, tmp_path / "alone", 3)
    core = Cell("team/cell-0", model_path, tmp_path / "core")
    wait_until(lambda: ray.get(core.mailbox.status.remote()).num_ranks == 1)
    (core_rank,) = training_ranks()
    satellite = Cell("team/cell-1", model_path, tmp_path / "satellite", is_satellite=True, max_restarts=0)
    gates = {name: tmp_path / name for name in ("core-1", "core-2", "satellite-2")}

    def refs_of(step: int) -> list[Any]:
        first, second, third = (ray.put(make_micro_step(seed)) for seed in seeds_of(step))
        if step < 3:  # the core, which claims first, is slow
            first = held_back.remote(first, str(gates[f"core-{step}"]))
        if step == 2:
            second = held_back.remote(second, str(gates["satellite-2"]))
        return [first, second, third]

    async def micro_steps_of(group_id: str) -> list[Any]:
        return refs_of(int(group_id.removeprefix("g")))

    lost: list[str] = []
    progress: list[int] = []
    team = TrainingTeam(
        "cell-0",
        {"cell-0": core.mailbox, "cell-1": satellite.mailbox},
        micro_steps_of,
        num_ranks=1,
        timeout_s=120.0,
        lost=lambda cell_id, reason: lost.append(cell_id),
    )

    def train(step: int) -> asyncio.Task[TrainedStep | None]:
        listener = Listener(progress.append, lambda reason: None)
        return asyncio.create_task(team.train(Portion(step, -1, 0.9, (f"g{step}",), True), listener))

    team.join("cell-1")
    answer = train(1)
    await until(lambda: bool(progress) and progress[-1] == 0)
    gates["core-1"].touch()
    trained = [await asyncio.wait_for(answer, 120)]
    assert trained[0] is not None
    assert trained[0].report.extra["satellite_share"] == pytest.approx(2 / 3)

    progress.clear()
    answer = train(2)
    await until(lambda: bool(progress) and progress[-1] == 1)  # the satellite waits for its micro-step
    for process in training_ranks():
        if process != core_rank:
            process.kill()
    for gate in gates.values():
        gate.touch()
    trained.append(await asyncio.wait_for(answer, 120))
    assert lost == ["cell-1"]
    trained.append(await asyncio.wait_for(train(3), 120))
    for one, alone in zip(trained, reports, strict=True):
        assert one is not None
        assert one.report.loss == pytest.approx(alone.loss, abs=1e-5)
        assert one.report.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
        assert (one.report.num_runs, one.report.num_targets) == (alone.num_runs, alone.num_targets)
    for name, tensor in pull(core.submit(Publish(3))).items():
        np.testing.assert_allclose(tensor, expected[name], atol=2e-5)
    await team.close()
    core.stop()
    ray.kill(satellite.mailbox)
