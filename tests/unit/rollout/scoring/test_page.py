"""What docs/scoring.md shows can be used as it stands there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.rollout.config import RolloutConfig
from services.rollout.scoring.base import Score

PROJECT = Path(__file__).resolve().parents[4]
PAGE = (PROJECT / "docs" / "scoring.md").read_text(encoding="utf-8")
EXAMPLE = PROJECT / "examples" / "scoring" / "vowels.py"


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_each_configuration_is_valid(block: str) -> None:
    RolloutConfig.model_validate(yaml.safe_load(block))


def test_the_page_shows_a_configuration_of_each_kind_and_the_example_as_it_is() -> None:
    assert set(re.findall(r"^  kind: (\w+)$", PAGE, re.MULTILINE)) == {"harbor", "function", "judge"}
    [shown] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert EXAMPLE.read_text(encoding="utf-8").endswith(shown)


def test_the_example_counts_vowels(tmp_path: Path) -> None:
    score: Any = runpy.run_path(str(EXAMPLE))["score"]
    assert score(None, tmp_path) == Score(0.0, True, details={"num_characters": 0})
    (tmp_path / "answer.txt").write_text("aebc")
    assert score(None, tmp_path) == Score(0.5, True, details={"num_characters": 4})
    (tmp_path / "answer.txt").write_bytes(b"\xff")
    assert not score(None, tmp_path).valid
