from __future__ import annotations

from pathlib import Path

import pytest

from services import cli


def test_an_error_is_not_broken_into_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / ("long-name-" * 20) / "job.yaml"
    monkeypatch.setattr("sys.argv", ["tidegate", "train", str(missing)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"error: cannot read {missing}: No such file or directory." in capsys.readouterr().err
