"""A job never spends more on its judge than its limit, whatever runs at once and whenever it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.rollout.scoring.budget import Budget, BudgetSpentError, Ledger


def test_what_was_spent_is_known_to_whoever_opens_it_next(tmp_path: Path) -> None:
    first = Budget(tmp_path / "budget.json", 1.0)
    assert first.read() == Ledger()
    first.settle(first.reserve(0.4), 0.1)
    kept = first.reserve(0.5)
    again = Budget(tmp_path / "budget.json", 1.0).read()
    assert (again.spent_usd, again.reserved, again.num_calls) == (0.1, {kept: 0.5}, 2)
    assert again.total_usd == pytest.approx(0.6)


def test_a_call_that_could_exceed_the_limit_is_refused_and_counted(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "budget.json", 1.0)
    name = budget.reserve(0.9)
    with pytest.raises(BudgetSpentError, match=r"may cost \$0\.2, \$0\.1 of \$1 is left.*max_cost_usd"):
        budget.reserve(0.2)
    budget.settle(name, 0.3)
    budget.reserve(0.2)
    assert (budget.read().num_calls, budget.read().num_refused) == (2, 1)


def test_a_settled_reservation_cannot_be_settled_again(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "budget.json", 1.0)
    name = budget.reserve(0.5)
    budget.settle(name, 0.2)
    budget.settle(name, 0.2)
    assert budget.read().total_usd == 0.2


def test_many_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    def spend(_: int) -> bool:
        budget = Budget(tmp_path / "budget.json", 1.0)
        try:
            budget.settle(budget.reserve(0.1), 0.1)
        except BudgetSpentError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(spend, range(40)))
    assert sum(made) in (9, 10)  # ten tenths are a little more than 1.0 in binary
    ledger = Budget(tmp_path / "budget.json", 1.0).read()
    assert ledger.total_usd <= 1.0
    assert ledger.num_calls + ledger.num_refused == 40


SPENDER = """
import sys
from pathlib import Path
from services.rollout.scoring.budget import Budget
budget = Budget(Path(sys.argv[1]), 1e9)
print("begun", flush=True)
while True:
    budget.settle(budget.reserve(2.0), 1.0)
"""


def test_a_spender_that_is_killed_leaves_a_ledger_that_can_be_read_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SPENDER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while not path.exists():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        ledger = Budget(path, 1e9).read()
        settled = ledger.num_calls - len(ledger.reserved)
        assert ledger.spent_usd == settled * 1.0
        Budget(path, 1e9).reserve(1.0)
