"""What is cut short does not look installed, and what is installed is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import install_harnesses as install


def test_what_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "codex"
    with pytest.raises(FileExistsError), install._Fresh(target, "codex@1") as made:
        made.mkdir()  # it is there
    assert list(tmp_path.iterdir()) == []


def test_another_version_takes_the_place_of_the_old_one_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "codex"
    for pin in ("codex@1", "codex@2"):
        with install._Fresh(target, pin) as made:
            (made / pin).touch()
    with pytest.raises(RuntimeError), install._Fresh(target, "codex@3"):
        raise RuntimeError("npm failed")
    assert install._is_installed(target, "codex@2")
    assert sorted(path.name for path in target.iterdir()) == [".installed", "codex@2"]


def test_what_is_there_is_not_installed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = {name: harness.pin for name, harness in install.NPM_HARNESSES.items()}
    pins["node"] = f"{install.NODE_PACKAGE}=={install.NODE_VERSION}"
    for name, pin in {**pins, "mini": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".installed").write_text(pin)
    assert install.main(["--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_a_failure_is_one_error_with_the_command_and_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node.js that is no program cannot install anything."""
    (tmp_path / "node" / "bin").mkdir(parents=True)
    (tmp_path / "node" / ".installed").write_text(f"{install.NODE_PACKAGE}=={install.NODE_VERSION}")
    node = tmp_path / "node" / "bin" / "node"
    node.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 3\n")
    node.chmod(0o755)
    assert install.main(["codex", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "npm-cli.js install" in said
    assert "exit code 3" in said
    assert "no space left" in said
    assert not (tmp_path / "codex").exists()


def test_an_unknown_harness_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        install.main(["codecs"])
    assert "no harness codecs; there are mini, pi" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert install.main(["pi", "--dir", str(tmp_path / "file" / "harnesses")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(tmp_path / "file") in said
