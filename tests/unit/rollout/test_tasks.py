"""Task folders are checked before anything starts; the example tasks are what their script makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from services.common.errors import ConfigError
from services.rollout.tasks import load_task, load_task_set

PROJECT = Path(__file__).resolve().parents[3]


def write_task(folder: Path, toml: str = "", instruction: str = "Do it.") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text(instruction)
    (folder / "task.toml").write_text(toml)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


def test_a_task_is_read_as_written(tmp_path: Path) -> None:
    toml = (
        'version = "1.0"\n[metadata]\ndifficulty = "easy"\ntags = ["a", "b"]\n[agent]\ntimeout_sec = 30\n'
        "[verifier]\ntimeout_sec = 2.5\n[environment]\nmemory_mb = 64\nbuild_timeout_sec = 9.0\n"
    )
    task = load_task(write_task(tmp_path / "greet", toml, "  Say hello.\n\n"))
    assert (task.name, task.instruction) == ("greet", "Say hello.")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (30.0, 2.5)
    assert task.memory_bytes == 64 << 20
    assert task.metadata == {"difficulty": "easy", "tags": "a, b"}
    assert task.path == str(tmp_path / "greet")


def test_an_empty_toml_takes_the_defaults(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "greet"))
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.memory_bytes) == (600.0, 600.0, 2048 << 20)


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_task(tmp_path / "greet")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match="is missing") as error:
        load_task(folder)
    assert str(folder / name) in error.value.message
    assert error.value.hint


def test_a_verifier_is_needed_only_where_the_job_scores_by_it(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "greet")
    (folder / "tests" / "test.sh").unlink()
    assert load_task_set(tmp_path, needs_verifier=False)[0].name == "greet"
    with pytest.raises(ConfigError, match=r"test\.sh"):
        load_task_set(tmp_path)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ('[agent]\ntimeout_sec = "long"', "[agent].timeout_sec"),
        ("[agent]\ntimeout_sec = true", "[agent].timeout_sec"),
        ("[verifier]\ntimeout_sec = 0", "[verifier].timeout_sec"),
        ("[agent]\ntimeout_sec = inf", "[agent].timeout_sec"),
        ("[environment]\nmemory_mb = [1]", "[environment].memory_mb"),
        ('agent = "me"', "'agent'"),
        ("[agent\n", "not valid TOML"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, toml: str, named: str) -> None:
    folder = write_task(tmp_path / "greet", toml)
    with pytest.raises(ConfigError) as error:
        load_task(folder)
    assert named in error.value.message
    assert str(folder / "task.toml") in error.value.message


def test_an_empty_instruction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        load_task(write_task(tmp_path / "greet", instruction=" \n"))


def test_a_set_is_sorted_and_skips_what_is_no_task(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_task(tmp_path / name)
    (tmp_path / "README.md").write_text("tasks")
    (tmp_path / ".cache").mkdir()
    assert [task.name for task in load_task_set(tmp_path)] == ["a", "b", "c"]


def test_a_set_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no task"):
        load_task_set(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_task_set(tmp_path / "nowhere")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tasks", PROJECT / "scripts" / "make_tasks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_task_in_place_of_a_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a task, not a folder of tasks") as error:
        load_task_set(write_task(tmp_path / "greet"))
    assert str(tmp_path) in error.value.hint


def test_example_tasks_are_what_their_script_makes() -> None:
    assert load_script().is_fresh(PROJECT / "examples" / "tasks"), "run `make tasks`"


def test_example_tasks_are_enough_and_held_out_ones_differ() -> None:
    train = load_task_set(PROJECT / "examples" / "tasks" / "train")
    heldout = load_task_set(PROJECT / "examples" / "tasks" / "heldout")
    assert len(train) >= 24
    assert len(heldout) >= 8
    instructions = [task.instruction for task in (*train, *heldout)]
    assert len(set(instructions)) == len(instructions)
    assert all(Path(task.path, "solution", "solve.sh").is_file() for task in (*train, *heldout))
