"""A shard with a small chat template, and what a proxy and a harness would do with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.common.types import VersionSpan
from services.proxy.types import CanonicalRequest, Message
from services.rollout.types import RunResult, Sampling
from services.trajectory.actor import TrajectoryShard
from services.trajectory.config import TrajectoryConfig
from services.trajectory.outcome import Outcome
from services.trajectory.types import CallRecord, CallTicket, GroupSpec

END = 1
_SPECIAL = {"<user>": 2, "<assistant>": 3, "<system>": 4, "<tool>": 5, "<end>": END}
SAMPLING = Sampling(temperature=0.7, max_tokens=64)


class CharRenderer:
    """One token a character; ``<role>text<end>`` a message. Counts the characters that it encodes."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.is_thread_safe = False

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        text = "".join(f"<{message.role}>{message.content}<end>" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        self.num_encoded += len(text)
        pieces = re.split("(" + "|".join(_SPECIAL) + ")", text)
        return [one for piece in pieces for one in ([_SPECIAL[piece]] if piece in _SPECIAL else map(ord, piece))]

    @property
    def end_of_turn(self) -> Mapping[int, str]:
        return {END: "<end>"}


def make_spec(index: int = 0, num_runs: int = 2, *, is_eval: bool = False) -> GroupSpec:
    group_id = f"{'e' if is_eval else 'g'}{index:06d}"
    return GroupSpec(group_id, "task", tuple(f"{group_id}-r{run}" for run in range(num_runs)), 3, is_eval)


def open_shard(folder: Path, **options: Any) -> TrajectoryShard:
    arguments: dict[str, Any] = {
        "config": TrajectoryConfig(),
        "sampling": SAMPLING,
        "max_model_len": 10_000,
        "renderer": CharRenderer(),
    }
    return TrajectoryShard("job", 0, store_dir=str(folder), model_path="", **{**arguments, **options})


def ask(*contents: str, **requested: Any) -> CanonicalRequest:
    """A request whose messages are user, assistant, user, ..."""
    messages = tuple(Message("assistant" if at % 2 else "user", content) for at, content in enumerate(contents))
    return CanonicalRequest("openai_chat", "policy", messages, requested_sampling=requested)


def answer(
    ticket: CallTicket, text: str, *, version: int = 3, finish_reason: str = "stop", **changes: Any
) -> CallRecord:
    """What the proxy sends when a cell has answered with ``text`` and the end of its turn."""
    output_ids = [*map(ord, text), *([END] if finish_reason == "stop" else [])]
    fields: dict[str, Any] = {
        "call_id": ticket.call_id,
        "run_id": ticket.run_id,
        "attempt": ticket.attempt,
        "parent_call_id": ticket.parent_call_id,
        "request": {"dialect": "openai_chat", "messages": [], "tools": []},
        "prompt_ids": np.empty(0, dtype=np.int32),
        "output_ids": np.asarray(output_ids, dtype=np.int32),
        "logprobs": np.linspace(-1, -0.1, len(output_ids), dtype=np.float32),
        "version_spans": (VersionSpan(version, len(output_ids)),) if output_ids else (),
        "output_text": text,
        "finish_reason": finish_reason,
        "trainable": ticket.trainable,
        "cells": ("cell-1",),
        "started_at_s": 100.0,
        "ended_at_s": 101.0,
        "requested_sampling": {},
    }
    return CallRecord(**{**fields, **changes})


def make_result(run_id: str, reward: float | None, outcome: Outcome = Outcome.FINISHED, attempt: int = 0) -> RunResult:
    return RunResult(run_id, attempt, outcome, reward, 2.0, 1.5, 0.5, 0, "as it went", "/workspace", 1 << 20)


def data_of(request: CanonicalRequest) -> dict[str, Any]:
    return dataclasses.asdict(request)


async def call(
    shard: TrajectoryShard, run_id: str, key: str, request: CanonicalRequest, text: str, **changes: Any
) -> CallTicket:
    """One whole call."""
    ticket = await shard.match_call(run_id, key, request)
    record = answer(
        ticket, text, request=data_of(request), requested_sampling=dict(request.requested_sampling), **changes
    )
    await shard.append_call(record)
    return ticket


async def run_to_end(
    shard: TrajectoryShard, run_id: str, reward: float | None, outcome: Outcome = Outcome.FINISHED
) -> None:
    """A run of two calls."""
    key = await shard.open_attempt(run_id, 0)
    await call(shard, run_id, key, ask("do it"), f"first of {run_id}")
    await call(shard, run_id, key, ask("do it", f"first of {run_id}", "go on"), "done")
    await shard.close_attempt(run_id, 0)
    await shard.finish_run(make_result(run_id, reward, outcome))
