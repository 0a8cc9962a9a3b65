from pathlib import Path

import pytest

from services.common.config import load_config
from services.common.errors import ConfigError
from services.job.config import JobConfig, load_job_config

MINIMAL = "name: small\ntasks: {train: tasks}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_overrides_win_over_the_file_and_are_typed(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "trainer: {steps: 3}\n")
    overrides = [
        "trainer.steps=7",
        "trainer.optimizer.learning_rate=2e-3",
        "rollout.harness.command=[sh, -c, 'exit 0']",
    ]
    config = load_config(JobConfig, path, overrides)
    assert config.trainer.steps == 7
    assert config.trainer.optimizer.learning_rate == 2e-3
    assert config.rollout.harness.command == ("sh", "-c", "exit 0")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (MINIMAL + "trainr: {steps: 3}\n", [], "did you mean 'trainer'"),
        (MINIMAL, ["trainer.stepz=3"], "did you mean 'steps'"),
        (MINIMAL, ["trainer.steps"], "dotted.key=value"),
        (MINIMAL, ["trainer.steps=many"], "trainer.steps"),
        (MINIMAL, ["name.x=3"], "'name' holds a value"),
        (MINIMAL, ["name=Not A Name"], "lower-case"),
        ("name: [", [], "not YAML"),
        ("- 1\n", [], "mapping"),
        ("name: small\n", [], "tasks: Field required"),
        (MINIMAL, ["trainer.tune.kind=qlora"], "trainer.tune"),
        (MINIMAL, ["rollout.harness.command=python3"], "rollout.harness.command: must be a list"),
        (MINIMAL, ["rollout.sandbox=none"], "rollout.sandbox: is a section; set its keys"),
    ],
)
def test_a_wrong_configuration_names_the_key(tmp_path: Path, text: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(JobConfig, write(tmp_path, text), overrides)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(JobConfig, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("rollout.sampling.max_tokens=4096", "leaves no room"),
        ("rollout.sampling.temperature=0", "greedy"),
        ("proxy.port=7000 scheduler.grpc_port=7000", "both 7000"),
        ("eval.every=2", "tasks.heldout"),
        ("proxy.host=0.0.0.0", "admin_token"),
        (
            "scheduler.policy.mode=async scheduler.policy.train_cells=2 trainer.satellites=true",
            "no cell is left to serve",
        ),
        (
            "scheduler.policy.mode=async scheduler.policy.train_cells=2 rollout.cells.num_cells=3",
            "1 of the cells can train",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(tmp_path: Path, overrides: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_job_config(write(tmp_path, MINIMAL), overrides.split())


@pytest.mark.parametrize("key", ["scheduler.grpc_host", "rollout.cells.grpc_host"])
def test_a_public_grpc_server_with_a_default_token_is_refused(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=key):
        load_job_config(path, [f"{key}=0.0.0.0", "scheduler.grpc_token=changeme"])
    load_job_config(path, [f"{key}=0.0.0.0", "scheduler.grpc_token=b7e0c1f2a9"])
    load_job_config(path, [f"{key}=0.0.0.0"])


def test_an_empty_section_takes_overrides(tmp_path: Path) -> None:
    assert load_config(JobConfig, write(tmp_path, MINIMAL + "trainer:\n"), ["trainer.steps=7"]).trainer.steps == 7


def test_an_unknown_key_of_a_choice_names_its_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        load_config(JobConfig, write(tmp_path, MINIMAL), ["trainer.tune={kind: lora, rnk: 4}"])


def test_a_key_of_another_choice_is_not_its_own_neighbour(tmp_path: Path) -> None:
    overrides = ["scheduler.policy.mode=colocate", "scheduler.policy.train_cells=2"]
    with pytest.raises(ConfigError, match="train_cells: unknown key") as refused:
        load_config(JobConfig, write(tmp_path, MINIMAL), overrides)
    assert "did you mean" not in str(refused.value)


def test_a_key_that_resembles_none_has_no_neighbour(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_checkpointing: unknown key") as refused:
        load_config(JobConfig, write(tmp_path, MINIMAL), ["trainer.gradient_checkpointing=true"])
    assert "did you mean" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(JobConfig, tmp_path / "job.yaml")
