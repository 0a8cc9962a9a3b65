from __future__ import annotations

import os

import pytest

from services.job import doctor
from services.job.doctor import Verdict


def test_a_machine_without_the_default_harness_can_run_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_HARNESS_DIR", "/nonexistent")
    finding = doctor._probe("default harness", doctor._harness, Verdict.WARN)
    assert finding.verdict is Verdict.WARN
    assert "make harness" in finding.hint


def test_a_check_that_breaks_is_a_finding_and_no_crash() -> None:
    def broken() -> str:
        raise RuntimeError("odd")

    finding = doctor._probe("odd", broken)
    assert finding.verdict is Verdict.FAIL
    assert "odd" in finding.detail


def test_a_package_that_is_missing_says_what_to_install() -> None:
    finding = doctor._distribution(("no-such-package",), "nothing")
    assert finding.verdict is Verdict.FAIL
    assert "make setup" in finding.hint


def test_noise_of_a_library_is_not_in_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    with doctor._no_stderr():
        os.write(2, b"E1129 odd\n")
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"
