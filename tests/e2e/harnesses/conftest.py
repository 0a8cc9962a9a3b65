"""Prints what each harness did, as rows for docs/harnesses.md."""

from __future__ import annotations

import pytest

from tests.e2e.harnesses.story import HEADER, REPORT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section("harnesses", sep="-")
        terminalreporter.write_line(HEADER)
        for told in REPORT:
            terminalreporter.write_line(str(told))
