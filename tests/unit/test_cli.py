from __future__ import annotations

from pathlib import Path

import pytest

from services import cli
from services.common.errors import NotFoundError


def test_an_unknown_outcome_is_refused_and_names_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="no outcome 'crash'") as error:
        cli.runs_list(outcome="crash")
    assert "harness_crash" in error.value.hint
    assert "unfinished" in error.value.hint


def test_an_error_is_not_broken_into_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / ("long-name-" * 20) / "job.yaml"
    monkeypatch.setattr("sys.argv", ["tidegate", "train", str(missing)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"error: cannot read {missing}: No such file or directory." in capsys.readouterr().err
