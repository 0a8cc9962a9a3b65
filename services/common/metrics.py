"""The one metric registry. Every series that any service exports is declared in ``SERIES``, with its unit.

Inside Ray the values go to the node's metrics agent and appear on its export port as ``ray_<name>``; outside
Ray they go to ``prometheus_client``'s default registry under their plain name.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import prometheus_client
import ray
import ray.util.metrics


@dataclass(frozen=True, slots=True)
class Series:
    """A declared metric. All series carry the label ``job``."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

SERIES: dict[str, Series] = {
    "tidegate_step": Series("gauge", "Optimizer steps completed"),
    "tidegate_version": Series("gauge", "Version of the weights published last"),
    "tidegate_water_level": Series("gauge", "Unfinished runs: dispatched minus finally ended"),
    "tidegate_ready_groups": Series("gauge", "Groups ready to be trained"),
    "tidegate_cell_role": Series("gauge", "1 for the role that a cell has, else 0", ("cell", "role")),
    "tidegate_cell_stale_total": Series("counter", "Times that a cell became STALE", ("cell",)),
    "tidegate_decisions_total": Series("counter", "Actions decided by the scheduler", ("action",)),
    "tidegate_runs_total": Series("counter", "Runs finally ended", ("outcome",)),
    "tidegate_run_retries_total": Series("counter", "Further attempts of runs", ("outcome",)),
    "tidegate_groups_lost_total": Series("counter", "Groups lost for training"),
    "tidegate_reward_mean": Series("gauge", "Mean reward of the groups of the last step"),
    "tidegate_calls_total": Series("counter", "Calls completed by the proxy", ("dialect", "finish_reason")),
    "tidegate_calls_shared_total": Series("counter", "Requests answered by a call that another request had made"),
    "tidegate_calls_resumed_total": Series("counter", "Calls that went on behind an answer that was cut"),
    "tidegate_malformed_tool_calls_total": Series("counter", "Tool calls that could not be read and became text"),
    "tidegate_refusals_total": Series("counter", "Requests that got an error instead of an answer", ("kind",)),
    "tidegate_call_moves_total": Series("counter", "Calls that went on at another cell"),
    "tidegate_call_seconds": Series("histogram", "Wall time of a call at the proxy, seconds", (), _SECONDS),
    "tidegate_prompt_tokens_total": Series("counter", "Prompt tokens of completed calls"),
    "tidegate_prompt_tokens_new_total": Series("counter", "Prompt tokens that had to be tokenised"),
    "tidegate_output_tokens_total": Series("counter", "Sampled tokens of completed calls"),
    "tidegate_false_forks_total": Series("counter", "Calls that extended no stored call although their history did"),
    "tidegate_groups_settled_total": Series("counter", "Settled groups: ready, or why they are lost", ("reason",)),
    "tidegate_left_out_tokens_total": Series("counter", "Trainable tokens that the limit on trajectories left out"),
    "tidegate_store_commit_seconds": Series("histogram", "Commit of the trajectory store, seconds", (), _SECONDS),
    "tidegate_store_operations_total": Series("counter", "Operations committed by the trajectory store"),
    "tidegate_store_sealed_bytes_total": Series("counter", "Bytes of objects with the calls of ended attempts"),
    "tidegate_store_seal_failures_total": Series("counter", "Times that calls could not be moved into an object"),
    "tidegate_store_pruned_groups_total": Series("counter", "Groups whose calls retention deleted"),
    "tidegate_train_tokens_total": Series("counter", "Tokens trained"),
    "tidegate_train_step_seconds": Series("histogram", "Wall time of an optimizer step, seconds", (), _SECONDS),
    "tidegate_grad_norm": Series("gauge", "Gradient norm before clipping"),
    "tidegate_logprob_abs_diff_max": Series("gauge", "Largest |engine - trainer| log-probability of the last step"),
    "tidegate_publish_seconds": Series("histogram", "Weight update of one cell, seconds", ("cell",), _SECONDS),
    "tidegate_publish_bytes_total": Series("counter", "Bytes of weights pulled", ("cell", "transport")),
}


class Metric:
    """One series, wherever this process exports it."""

    def __init__(self, name: str) -> None:
        series = SERIES[name]
        labels = ("job", *series.labels)
        self._in_ray = ray.is_initialized()
        self._metric: Any
        if self._in_ray:
            kinds = {
                "counter": ray.util.metrics.Counter,
                "gauge": ray.util.metrics.Gauge,
                "histogram": ray.util.metrics.Histogram,
            }
            extra = {"boundaries": list(series.buckets)} if series.kind == "histogram" else {}
            self._metric = kinds[series.kind](name, description=series.help, tag_keys=labels, **extra)
        else:
            # prometheus_client appends _total to counters itself
            plain = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
            self._metric = (
                prometheus_client.Histogram(name, series.help, labels, buckets=series.buckets)
                if series.kind == "histogram"
                else plain[series.kind](name, series.help, labels)
            )

    def inc(self, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if value == 0:
            return  # Ray refuses to add zero
        if self._in_ray:
            self._metric.inc(value, tags=labels)
        else:
            self._metric.labels(**labels).inc(value)

    def set(self, value: float, **labels: str) -> None:
        """Set a gauge."""
        if self._in_ray:
            self._metric.set(value, tags=labels)
        else:
            self._metric.labels(**labels).set(value)

    def observe(self, value: float, **labels: str) -> None:
        """Add an observation to a histogram."""
        if self._in_ray:
            self._metric.observe(value, tags=labels)
        else:
            self._metric.labels(**labels).observe(value)


@functools.cache
def metric(name: str) -> Metric:
    """The process's handle on a declared series; ``KeyError`` for one that is not in ``SERIES``."""
    return Metric(name)
