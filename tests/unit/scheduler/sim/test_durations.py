from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.scheduler.sim.config import CsvWorkload, load_sim_config
from services.scheduler.sim.durations import read_durations, rows_of


def write(folder: Path, text: str) -> Path:
    path = folder / "durations.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_durations_are_read_by_task(tmp_path: Path) -> None:
    path = write(tmp_path, "task,duration_s\na,1\nb,2.5\na,3\n")
    assert read_durations(path) == [[1.0, 2.5, 3.0]]
    assert read_durations(path, task_column="task") == [[1.0, 3.0], [2.5]]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    assert read_durations(write(tmp_path, "\ufeffduration_s\n7\n")) == [[7.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("duration_s\n", "no line behind its header"),
        ("seconds,task\n1,a\n", "no column 'duration_s'; its first line names seconds, task"),
        ("duration_s\n1\n-2\n", "line 3: '-2' is not a duration"),
        ("duration_s\n1\n2\nlong\n", "line 4: 'long' is not a duration"),
        ("duration_s\nnan\n", "line 2: 'nan' is not a duration"),
        ("task,duration_s\na\n", "line 2: None is not a duration"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_durations(write(tmp_path, text))
    assert error.value.hint


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_durations(tmp_path / "none.csv")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="is not a CSV file"):
        read_durations(path)


def test_a_path_is_relative_to_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, "duration_s\n5\n")
    path = tmp_path / "sim.yaml"
    path.write_text("workload: {kind: csv, path: durations.csv}\n")
    config = load_sim_config(path, [])
    assert isinstance(config.workload, CsvWorkload)
    assert rows_of(config.workload) == [[5.0]]


@pytest.mark.parametrize("path", sorted(Path("examples/sim").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_load(path: Path) -> None:
    config = load_sim_config(path, [])
    assert config.name == path.stem
    rows_of(config.workload)
