"""What a job may spend on its judge: one ledger for all its processes on this machine, which survives restarts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from services.common.errors import JobError

BUDGET_FILE = "judge-budget.json"
"""In the job's folder."""


class BudgetSpentError(JobError):
    """A call could cost more than is left."""


@dataclass
class Ledger:
    """What was spent, US dollars."""

    spent_usd: float = 0.0
    """By calls whose price is known."""
    reserved: dict[str, float] = field(default_factory=dict)
    """By calls in flight, at their worst. One whose process was killed stays: nobody knows what it cost."""
    num_calls: int = 0
    num_refused: int = 0

    @property
    def total_usd(self) -> float:
        return self.spent_usd + sum(self.reserved.values())


class Budget:
    """Reserves the worst that a call may cost before it is made, and settles for what it did cost.

    So the sum of all calls never exceeds the limit, whatever runs at once and whenever it is killed. The file is
    replaced under a lock that the kernel lets go of with its holder.
    """

    def __init__(self, path: Path, limit_usd: float) -> None:
        self._path = path
        self._limit_usd = limit_usd

    def reserve(self, cost_usd: float) -> str:
        """Set aside what a call may cost at most; the reservation's name. Raises ``BudgetSpentError``."""
        with self._locked() as ledger:
            left_usd = self._limit_usd - ledger.total_usd
            if cost_usd > left_usd:
                ledger.num_refused += 1
                refusal = BudgetSpentError(
                    f"the judge's budget is spent: a call may cost ${cost_usd:.6g}, ${max(0.0, left_usd):.6g} of "
                    f"${self._limit_usd:.6g} is left.",
                    "Raise rollout.scoring.max_cost_usd, or make the judge's prompts or answers shorter.",
                )
            else:
                refusal = None
                name = secrets.token_hex(8)
                ledger.reserved[name] = cost_usd
                ledger.num_calls += 1
        if refusal is not None:
            raise refusal
        return name

    def settle(self, name: str, cost_usd: float) -> None:
        """Replace a reservation by what the call did cost."""
        with self._locked() as ledger:
            if ledger.reserved.pop(name, None) is not None:
                ledger.spent_usd += cost_usd

    def read(self) -> Ledger:
        """The ledger as it is now."""
        if not self._path.exists():
            return Ledger()
        return Ledger(**json.loads(self._path.read_text(encoding="utf-8")))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Ledger]:
        """The ledger, read and written back by nobody else meanwhile; synced before anybody sees it."""
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            ledger = self.read()
            yield ledger
            partial = self._path.with_suffix(".partial")
            with partial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(ledger)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
