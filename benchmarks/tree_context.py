"""The longest context within a budget of memory and page files: by the tree executor, and by flattened rows.

Two runs of ``RESPONSE_TOKENS`` answer one prompt; the context is the prompt and a response. The flattened rows may take
the sum of both budgets as memory, as if they could use page files too.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tree_measures import Peak, flattened_peak, measured_costs, options_for, tree_peak
from benchmarks.tree_world import CONFIGS, Group, group_nodes, make_model
from services.common.errors import ConfigError
from services.trainer.tree.costs import Budget
from services.trainer.tree.forest import make_forest
from services.trainer.tree.plan import ModeChoice, Plan, make_plan
from services.trainer.types import Node

RESPONSE_TOKENS = 64
_GROUP_SIZE = 2
_STEP_TOKENS = 64
_MAX_CHUNK_TOKENS = 1024
_MOST_TOKENS = 1 << 20
_PLANNED_SHARE = 0.96
"""Of the budgets: a prediction may be wrong by a little."""


def longest_flattened(config: str, settings: dict[str, Any], budget_bytes: int) -> dict[str, Any]:
    """By the line through two measured lengths; ``run`` checks it."""
    lengths = (512, 1024)
    peaks = [_flattened(config, settings, length).live_bytes for length in lengths]
    slope = (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])
    longest = lengths[0] + (budget_bytes - peaks[0]) / slope
    return {"context_tokens": int(longest) // _STEP_TOKENS * _STEP_TOKENS, "bytes_per_token": slope}


def longest_tree(config: str, settings: dict[str, Any], live_bytes: int, disk_bytes: int) -> dict[str, Any]:
    """The longest for which there is a plan, from measured costs; ``run`` checks it."""
    planner = _Planner(config, settings, live_bytes, disk_bytes)
    low, high = 0, _MOST_TOKENS // _STEP_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planner.fits(middle * _STEP_TOKENS) else (low, middle)
    return {"context_tokens": low * _STEP_TOKENS}


def run(
    way: str, config: str, settings: dict[str, Any], context_tokens: int, live_bytes: int, disk_bytes: int
) -> dict[str, Any]:
    """One step over a context, and what it took."""
    if way == "flattened":
        peak, reason = _flattened(config, settings, context_tokens), ""
    else:
        plan = _Planner(config, settings, live_bytes, disk_bytes).plan(context_tokens)
        nodes = _nodes(context_tokens)
        peak = tree_peak(make_model(CONFIGS[config](**settings)), nodes, make_forest(nodes), plan, disk_bytes)
        reason = plan.reason
    return {"live_bytes": peak.live_bytes, "disk_bytes": peak.disk_bytes, "plan": reason}


class _Planner:
    def __init__(self, config: str, settings: dict[str, Any], live_bytes: int, disk_bytes: int) -> None:
        self._costs = measured_costs(config, settings)
        self._budget = Budget(int(_PLANNED_SHARE * live_bytes), 0, int(_PLANNED_SHARE * disk_bytes))
        model = make_model(CONFIGS[config](**settings))
        self._options = options_for(model, mode=ModeChoice.WALK, max_chunk_tokens=_MAX_CHUNK_TOKENS)

    def plan(self, context_tokens: int) -> Plan:
        return make_plan(make_forest(_nodes(context_tokens)), self._costs, self._budget, self._options)

    def fits(self, context_tokens: int) -> bool:
        try:
            self.plan(context_tokens)
        except ConfigError:
            return False
        return True


def _nodes(context_tokens: int) -> tuple[Node, ...]:
    return group_nodes(Group(context_tokens - RESPONSE_TOKENS, RESPONSE_TOKENS, _GROUP_SIZE))


def _flattened(config: str, settings: dict[str, Any], context_tokens: int) -> Peak:
    return flattened_peak(make_model(CONFIGS[config](**settings)), _nodes(context_tokens))
