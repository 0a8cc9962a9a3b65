"""``tidegate longctx`` as a user types it, on small models that are made here."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from services import cli
from services.common.errors import TidegateError
from services.trainer.tree import longload
from services.trajectory.export import ExportFilter
from services.trajectory.exporting import export_runs
from services.trajectory.files import Format
from services.trajectory.source import StoreSource
from tests.unit.trainer.tree.models import make_model
from tests.unit.trajectory.stored_job import make_job

SMALL = ("--prompt-tokens", "150", "--response-tokens", "20", "--group", "3", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models: attention, hybrid, one with its configuration only, one that no adapter serves."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3_5"):
        make_model(name, torch.float32, max_position_embeddings=1024).save_pretrained(folder / name)
    (folder / "paper").mkdir()
    shutil.copy(folder / "qwen3_5" / "config.json", folder / "paper")
    (folder / "empty").mkdir()
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "nonsense").mkdir()
    (folder / "nonsense" / "config.json").write_text('{"model_type": "no-such-thing"}')
    return folder


@pytest.fixture(autouse=True)
def _quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longload, "_MEASURED_SIZES", (16, 64))


def longctx(model: Path | str, *arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["longctx", "--model", str(model), *map(str, arguments)])


def done(model: Path | str, *arguments: object) -> str:
    result = longctx(model, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def answer(model: Path | str, *arguments: object) -> dict[str, Any]:
    found = json.loads(done(model, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_configuration_is_enough_to_plan(models: Path) -> None:
    told = done(models / "paper" / "config.json", *SMALL)
    assert "208 unique, 510 as rows of their own" not in told
    assert "207 unique, 507 as rows of their own; longest path 169; 60 targets of 3 runs" in told
    assert "walk, prefix gradient exact" in told
    assert "F (forwards of the unique tokens)" in told
    assert "the step" not in told


def test_a_model_of_attention_only_is_packed(models: Path) -> None:
    assert answer(models / "qwen3", *SMALL)["plan"]["mode"] == "pack"
    walked = answer(models / "qwen3", *SMALL, "--mode", "walk", "--chunk-tokens", 32, "--recompute", "chunk")
    assert walked["plan"]["mode"] == "walk"
    assert walked["plan"]["chunk_tokens"] <= 32
    assert walked["plan"]["num_kept_graphs"] == 0


def test_detached_prompts_take_less(models: Path) -> None:
    exact = answer(models / "paper", *SMALL, "--chunk-tokens", 64)["predicted"]
    detached = answer(models / "paper", *SMALL, "--chunk-tokens", 64, "--prefix-gradient", "detached")["predicted"]
    assert detached["forwards"] < exact["forwards"]
    assert detached["parts"]["gradients"] == 0 < exact["parts"]["gradients"]


def test_ranks_share_states_and_weights_on_paper(models: Path) -> None:
    alone = answer(models / "paper", *SMALL, "--device", "cuda")["predicted"]
    four = answer(models / "paper", *SMALL, "--ranks", 4, "--weight-ranks", 2, "--lora-rank", 8, "--weight-bits", 4.5)
    held = four["predicted"]["always_held"]
    assert held["weights"] == pytest.approx(alone["always_held"]["weights"] * 4.5 / 32 / 2)
    assert held["optimizer"] < alone["always_held"]["optimizer"]
    assert four["ranks"] == 4


def test_the_longest_prompt_that_fits_fits(models: Path) -> None:
    budget = ("--memory", "3MB", "--mode", "walk", "--find-longest")
    longest = answer(models / "qwen3", *SMALL, *budget)["longest"]["prompt_tokens"]
    assert longest > 150
    again = answer(models / "qwen3", *SMALL, *budget, "--prompt-tokens", longest)
    assert again["predicted"]["live_bytes"] <= 3e6


def test_positions_beyond_the_models_are_a_warning(models: Path) -> None:
    told = done(models / "paper", *SMALL, "--prompt-tokens", 2000)
    assert "warning: the longest path has 2,019 positions, the model was made for 1,024" in told


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_step_is_run_and_measured(models: Path, name: str) -> None:
    found = answer(models / name, *SMALL, "--mode", "walk", "--chunk-tokens", 64, "--run")
    measured = found["measured"]
    assert measured["live_bytes"] > found["predicted"]["always_held"]["weights"]
    assert measured["grad_norm"] > 0
    assert measured["seconds"] > 0
    packed = ("--mode", "pack") if name == "qwen3" else ("--mode", "walk", "--chunk-tokens", 512)
    other = answer(models / name, *SMALL, *packed, "--run")["measured"]
    assert other["loss"] == pytest.approx(measured["loss"], rel=1e-4)
    assert other["grad_norm"] == pytest.approx(measured["grad_norm"], rel=1e-4)


def test_a_step_prints_what_was_predicted_beside_what_was_measured(models: Path) -> None:
    told = done(models / "qwen3", *SMALL, "--run", "--lora-rank", 2, "--measure")
    assert "live tensors, no optimizer" in told
    assert "nothing was updated" in told
    assert "(measured)" in told


def test_pages_that_memory_has_no_room_for_go_to_a_folder(models: Path, tmp_path: Path) -> None:
    options = ("--prompt-tokens", 1500, "--chunk-tokens", 64, "--mode", "walk", "--run")
    budget = ("--memory", "1.5MB", "--page-dir", tmp_path, "--page-bytes", "10MB")
    found = answer(models / "qwen3", *SMALL, *options, *budget)
    assert found["measured"]["disk_bytes"] > 0
    assert found["measured"]["disk_bytes"] <= 10e6
    assert list(tmp_path.iterdir()) == []


def test_a_finished_step_leaves_only_its_budget_in_the_folder(models: Path, tmp_path: Path) -> None:
    options = (*SMALL, "--chunk-tokens", 64, "--run", "--resume-dir", tmp_path / "new")
    first = answer(models / "qwen3_5", *options)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["longctx.json"]
    again = answer(models / "qwen3_5", *options)
    assert again["budget"] == first["budget"]  # though other memory is free now
    assert again["measured"]["loss"] == first["measured"]["loss"]


def test_exported_runs_are_trained(models: Path, tmp_path: Path) -> None:
    asyncio.run(make_job(tmp_path / "job"))
    for kind in (Format.JSONL, Format.PARQUET):
        export_runs(StoreSource(tmp_path / "job"), ExportFilter(selected_only=True), tmp_path / f"runs.{kind}", kind)
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    vocabulary = 1 + max(max(row["token_ids"]) for row in rows)
    make_model("qwen3", torch.float32, vocab_size=vocabulary).save_pretrained(tmp_path / "model")
    options = ("--dtype", "float32", "--device", "cpu", "--data")
    found = answer(tmp_path / "model", *options, tmp_path / "runs.jsonl", "--run")
    assert found["tokens"]["targets"] == sum(sum(row["target_mask"]) for row in rows)
    assert found["tokens"]["unique"] < sum(len(row["token_ids"]) for row in rows)
    assert found["measured"]["grad_norm"] > 0
    packed = answer(tmp_path / "model", *options, tmp_path / "runs.parquet", "--run")
    assert packed["measured"]["loss"] == found["measured"]["loss"]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("none", (), "no model at {dir}/none"),
        ("empty", (), "has no config.json"),
        ("gpt2", (), "no state adapter for the architecture 'gpt2'"),
        ("nonsense", (), "cannot be understood"),
        ("paper", ("--run",), "has no *.safetensors"),
        ("qwen3", ("--memory", "lots"), "'lots' is no size"),
        ("qwen3", ("--memory", "100kB"), "no plan fits"),
        ("qwen3", ("--page-dir", "/no/such/folder"), "no folder /no/such/folder"),
        ("qwen3", ("--page-bytes", "1MB"), "--page-bytes are those of files in a folder"),
        ("qwen3", ("--page-dir", "{dir}", "--page-bytes", "900TB"), "free, not 900 TB"),
        ("qwen3", ("--host-memory", "1GB", "--device", "cpu"), "on a CPU the device's memory is the host's"),
        ("qwen3", ("--ranks", "2", "--run"), "are for plans on paper"),
        ("qwen3", ("--prompt-tokens", "100000000000"), "more than are made up"),
        ("qwen3", ("--group", "1000000"), "more than are made up"),
        ("qwen3", ("--resume-dir", "{dir}/new"), "is for a step that runs"),
        ("qwen3", ("--resume-dir", "{dir}/new", "--run", "--measure"), "measured costs differ"),
        (
            "qwen3",
            ("--resume-dir", "{dir}/new", "--run", "--recompute", "keep"),
            "cannot be saved while graphs are kept",
        ),
        ("qwen3", ("--resume-dir", "{dir}/new", "--run", "--mode", "pack"), "one pass cannot be saved"),
        ("qwen3", ("--find-longest",), "without a limit on memory"),
        ("qwen3_5", ("--mode", "pack"), "mode pack does not serve a model whose layers are not all attention."),
        ("qwen3", ("--data", "{dir}/none.jsonl"), "cannot read {dir}/none.jsonl"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(
    models: Path, model: str, arguments: tuple[str, ...], message: str
) -> None:
    here = {"dir": str(models.resolve())}
    result = longctx(models / model, *(argument.format(**here) for argument in arguments))
    assert isinstance(result.exception, TidegateError), (result.output, result.exception)
    assert result.exception.exit_code != 0
    assert message.format(**here) in str(result.exception)
    assert not (models / "new").exists()


@pytest.mark.parametrize("option", ["--prompt-tokens", "--group", "--chunk-tokens", "--ranks", "--lora-rank"])
def test_numbers_below_one_are_refused(models: Path, option: str) -> None:
    assert longctx(models / "qwen3", option, "-3").exit_code == 2
    assert longctx(models / "qwen3", option, "0").exit_code == 2


def test_a_budget_that_is_too_small_says_what_would_fit(models: Path) -> None:
    result = longctx(models / "qwen3", *SMALL, "--mode", "walk", "--memory", "3MB", "--prompt-tokens", 100_000)
    assert "prompt tokens would fit" in str(result.exception)
