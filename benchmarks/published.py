"""What was published of QwenGyre (arXiv 2609.33848), and how its rows are read here.

The summaries that these figures come from give ratios, not the parameters behind them: group size, groups a step,
slots, timeouts and the async split were not published, nor what tells the rows of the ablation apart beyond the words
quoted here. The reading below is ours; ``docs/elastic.md`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Relation:
    """``row`` takes ``ratio`` times as long as ``base``: first 12 steps, 122B, NL2RepoBench."""

    row: str
    base: str
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.row}/{self.base}"


RELATIONS = (
    Relation("E1", "E0", 1.109),
    Relation("E2", "E0", 16.47 / 16.12),
    Relation("C2", "E0", 1.19),
    Relation("A3", "E1", 1.24),
    Relation("C1", "C0", 1 - 0.029),
    Relation("C2", "C1", 1 - 0.148),
    Relation("C3", "C2", 1 + 0.076),
    Relation("A1", "A0", 1 + 0.077),
    Relation("A2", "A0", 1 + 0.299),
    Relation("A3", "A1", 1 - 0.116),
)

E0_HOURS = 16.12
RUN_MEAN_HOURS = 1.93
SLOWEST_OF_GROUP_MEAN_HOURS = 2.96

_TWO_STEPS = {"scheduler.steps_per_burst": 2, "scheduler.carry_over_steps": 1.0}
_ONE_STEP = {"scheduler.steps_per_burst": 1, "scheduler.carry_over_steps": 1.5}
"""Both have mean staleness phi + (mu - 1)/2 = 1.5."""


def policy(mode: str, *, streaming: bool, **more: Any) -> dict[str, Any]:
    """The change of a configuration that sets its policy."""
    return {"scheduler.policy": {"mode": mode, "streaming": streaming, **more}}


def rows() -> dict[str, dict[str, Any]]:
    """The rows of the ablation as changes of a configuration: dotted keys and values.

    Async rows are read as splits of the 8 cells: 4 train in A0 (the best of them), 5 in A1, 2 in A2, and A3 is A1's
    split with streaming. E2's cells are twice as large: ``scale`` doubles.
    """
    return {
        "A0": {**_TWO_STEPS, **policy("async", streaming=False, train_cells=4)},
        "A1": {**_TWO_STEPS, **policy("async", streaming=False, train_cells=5)},
        "A2": {**_TWO_STEPS, **policy("async", streaming=False, train_cells=2)},
        "A3": {**_ONE_STEP, **policy("async", streaming=True, train_cells=5)},
        "C0": {**_ONE_STEP, **policy("colocate", streaming=False)},
        "C1": {**_TWO_STEPS, **policy("colocate", streaming=False)},
        "C2": {**_TWO_STEPS, **policy("colocate", streaming=True)},
        "C3": {**_ONE_STEP, **policy("colocate", streaming=True)},
        "E0": {**_TWO_STEPS, **policy("elastic", streaming=True)},
        "E1": {**_ONE_STEP, **policy("elastic", streaming=True)},
        "E2": {**_TWO_STEPS, **policy("elastic", streaming=True), "scale": 2},
    }


@dataclass(frozen=True, slots=True)
class Band:
    """How much longer the baselines take than elastic: lowest and highest published ratio."""

    async_ratio: tuple[float, float]
    colocate_ratio: tuple[float, float]


BANDS = {
    "nl2repo_122b": Band((1.42, 1.53), (1.36, 1.47)),
    "deepswe_122b": Band((1.38, 1.57), (1.61, 1.85)),
    "terminalbench_122b": Band((1.38, 1.57), (1.61, 1.85)),
    "nl2repo_2p4t": Band((134.55 / 75.42 * 0.95, 134.55 / 75.42 * 1.05), (91.47 / 75.42 * 0.95, 91.47 / 75.42 * 1.05)),
}
"""For the 2.4T model one figure each was published; its band is 5% around it."""
