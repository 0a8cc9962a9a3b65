"""A tiny model learns through the whole chain, with real processes everywhere."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.e2e import jobs
from tests.waiting import wait_until

MARGIN = 0.3
"""By how much the mean reward of the last two steps must be above that of the first two."""


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(720)
def test_a_tiny_model_learns_through_the_whole_chain(start_job: Callable[..., jobs.Job]) -> None:
    job = start_job("seed=1")
    code, text = job.wait(700)
    assert code == 0, text
    summary = job.summary()
    rewards = summary["reward_mean_by_step"]
    assert summary["steps_completed"] == 14
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + MARGIN, rewards
    assert summary["policy_version"] == 14
    assert summary["runs_finished"] >= 14 * 32
    assert summary["runs_failed"] == 0
    assert 0 <= summary["logprob_abs_diff_max"] < 1e-3
    for key in ("rollout_tokens", "train_tokens", "wall_s", "peak_rss_bytes"):
        assert summary[key] > 0, key
    updates = job.metrics("weights")
    assert {update["cell"] for update in updates} == {"cell-0", "cell-1"}
    assert all(update["ok"] and update["canary_abs_diff_max"] < 1e-3 for update in updates)
    assert {update["transport"] for update in updates} == {"tcp"}
    assert (job.folder / "reward.png").exists()
    assert list((job.folder / "tensorboard").iterdir())
    assert "finished" in job.runs()
    wait_until(lambda: not job.descendants(), 20, "all processes of the job gone")
