import re
from pathlib import Path

import prometheus_client
import pytest

from services.common.metrics import SERIES, metric

SERVICES = Path(__file__).resolve().parents[3] / "services"


def test_a_series_is_exported_with_its_labels() -> None:
    metric("tidegate_runs_total").inc(2, job="one", outcome="finished")
    metric("tidegate_runs_total").inc(0, job="one", outcome="cancelled")
    metric("tidegate_step").set(7, job="one")
    metric("tidegate_call_seconds").observe(0.03, job="one")
    text = prometheus_client.generate_latest().decode()
    assert 'tidegate_runs_total{job="one",outcome="finished"} 2.0' in text
    assert "cancelled" not in text
    assert 'tidegate_step{job="one"} 7.0' in text
    assert 'tidegate_call_seconds_bucket{job="one",le="0.05"} 1.0' in text


def test_an_undeclared_series_is_refused() -> None:
    with pytest.raises(KeyError):
        metric("tidegate_unknown_total")


def test_every_declared_series_is_used_and_every_used_one_declared() -> None:
    used = set()
    for path in SERVICES.rglob("*.py"):
        used |= set(re.findall(r'(?:metric|_count_up_to|_?count)\(\s*"(tidegate_[a-z_]+)"', path.read_text()))
    assert used == set(SERIES)


@pytest.mark.parametrize(("name", "series"), SERIES.items())
def test_names_tell_kind_and_unit(name: str, series: object) -> None:
    kind = SERIES[name].kind
    assert name.endswith("_total") is (kind == "counter")
    if kind == "histogram":
        assert name.endswith("_seconds")
        assert SERIES[name].buckets
