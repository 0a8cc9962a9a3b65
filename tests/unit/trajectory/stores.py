"""Stores for tests: where they are, and calls to put into them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.common.types import VersionSpan
from services.trajectory.encoding import CallRow
from services.trajectory.store import Store, StoreConfig, StoreReader, open_reader
from services.trajectory.types import CallRecord, GroupResult, LossReason

RUN = "g000000-r0"


@dataclass
class Place:
    """A place for the store of one job, empty at first. Stores that are opened here are closed by ``close``."""

    folder: Path
    url: str = ""
    blob_url: str = ""
    job_id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    opened: list[Store] = field(default_factory=list)

    @property
    def is_sqlite(self) -> bool:
        return not self.url

    def config(self, **options: Any) -> StoreConfig:
        return StoreConfig(**{"url": self.url, "blob_url": self.blob_url, "reconnect_timeout_s": 20, **options})

    def open(self, index: int = 0, **options: Any) -> Store:
        self.opened.append(Store(self.config(**options), self.job_id, index, self.folder))
        return self.opened[-1]

    def reader(self) -> StoreReader:
        return open_reader(self.url, self.job_id) if self.url else open_reader(str(self.folder))

    def close(self) -> None:
        for store in self.opened:
            store.close()


def make_row(index: int, parent: CallRow | None = None, run_id: str = RUN, attempt: int = 0, **changes: Any) -> CallRow:
    """A call with five new prompt tokens that says ``answer N``, behind its parent."""
    text = f"answer {index}"
    start = 0 if parent is None else parent.num_prompt_tokens + len(parent.record.output_ids)
    num_shared = 0 if parent is None else len(parent.record.request["messages"])
    contents = [str(one) for one in range(num_shared + 1)]
    fields: dict[str, Any] = {
        "call_id": f"{run_id}-a{attempt}-c{index}",
        "run_id": run_id,
        "attempt": attempt,
        "parent_call_id": None if parent is None else parent.record.call_id,
        "request": {
            "dialect": "openai_chat",
            "messages": [{"role": "user", "content": one} for one in contents],
            "tools": [{"a": 1}],
        },
        "prompt_ids": np.empty(0, dtype=np.int32),
        "output_ids": np.asarray([*map(ord, text)], dtype=np.int32),
        "logprobs": np.linspace(-1, -0.1, len(text), dtype=np.float32),
        "version_spans": (VersionSpan(3, len(text)),),
        "output_text": text,
        "finish_reason": "stop",
        "trainable": True,
        "cells": ("cell-0",),
        "started_at_s": 1.5,
        "ended_at_s": 2.25,
    }
    record = CallRecord(**{**fields, **changes})
    new_ids = np.arange(index, index + 5, dtype=np.int32)
    return CallRow(record, index, start + 5, new_ids, num_shared, parent is not None)


def make_group_result(group_id: str, *, ready: bool = True) -> GroupResult:
    loss_reason = None if ready else LossReason.EQUAL_REWARDS
    return GroupResult(group_id, ready, "" if ready else "equal", 2, 2, 8, 40, 0.5, (0.0, 1.0), 3, loss_reason, 2)
