"""Unit tests start no cluster."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("unit tests must not start Ray; put this test into tests/integration")

    monkeypatch.setattr(ray, "init", refuse)
