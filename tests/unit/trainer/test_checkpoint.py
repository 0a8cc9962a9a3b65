"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import TrainingError
from services.trainer import checkpoint as checkpoints
from services.trainer.checkpoint import Best, Checkpoint


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(2, generator=generator)}
    return Checkpoint(step, step - 1, tensors, {"state": {0: {"step": torch.tensor(float(step))}}}, {"torch": step})


def steps(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.list_checkpoints(folder)]


def test_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = make(3)
    assert checkpoints.save_checkpoint(tmp_path, saved).name == "step-000003"
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.version, loaded.random) == (3, 2, {"torch": 3})
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())
    assert loaded.optimizer["state"][0]["step"] == 3.0


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoints.load_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "no_meta", "half_meta", "no_optimizer"])
def test_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save_checkpoint(tmp_path, make(1))
    path = checkpoints.save_checkpoint(tmp_path, make(2))
    tensors = path / "trainable.safetensors"
    content = bytearray(tensors.read_bytes())
    if damage == "truncate":
        tensors.write_bytes(content[:-5])
    elif damage == "flip":
        content[-3] ^= 1
        tensors.write_bytes(content)
    elif damage == "no_meta":
        (path / "meta.json").unlink()
    elif damage == "half_meta":
        (path / "meta.json").write_text('{"step": 2, "ver')
    else:
        (path / "optimizer.pt").unlink()
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert "damaged" in caplog.text


def test_interrupted_save_leaves_the_older_one_and_no_half_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save_checkpoint(tmp_path, make(1))

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            checkpoints.save_checkpoint(tmp_path, make(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    killed = tmp_path / ".step-000002-abc.tmp"
    killed.mkdir()
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    checkpoints.prune(tmp_path, keep=2)
    assert not killed.exists()


def save(folder: Path, step: int, *, export: bool = True) -> Path:
    path = checkpoints.save_checkpoint(folder, make(step))
    if export:
        (path / checkpoints.EXPORT).mkdir()
        (path / checkpoints.EXPORT / "config.json").write_text(str(step))
    return path


def exported(folder: Path) -> list[str]:
    return [path.name for path in checkpoints.list_checkpoints(folder) if (path / checkpoints.EXPORT).exists()]


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
        if step == 2:
            checkpoints.mark_best(tmp_path, Best(2, 0.5))
        checkpoints.prune(tmp_path, keep=2)
    assert steps(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    checkpoints.mark_best(tmp_path, Best(5, 0.6))
    checkpoints.prune(tmp_path, keep=2)
    assert steps(tmp_path) == ["step-000004", "step-000005"]


def test_exports_of_the_best_the_newest_and_those_that_wait_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    checkpoints.mark_best(tmp_path, Best(1, 0.5))
    checkpoints.prune(tmp_path, keep=3, kept_steps=(2,))
    assert steps(tmp_path) == [f"step-00000{step}" for step in (1, 2, 4, 5, 6)]
    assert exported(tmp_path) == [f"step-00000{step}" for step in (1, 2, 6)]


def test_best_is_a_link_to_the_export_and_moves_in_one_piece(tmp_path: Path) -> None:
    assert checkpoints.best_of(tmp_path) is None
    for step, reward_mean in ((1, 0.5), (2, 0.75)):
        save(tmp_path, step)
        checkpoints.mark_best(tmp_path, Best(step, reward_mean))
        assert checkpoints.best_of(tmp_path) == Best(step, reward_mean)
        assert (tmp_path / "best" / "config.json").read_text() == str(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-000001", "step-000002"]
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert checkpoints.best_of(moved) == Best(2, 0.75)
    assert (moved / "best" / "config.json").exists()


def test_a_checkpoint_without_an_export_is_not_marked(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoints.mark_best(tmp_path, Best(1, 0.5))
    save(tmp_path, 2, export=False)
    for step in (2, 3):
        with pytest.raises(TrainingError, match="no export"):
            checkpoints.mark_best(tmp_path, Best(step, 0.6))
    assert checkpoints.best_of(tmp_path) == Best(1, 0.5)


def test_what_an_interrupted_mark_or_export_left_behind_is_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / ".best-abc.tmp").symlink_to("step-000001/hugging-face")
    (path / ".hugging-face-abc.tmp").mkdir()
    (path / ".best.json.tmp").write_text("{")
    checkpoints.prune(tmp_path, keep=1)
    assert exported(tmp_path) == ["step-000001"]
    assert not [*tmp_path.glob(".*"), *path.glob(".*")]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints.save_checkpoint(tmp_path, make(1))
    path = checkpoints.save_checkpoint(tmp_path, Checkpoint(1, 7, {"a": torch.zeros(1)}, {}, {}))
    assert json.loads((path / "meta.json").read_text())["version"] == 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def test_export_loads_in_hugging_face_and_replaces_the_older_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    source = tmp_path / "source"
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    target = tmp_path / "best"
    for factor in (1.0, 2.0):
        weights = [(name, tensor.detach() * factor) for name, tensor in model.named_parameters()]
        checkpoints.export_hugging_face(target, source, weights, torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), (tensor * 2).bfloat16())
    assert (target / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "source"]
    shutil.rmtree(target)
