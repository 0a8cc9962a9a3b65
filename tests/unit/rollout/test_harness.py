"""From a harness configuration to a command; a harness that is not there is told before work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.common.errors import ConfigError, MachineError
from services.rollout.config import HarnessConfig
from services.rollout.harness import HarnessPlaces, check_harness, fill, harness_dir, plan_harness

PLACES = HarnessPlaces(
    instruction="Write {api_key} to a file.",
    instruction_file="/run/tidegate/instruction.md",
    workspace="/app",
    logs_dir="/logs/agent",
    config_dir="/config",
    base_url="http://127.0.0.1:7070/job/run/k",
    api_key="k",
    model="policy",
)


def make_harness(folder: Path) -> Path:
    program = folder / "mini" / "bin" / "mini"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return folder / "mini"


def test_values_are_not_searched_for_placeholders() -> None:
    assert fill("{a}{b}{c} {}", {"a": "{b}", "b": "x"}) == "{b}x{c} {}"


def test_placeholders_are_replaced_in_command_and_environment() -> None:
    config = HarnessConfig(
        command=("agent", "--do={instruction}", '{"json": 1}', "{config_dir}/c"), env={"URL": "{base_url}/v1"}
    )
    plan = plan_harness(config, PLACES)
    assert plan.command == ("agent", "--do=Write {api_key} to a file.", '{"json": 1}', "/config/c")
    assert plan.env == {"URL": "http://127.0.0.1:7070/job/run/k/v1"}
    assert (plan.config_dir, plan.readonly) == ("", ())


def test_the_default_is_mini_swe_agent_out_of_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_harness(tmp_path)
    monkeypatch.setenv("TIDEGATE_HARNESS_DIR", str(tmp_path))
    plan = plan_harness(HarnessConfig(env={"EXTRA": "{model}"}), PLACES)
    assert plan.command[0] == f"{folder}/bin/mini"
    assert "--model=openai/policy" in plan.command
    assert "--task=Write {api_key} to a file." in plan.command
    assert plan.env["OPENAI_API_BASE"] == "http://127.0.0.1:7070/job/run/k/v1"
    assert plan.env["OPENAI_API_KEY"] == "k"
    assert plan.env["EXTRA"] == "policy"
    assert str(folder) in [mount.source for mount in plan.readonly]
    assert Path(plan.config_dir, "config.yaml").is_file()


def test_a_python_outside_the_system_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_harness(tmp_path / "harness")
    python = tmp_path / "python3.11" / "bin" / "python3.11"
    python.parent.mkdir(parents=True)
    python.touch()
    (folder / "bin" / "python").symlink_to(python)
    monkeypatch.setenv("TIDEGATE_HARNESS_DIR", str(tmp_path / "harness"))
    plan = plan_harness(HarnessConfig(), PLACES)
    assert [mount.source for mount in plan.readonly] == [str(folder), str(tmp_path / "python3.11")]


def test_a_missing_default_harness_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HARNESS_DIR", str(tmp_path))
    with pytest.raises(MachineError, match="make harness"):
        check_harness(HarnessConfig())
    make_harness(tmp_path)
    check_harness(HarnessConfig())
    assert harness_dir() == tmp_path / "mini"


def test_a_missing_program_or_path_is_told(tmp_path: Path) -> None:
    check_harness(HarnessConfig(command=("sh", "-c", "true")))
    with pytest.raises(MachineError, match="no-such-agent"):
        check_harness(HarnessConfig(command=("no-such-agent",)))
    with pytest.raises(ConfigError, match="config_dir"):
        check_harness(HarnessConfig(command=("sh",), config_dir=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="readonly_paths"):
        check_harness(HarnessConfig(command=("sh",), readonly_paths=("relative",)))


def test_the_project_config_makes_one_call_and_hides_the_endpoint_from_commands() -> None:
    folder = Path(__file__).resolve().parents[3] / "examples" / "harness" / "mini-swe-agent"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["agent"]["step_limit"] == 1
    assert config["agent"]["cost_limit"] == 0
    assert config["model"]["model_class"] == "litellm_textbased"
    assert config["environment"]["env"] == {"OPENAI_API_BASE": "", "OPENAI_API_KEY": ""}
