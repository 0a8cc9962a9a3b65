"""The scheduler as a Ray actor that is killed while its job runs: Ray makes it again, and the job goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from services.common.errors import JobError
from services.common.names import RAY_NAMESPACE
from services.common.remote import one_line
from services.job.link import SchedulerLink
from services.scheduler.actions import Action
from services.scheduler.actor import JobScheduler
from services.scheduler.client import SchedulerClient
from services.scheduler.events import Event
from services.scheduler.journal import Journal, read_journal
from services.scheduler.options import JobOptions, Policy, PolicyMode
from services.scheduler.performer import Recovered
from tests.ray_cluster import start_ray
from tests.unit.scheduler.lasting import LastingPerformer, LastingWorld
from tests.unit.scheduler.world import options
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

JOB = options(
    steps=12,
    max_staleness_steps=50,
    carry_over_steps=1.0,
    eval_task_names=("e0",),
    eval_every=4,
    checkpoint_every=3,
    policy=Policy(PolicyMode.ELASTIC, streaming=True),
)


class SlowWorld(LastingWorld):
    async def pause(self) -> None:
        await asyncio.sleep(0.002 * self.rng.randrange(6))


class WorldActor:
    """The job's other processes, in one that nobody kills."""

    def __init__(self, job: JobOptions) -> None:
        self._world = SlowWorld(job, seed=5)

    async def perform(self, action: Action) -> list[Event]:
        events: list[Event] = []
        await LastingPerformer(self._world).perform(action, events.append)
        return events

    async def attend(self, recovered: Recovered | None) -> list[Event]:
        performer = LastingPerformer(self._world)
        if recovered is not None:
            await performer.recover(recovered)
        events: list[Event] = []
        await performer.attend(events.append)
        return events

    async def books(self) -> dict[str, Any]:
        world = self._world
        return {"num_executed": dict(world.num_executed), "trained": world.trained, "finish": world.finish}


class RemotePerformer:
    """The scheduler's way to the world."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._recovered: Recovered | None = None

    async def recover(self, recovered: Recovered) -> None:
        self._recovered = recovered

    async def attend(self, emit: Callable[[Event], None]) -> None:
        for event in await self._world.attend.remote(self._recovered):
            emit(event)

    async def perform(self, action: Action, emit: Callable[[Event], None]) -> None:
        for event in await self._world.perform.remote(action):
            emit(event)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tgs", dir="/tmp") as folder:
        start_ray(num_cpus=2, include_dashboard=False, _temp_dir=folder, namespace=RAY_NAMESPACE, log_to_driver=False)
        yield
        ray.shutdown()


def start(folder: Path, max_restarts: int = 10) -> tuple[Any, Any, SchedulerLink, list[str]]:
    """The world, the scheduler's actor and the driver's line to it, with what it notes."""
    options_of_actor = {"num_cpus": 0, "max_concurrency": 1000}
    world = ray.remote(WorldActor).options(**options_of_actor).remote(JOB)
    scheduler = (
        ray.remote(JobScheduler)
        .options(max_restarts=max_restarts, **options_of_actor)
        .remote(
            JOB,
            performer_factory=lambda: RemotePerformer(world),
            job_dir=str(folder),
            start_id="one start",
            grpc_token="t",
        )
    )
    notes: list[str] = []
    return world, scheduler, SchedulerLink(scheduler, notes.append), notes


def kill(scheduler: Any, folder: Path, after: int) -> None:
    """Kill the scheduler's process once its journal has so many records."""
    wait_until(lambda: len(list(read_journal(folder))) >= after, 60, f"{after} records in the journal")
    ray.kill(scheduler, no_restart=False)


def num_recoveries(folder: Path) -> int:
    return [record.kind for record in read_journal(folder)].count("SchedulerRecovered")


def test_a_job_whose_scheduler_is_killed_goes_on_and_ends_with_the_right_counts(cluster: None, tmp_path: Path) -> None:
    world, scheduler, link, notes = start(tmp_path)
    link.start()
    for num_kills, after in enumerate((5, 40, 80, 120), start=1):
        kill(scheduler, tmp_path, after)
        wait_until(lambda num=num_kills: link.wait_done(0.0) and num_recoveries(tmp_path) == num)
    while not (status := link.wait_done(1.0))["done"]:
        pass
    assert status["status"] == "finished", status["reason"]
    assert len([note for note in notes if "goes on" in note]) == 4
    books = ray.get(world.books.remote())
    assert set(books["num_executed"].values()) == {1}
    assert len(books["num_executed"]) == status["dispatched"] == status["ended"] == sum(status["outcomes"].values())
    assert sorted(books["trained"]) == list(range(1, JOB.steps + 1))
    assert status["trained_groups"] == JOB.steps * JOB.groups_per_step
    assert books["finish"].status == "finished"
    kinds = [record.kind for record in read_journal(tmp_path)]
    assert (kinds.count("JobStarted"), kinds.count("SchedulerRecovered")) == (1, 4)
    ray.kill(scheduler)


def test_clients_find_it_again_and_a_cancelled_job_stays_cancelled(cluster: None, tmp_path: Path) -> None:
    _world, scheduler, link, _ = start(tmp_path)
    address = link.start()

    async def ask() -> Any:
        client = SchedulerClient(address, "t")
        try:
            await client.cancel("enough")
            return await client.cluster_state()
        finally:
            await client.close()

    kill(scheduler, tmp_path, 60)
    wait_until(lambda: link.wait_done(0.0) and num_recoveries(tmp_path) == 1)
    asyncio.run(ask())
    ray.kill(scheduler, no_restart=False)
    while not (status := link.wait_done(1.0))["done"]:
        pass
    assert (status["status"], status["reason"]) == ("cancelled", "enough")
    ray.kill(scheduler)


def test_a_scheduler_without_restarts_left_ends_the_job_and_says_how_to_go_on(cluster: None, tmp_path: Path) -> None:
    _world, scheduler, link, _ = start(tmp_path, max_restarts=1)
    link.start()
    kill(scheduler, tmp_path, 20)
    wait_until(lambda: link.wait_done(0.0) and num_recoveries(tmp_path) == 1)
    kill(scheduler, tmp_path, 40)
    with pytest.raises(JobError, match="--resume"):
        link.wait_done(60.0)
    with pytest.raises(RayActorError):
        ray.get(scheduler.progress.remote())


def test_a_journal_that_tells_another_story_ends_the_job(cluster: None, tmp_path: Path) -> None:
    _world, scheduler, link, _ = start(tmp_path, max_restarts=1)
    link.start()
    kill(scheduler, tmp_path, 30)
    journal = Journal(tmp_path)  # waits until the killed one is gone
    first = next(record for record in journal.records() if record.decisions)
    forged = dataclasses.replace(first, sequence=journal.last_sequence + 1)
    journal.append(forged)
    journal.close()
    with pytest.raises(JobError) as caught:
        link.wait_done(60.0)
    assert "cannot go on" in one_line(caught.value)
    ray.kill(scheduler)
