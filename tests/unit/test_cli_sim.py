from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services import cli
from tests.unit.scheduler.sim.test_measured import write_job

TINY = """
name: tiny
steps: 3
pool: {num_cells: 2, slots: 4}
scheduler: {groups_per_step: 2, group_size: 4}
workload: {kind: lognormal, mean_s: 100}
"""
PLAN = ("--cells", "3", "--slots", "4", "--group-size", "4", "--groups-per-step", "2", "--steps", "3")


@pytest.fixture
def sim_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "sim.yaml"
    path.write_text(TINY)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``tidegate ARGUMENTS``."""
    monkeypatch.setattr("sys.argv", ["tidegate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def one_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_simulate_prints_a_table(monkeypatch: pytest.MonkeyPatch, sim_yaml: Path, capsys: Any) -> None:
    assert run(monkeypatch, "simulate", sim_yaml) == 0
    told = capsys.readouterr().out
    assert "for 3 steps" in told
    assert "lower bound" in told


def test_simulate_prints_one_object_and_takes_overrides(
    monkeypatch: pytest.MonkeyPatch, sim_yaml: Path, capsys: Any
) -> None:
    changes = ("--set", "steps=5", "--set", "scheduler.policy={mode: colocate}")
    assert run(monkeypatch, "simulate", sim_yaml, "--json", *changes) == 0
    found = one_object(capsys.readouterr().out)
    assert found["steps"] == 5
    assert found["hours"] >= found["lower_bound"]["hours"]


def test_simulate_draws(monkeypatch: pytest.MonkeyPatch, sim_yaml: Path, tmp_path: Path) -> None:
    picture = tmp_path / "sim.png"
    assert run(monkeypatch, "simulate", sim_yaml, "--plot", picture) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_simulate_compares_with_a_real_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    from tests.unit.scheduler.sim.helpers import config

    real = write_job(tmp_path, config(steps=3, sigma=0.4, train_per_rollout=0.05))
    assert run(monkeypatch, "simulate", "--job", tmp_path, "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert found["measured_hours"] == pytest.approx(real.hours)
    assert found["hours"] == pytest.approx(real.hours, rel=0.1)


def test_a_real_job_is_simulated_under_another_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    from tests.unit.scheduler.sim.helpers import config

    write_job(tmp_path, config(steps=3, sigma=0.4))
    options = ("--job", tmp_path, "--json", "--set", "scheduler.policy.mode=colocate")
    assert run(monkeypatch, "simulate", *options) == 0
    assert one_object(capsys.readouterr().out)["status"] == "finished"


def test_a_name_too_long_for_the_system_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "replay", "a" * 300) == 1
    assert "too long" in capsys.readouterr().err


def test_plan_recommends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "durations.csv"
    path.write_text("duration_s\n" + "\n".join(str(60 * number) for number in range(1, 20)))
    assert run(monkeypatch, "plan", "--durations", path, *PLAN) == 0
    told = capsys.readouterr().out
    assert "recommended: " in told
    assert "assumed: " in told
    assert run(monkeypatch, "plan", "--durations", path, *PLAN, "--train-per-rollout", "0.05", "--json") == 0
    found = one_object(capsys.readouterr().out)
    assert found["recommended"]["hours"] == min(row["hours"] for row in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{dir}/none.yaml",), "cannot read {dir}/none.yaml"),
        ((), "give either a configuration or --job"),
        (("{sim}", "--set", "workload.run_sigma=.inf"), "run_sigma: Input should be a finite number"),
        (("{sim}", "--set", "steps=0"), "steps: Input should be greater than or equal to 1"),
        (("{sim}", "--set", "pool.slot=4"), "unknown key; did you mean 'slots'?"),
        (("{sim}", "--set", "steps"), "is not of the form dotted.key=value"),
        (("{sim}", "--set", "pool.standalone_cells=2"), "standalone_cells must be below num_cells"),
        (("{sim}", "--set", "pool.slots=[1, 2, 3]"), "slots has 3 numbers for 2 cells"),
        (("{sim}", "--plot", "{dir}/plot.txt"), "has no suffix of a picture"),
        (("{sim}", "--plot", "{dir}/none/plot.png"), "does not exist"),
        (("{sim}", "--set", "scheduler.max_staleness_steps=0"), "max_staleness_steps=0 is below 1"),
    ],
)
def test_simulate_refuses_what_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    sim_yaml: Path,
    tmp_path: Path,
    capsys: Any,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    folder = sim_yaml.parent
    given = [text.format(dir=folder, sim=sim_yaml) for text in arguments]
    assert run(monkeypatch, "simulate", *given) == 2
    assert message.format(dir=folder) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("", "is empty"),
        ("seconds\n4\n", "no column 'duration_s'"),
        ("duration_s\n4\n-1\n", "line 3: '-1' is not a duration"),
        ("duration_s\n4\n\nfour\n", "line 4: 'four' is not a duration"),
    ],
)
def test_plan_refuses_bad_durations_before_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, text: str | None, message: str
) -> None:
    path = tmp_path / "durations.csv"
    if text is not None:
        path.write_text(text)
    assert run(monkeypatch, "plan", "--durations", path, *PLAN) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
