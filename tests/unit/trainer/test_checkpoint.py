"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer import checkpoint as checkpoints
from services.trainer.checkpoint import Checkpoint


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


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        checkpoints.save_checkpoint(tmp_path, make(step))
        if step == 2:
            checkpoints.mark_best(tmp_path, 2)
        checkpoints.prune(tmp_path, keep=2)
    assert steps(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    checkpoints.mark_best(tmp_path, 5)
    checkpoints.prune(tmp_path, keep=2)
    assert steps(tmp_path) == ["step-000004", "step-000005"]
    assert checkpoints.best_step(tmp_path) == 5


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
